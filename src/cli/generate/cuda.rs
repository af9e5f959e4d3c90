//! `generate --device cuda`: the model's weights and cache lie in a GPU's memory; tokens are chosen on the host.

use super::{Args, Ran};
use crate::cli::failure::Failure;
use crate::cli::hardware::Hardware;
use crate::cli::model::OnCuda;
use crate::model::cuda::{DeviceDecoder, DeviceModel};
use crate::model::{OneSequence, Sampling, Text};
use crate::policy::Registry;

pub fn run(args: &Args, registry: &Registry, index: usize, sampling: Sampling, text: &Text) -> Result<(), Failure> {
    let OnCuda { runtime, opened } = args.model.open_on_cuda(index, registry)?;
    let prompt = args.prompt_tokens(text)?;
    let setup = args.model.setup(&opened, 1, prompt.len().saturating_add(args.max_new_tokens), false)?;
    let there = DeviceModel::new(&opened.model, &runtime, &opened.arena)?;
    let eviction = args.model.eviction(&opened);
    eviction.map_or(Ok(()), |eviction| there.check(&eviction))?;
    let mut decoder = DeviceDecoder::new(&there, setup, &opened.arena)?;
    if let Some(eviction) = eviction {
        decoder.evict(eviction, &opened.cpu, prompt.len())?;
    }
    let generated = args.write(&mut decoder, &opened.model, sampling, text, &prompt)?;
    let ran = Ran {
        hardware: Hardware::cuda(index, &runtime, Some(runtime.gemm())),
        generated,
        evicted_tokens: decoder.evicted_tokens(),
        weights_bytes: there.bytes(),
        kv_bytes_live: decoder.kv_bytes(),
        peak_bytes: opened.arena.usage().peak_bytes,
    };
    args.finish(&opened, &setup, text, &prompt, ran)
}

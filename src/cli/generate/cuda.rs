//! `generate --device cuda`: the model's weights and cache lie in a GPU's memory; tokens are chosen on the host.

use super::{Args, Ran};
use crate::cli::failure::Failure;
use crate::cli::place::Place;
use kvsieve::model::cuda::{DeviceDecoder, DeviceModel};
use kvsieve::model::{OneSequence, Sampling, Text};

pub fn run(args: &Args, index: usize, sampling: Sampling, text: &Text) -> Result<(), Failure> {
    let on = args.model.open_on_cuda(index)?;
    let prompt = text.tokens(&args.prompt)?;
    let setup = args.model.setup(&on.model, None, 1, prompt.len() + args.max_new_tokens, false)?;
    let there = DeviceModel::new(&on.model, &on.runtime, &on.arena)?;
    let mut decoder = DeviceDecoder::new(&there, setup, &on.arena)?;
    let generated = args.write(&mut decoder, &on.model, sampling, text, &prompt)?;
    let ran = Ran {
        place: Place::cuda(index, &on.runtime, Some(on.runtime.products())),
        generated,
        evicted_tokens: 0,
        weights_bytes: there.bytes(),
        kv_bytes_live: decoder.kv_bytes(),
        peak_bytes: on.arena.usage().peak_bytes,
    };
    args.finish(&on.model, &setup, None, text, &prompt, ran)
}

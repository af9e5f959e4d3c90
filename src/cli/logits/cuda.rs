//! `logits --device cuda`: sequences one after another through a model whose weights and cache lie in a GPU's memory.

use super::{Args, Logits, Ran, check_eviction};
use crate::cli::failure::Failure;
use crate::cli::hardware::Hardware;
use crate::cli::model::OnCuda;
use crate::memory::Arena;
use crate::model::OneSequence;
use crate::model::cuda::{DeviceDecoder, DeviceModel};
use crate::policy::Registry;
use std::time::Instant;

pub fn run(args: &Args, registry: &Registry, index: usize, sequences: &[Vec<u32>]) -> Result<(), Failure> {
    let OnCuda { runtime, opened } = args.model.open_on_cuda(index, registry)?;
    check_eviction(args, &opened, sequences)?;
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    let setup = args.model.setup(&opened, 1, longest, true)?;
    // The host's copies are not what is measured.
    let mut logits = Logits::new(&Arena::unlimited(), &opened.model, sequences.len(), longest)?;
    let there = DeviceModel::new(&opened.model, &runtime, &opened.arena)?;
    let eviction = args.model.eviction(&opened);
    eviction.map_or(Ok(()), |eviction| there.check(&eviction))?;
    let mut decoder = DeviceDecoder::new(&there, setup, &opened.arena)?;
    let (start, mut evicted_tokens, mut kv_bytes_live) = (Instant::now(), 0, 0);
    for (sequence, tokens) in sequences.iter().enumerate() {
        let (first, rest) = tokens.split_at(args.evict_after.unwrap_or(tokens.len()));
        decoder.clear()?;
        if let Some(eviction) = eviction {
            decoder.evict(eviction, &opened.cpu, first.len())?;
        }
        decoder.prefill(sequence, first, |place, row| logits.store(sequence, place, row))?;
        decoder.follow(sequence, rest, |place, row| logits.store(sequence, first.len() + place, row))?;
        evicted_tokens += decoder.evicted_tokens();
        kv_bytes_live = decoder.kv_bytes().max(kv_bytes_live);
    }
    let ran = Ran {
        hardware: Hardware::cuda(index, &runtime, Some(runtime.gemm())),
        run_ns: start.elapsed().as_nanos() as u64,
        evicted_tokens,
        weights_bytes: there.bytes(),
        kv_bytes_live,
        peak_bytes: opened.arena.usage().peak_bytes,
    };
    args.finish(&opened, &setup, sequences, &logits, ran)
}

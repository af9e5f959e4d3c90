//! `logits --device cuda`: sequences one after another through a model whose weights and cache lie in a GPU's memory.

use super::{Args, Logits, Ran};
use crate::cli::failure::Failure;
use crate::cli::place::Place;
use kvsieve::memory::Arena;
use kvsieve::model::OneSequence;
use kvsieve::model::cuda::{DeviceDecoder, DeviceModel};
use std::time::Instant;

pub fn run(args: &Args, index: usize, sequences: &[Vec<u32>]) -> Result<(), Failure> {
    let on = args.model.open_on_cuda(index)?;
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    let setup = args.model.setup(&on.model, None, 1, longest, true)?;
    // The host's copies are not what is measured.
    let mut logits = Logits::new(&Arena::unlimited(), &on.model, sequences.len(), longest)?;
    let there = DeviceModel::new(&on.model, &on.runtime, &on.arena)?;
    let mut decoder = DeviceDecoder::new(&there, setup, &on.arena)?;
    let (start, mut kv_bytes_live) = (Instant::now(), 0);
    for (sequence, tokens) in sequences.iter().enumerate() {
        decoder.clear()?;
        decoder.feed(sequence, tokens, |place, row| logits.store(sequence, place, row))?;
        kv_bytes_live = decoder.kv_bytes().max(kv_bytes_live);
    }
    let ran = Ran {
        place: Place::cuda(index, &on.runtime, Some(on.runtime.products())),
        run_ns: start.elapsed().as_nanos() as u64,
        evicted_tokens: 0,
        weights_bytes: there.bytes(),
        kv_bytes_live,
        peak_bytes: on.arena.usage().peak_bytes,
    };
    args.finish(&on.model, &setup, None, sequences, &logits, ran)
}

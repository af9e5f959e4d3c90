//! The planner against numbers that others published: parameters, bytes of keys and values, cliffs, buffers of llama.cpp,
//! slots of vLLM, FlashAttention's table, ZeRO's figure; properties of every plan; and what a user sees.

mod command;
#[path = "../common/mod.rs"]
mod common;
mod files;
mod goldens;
mod properties;
mod times;

use kvsieve::planner::presets::{gpu, model};
use kvsieve::planner::scenario::{Allocation, Attention, Logits, Memory};
use kvsieve::planner::source::Source;
use kvsieve::planner::{Scenario, Subject};

/// The preset of a name.
fn subject(name: &str) -> Subject {
    Subject::new(model(name).unwrap().clone(), Source::Preset, None).unwrap()
}

/// A model in bf16 on a card: one sequence, tiled, in one piece.
fn on<'a>(subject: &'a Subject, card: &str, context: u64) -> Scenario<'a> {
    Scenario {
        subject,
        weights: None,
        memory: Memory::Gpu(gpu(card).unwrap()),
        overhead_bytes: None,
        batch: 1,
        concurrency: 1,
        context,
        output: 0,
        chunk: None,
        step: None,
        attention: Attention::Tiled,
        logits: Logits::Last,
        kv: "bf16".parse().unwrap(),
        allocation: Allocation::Exact,
        eviction: None,
        tensor_parallel: 1,
        pipeline: 1,
        offload: 0,
    }
}

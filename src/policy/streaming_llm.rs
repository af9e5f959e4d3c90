//! StreamingLLM (arXiv 2309.17453): the first tokens, which attract attention whatever they say, and the latest.
//!
//! Kept tokens keep their positions; the paper's own form re-assigns positions inside the cache.

use super::{Context, Needs, Policy, PolicyEntry, PolicyError, Protect, Scorer};
use crate::named::Parameter;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "streaming-llm",
    about: "keeps the first tokens (attention sinks) and the latest",
    paper: "2309.17453",
    parameters: &[
        Parameter { name: "sink", default: "4", about: "first tokens kept" },
        Parameter { name: "every", default: "1", about: "decode steps between evictions; 0: only after prefill" },
    ],
    needs: Needs::Positions,
    build: |named| {
        let sink = named.count("sink", 4, 0)?;
        Ok(Policy::after_prefill(StreamingLlm { sink }).every(named.count("every", 1, 0)?))
    },
};

struct StreamingLlm {
    sink: usize,
}

impl Scorer for StreamingLlm {
    fn needs(&self) -> Needs {
        Needs::Positions
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let shape = context.call.shape;
        for (list, scores) in scores.chunks_mut(shape.kv_len).enumerate() {
            let len = context.call.kv.len(list / shape.kv_heads, list % shape.kv_heads);
            for (slot, score) in scores[..len].iter_mut().enumerate() {
                *score = (context.positions)(list, slot) as f32;
            }
        }
        Ok(())
    }
}

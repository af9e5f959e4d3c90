//! Compactor (arXiv 2507.08143): leverage of the keys before RoPE, plus attention without a mask inside chunks.
//!
//! Formula and defaults are kvpress's: both are taken of the tokens between the first `start` and the last `end` alone,
//! each with mean 0 and deviation 1 over the heads of a sequence, and `blend` times the leverage is added to the
//! attention. `blend=auto` is the fraction of the list that the budget evicts. kvpress gives the two ends the highest
//! score of the others; here they are protected.

use super::leverage::{self, leverages, sketch};
use super::non_causal::{self, attention_in_chunks, standardise};
use crate::attention::Shape;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, List, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "compactor",
    about: "keeps the keys outside what others span, and what the queries of the same chunk attend to",
    paper: "2507.08143",
    parameters: &[
        Parameter { name: "start", default: "8", about: "first tokens kept" },
        Parameter { name: "end", default: "4", about: "recent tokens kept" },
        non_causal::CHUNK,
        leverage::SKETCH,
        Parameter { name: "blend", default: "auto", about: "weight of the leverage; auto: the fraction evicted" },
    ],
    build: |named, _| {
        let blend = match named.text("blend") {
            None | Some("auto") => None,
            Some(_) => Some(named.number("blend", 0.0, 0.0..=1e6)? as f32),
        };
        let protect = Protect { sink: named.count("start", 8, 0)?, window: named.count("end", 4, 0)? };
        let (chunk, sketch) = (named.count("chunk", 256, 1)?, sketch(named)?);
        Ok(Policy::after_prefill(Compactor { protect, chunk, sketch, blend }))
    },
};

struct Compactor {
    protect: Protect,
    chunk: usize,
    sketch: usize,
    blend: Option<f32>,
}

impl Compactor {
    /// The slots that are scored.
    fn span(&self, list: &List<'_>) -> Range<usize> {
        let start = list.sinks(self.protect.sink);
        start..list.len.saturating_sub(self.protect.window).max(start)
    }
}

impl Scorer for Compactor {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Values, Statistic::BeforeRope, Statistic::Queries]
    }

    fn protect(&self, _: usize) -> Protect {
        self.protect
    }

    fn recent_queries(&self) -> usize {
        self.chunk
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        let row = 4 * (shape.batch * shape.kv_heads * shape.kv_len) as u64;
        let passes =
            [leverage::scratch_bytes(shape, self.sketch), non_causal::scratch_bytes(shape, self.chunk, threads)];
        row + passes[0].max(passes[1])
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        scores.fill(0.0);
        let mut outside = context.arena.alloc::<f32>(Label::Workspace, scores.len())?;
        leverages(context, &mut outside, self.sketch, "compactor", |list| self.span(list))?;
        standardise(context, &mut outside, |list| self.span(list));
        attention_in_chunks(context, scores, self.chunk, |list| self.span(list))?;
        standardise(context, scores, |list| self.span(list));
        let outside = &*outside;
        each_list(context, scores, &mut [], |list, scores, _| {
            let evicted = 1.0 - (context.budget_tokens as f32 / list.len as f32).min(1.0);
            let blend = self.blend.unwrap_or(evicted);
            let outside = &outside[list.index * context.call.shape.kv_len..];
            for slot in self.span(list) {
                scores[slot] += blend * outside[slot];
            }
        });
        Ok(())
    }
}

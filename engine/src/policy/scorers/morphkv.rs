//! MorphKV (arXiv 2503.00979): a cache of constant size, re-ranked at every step by what the latest `window` queries see
//! in the tokens before them.
//!
//! As in the authors' code (ghadiaravi13/MorphKV, `morphkv/models/patch_mistral.py` at 1dc7d30): each query's softmax is
//! over the tokens before the window alone, the largest of the group's heads counts, and these are fused over the
//! queries by their sum or their maximum (`sum_fused` with a window of 32 and `max_fused` with 200 in its README). The
//! window itself stays. The authors keep each query's attention as it was when the query was new; here it is computed
//! over the tokens that are still cached, so a token that has gone no longer takes its share.

use super::past::{self, each_query, raise, softmax};
use crate::attention::Shape;
use crate::device::simd::loops;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "morphkv",
    about: "keeps what a window of recent queries attends to before them, and the window; the paper's is morphkv+every",
    paper: "2503.00979",
    parameters: &[
        Parameter { name: "window", default: "32", about: "recent queries that rank, and recent tokens kept" },
        Parameter { name: "fusion", default: "sum", about: "over these queries: sum or max" },
    ],
    build: |named, _| {
        let max = match named.text("fusion") {
            None | Some("sum") => false,
            Some("max") => true,
            Some(_) => return Err(named.wrong("fusion", "sum or max".into()).into()),
        };
        Ok(Policy::after_prefill(MorphKv { window: named.count("window", 32, 1)?, max }))
    },
};

struct MorphKv {
    window: usize,
    max: bool,
}

impl MorphKv {
    /// Scratch elements: a row of logits for each head of a group.
    fn elements(shape: &Shape) -> usize {
        shape.batch * shape.kv_heads * shape.group() * shape.kv_len
    }
}

impl Scorer for MorphKv {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: 0, window: self.window }
    }

    fn recent_queries(&self) -> usize {
        self.window
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * Self::elements(shape) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let shape = context.call.shape;
        let mut scratch = context.arena.alloc::<f32>(Label::Workspace, Self::elements(&shape))?;
        let isa = context.call.cpu.isa();
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let past = past::past(list.len, self.window);
            scores.fill(0.0);
            each_query(context, list, self.window, scratch, |logits| {
                logits.chunks_exact_mut(past).for_each(|head| softmax(isa, head));
                let (most, others) = logits.split_at_mut(past);
                others.chunks_exact(past).for_each(|head| raise(most, head));
                match self.max {
                    true => raise(&mut scores[..past], most),
                    false => loops::add_scaled(isa, &mut scores[..past], 1.0, most),
                }
            });
        });
        Ok(())
    }
}

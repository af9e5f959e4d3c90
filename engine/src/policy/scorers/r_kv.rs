//! R-KV (arXiv 2505.24133): a token stays if it is important and says something that later tokens do not repeat.
//!
//! `lambda * importance - (1 - lambda) * redundancy`, as in the authors' code (Zefan-Cai/R-KV, `rkv/compression/r1_kv.py`;
//! its default lambda is 0.07, its README's 0.1). Importance: of the logits of the last `window` queries over the tokens
//! before them the largest of the group's heads, softmax over these tokens, mean over the queries, max pool of width
//! `kernel`. Redundancy ([`super::redundancy`]): softmax over all tokens of the mean cosine between their keys, in which
//! the latest near-duplicate of each key is forgiven. The window always stays.
//!
//! Redundancy compares all pairs of keys, which takes time that grows with the square of the list and memory that does
//! not. The method is meant for decoding (`every:steps=128`), where lists are as short as the budget.

use super::past::{self, each_query, raise, softmax};
use super::pool::{Kind, Pool};
use super::redundancy;
use crate::attention::Shape;
use crate::device::simd::loops;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};
use std::f32::consts::LOG2_E;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "r-kv",
    about: "keeps what the last queries attend to and later keys do not repeat; the paper's is r-kv+every:steps=128",
    paper: "2505.24133",
    parameters: &[
        Parameter { name: "lambda", default: "0.1", about: "weight of importance; the rest is redundancy's" },
        Parameter { name: "window", default: "8", about: "observing queries, and recent tokens kept" },
        Parameter { name: "kernel", default: "7", about: "width of the max pool, odd" },
    ],
    build: |named, _| {
        let lambda = named.number("lambda", 0.1, 0.0..=1.0)? as f32;
        let (window, pool) = (named.count("window", 8, 1)?, Pool::of(named, 7, Kind::Max)?);
        Ok(Policy::after_prefill(RKv { lambda, window, pool }))
    },
};

struct RKv {
    lambda: f32,
    window: usize,
    pool: Pool,
}

impl RKv {
    /// Scratch elements of a list: a row for redundancy, and then either a row of logits for each head and one for
    /// importance, or what redundancy takes.
    fn elements(shape: &Shape) -> usize {
        let importance = (shape.group() + 1) * shape.kv_len;
        shape.kv_len + importance.max(redundancy::workspace(shape))
    }
}

impl Scorer for RKv {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::RecentAttention]
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: 0, window: self.window }
    }

    fn recent_queries(&self) -> usize {
        self.window
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * Self::elements(shape)) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let shape = context.call.shape;
        let elements = context.lists() * Self::elements(&shape);
        let mut scratch = context.arena.alloc::<f32>(Label::Workspace, elements)?;
        let (isa, observers) = (context.call.cpu.isa(), self.window.min(shape.q_len) as f32);
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let past = past::past(list.len, self.window);
            scores.fill(0.0);
            let (redundancy, scratch) = scratch.split_at_mut(list.len);
            redundancy::redundancy(isa, list, shape.head_dim, redundancy, scratch);
            loops::scale(isa, redundancy, LOG2_E);
            softmax(isa, redundancy);

            let (importance, scratch) = scratch.split_at_mut(past);
            importance.fill(0.0);
            each_query(context, list, self.window, scratch, |logits| {
                let (most, others) = logits.split_at_mut(past);
                others.chunks_exact(past).for_each(|head| raise(most, head));
                softmax(isa, most);
                loops::add_scaled(isa, importance, 1.0 / observers, most);
            });
            self.pool.apply(importance, &mut scores[..past]);
            for (score, redundancy) in scores[..past].iter_mut().zip(&*redundancy) {
                *score = self.lambda * *score - (1.0 - self.lambda) * redundancy;
            }
        });
        Ok(())
    }
}

//! `rms-attention`: a token is worth the root mean square of the attention that the latest queries gave it, over queries and the
//! query heads of the group: how Attention Matching (arXiv 2602.16284) chooses keys where it is to be quick.
//!
//! Squares let a token that one query needs stand above one that all look at a little. The authors' code asks queries that were
//! made for the purpose, or those of the context; here the context's last ones are asked, as SnapKV does, under their mask. What
//! makes the method whole is `+match`, which refits what is retained to the same queries.

use super::snapkv::recent_columns;
use crate::attention::Shape;
use crate::attention::export::{self, OverGroup, OverQueries, Reduction};
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Scorer, Statistic};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "rms-attention",
    about: "keeps the tokens with the largest root mean square of the last queries' attention",
    paper: "2602.16284",
    parameters: &[Parameter { name: "window", default: "64", about: "last queries that are asked" }],
    build: |named, _| Ok(Policy::after_prefill(RmsAttention { window: named.count("window", 64, 1)? })),
};

struct RmsAttention {
    window: usize,
}

impl Scorer for RmsAttention {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    fn recent_queries(&self) -> usize {
        self.window
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * export::workspace(shape, threads) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let reduction = Reduction { queries: OverQueries::SumOfSquares, group: OverGroup::Mean };
        let observers = recent_columns(context, self.window, reduction, scores)?;
        scores.iter_mut().for_each(|score| *score = (*score / observers as f32).sqrt());
        Ok(())
    }
}

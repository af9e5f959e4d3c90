//! TOVA (arXiv 2401.06104): token omission via attention. Tokens to which the latest query pays least attention go,
//! the same ones in every head of the layer; the latest token stays.

use super::snapkv::recent_columns;
use crate::attention::Shape;
use crate::attention::export::{self, Reduction};
use crate::policy::{
    Averages, Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic, Then,
};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "tova",
    about: "keeps what the latest query attends to, averaged over all heads; the paper's is tova+every",
    paper: "2401.06104",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(Tova)),
};

struct Tova;

impl Scorer for Tova {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    /// Every head evicts the same slots, so that lists of a layer have the same tokens in the same order.
    fn averages(&self) -> Averages {
        Averages::Heads
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: 0, window: 1 }
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * export::workspace(shape, threads) as u64
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::Recent { queries: Some(1), reduction: Reduction::RECEIVED, then: Then::MeanOverHeads })
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let Shape { kv_heads, kv_len, .. } = context.call.shape;
        let queries = recent_columns(context, 1, Reduction::RECEIVED, scores)?;
        Then::MeanOverHeads.apply(scores, [kv_heads, kv_len], |list| context.len(list), queries, context.arena)?;
        Ok(())
    }
}

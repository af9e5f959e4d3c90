//! TOVA (arXiv 2401.06104): token omission via attention. Tokens to which the latest query pays least attention go,
//! the same ones in every head of the layer; the latest token stays.

use super::snapkv::recent_columns;
use crate::attention::Shape;
use crate::attention::export::{self, Reduction};
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic, Then};

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
        let shape = context.call.shape;
        recent_columns(context, 1, Reduction::RECEIVED, scores)?;
        for sequence in scores.chunks_mut(shape.kv_heads * shape.kv_len) {
            // Every head evicts the same slots, so lists of a sequence have the same tokens in the same order.
            let (mean, heads) = sequence.split_at_mut(shape.kv_len);
            for head in heads.chunks_exact(shape.kv_len) {
                mean.iter_mut().zip(head).for_each(|(sum, score)| *sum += score);
            }
            mean.iter_mut().for_each(|sum| *sum /= shape.kv_heads as f32);
            heads.chunks_exact_mut(shape.kv_len).for_each(|head| head.copy_from_slice(mean));
        }
        Ok(())
    }
}

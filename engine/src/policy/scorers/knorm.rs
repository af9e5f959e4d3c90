//! Knorm (arXiv 2406.11430): keys of small norm attract attention, so the score is the negative L2 norm of the key.

use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Scorer, ScoringPlan, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "knorm",
    about: "keeps the keys of smallest L2 norm",
    paper: "2406.11430",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(Knorm)),
};

struct Knorm;

impl Scorer for Knorm {
    fn is_absolute(&self) -> bool {
        true
    }

    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys]
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::KeyNorm)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, &mut [], |list, scores, _| {
            list.keys(|slot, key| scores[slot] = -key.iter().map(|x| x * x).sum::<f32>().sqrt());
        });
        Ok(())
    }
}

//! Scores times the L2 norm of the value: attention to a small value adds little to the output. For scores that are
//! not negative, such as attention; a negative score times a large norm would only be more negative.

use super::super::linear::dot;
use crate::attention::Shape;
use crate::policy::{
    Context, Part, PartEntry, PolicyError, Protect, Scored, Scorer, ScoringPlan, Statistic, each_list,
};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "vnorm",
    about: "scores times the L2 norm of the value; for scores that are not negative, such as attention",
    paper: "2406.12335",
    parameters: &[],
    build: |_, _| Ok(Part::Scorer(Box::new(|scorer| Box::new(ValueNorm { scorer })))),
};

struct ValueNorm {
    scorer: Box<dyn Scorer>,
}

impl Scorer for ValueNorm {
    fn needs(&self) -> Vec<Statistic> {
        let mut needs = self.scorer.needs();
        needs.push(Statistic::Values);
        needs
    }

    fn protect(&self, budget_tokens: usize) -> Protect {
        self.scorer.protect(budget_tokens)
    }

    fn recent_queries(&self) -> usize {
        self.scorer.recent_queries()
    }

    fn gate(&self, layer: usize, hidden: &[f32], gates: &mut [f32]) {
        self.scorer.gate(layer, hidden, gates);
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        self.scorer.scratch_bytes(shape, threads)
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::TimesValueNorm(Box::new(self.scorer.scoring_plan()?)))
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.scorer.score(context, scores)?;
        times_value_norm(context, scores, 0.0);
        Ok(())
    }

    fn refine(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        counts: &[usize],
        scratch: &mut [f32],
    ) -> Result<(), PolicyError> {
        self.scorer.refine(context, scored, counts, scratch)
    }
}

/// `score = (score + epsilon) * |value|`.
pub(super) fn times_value_norm(context: &Context<'_>, scores: &mut [f32], epsilon: f32) {
    each_list(context, scores, &mut [], |list, scores, _| {
        list.values(|slot, value| scores[slot] = (scores[slot] + epsilon) * dot(value, value).sqrt());
    });
}

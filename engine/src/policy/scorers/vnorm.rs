//! Scores times the L2 norm of the value: attention to a small value adds little to the output. The paper (VATP) takes the
//! L1 norm and keeps the first tokens whatever they score; `+protect:sink=N` does that here. For scores that are
//! not negative, such as attention; a negative score times a large norm would only be more negative.

use super::super::linear::dot;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scorer, ScoringPlan, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "vnorm",
    about: "scores times the L2 norm of the value, for scores that are not negative, such as attention; VATP takes the L1 norm, and keeps the first tokens",
    paper: "2406.12335",
    parameters: &[],
    build: |_, _| Ok(Part::Scorer(Box::new(|scorer| Box::new(ValueNorm { scorer })))),
};

struct ValueNorm {
    scorer: Box<dyn Scorer>,
}

impl Scorer for ValueNorm {
    fn inner(&self) -> Option<&dyn Scorer> {
        Some(&*self.scorer)
    }

    fn needs(&self) -> Vec<Statistic> {
        let mut needs = self.scorer.needs();
        needs.push(Statistic::Values);
        needs
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::TimesValueNorm(Box::new(self.scorer.scoring_plan()?)))
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.scorer.score(context, scores)?;
        times_value_norm(context, scores, 0.0);
        Ok(())
    }
}

/// `score = (score + epsilon) * |value|`.
pub(super) fn times_value_norm(context: &Context<'_>, scores: &mut [f32], epsilon: f32) {
    each_list(context, scores, &mut [], |list, scores, _| {
        list.values(|slot, value| scores[slot] = (scores[slot] + epsilon) * dot(value, value).sqrt());
    });
}

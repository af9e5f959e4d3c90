//! Protection for any scorer: first and recent tokens that are not evicted.

use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "protect",
    about: "first and recent tokens that are never evicted, besides those of the method itself",
    paper: "",
    parameters: &[
        Parameter { name: "sink", default: "4", about: "first tokens kept" },
        Parameter { name: "window", default: "0", about: "recent tokens kept" },
    ],
    build: |named, _| {
        let more = Protect { sink: named.count("sink", 4, 0)?, window: named.count("window", 0, 0)? };
        Ok(Part::Scorer(Box::new(move |scorer| Box::new(Protected { scorer, more, at_most_budget: false }))))
    },
};

/// A scorer with more protection.
pub struct Protected {
    /// The scorer.
    pub scorer: Box<dyn Scorer>,
    /// At least these are protected.
    pub more: Protect,
    /// Whether the window shrinks to the budget where that is smaller.
    pub at_most_budget: bool,
}

impl Scorer for Protected {
    fn inner(&self) -> Option<&dyn Scorer> {
        Some(&*self.scorer)
    }

    fn needs(&self) -> Vec<Statistic> {
        self.scorer.needs()
    }

    fn protect(&self, budget_tokens: usize) -> Protect {
        let own = self.scorer.protect(budget_tokens);
        let most = if self.at_most_budget { budget_tokens } else { usize::MAX };
        Protect { sink: own.sink.max(self.more.sink), window: own.window.max(self.more.window.min(most)) }
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        self.scorer.scoring_plan()
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.scorer.score(context, scores)
    }
}

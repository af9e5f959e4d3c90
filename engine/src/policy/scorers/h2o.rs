//! H2O (arXiv 2306.14048): heavy hitters, the tokens that have received most attention so far, and a recent window.
//!
//! The score is the sum over all queries of the attention a token received, averaged over the query heads of its
//! group. The window defaults to half of the budget, as in the authors' code (`heavy_ratio = recent_ratio`). An old
//! token was seen by more queries than a young one; with `age` the sum is divided by their number, all that came behind it: also
//! where a sliding window hid it from most of them. That alone, after
//! prefill and without a window, is kvpress's observed attention.

use crate::named::Parameter;
use crate::policy::{
    Context, List, Policy, PolicyEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic, each_list,
};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "h2o",
    about: "keeps the tokens with most accumulated attention, and a recent window; the paper's is h2o+every",
    paper: "2306.14048",
    parameters: &[
        Parameter { name: "window", default: "auto", about: "recent tokens kept; auto: half of the budget" },
        Parameter { name: "age", default: "false", about: "true: divide by the number of queries that saw a token" },
    ],
    build: |named, _| {
        let window = match named.text("window") {
            None | Some("auto") => None,
            Some(_) => Some(named.count("window", 0, 0)?),
        };
        Ok(Policy::after_prefill(H2o { window, age: named.flag("age", false)? }))
    },
};

/// The registry's line of observed attention.
pub const OBSERVED: PolicyEntry = PolicyEntry {
    name: "observed-attention",
    about: "keeps the tokens with most attention per query that saw them, after prefill",
    paper: "2306.14048",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(H2o { window: Some(0), age: true })),
};

struct H2o {
    window: Option<usize>,
    age: bool,
}

impl Scorer for H2o {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::AccumulatedAttention]
    }

    fn protect(&self, budget_tokens: usize) -> Protect {
        Protect { sink: 0, window: self.window.unwrap_or(budget_tokens / 2) }
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::Accumulated { age: self.age })
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let missing = PolicyError::Missing { policy: "h2o", what: "the attention accumulated over all queries" };
        scores.copy_from_slice(context.accumulated.ok_or(missing)?);
        if self.age {
            each_list(context, scores, &mut [], |list: &List<'_>, scores, _| {
                for (slot, score) in scores.iter_mut().enumerate() {
                    *score /= (context.seen_tokens - list.position(slot)) as f32;
                }
            });
        }
        Ok(())
    }
}

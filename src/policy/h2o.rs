//! H2O (arXiv 2306.14048): heavy hitters, the tokens that have received most attention so far, and a recent window.
//!
//! The score is the sum over all queries of the attention a token received, averaged over the query heads of its
//! group. The window defaults to half of the budget, as in the authors' code (`heavy_ratio = recent_ratio`).

use super::{Context, Needs, Policy, PolicyEntry, PolicyError, Protect, Scorer};
use crate::named::Parameter;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "h2o",
    about: "keeps the tokens with most accumulated attention, and a recent window",
    paper: "2306.14048",
    parameters: &[
        Parameter { name: "window", default: "auto", about: "recent tokens kept; auto: half of the budget" },
        Parameter { name: "every", default: "1", about: "decode steps between evictions; 0: only after prefill" },
    ],
    needs: Needs::AllQueries,
    build: |named| {
        let window = match named.text("window") {
            None | Some("auto") => None,
            Some(_) => Some(named.count("window", 0, 0)?),
        };
        Ok(Policy::after_prefill(H2o { window }).every(named.count("every", 1, 0)?))
    },
};

struct H2o {
    window: Option<usize>,
}

impl Scorer for H2o {
    fn needs(&self) -> Needs {
        Needs::AllQueries
    }

    fn protect(&self, budget_tokens: usize) -> Protect {
        Protect { sink: 0, window: self.window.unwrap_or(budget_tokens / 2) }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let missing = PolicyError::Missing { policy: "h2o", what: "the attention accumulated over all queries" };
        scores.copy_from_slice(context.accumulated.ok_or(missing)?);
        Ok(())
    }
}

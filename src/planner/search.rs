//! The largest context and the largest batch that fit: bytes never fall as either grows, so halving finds the last.

use super::PlanError;
use super::eviction::Eviction;
use super::scenario::Scenario;
use crate::policy::Budget;

/// Beyond this nobody asks.
pub const MOST: u64 = 1 << 40;

/// The largest number from 1 to [`MOST`] that fits, if any does.
fn last(mut fits: impl FnMut(u64) -> Result<bool, PlanError>) -> Result<Option<u64>, PlanError> {
    if !fits(1)? {
        return Ok(None);
    }
    // Doubling first: most answers are far below the end, which is a power of two.
    let mut good = 1;
    while good < MOST && fits(2 * good)? {
        good *= 2;
    }
    let mut bad = if good == MOST { MOST + 1 } else { 2 * good };
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(middle)? {
            true => good = middle,
            false => bad = middle,
        }
    }
    Ok(Some(good))
}

impl Scenario<'_> {
    /// The largest context that fits; `None` when not even one token does.
    ///
    /// # Errors
    /// When the budget leaves no token of the context that was asked for.
    pub fn max_context(&self) -> Result<Option<u64>, PlanError> {
        // A fraction of few tokens leaves none: of such short contexts it is asked whether there is room for one token.
        last(|context| match self.fits(context) {
            Err(PlanError::Budget(_)) if context < self.context => {
                let one = |eviction| Eviction { budget: Budget::Tokens(1), ..eviction };
                Scenario { eviction: self.eviction.clone().map(one), ..self.clone() }.fits(context)
            }
            fits => fits,
        })
    }

    /// The largest batch that fits at the context.
    ///
    /// # Errors
    /// When the budget leaves no token.
    pub fn max_batch(&self) -> Result<Option<u64>, PlanError> {
        // All are read and held together.
        let mut scenario = Scenario { concurrency: 1, ..self.clone() };
        last(|batch| {
            scenario.batch = batch;
            scenario.fits(self.context)
        })
    }
}

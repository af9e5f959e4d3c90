//! What a model that was told facts answered: the part of a record that only `edit` has.

use super::answers::Estimate;
use crate::editing::{Answered, Rate};
use crate::stats::wilson;
use serde::{Deserialize, Serialize};

/// Shares of answers, with Wilson's intervals over questions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Edited {
    /// Drawn episodes.
    pub episodes: usize,
    /// Facts that were asked for, over all of them.
    pub asked: usize,
    /// Facts asked for by their stem, answered by their value.
    pub stem: Estimate,
    /// The same in words that no training has.
    pub rephrased: Estimate,
    /// Facts that got another value, answered by it.
    pub replaced: Estimate,
    /// The same, answered by the old value.
    pub replaced_old: Estimate,
    /// Facts that were taken back, answered by what they were.
    pub forgotten: Estimate,
    /// Facts beside those, answered by their value; `None` where all were taken back.
    pub remembered: Option<Estimate>,
    /// Facts that were never written, answered by what they would have been.
    pub never_written: Estimate,
    /// Other questions and sentences, whose likeliest token is that of the model that was told nothing.
    pub unchanged: Estimate,
    /// The same without the scope detector; `None` where there is none.
    pub unchanged_unscoped: Option<Estimate>,
    /// Bytes that hold the facts: the memory, the cache's pages, or the list of facts that are retrieved.
    pub held_bytes: u64,
}

impl Edited {
    /// Of what was answered; `None` where nothing was.
    pub fn of(answered: &Answered) -> Option<Self> {
        Some(Edited {
            episodes: answered.episodes,
            asked: answered.stem.asked,
            stem: estimate(&answered.stem)?,
            rephrased: estimate(&answered.rephrased)?,
            replaced: estimate(&answered.replaced)?,
            replaced_old: estimate(&answered.replaced_old)?,
            forgotten: estimate(&answered.forgotten)?,
            remembered: estimate(&answered.remembered),
            never_written: estimate(&answered.never_written)?,
            unchanged: estimate(&answered.unchanged)?,
            unchanged_unscoped: estimate(&answered.unchanged_unscoped),
            held_bytes: answered.held_bytes,
        })
    }
}

fn estimate(rate: &Rate) -> Option<Estimate> {
    let (ci95_low, ci95_high) = wilson(rate.share(), rate.asked);
    (rate.asked > 0).then(|| Estimate { mean: rate.share(), ci95_low, ci95_high })
}

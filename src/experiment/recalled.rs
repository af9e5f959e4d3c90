//! What a memory of facts recalled: the part of a record that only `recall` has.

use super::answers::Estimate;
use crate::episodic::{Episode, Outcome, UNWRITTEN};
use crate::stats::wilson;
use serde::{Deserialize, Serialize};

/// Shares of right answers, with intervals over drawn episodes. An answer is right when the cue is answered at all, with the
/// right value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recalled {
    /// Drawn episodes.
    pub samples: usize,
    /// Bytes that the memory holds of facts; a prior, which holds none, is not counted.
    pub held_bytes: u64,
    /// Of facts that were written and left alone; `None` where all are changed.
    pub kept: Option<Estimate>,
    /// Of overwritten facts: the new value is given.
    pub changed: Option<Estimate>,
    /// Of overwritten or forgotten facts: the old value is still given.
    pub old: Option<Estimate>,
    /// Facts to be taken out that the memory did not find; `None` where none is taken out.
    pub refused: Option<Estimate>,
    /// Of facts that were never written.
    pub unwritten: Estimate,
    /// Cues about facts that were left alone which are answered.
    pub answered_kept: Option<Estimate>,
    /// Cues about changed facts which are answered.
    pub answered_changed: Option<Estimate>,
    /// Cues about never-written facts which are answered.
    pub answered_unwritten: Estimate,
    /// Chance that the scope detector's distance is smaller for a written fact than for a never-written one; `None` without one.
    pub scope_auc: Option<Estimate>,
    /// Mean cosine of what is read with the fact.
    pub likeness: Option<Estimate>,
}

impl Recalled {
    /// Means over the outcomes of an episode; `None` without any.
    pub fn over(outcomes: &[Outcome], episode: &Episode, held_bytes: u64) -> Option<Self> {
        let (kept, changed) = (episode.count - episode.changed_count(), episode.changed_count());
        let values = |read: fn(&Outcome) -> Option<f64>| outcomes.iter().filter_map(read).collect::<Vec<f64>>();
        let share = |facts: usize, read: fn(&Outcome) -> Option<f64>| share(&values(read), facts);
        Some(Recalled {
            samples: outcomes.len(),
            held_bytes,
            kept: share(kept, |outcome| outcome.kept),
            changed: share(changed, |outcome| outcome.changed),
            old: share(changed, |outcome| outcome.old),
            refused: share(changed, |outcome| outcome.refused),
            unwritten: share(UNWRITTEN, |outcome| Some(outcome.unwritten))?,
            answered_kept: share(kept, |outcome| outcome.answered_kept),
            answered_changed: share(changed, |outcome| outcome.answered_changed),
            answered_unwritten: share(UNWRITTEN, |outcome| Some(outcome.answered_unwritten))?,
            scope_auc: share(kept, |outcome| outcome.scope_auc),
            likeness: Estimate::over(&values(|outcome| outcome.likeness)),
        })
    }
}

/// Mean of one share for each episode, each of so many facts: with a bootstrap interval over episodes and, where all of these
/// agree, Wilson's over facts.
fn share(values: &[f64], facts: usize) -> Option<Estimate> {
    let found = Estimate::over(values)?;
    let (ci95_low, ci95_high) = match found.ci95_low < found.ci95_high {
        true => (found.ci95_low, found.ci95_high),
        false => wilson(found.mean, values.len() * facts),
    };
    Some(Estimate { ci95_low, ci95_high, ..found })
}

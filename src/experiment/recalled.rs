//! What a memory of facts recalled: the part of a record that only `recall` has.

use super::answers::Estimate;
use crate::episodic::Outcome;
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
    /// Means over outcomes; `None` without any.
    pub fn over(outcomes: &[Outcome], held_bytes: u64) -> Option<Self> {
        let values = |read: fn(&Outcome) -> Option<f64>| outcomes.iter().filter_map(read).collect::<Vec<f64>>();
        let share = |read: fn(&Outcome) -> Option<f64>| Estimate::of_shares(&[&values(read)]);
        Some(Recalled {
            samples: outcomes.len(),
            held_bytes,
            kept: share(|outcome| outcome.kept),
            changed: share(|outcome| outcome.changed),
            old: share(|outcome| outcome.old),
            refused: share(|outcome| outcome.refused),
            unwritten: share(|outcome| Some(outcome.unwritten))?,
            answered_kept: share(|outcome| outcome.answered_kept),
            answered_changed: share(|outcome| outcome.answered_changed),
            answered_unwritten: share(|outcome| Some(outcome.answered_unwritten))?,
            scope_auc: share(|outcome| outcome.scope_auc),
            likeness: Estimate::over(&values(|outcome| outcome.likeness)),
        })
    }
}

//! A scorer in the steps that a GPU has kernels for (`kernels/export.cu`, `kernels/score.cu`).
//!
//! A scoring plan says nothing new: it names the formula that the scorer itself computes on the CPU, so that
//! [`super::cuda`] can launch the kernels of it. Scores agree with the scorer's as far as f32 sums of another order do.

use crate::attention::export::Reduction;

/// How scores are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScoringPlan {
    /// The position.
    Positions,
    /// `-|k|`.
    KeyNorm,
    /// `-cos(k, sum of k / |k| over the list)`.
    KeyUnlike,
    /// Attention received so far.
    Accumulated {
        /// Divided by the number of queries that saw the token.
        age: bool,
    },
    /// Attention of the last queries.
    Recent {
        /// How many; all that are at hand where it is `None`.
        queries: Option<usize>,
        /// How their probabilities become one number.
        reduction: Reduction,
        /// What is done with it.
        then: Then,
    },
    /// The scores of another plan times `|v|`.
    TimesValueNorm(Box<ScoringPlan>),
}

/// What becomes of attention columns before they are scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// They are the scores.
    Nothing,
    /// The fewer the better.
    Negated,
    /// Every head of a sequence gets the mean over its heads.
    MeanOverHeads,
    /// A centred pool along the list.
    Pooled {
        /// Divided by the number of queries before.
        mean: bool,
        /// Width, odd.
        kernel: usize,
        /// The largest instead of the mean.
        is_max: bool,
        /// Slots at the end that are left out and get 0.
        behind: usize,
    },
}

impl ScoringPlan {
    /// Whether it looks at the attention of the last queries.
    pub fn observes(&self) -> bool {
        match self {
            ScoringPlan::Recent { .. } => true,
            ScoringPlan::TimesValueNorm(plan) => plan.observes(),
            _ => false,
        }
    }
}

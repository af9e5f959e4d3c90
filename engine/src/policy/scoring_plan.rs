//! A scorer in the steps that a GPU has kernels for (`kernels/export.cu`, `kernels/score.cu`).
//!
//! A scoring plan says nothing new: it names the formula that the scorer itself computes on the CPU, so that
//! [`super::cuda`] can launch the kernels of it. Scores agree with the scorer's as far as f32 sums of another order do.

use super::scorers::pool::Pool;
use crate::attention::export::Reduction;
use crate::memory::{Arena, ArenaError, Label};

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
    /// The gate that the token carries.
    Gates,
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
        /// Over how many neighbours, and their mean or the largest.
        pool: Pool,
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

impl Then {
    /// Makes scores of attention columns in place, `[B, Hkv, kv_len]` with lists of `len(list)` tokens, to which `queries`
    /// queries added up.
    ///
    /// # Errors
    /// When the arena has no room for a copy of a list.
    pub fn apply(
        self,
        scores: &mut [f32],
        [kv_heads, kv_len]: [usize; 2],
        len: impl Fn(usize) -> usize,
        queries: usize,
        arena: &Arena,
    ) -> Result<(), ArenaError> {
        match self {
            Then::Nothing => {}
            Then::Negated => scores.iter_mut().for_each(|score| *score = -*score),
            Then::MeanOverHeads => {
                for sequence in scores.chunks_mut(kv_heads * kv_len) {
                    let (mean, heads) = sequence.split_at_mut(kv_len);
                    for head in heads.chunks_exact(kv_len) {
                        mean.iter_mut().zip(head).for_each(|(sum, score)| *sum += score);
                    }
                    mean.iter_mut().for_each(|sum| *sum /= kv_heads as f32);
                    heads.chunks_exact_mut(kv_len).for_each(|head| head.copy_from_slice(mean));
                }
            }
            Then::Pooled { mean, pool, behind } => {
                if mean {
                    scores.iter_mut().for_each(|score| *score /= queries as f32);
                }
                let mut raw = arena.alloc::<f32>(Label::Workspace, kv_len)?;
                for (list, scores) in scores.chunks_mut(kv_len).enumerate() {
                    // The columns of the last slots are left out of the pool: past its end there is nothing.
                    let scored_tokens = len(list).saturating_sub(behind);
                    raw[..scored_tokens].copy_from_slice(&scores[..scored_tokens]);
                    pool.apply(&raw[..scored_tokens], &mut scores[..scored_tokens]);
                    scores[scored_tokens..len(list)].fill(0.0);
                }
            }
        }
        Ok(())
    }
}

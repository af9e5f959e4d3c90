//! What becomes of a token that loses: it is dropped, or folded into one that stays, before its bytes are given back.

pub mod drop;

use super::{PolicyError, Statistic};
use crate::attention::Shape;
use crate::cache::PagedCache;
use crate::memory::Arena;

/// What an action may use besides the cache.
pub struct Fold<'a> {
    /// Where scratch memory comes from.
    pub arena: &'a Arena,
    /// Seed of the cell.
    pub seed: u64,
    /// Tokens that the sequence has seen.
    pub seen_tokens: usize,
}

/// Folds losers into tokens that stay.
pub trait Action: Send + Sync {
    /// What it looks at besides keys and values of the cache.
    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    /// Whether tokens of the cache carry how much was folded into them.
    fn weighs(&self) -> bool {
        false
    }

    /// Scratch bytes of [`Action::fold`].
    fn scratch_bytes(&self, _shape: &Shape) -> u64 {
        0
    }

    /// Changes tokens of `list` that stay by those that go. `kept` are the slots that stay, ascending; the list is
    /// still whole. `scores` are those of its tokens, protected ones above all others.
    ///
    /// # Errors
    /// When something it needs is missing, or the arena has no room.
    fn fold(
        &self,
        fold: &Fold<'_>,
        cache: &mut PagedCache,
        list: usize,
        kept: &[u32],
        scores: &[f32],
    ) -> Result<(), PolicyError>;
}

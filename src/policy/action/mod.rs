//! What becomes of a token that loses: it is dropped, or merged into one that stays, before its bytes are given back.
//!
//! An action works in place, on the tokens of one list of the cache at a time, while the list is still whole. Keys of
//! what is retained may then be rotated to positions inside the cache ([`rerotate`]).

pub mod accumulate;
pub mod cam;
pub mod drop;
pub mod merge;
pub mod rerotate;

use super::{Policy, PolicyError, Statistic};
use crate::attention::Shape;
use crate::attention::rope::Frequencies;
use crate::cache::{Column, PagedCache};
use crate::device::Cpu;
use crate::memory::Arena;

/// What an action may use besides the cache.
pub struct Fold<'a> {
    /// Where scratch memory comes from.
    pub arena: &'a Arena,
    /// Where it runs.
    pub cpu: &'a Cpu,
    /// Seed of the cell.
    pub seed: u64,
    /// Numbers in `0 .. 1` by position, in place of drawn ones.
    pub draws: Option<&'a [f32]>,
    /// RoPE's frequencies, to rotate keys; `None` where the inputs do not tell.
    pub rope: Option<&'a Frequencies>,
}

/// Merges evicted tokens into retained tokens.
pub trait Action: Send + Sync {
    /// What it looks at besides keys and values of the cache.
    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    /// Whether tokens of the cache carry how much was merged into them.
    fn weighs(&self) -> bool {
        false
    }

    /// Whether it changes keys, not values alone.
    fn changes_keys(&self) -> bool {
        false
    }

    /// Whether it looks at [`Fold::draws`].
    fn draws(&self) -> bool {
        false
    }

    /// Scratch bytes of [`Action::fold`] for one list of `kv_len` tokens.
    fn scratch_bytes(&self, _shape: &Shape, _threads: usize) -> u64 {
        0
    }

    /// Changes tokens of `list` that stay by those that go. `kept` are the slots that stay, ascending, at least one and
    /// not all; the list is still whole. Tokens do not depend on the number of threads.
    ///
    /// # Errors
    /// When something it needs is missing, or the arena has no room.
    fn fold(&self, fold: &Fold<'_>, cache: &mut PagedCache, list: usize, kept: &[u32]) -> Result<(), PolicyError>;
}

impl Policy {
    /// What tokens of a cache under this policy carry.
    pub fn columns(&self) -> &'static [Column] {
        use Column::{Attention, Gate, Origin, Weight};
        const SETS: [&[Column]; 16] = [
            &[],
            &[Attention],
            &[Weight],
            &[Attention, Weight],
            &[Origin],
            &[Attention, Origin],
            &[Weight, Origin],
            &[Attention, Weight, Origin],
            &[Gate],
            &[Attention, Gate],
            &[Weight, Gate],
            &[Attention, Weight, Gate],
            &[Origin, Gate],
            &[Attention, Origin, Gate],
            &[Weight, Origin, Gate],
            &[Attention, Weight, Origin, Gate],
        ];
        let attention = self.looks_at(Statistic::AccumulatedAttention);
        let weight = self.action.as_ref().is_some_and(|action| action.weighs());
        let bits = [attention, weight, self.rerotates, self.looks_at(Statistic::HiddenStates)];
        SETS[bits.iter().rev().fold(0, |set, &bit| 2 * set + usize::from(bit))]
    }

    /// Shrinks a list to the slots `kept` (ascending): evicted tokens are merged, what is retained moves together, and its keys are
    /// turned, as the policy says.
    ///
    /// # Errors
    /// When the action or re-rotation of keys lacks something, or the arena has no room.
    pub fn shrink(
        &self,
        fold: &Fold<'_>,
        cache: &mut PagedCache,
        list: usize,
        kept: &[u32],
    ) -> Result<(), PolicyError> {
        let some = !kept.is_empty() && kept.len() < cache.lens()[list];
        if let Some(action) = self.action.as_ref().filter(|_| some) {
            action.fold(fold, cache, list, kept)?;
        }
        cache.retain(list, kept.iter().map(|&slot| slot as usize))?;
        if self.rerotates {
            cache.rerotate(list, fold.rope.ok_or(rerotate::NO_ROPE)?)?;
        }
        Ok(())
    }
}

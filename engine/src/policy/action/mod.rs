//! What becomes of a token that loses: it is dropped, or merged into one that stays, before its bytes are given back.
//!
//! An action works in place, on the tokens of one list of the cache at a time, while the list is still whole. Keys of
//! what is retained may then be rotated to positions inside the cache ([`rerotate`]).

pub mod accumulate;
pub mod cam;
pub mod drop;
pub mod matching;
pub mod merge;
pub mod rerotate;

use super::{Policy, PolicyError, Statistic};
use crate::attention::rope::Frequencies;
use crate::attention::{Params, Shape};
use crate::cache::{Column, PagedCache};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::tensor::TensorView;

/// What an action may use besides the cache.
#[derive(Clone, Copy)]
pub struct Fold<'a> {
    /// Where scratch memory comes from.
    pub arena: &'a Arena,
    /// Where it runs.
    pub cpu: &'a Cpu,
    /// Seed of the cell.
    pub seed: u64,
    /// The list's number among those of all layers ([`list_number`](crate::policy::list_number)): what is drawn for it does not
    /// depend on what else lies in the cache.
    pub number: usize,
    /// Numbers in `0 .. 1` by position, in place of drawn ones.
    pub draws: Option<&'a [f32]>,
    /// RoPE's frequencies, to rotate keys; `None` where the inputs do not tell.
    pub rope: Option<&'a Frequencies>,
    /// Queries that have asked the list, for actions that look at them.
    pub asked: Option<Asked<'a>>,
}

/// Queries that an eviction step is shown, and which of its lists is to be shrunk.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// The latest queries, `[B, Hq, Lq, D]`.
    pub q: TensorView<'a>,
    /// Number of the list among those of these sequences: `sequence * Hkv + head`.
    pub list: usize,
    /// Scale and soft-cap.
    pub params: Params,
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

    /// What each token weighs at first, from its hidden state in a layer as it arrives, `hidden` `[hidden]`, for an action that says so: a
    /// number for each KV head, `weights` `[Hkv]`, which are 1.
    fn weigh(&self, _layer: usize, _hidden: &[f32], _weights: &mut [f32]) {}

    /// Whether tokens of the cache carry a bias, which it gives them.
    fn biases(&self) -> bool {
        false
    }

    /// Whether it refits what is retained to [`Fold::asked`]: once, and to keys as they stand.
    fn refits(&self) -> bool {
        false
    }

    /// How many of the latest queries it looks at ([`Fold::asked`]).
    fn recent_queries(&self) -> usize {
        0
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

const KINDS: usize = Column::ALL.len();

/// Every set of columns: its members, and how many they are. Bit `i` of a set's number is that of [`Column::ALL`]'s `i`.
static COLUMNS: [([Column; KINDS], usize); 1 << KINDS] = {
    let mut sets = [(Column::ALL, 0); 1 << KINDS];
    let mut number = 0;
    while number < 1 << KINDS {
        let mut kind = 0;
        while kind < KINDS {
            if number >> kind & 1 == 1 {
                let (members, count) = &mut sets[number];
                members[*count] = Column::ALL[kind];
                *count += 1;
            }
            kind += 1;
        }
        number += 1;
    }
    sets
};

impl Policy {
    /// What tokens of a cache under this policy carry.
    pub fn columns(&self) -> &'static [Column] {
        let (action, looks_at) = (self.action.as_ref(), |statistic| self.looks_at(statistic));
        let carried = Column::ALL.map(|column| match column {
            Column::Attention => looks_at(Statistic::AccumulatedAttention),
            Column::Weight => action.is_some_and(|action| action.weighs()),
            Column::Origin => self.rerotates,
            Column::Gate => looks_at(Statistic::HiddenStates),
            Column::Bias => action.is_some_and(|action| action.biases()),
        });
        let (columns, count) = &COLUMNS[carried.iter().rev().fold(0, |set, &is_in| 2 * set + usize::from(is_in))];
        &columns[..*count]
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

//! What happens to a cache around a judgement, whoever holds the cache: attention that its tokens received is added up,
//! and a token that leaves the window of a delayed schedule is let go.

use super::action::Fold;
use super::{Policy, PolicyError};
use crate::attention::{Forward, export};
use crate::cache::PagedCache;
use crate::memory::{Arena, ArenaError, Buffer, Label};

/// Attention that each token of a call's lists receives from its queries, `[B, Hkv, kv_len]`.
///
/// # Errors
/// When the arena has no room.
pub fn received(call: &Forward<'_>, lse: &[f32], arena: &Arena) -> Result<Buffer<f32>, ArenaError> {
    let shape = &call.shape;
    let mut sums = arena.alloc::<f32>(Label::Policy, shape.batch * shape.kv_heads * shape.kv_len)?;
    let mut scratch = arena.alloc(Label::Workspace, export::workspace(shape, call.cpu.threads()))?;
    export::column_sums(call, lse, 0..shape.q_len, &mut sums, &mut scratch);
    Ok(sums)
}

/// Adds what [`received`] gave to the tokens of a cache. `list` gives the number in the cache of each list of the call,
/// whose longest has `kv_len` tokens.
///
/// # Errors
/// When other sequences share pages and the arena has no room for copies.
pub fn add_received(
    cache: &mut PagedCache,
    list: impl Fn(usize) -> usize,
    kv_len: usize,
    sums: &[f32],
) -> Result<(), ArenaError> {
    sums.chunks(kv_len).enumerate().try_for_each(|(index, sums)| cache.add_attention(list(index), sums))
}

/// Attention that tokens of a cache received so far, `[lists, kv_len]`, into `sums`.
pub fn accumulated(cache: &PagedCache, list: impl Fn(usize) -> usize, kv_len: usize, sums: &mut [f32]) {
    for (index, sums) in sums.chunks_mut(kv_len).enumerate() {
        let list = list(index);
        let len = cache.lens()[list];
        sums[..len].iter_mut().enumerate().for_each(|(slot, sum)| *sum = cache.attention(list, slot));
    }
}

/// What a delayed schedule compares with.
pub struct Leaving<'a> {
    /// Recent tokens of a list that are not judged yet.
    pub window: usize,
    /// Scores of the list's tokens.
    pub scores: &'a [f32],
    /// The best of those that the list lost after prefill.
    pub best_lost: f32,
}

/// Under a delayed schedule: lets the token go that has just left the window of a list, if it does not beat all that
/// the list lost. `stays` is scratch as long as the list. Returns how many went.
///
/// # Errors
/// When the policy's action lacks something, or the arena has no room.
pub fn let_leave(
    policy: &Policy,
    fold: &Fold<'_>,
    cache: &mut PagedCache,
    list: usize,
    leaving: &Leaving<'_>,
    stays: &mut [u32],
) -> Result<usize, PolicyError> {
    let len = cache.lens()[list];
    let Some(slot) = len.checked_sub(leaving.window + 1) else { return Ok(0) };
    if leaving.scores[slot] > leaving.best_lost {
        return Ok(0);
    }
    let others = (0..len as u32).filter(|&other| other as usize != slot);
    stays.iter_mut().zip(others).for_each(|(stays, other)| *stays = other);
    policy.shrink(fold, cache, list, &stays[..len - 1])?;
    Ok(1)
}

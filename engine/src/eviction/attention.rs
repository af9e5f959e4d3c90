//! Attention statistics of cached tokens, as eviction steps look at them: cumulative attention scores, which tokens carry in
//! a column of the cache, and log-sum-exps that are recomputed when lists have changed since their queries attended.

use crate::attention::{AttentionError, Forward, Kernel, Outputs, export};
use crate::cache::{Column, PagedCache};
use crate::memory::{Arena, ArenaError, Buffer, Label};

/// Attention that each token of a call's lists receives from its queries, `[B, Hkv, kv_len]`.
///
/// # Errors
/// When the arena has no room.
pub fn attention_sums(call: &Forward<'_>, lse: &[f32], arena: &Arena) -> Result<Buffer<f32>, ArenaError> {
    let shape = &call.shape;
    let mut sums = arena.alloc::<f32>(Label::Policy, shape.batch * shape.kv_heads * shape.kv_len)?;
    let mut scratch = arena.alloc(Label::Workspace, export::workspace(shape, call.cpu.threads()))?;
    export::column_sums(call, lse, 0..shape.q_len, &mut sums, &mut scratch);
    Ok(sums)
}

/// Adds what [`attention_sums`] gave to the tokens of a cache. `list` gives the number in the cache of each list of the call,
/// whose longest has `kv_len` tokens.
///
/// # Errors
/// When other sequences share pages and the arena has no room for copies.
pub(crate) fn add_cumulative_attention(
    cache: &mut PagedCache,
    list: impl Fn(usize) -> usize,
    kv_len: usize,
    sums: &[f32],
) -> Result<(), ArenaError> {
    sums.chunks(kv_len).enumerate().try_for_each(|(index, sums)| cache.add_attention(list(index), sums))
}

/// Attention that tokens of a cache received so far, `[lists, kv_len]`.
///
/// # Errors
/// When the arena has no room.
pub(super) fn accumulated(
    cache: &PagedCache,
    list: impl Fn(usize) -> usize,
    [lists, kv_len]: [usize; 2],
    arena: &Arena,
) -> Result<Buffer<f32>, ArenaError> {
    let mut sums = arena.alloc::<f32>(Label::Policy, lists * kv_len)?;
    for (index, sums) in sums.chunks_mut(kv_len.max(1)).enumerate() {
        let list = list(index);
        cache.read_column(list, Column::Attention, &mut sums[..cache.lens()[list]]);
    }
    Ok(sums)
}

/// Log-sum-exps of a call's queries, `[B, Hq, Lq]`, by one pass of a kernel.
///
/// # Errors
/// When the kernel cannot do the problem, or the arena has no room.
pub fn recompute_lse(kernel: &dyn Kernel, call: &Forward<'_>, arena: &Arena) -> Result<Buffer<f32>, AttentionError> {
    let dtype = call.q.dtype();
    let size = kernel.workspace(&call.shape, &call.params, dtype, call.cpu.threads());
    let mut workspace = size.allocate(arena)?;
    let mut outputs = Outputs::allocate(arena, &call.shape, dtype)?;
    kernel.forward(call, &mut outputs, &mut workspace)?;
    Ok(outputs.lse)
}

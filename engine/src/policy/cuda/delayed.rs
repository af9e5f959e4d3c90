//! Delayed eviction on a GPU: in each list, the token that has just left the recent ones goes unless it beats all that
//! the list lost after prefill. What [`crate::policy::select_leaving`] does on the CPU.

use super::{DeviceContext, DevicePolicyError, DeviceScored, DeviceSelection, launch, program};
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{ChoiceOperands, CudaError, DeviceBuffer};
use crate::memory::Label;

/// What is retained of each list; `best_lost` are the best scores that they lost after prefill.
///
/// # Errors
/// When there is no room, and as [`crate::device::cuda::Runtime::module`].
pub fn let_leave(
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    scored: &mut DeviceScored,
    best_lost: &[f32],
) -> Result<DeviceSelection, DevicePolicyError> {
    let (device, lists, width) = (context.runtime.device(), cache.shape().lists(), scored.width);
    let mut counts_there = device.alloc(context.arena, Label::Policy, 4 * lists as u64)?;
    let mut slots = device.alloc(context.arena, Label::Policy, 4 * (lists * width) as u64)?;
    scored.found.write(bytemuck::cast_slice(best_lost))?;
    let DeviceScored { values, found, protect, .. } = scored;
    let chosen = (&counts_there, &mut slots);
    context.runtime.load([program()])?;
    let time_ns = device.timed(|| begin_leaving(context, cache, [values, found], chosen, protect.window))?;
    let mut words = vec![0u32; 4 * lists];
    found.read(bytemuck::cast_slice_mut(&mut words))?;
    let counts = staying(cache, &words);
    let numbers: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
    counts_there.write(bytemuck::cast_slice(&numbers))?;
    Ok(DeviceSelection { slots, width, counts, counts_there, best_lost: best_lost.to_vec(), time_ns })
}

/// Begins to write the slots that stay, and which one goes: `found` `[4, lists]` has the best scores that were lost, as
/// [`super::begin_select`] leaves them there. `recent` slots at the end are not evicted yet.
pub(crate) fn begin_leaving(
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    [scores, found]: [&mut DeviceBuffer; 2],
    chosen: (&DeviceBuffer, &mut DeviceBuffer),
    recent: usize,
) -> Result<(), CudaError> {
    let (lists, width) = (cache.shape().lists(), cache.max_len());
    let choice = ChoiceOperands { scores, chosen: Some(chosen), found, lists, width, sink: 0, recent };
    launch(context, cache, "let_leave", [width.div_ceil(256), lists, 1], 256, &choice)
}

/// How many tokens stay of each list, by what [`begin_leaving`] has found.
pub(crate) fn staying(cache: &DeviceCache, found: &[u32]) -> Vec<usize> {
    let gone = &found[3 * cache.shape().lists()..];
    cache.lens().iter().zip(gone).map(|(len, &slot)| len - usize::from(slot as i32 >= 0)).collect()
}

//! Delayed judgements on a GPU: in each list, the token that has just left the recent ones goes unless it beats all that
//! the list lost after prefill. What [`crate::policy::evict`] does on the CPU.

use super::{DeviceContext, DevicePolicyError, DeviceScored, DeviceSelection, run};
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::ChoiceOperands;
use crate::memory::Label;

/// What stays of each list; `best_lost` are the best scores that they lost after prefill.
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
    let choice = ChoiceOperands {
        scores: &mut scored.values,
        chosen: Some((&counts_there, &mut slots)),
        found: &mut scored.found,
        lists,
        width,
        sink: 0,
        recent: scored.protect.window,
        highest: scored.highest_judged,
    };
    let time_ns = run(context, cache, "let_leave", [width.div_ceil(256), lists, 1], 256, &choice)?;
    let mut gone = vec![0i32; lists];
    scored.found.read_from(8 * lists, bytemuck::cast_slice_mut(&mut gone))?;
    let counts: Vec<usize> = cache.lens().iter().zip(gone).map(|(len, slot)| len - usize::from(slot >= 0)).collect();
    let numbers: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
    counts_there.write(bytemuck::cast_slice(&numbers))?;
    Ok(DeviceSelection { slots, width, counts, counts_there, best_lost: best_lost.to_vec(), time_ns })
}

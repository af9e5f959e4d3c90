//! Tokens of a dense tensor in a GPU's memory as a tensor of their own, or as a part of another: what kernels for
//! contiguous tensors read of a longer one.

use super::{ROWS, program};
use crate::device::cuda::{Corner, CudaError, DeviceBuffer, Launch, Runtime, Slice};
use crate::tensor::DType;
use std::ops::Range;

/// Copies the tokens `range` of the `heads` of `from` `[.., length, D]` to `to` `[heads, tokens, D]`. Returns the GPU's
/// time in nanoseconds.
///
/// # Errors
/// [`CudaError::Operand`] when a buffer is too small, and as [`Runtime::module`].
pub fn take_tokens(
    runtime: &Runtime,
    kind: (DType, usize),
    (from, length): (&DeviceBuffer, usize),
    heads: Range<usize>,
    range: Range<usize>,
    to: &mut DeviceBuffer,
) -> Result<u64, CudaError> {
    let at = Corner { head: heads.start, length, first: range.start };
    let there = Corner { head: 0, length: range.len(), first: 0 };
    runtime.load([program(kind.0.into(), kind.1)])?;
    runtime.device().timed(|| begin_copy(runtime, kind, (from, at), (to, there), [heads.len(), range.len()]))
}

/// Begins to copy `count` tokens of each of `heads` heads of a tensor at one corner to another at another; element type and
/// head dim are the `kind`.
///
/// # Errors
/// As [`take_tokens`].
pub(super) fn begin_copy(
    runtime: &Runtime,
    (dtype, head_dim): (DType, usize),
    from: (&DeviceBuffer, Corner),
    to: (&mut DeviceBuffer, Corner),
    [heads, count]: [usize; 2],
) -> Result<(), CudaError> {
    let slice = Slice::new(from, to, head_dim * dtype.bytes(), [heads, count])?;
    let program = program(dtype.into(), head_dim);
    let launch =
        Launch { function: "take_tokens", grid: [count.div_ceil(ROWS), heads, 1], threads: 128, shared_bytes: 0 };
    let device = runtime.device();
    device.begin(&device.ready(&*runtime.module(&program)?, &[launch])?, &[&slice])
}

//! Tokens of a dense tensor in a GPU's memory as a tensor of their own: what kernels for contiguous tensors read of a
//! longer one.

use super::{ROWS, SOURCE};
use crate::device::cuda::{CudaError, DeviceBuffer, Launch, Program, Runtime, Slice};
use crate::tensor::DType;
use std::ops::Range;

/// Copies the tokens `range` of the `heads` of `from` `[.., length, D]` to `to` `[heads, tokens, D]`. Returns the GPU's
/// time in nanoseconds.
///
/// # Errors
/// [`CudaError::Operand`] when a buffer is too small, and as [`Runtime::module`].
pub fn take_tokens(
    runtime: &Runtime,
    (dtype, head_dim): (DType, usize),
    (from, length): (&DeviceBuffer, usize),
    heads: Range<usize>,
    range: Range<usize>,
    to: &mut DeviceBuffer,
) -> Result<u64, CudaError> {
    let grid = [range.len().div_ceil(ROWS), heads.len(), 1];
    let slice = Slice::new(from, to, head_dim * dtype.bytes(), length, heads, range)?;
    let program = Program { source: SOURCE, dtype, head_dim, macros: vec![] };
    let launch = Launch { function: "take_tokens", grid, threads: 128, shared_bytes: 0 };
    runtime.device().run(&*runtime.module(&program)?, &[launch], &[&slice])
}

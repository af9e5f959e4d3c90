//! What a backward pass is told besides the problem: the same struct as in `kernels/gradient.cuh`.

use super::problem::{Buffers, has};
use super::{CudaError, DeviceBuffer, Extents, Problem};
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// The buffers of a backward pass.
pub struct BackwardOperands<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub k: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub v: &'a DeviceBuffer,
    /// What the forward pass wrote, `[B, Hq, Lq, D]`.
    pub o: &'a DeviceBuffer,
    /// What the forward pass wrote, `[B, Hq, Lq]` in f32.
    pub lse: &'a DeviceBuffer,
    /// `[B, Hq, Lq, D]`.
    pub grad_o: &'a DeviceBuffer,
    /// As `q`.
    pub grad_q: &'a mut DeviceBuffer,
    /// As `k`.
    pub grad_k: &'a mut DeviceBuffer,
    /// As `v`.
    pub grad_v: &'a mut DeviceBuffer,
    /// Twice `[B, Hq, Lq, Lk]` in f32: naive's probabilities and gradients of scores.
    pub scores: &'a mut DeviceBuffer,
    /// In f32: the inner products of the rows of `grad_o` and `o`, `[B, Hq, Lq]`, then sums of `grad_q`.
    pub partials: &'a mut DeviceBuffer,
}

/// The second argument of every kernel of a backward pass. It borrows its buffers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Gradients<'a> {
    grad_o: u64,
    grad_q: u64,
    grad_k: u64,
    grad_v: u64,
    delta: u64,
    sums: u64,
    buffers: PhantomData<&'a mut DeviceBuffer>,
}

// SAFETY: the struct is `repr(C)`, has no padding, and holds numbers only; its fields are those of `Gradients` in
// kernels/gradient.cuh (a test compares them). `backward` compares the buffers with the extents.
unsafe impl DeviceRepr for Gradients<'_> {}

/// Elements of f32 that hold the inner products of `rows` rows of `grad_o` and `o`: so many that what follows them is
/// aligned.
pub fn deltas(rows: usize) -> usize {
    rows.next_multiple_of(32)
}

/// Both arguments of a backward pass over buffers.
///
/// # Errors
/// [`CudaError::Operand`] when a buffer is smaller than the extents say, or an extent does not fit 31 bits.
pub fn backward<'a>(
    extents: &Extents,
    operands: &'a mut BackwardOperands<'_>,
) -> Result<(Problem<'a>, Gradients<'a>), CudaError> {
    let BackwardOperands { q, k, v, o, lse, grad_o, grad_q, grad_k, grad_v, scores, partials } = operands;
    // The kernels of a backward pass read o and lse.
    let problem = Problem::over(extents, Buffers { q, k: Some(k), v: Some(v), o, lse, scores, partials })?;
    let Extents { batch, q_heads, kv_heads, q_len, kv_len, head_dim, dtype, .. } = *extents;
    let row_bytes = head_dim * dtype.bytes();
    let (q_bytes, kv_bytes) = (batch * q_heads * q_len * row_bytes, batch * kv_heads * kv_len * row_bytes);
    let deltas = deltas(batch * q_heads * q_len);
    let delta = has("partials", partials, 4 * deltas)?;
    let gradients = Gradients {
        grad_o: has("do", grad_o, q_bytes)?,
        grad_q: has("dq", grad_q, q_bytes)?,
        grad_k: has("dk", grad_k, kv_bytes)?,
        grad_v: has("dv", grad_v, kv_bytes)?,
        delta,
        sums: delta + 4 * deltas as u64,
        buffers: PhantomData,
    };
    Ok((problem, gradients))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_has_the_size_that_cuda_gives_it() {
        assert_eq!(size_of::<Gradients>(), 6 * 8);
    }
}

//! What a forward pass writes in a GPU's memory, and how it is checked.

use super::Bench;
use crate::attention::cuda::Results;
use crate::attention::{Outputs, Shape};
use crate::device::cuda::{CudaError, DeviceBuffer};
use crate::experiment::measure::check::accurate;
use crate::experiment::measure::{TrialError, Truth};
use crate::experiment::record::Drift;
use crate::memory::{Arena, Label};
use crate::tensor::{DType, Tensor};

/// Bytes that are read back at a time: a GPU may have more memory than its host.
const PIECE_BYTES: usize = 32 << 20;

/// An output and its log-sum-exps.
pub(super) struct Written {
    shape: Shape,
    dtype: DType,
    /// `[B, Hq, Lq, D]`.
    pub(super) o: DeviceBuffer,
    /// `[B, Hq, Lq]` in f32.
    pub(super) lse: DeviceBuffer,
}

impl Written {
    /// As much as [`Outputs::bytes`] says. In a checked trial it is filled with NaN, so that what a kernel does not write
    /// is seen.
    pub(super) fn allocate(bench: Bench<'_>, shape: Shape, dtype: DType) -> Result<Self, CudaError> {
        let device = bench.runtime.device();
        let lse_bytes = DType::F32.bytes() as u64 * shape.rows() as u64;
        let o_bytes = Outputs::bytes(&shape, dtype) - lse_bytes;
        let o = device.alloc(bench.arena, Label::Activations, o_bytes)?;
        let lse = device.alloc(bench.arena, Label::Activations, lse_bytes)?;
        let mut written = Written { shape, dtype, o, lse };
        written.poison(bench)?;
        Ok(written)
    }

    /// In a checked trial, fills it with NaN.
    pub(super) fn poison(&mut self, bench: Bench<'_>) -> Result<(), CudaError> {
        if bench.truth.is_some() {
            self.o.fill(0xff)?;
            self.lse.fill(0xff)?;
        }
        Ok(())
    }

    pub(super) fn results(&mut self) -> Results<'_> {
        Results { o: &mut self.o, lse: &mut self.lse }
    }

    /// A copy on the host, outside every measured arena.
    pub(super) fn read(&self) -> Result<Outputs, TrialError> {
        let mut outputs = Outputs::allocate(&Arena::unlimited(), &self.shape, self.dtype)?;
        self.o.read(outputs.o.bytes_mut())?;
        self.lse.read(bytemuck::cast_slice_mut(&mut outputs.lse))?;
        Ok(outputs)
    }

    /// The distance from the truth. `token` says which query of this pass a token of the truth is.
    ///
    /// # Errors
    /// When the output holds a NaN or an infinity, or is further away than rounding explains.
    pub(super) fn check(&self, truth: &Truth, token: impl Fn(usize) -> usize) -> Result<Drift, TrialError> {
        let drift = self.drift(truth, token)?;
        accurate(&drift, self.dtype)?;
        Ok(drift)
    }

    /// Likewise, however far away.
    ///
    /// # Errors
    /// When the output holds a NaN or an infinity.
    pub(super) fn drift(&self, truth: &Truth, token: impl Fn(usize) -> usize) -> Result<Drift, TrialError> {
        self.finite()?;
        let Shape { q_heads, q_len, head_dim, .. } = self.shape;
        let row_bytes = head_dim * self.dtype.bytes();
        Ok(truth.drift(head_dim, |[batch, head, at], row| {
            let mut raw = vec![0; row_bytes];
            let index = (batch * q_heads + head) * q_len + token(at);
            match self.o.read_from(index * row_bytes, &mut raw) {
                Ok(()) => self.dtype.decode(&raw, row),
                // A distance that is no number is refused.
                Err(_) => row.fill(f32::NAN),
            }
        }))
    }

    fn finite(&self) -> Result<(), TrialError> {
        let Shape { q_heads, q_len, head_dim, .. } = self.shape;
        let (arena, rows) = (Arena::unlimited(), self.shape.rows());
        let piece = (PIECE_BYTES / (head_dim * self.dtype.bytes())).max(1);
        for first in (0..rows).step_by(piece) {
            let dims = [1, 1, piece.min(rows - first), head_dim];
            let mut o = Tensor::zeros(&arena, Label::Activations, self.dtype, dims)?;
            self.o.read_from(first * head_dim * self.dtype.bytes(), o.bytes_mut())?;
            if let Some(([_, _, row, element], value)) = o.first_non_finite() {
                let row = first + row;
                let at = [row / q_len / q_heads, row / q_len % q_heads, row % q_len, element];
                return Err(TrialError::Failed(format!("the output holds {value} at {at:?}")));
            }
            let mut lse = vec![0f32; dims[2]];
            self.lse.read_from(4 * first, bytemuck::cast_slice_mut(&mut lse))?;
            if let Some(row) = lse.iter().position(|lse| lse.is_nan() || *lse == f32::INFINITY) {
                return Err(TrialError::Failed(format!("the log-sum-exp of row {} is {}", first + row, lse[row])));
            }
        }
        Ok(())
    }
}

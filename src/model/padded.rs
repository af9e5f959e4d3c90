//! Activations: rows of f32 in the layout that products with weights read.

use crate::device::simd::linear::padded_rows;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::DType;

/// Rows of `width` elements, each followed by zeros up to whole vectors, with room for whole register tiles.
pub(super) struct PaddedRows {
    pub data: Buffer<f32>,
    pub width: usize,
    pub stride: usize,
    /// Whether products with bf16 weights may round it to bf16.
    pub rounds: bool,
}

impl PaddedRows {
    fn stride(width: usize) -> usize {
        width.next_multiple_of(16)
    }

    /// Zeros, of a pass in `dtype`: where that is f32, nothing is rounded.
    pub fn new(arena: &Arena, rows: usize, width: usize, dtype: DType) -> Result<Self, ArenaError> {
        let stride = Self::stride(width);
        Ok(PaddedRows {
            data: arena.alloc(Label::Activations, padded_rows(rows) * stride)?,
            width,
            stride,
            rounds: dtype != DType::F32,
        })
    }

    /// Bytes that [`PaddedRows::new`] takes.
    pub fn bytes(rows: usize, width: usize) -> u64 {
        4 * (padded_rows(rows) * Self::stride(width)) as u64
    }

    /// A row, without what follows it.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.stride..][..self.width]
    }
}

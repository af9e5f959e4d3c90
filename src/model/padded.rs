//! Activations: rows of f32 in the layout that products with weights read.

use super::Setup;
use crate::device::Cpu;
use crate::device::simd::linear::{FEW, padded_rows};
use crate::format::RowFormat;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{DType, RowCode};
use rayon::prelude::*;

/// Rows of `width` elements, each followed by zeros up to whole vectors, with room for whole register tiles.
pub(super) struct PaddedRows {
    pub data: Buffer<f32>,
    pub width: usize,
    pub stride: usize,
    /// Whether products with bf16 weights may round it to bf16.
    pub rounds: bool,
    /// What rows are rounded to before they are multiplied.
    activations: Option<RowFormat>,
}

impl PaddedRows {
    fn stride(width: usize) -> usize {
        width.next_multiple_of(16)
    }

    /// Zeros, of a pass in a type: where that is f32, no product rounds anything.
    pub fn new(arena: &Arena, rows: usize, width: usize, setup: &Setup<'_>) -> Result<Self, ArenaError> {
        let stride = Self::stride(width);
        Ok(PaddedRows {
            data: arena.alloc(Label::Activations, padded_rows(rows) * stride)?,
            width,
            stride,
            rounds: setup.dtype != DType::F32,
            activations: setup.activations,
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

    /// The first `rows` rows as the format of the pass's activations keeps them, one scale or more to each row: what a product in
    /// that format would read. As they are where there is none.
    pub fn round(&mut self, cpu: &Cpu, rows: usize) {
        let Some(format) = self.activations else { return };
        let (width, row_bytes) = (self.width, format.row_bytes(self.width));
        let round = |kept: &mut Vec<u8>, row: &mut [f32]| {
            format.encode(&row[..width], width, kept);
            format.decode(kept, 0, &mut row[..width]);
        };
        let kept = || vec![0; row_bytes];
        let data = &mut self.data[..rows * self.stride];
        match rows <= FEW {
            true => {
                let mut kept = kept();
                data.chunks_exact_mut(self.stride).for_each(|row| round(&mut kept, row));
            }
            false => cpu.install(|| data.par_chunks_exact_mut(self.stride).for_each_init(kept, round)),
        }
    }
}

//! Activations: rows of f32 in the layout that products with weights read.

use super::Setup;
use crate::device::Cpu;
use crate::device::simd::integers::{Codes, GROUP, Integers, MOST_ROWS, Quad};
use crate::device::simd::linear::FEW;
use crate::device::simd::panel::{padded_rows, rounds};
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
    rounds: bool,
    /// Whether what rows are is not in `data` in f32, but rounded to bf16 at its start, as [`super::linear`] reads them.
    pub lie_rounded: bool,
    /// What rows are rounded to before they are multiplied.
    activations: Option<RowFormat>,
    /// Few rows as whole numbers, [`Quad::count`] to a row; none where they are rounded to anything else, or not at all.
    quads: Buffer<Quad>,
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
            lie_rounded: false,
            activations: setup.activations,
            quads: arena.alloc(Label::Activations, Self::quads(rows, width, setup))?,
        })
    }

    /// Bytes that [`PaddedRows::new`] takes.
    pub fn bytes(rows: usize, width: usize, setup: &Setup<'_>) -> u64 {
        let quads = size_of::<Quad>() * Self::quads(rows, width, setup);
        (size_of::<f32>() * padded_rows(rows) * Self::stride(width) + quads) as u64
    }

    /// Quads of all rows that may be multiplied as whole numbers.
    fn quads(rows: usize, width: usize, setup: &Setup<'_>) -> usize {
        let whole = signed_bytes(setup.activations).is_some() && width.is_multiple_of(GROUP);
        if whole { rows.min(MOST_ROWS) * Quad::count(width) } else { 0 }
    }

    /// A row, without what follows it.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.stride..][..self.width]
    }

    /// Whether `rows` rows may lie rounded, which whoever reads them but a layer that rounds them anyway would not understand: they
    /// have to be whole pairs, without anything that follows them.
    pub fn can_lie_rounded(&self, cpu: &Cpu, rows: usize) -> bool {
        let are_whole = self.width == self.stride && self.width >= 32;
        self.are_rounded(cpu, rows) && self.activations.is_none() && are_whole
    }

    /// Whether products with bf16 weights round `rows` rows to bf16.
    pub fn are_rounded(&self, cpu: &Cpu, rows: usize) -> bool {
        self.rounds && rows > FEW && rounds(cpu.isa())
    }

    /// The first `rows` rows as whole numbers, as they were last rounded, where products of these are faster.
    pub fn as_integers(&self, cpu: &Cpu, rows: usize) -> Option<&[Quad]> {
        (rows <= MOST_ROWS && !self.quads.is_empty() && Integers::are_on(cpu.isa())).then_some(&*self.quads)
    }

    /// The first `rows` rows as the format of the pass's activations keeps them, one scale or more to each row: what a product in
    /// that format would read. As they are where there is none.
    ///
    /// Signed bytes have the `scale` of the layer that reads them, if it has one for all rows (static activations).
    pub fn round(&mut self, cpu: &Cpu, rows: usize, scale: Option<f32>) {
        let Some(format) = self.activations else { return };
        let (width, row_bytes) = (self.width, format.row_bytes(self.width));
        let codes = signed_bytes(self.activations).filter(|_| self.as_integers(cpu, rows).is_some());
        let round = |kept: &mut Vec<u8>, (row, quads): (&mut [f32], Option<&mut [Quad]>)| {
            match (format, scale) {
                (RowFormat::Int8(format), Some(scale)) => format.encode_under(scale, &row[..width], kept),
                _ => format.encode(&row[..width], width, kept),
            }
            format.decode(kept, 0, &mut row[..width]);
            if let Some((codes, quads)) = codes.zip(quads) {
                Quad::fill(codes, kept, quads);
            }
        };
        let kept = || vec![0; row_bytes];
        let rows_of_data = &mut self.data[..rows * self.stride];
        let quads = self.quads.chunks_exact_mut(Quad::count(width)).map(Some);
        let mut quads: Vec<_> = quads.chain(std::iter::repeat_with(|| None)).take(rows).collect();
        match rows <= FEW {
            true => {
                let mut kept = kept();
                let data = rows_of_data.chunks_exact_mut(self.stride);
                data.zip(quads).for_each(|row| round(&mut kept, row));
            }
            false => cpu.install(|| {
                let data = rows_of_data.par_chunks_exact_mut(self.stride);
                data.zip(&mut quads).for_each_init(kept, |kept, (row, quads)| round(kept, (row, quads.take())));
            }),
        }
    }
}

/// How codes of activations lie, where they are whole numbers to be multiplied.
fn signed_bytes(activations: Option<RowFormat>) -> Option<Codes> {
    activations.and_then(RowFormat::codes).filter(|codes| codes.are_signed_bytes())
}

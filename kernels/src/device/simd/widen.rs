//! Coded rows widened in memory: where more rows of the other operand are multiplied with them than is worth to widen them for each.

use super::reader::RowReader;
use super::{Simd, SimdOp, narrow};
use crate::tensor::{DType, Rows};
use std::ops::Range;

/// Some columns of coded rows, widened.
pub struct Widen<'a, R> {
    /// The rows, whole.
    pub rows: Rows<'a>,
    /// What reads them.
    pub reader: R,
    /// The columns; the first is a multiple of [`Widen::STEP`].
    pub columns: Range<usize>,
    /// What becomes of elements.
    pub dtype: DType,
    /// Room for all of them.
    pub to: &'a mut [u8],
}

impl<R> Widen<'_, R> {
    /// Formats share scales among no fewer elements, and read as many together.
    pub const STEP: usize = 32;
}

impl<R: RowReader> SimdOp for Widen<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        /// Vectors that are read together.
        const MANY: usize = 4;
        let Widen { rows, reader, columns, dtype, to } = self;
        let (span, stride_bytes) = rows.span().expect("rows of a matrix lie along it");
        assert!(columns.start.is_multiple_of(Self::STEP) && columns.end <= rows.width());
        assert!(rows.count() * columns.len() * dtype.bytes() == to.len());
        let mut lanes = [0.0; MANY * 16];
        for (row, to) in to.chunks_exact_mut(columns.len() * dtype.bytes()).enumerate() {
            let row = span[row * stride_bytes..][..reader.row_bytes(rows.width())].as_ptr();
            // SAFETY: the row holds the bytes of its width.
            let scale = simd.splat(if R::SCALED { unsafe { reader.scale(row) } } else { 1.0 });
            for (part, to) in to.chunks_mut(MANY * S::LANES * dtype.bytes()).enumerate() {
                let (column, count) = (columns.start + part * MANY * S::LANES, to.len() / dtype.bytes());
                let mut put = |index: usize, vector: S::Vector| {
                    let vector = if R::SCALED { simd.mul(scale, vector) } else { vector };
                    simd.write(&mut lanes[index * S::LANES..], vector);
                };
                // SAFETY: the row has these columns by the assertion above, and the last vector those that are left.
                unsafe {
                    if count == MANY * S::LANES {
                        let vectors = reader.load_many::<S, MANY>(simd, row, column);
                        vectors.into_iter().enumerate().for_each(|(index, vector)| put(index, vector));
                    } else {
                        for index in 0..count.div_ceil(S::LANES) {
                            let (at, left) = (column + index * S::LANES, S::LANES.min(count - index * S::LANES));
                            put(index, reader.load_part(simd, row, at, left));
                        }
                    }
                }
                narrow(simd, dtype, &lanes[..count], to);
            }
        }
    }
}

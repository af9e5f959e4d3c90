//! Products with the rows of a weight matrix: `y = x wᵀ + b`, where rows of `w` are read in the format in which they are
//! kept: plain elements, or bytes that a [`RowReader`] makes vectors of.
//!
//! For few rows of `x` packing `w` would cost more than the product: [`Few`] reads each row of `w` once, where it lies, from its
//! beginning to its end, at the speed of the memory, and keeps `x` as it is. More rows share what is packed:
//! [`super::panel`]. Either way each element of `y` is one sum in one order, whoever computes it.

use super::reader::RowReader;
use super::row_list::LINE_BYTES;
use super::rows::tile;
use super::vector::each;
use super::{Simd, SimdOp};
use crate::tensor::Rows;
use std::marker::PhantomData;
use std::ops::Range;

/// Rows of `x` up to which `w` is not packed.
pub const FEW: usize = 8;
/// How far ahead of what is multiplied memory is asked for; what it brings is in `docs/cpu-kernels.md` ("Prefetching"). For bf16 on
/// Zen 5, 2 and 4 KiB are alike, and better than 1, 8 and 16.
pub(super) const AHEAD_BYTES: usize = 4096;
/// Rows of `w` in a register tile of [`Few`].
pub(super) const TILE: usize = 4;

/// A row-major matrix of which threads write different columns.
pub struct Stripes<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    width: usize,
    /// Columns in each word of it, as a power of two.
    word_shift: u32,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: the matrix is borrowed mutably for as long as this lives, and `Stripes::row` gives out parts of it only to
// callers that promise to take different ones.
unsafe impl Sync for Stripes<'_> {}

impl<'a> Stripes<'a> {
    /// A matrix of `rows` rows of `width` elements, `stride` apart.
    ///
    /// # Panics
    /// When it reaches past the end of `matrix`, or rows overlap.
    pub fn new(matrix: &'a mut [f32], stride: usize, rows: usize, width: usize) -> Self {
        assert!(width <= stride && (rows == 0 || (rows - 1) * stride + width <= matrix.len()), "a matrix is too short");
        Stripes { start: matrix.as_mut_ptr(), stride, rows, width, word_shift: 0, matrix: PhantomData }
    }

    /// As [`Stripes::new`], of pairs of bf16: the stride is in words, the width in columns.
    ///
    /// # Panics
    /// As [`Stripes::new`], and when the width is odd.
    pub fn of_pairs(matrix: &'a mut [f32], stride: usize, rows: usize, width: usize) -> Self {
        assert!(width.is_multiple_of(2), "{width} columns of pairs");
        Stripes { width, word_shift: 1, ..Stripes::new(matrix, stride, rows, width / 2) }
    }

    /// Some columns of a row, as words.
    ///
    /// # Safety
    /// No two parts that are in use at the same time overlap.
    ///
    /// # Panics
    /// When there is no such row or column, or words are cut.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller's promise
    pub(super) unsafe fn row(&self, row: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(row < self.rows && columns.start <= columns.end && columns.end <= self.width, "a part of the matrix");
        let cut = (columns.start | columns.end) & ((1 << self.word_shift) - 1);
        assert_eq!(cut, 0, "columns {columns:?} cut a word");
        let columns = columns.start >> self.word_shift..columns.end >> self.word_shift;
        // SAFETY: the part lies inside the matrix by the assertion above and that of `new`; the caller promises that
        // nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride + columns.start), columns.len()) }
    }
}

/// Some columns of `y`: the products of all rows of `x` with some rows of `w`.
pub struct Columns<'a, X = f32> {
    /// Rows of `x`, each followed by zeros up to whole vectors.
    pub x: &'a [X],
    /// Their distance; of f32 a multiple of 16.
    pub stride: usize,
    /// Their number.
    pub rows: usize,
    /// The rows of `w`.
    pub w: Rows<'a>,
    /// Added to every product, one number for each row of `w`.
    pub bias: Option<&'a [f32]>,
    /// Column of `y` that belongs to the first row of `w`; no other thread writes it or those after it.
    pub first: usize,
}

impl Columns<'_> {
    /// Checks that `x` holds `rows` rows.
    #[inline(always)]
    pub(super) fn check(&self, rows: usize) {
        let fits = self.w.width() <= self.stride && self.stride.is_multiple_of(16);
        assert!(fits && rows * self.stride <= self.x.len(), "x in whole vectors and register tiles");
        assert!(self.bias.is_none_or(|bias| bias.len() == self.w.count()), "a bias for each row of w");
    }
}

/// Columns of `y` for few rows of `x`, unpacked.
pub struct Few<'a, R> {
    /// What is multiplied.
    pub columns: Columns<'a>,
    /// What reads the rows of `w`.
    pub reader: R,
    /// All of `y`.
    pub y: &'a Stripes<'a>,
}

impl<R: RowReader> SimdOp for Few<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Few { columns: part, reader, y } = self;
        part.check(part.rows);
        let (span, stride_bytes) = part.w.span().expect("rows of a matrix lie along it");
        let (width, count) = (part.w.width(), part.w.count());
        let row = |index: usize| span[index * stride_bytes..][..reader.row_bytes(width)].as_ptr();
        let mut first = 0;
        while first < count {
            let rows = TILE.min(count - first);
            // Rows that are not there are the last one again.
            let at: [*const u8; TILE] = each(
                std::ptr::null(),
                #[inline(always)]
                |offset| row(first + offset.min(rows - 1)),
            );
            let mut scales = R::SCALED.then_some([1.0; TILE]);
            for (scale, row) in scales.iter_mut().flatten().zip(at) {
                // SAFETY: each row holds the bytes of `width` elements, by `row`.
                *scale = unsafe { reader.scale(row) };
            }
            let mut query = 0;
            while query < part.rows {
                // SAFETY: rows of `w` hold `width` elements, by `row`, rows of `x` whole vectors of as many, by `check`.
                query += unsafe {
                    let (x, stride) = (part.x.as_ptr().add(query * part.stride), part.stride);
                    match part.rows - query {
                        1 => part.put(
                            simd,
                            y,
                            four::<S, R, 1>(simd, reader, at, width, x, stride),
                            scales,
                            [query, first],
                        ),
                        2 | 3 => part.put(
                            simd,
                            y,
                            four::<S, R, 2>(simd, reader, at, width, x, stride),
                            scales,
                            [query, first],
                        ),
                        _ if const { S::COLUMNS < 4 } => part.put(
                            simd,
                            y,
                            four::<S, R, 2>(simd, reader, at, width, x, stride),
                            scales,
                            [query, first],
                        ),
                        _ => part.put(
                            simd,
                            y,
                            four::<S, R, 4>(simd, reader, at, width, x, stride),
                            scales,
                            [query, first],
                        ),
                    }
                };
            }
            first += rows;
        }
    }
}

/// Inner products of four rows and of `QUERIES` rows of `x`, to be summed over the lanes. One row is read after another, from its
/// beginning to its end: processors fetch ahead in such a stream, and take twice the time for four of them side by side.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn four<S: Simd, R: RowReader, const QUERIES: usize>(
    simd: S,
    reader: R,
    rows: [*const u8; TILE],
    width: usize,
    x: *const f32,
    stride: usize,
) -> [[S::Vector; TILE]; QUERIES] {
    /// Vectors that are added up apart, so that none waits for the one before it.
    const APART: usize = 4;
    let mut sums = [[simd.splat(0.0); TILE]; QUERIES];
    let whole = width - width % (APART * S::LANES);
    for (index, row) in rows.into_iter().enumerate() {
        let mut apart = [[simd.splat(0.0); APART]; QUERIES];
        // SAFETY: the caller's promise.
        let rest = unsafe {
            for column in (0..whole).step_by(APART * S::LANES) {
                let (at, end) = (reader.row_bytes(column), reader.row_bytes(column + APART * S::LANES));
                // Codes are widened slowly enough for the processor to fetch ahead by itself, and f32 is read at full speed as it is.
                if end - at == 2 * APART * S::LANES {
                    for line in (at..end).step_by(LINE_BYTES) {
                        simd.prefetch_for_reading(row.wrapping_add(AHEAD_BYTES + line));
                    }
                }
                let w: [S::Vector; APART] = reader.load_many(simd, row, column);
                for (query, apart) in apart.iter_mut().enumerate() {
                    let x = x.add(query * stride + column);
                    for (part, (sum, w)) in apart.iter_mut().zip(w).enumerate() {
                        *sum = simd.mul_add(simd.load(x.add(part * S::LANES)), w, *sum);
                    }
                }
            }
            tile::<S, R, 1, QUERIES>(simd, reader, [row], whole..width, x, stride)
        };
        for ((sums, [a, b, c, d]), [rest]) in sums.iter_mut().zip(apart).zip(rest) {
            sums[index] = simd.add(rest, simd.add(simd.add(a, b), simd.add(c, d)));
        }
    }
    sums
}

impl<X> Columns<'_, X> {
    /// Writes a register tile, given as lanes to be summed and then multiplied by the `scales` of the rows of `w`, at a row
    /// and a column of this part; returns its rows.
    #[inline(always)]
    pub(super) fn put<S: Simd, const QUERIES: usize>(
        &self,
        simd: S,
        y: &Stripes<'_>,
        tile: [[S::Vector; TILE]; QUERIES],
        scales: Option<[f32; TILE]>,
        [row, column]: [usize; 2],
    ) -> usize {
        let count = TILE.min(self.w.count() - column);
        for (offset, sums) in tile.into_iter().enumerate() {
            let mut sums = simd.sums(sums);
            if let Some(scales) = scales {
                sums.iter_mut().zip(scales).for_each(|(sum, scale)| *sum *= scale);
            }
            if let Some(bias) = self.bias {
                sums.iter_mut().zip(&bias[column..]).for_each(|(sum, bias)| *sum += bias);
            }
            // SAFETY: these columns are this task's alone, by the promise of `Columns::first`.
            let to = unsafe { y.row(row + offset, self.first + column..self.first + column + count) };
            to.copy_from_slice(&sums[..count]);
        }
        QUERIES
    }
}

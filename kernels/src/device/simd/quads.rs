//! Inner products of queries with the rows of a list, four rows at a time, for operands of any kind: what [`rows::Dots`](super::rows::Dots)
//! is where every element is widened to f32.

use super::Simd;
use super::row_list::{BLOCK, RowList};
use super::vector::each;
use std::ops::Range;

/// Rows whose sums over lanes are taken together.
const ROWS: usize = 4;
/// Queries that share what is read of them.
pub const QUERIES: usize = 4;

/// Queries in the form in which they are multiplied with rows.
pub trait Products<S: Simd>: Copy {
    /// Products of some rows and queries, to be summed over the lanes.
    ///
    /// # Safety
    /// The rows are of the width and the format that the queries are for, and there are `COUNT` queries.
    unsafe fn of<const ROWS: usize, const COUNT: usize>(
        self,
        simd: S,
        rows: [*const u8; ROWS],
    ) -> [[S::Vector; ROWS]; COUNT];
}

/// Writes the products of `count` queries, at most [`QUERIES`], and rows of `row_bytes`: those of a query begin at a multiple of [`BLOCK`].
///
/// # Safety
/// The rows and the queries are as [`Products::of`] wants them.
///
/// # Panics
/// When the range is not one of the list's rows, or scores are too short.
#[inline(always)]
pub unsafe fn put<S: Simd>(
    simd: S,
    (rows, row_bytes): (&RowList<'_>, usize),
    range: Range<usize>,
    queries: impl Products<S>,
    count: usize,
    scores: &mut [f32],
) {
    assert!(range.start <= range.end && range.end <= rows.count(), "rows {range:?} of {}", rows.count());
    assert!(scores.len() >= count * BLOCK, "scores are too short");
    let all = (rows, row_bytes);
    // SAFETY: the caller's promise, and the range is one of the rows.
    unsafe {
        match count {
            1 => put_of::<S, 1>(simd, all, range, queries, scores),
            2 => put_of::<S, 2>(simd, all, range, queries, scores),
            3 => put_of::<S, 3>(simd, all, range, queries, scores),
            _ => put_of::<S, QUERIES>(simd, all, range, queries, scores),
        }
    }
}

/// As [`put`].
#[inline(always)]
unsafe fn put_of<S: Simd, const COUNT: usize>(
    simd: S,
    (rows, row_bytes): (&RowList<'_>, usize),
    range: Range<usize>,
    queries: impl Products<S>,
    scores: &mut [f32],
) {
    let quads = range.end - range.len() % ROWS;
    // SAFETY: the caller's promise.
    unsafe {
        for first in (range.start..quads).step_by(ROWS) {
            rows.prefetch_rows::<S, ROWS>(simd, first, row_bytes);
            let quad: [*const u8; ROWS] = each(
                std::ptr::null(),
                #[inline(always)]
                |row| rows.row(first + row),
            );
            for (query, sums) in queries.of::<ROWS, COUNT>(simd, quad).into_iter().enumerate() {
                scores[query * BLOCK + first..][..ROWS].copy_from_slice(&simd.sums(sums));
            }
        }
        for row in quads..range.end {
            for (query, [sum]) in queries.of::<1, COUNT>(simd, [rows.row(row)]).into_iter().enumerate() {
                scores[query * BLOCK + row] = simd.sum(sum);
            }
        }
    }
}

//! Inner products with rows of bf16 where both sides are bf16 and the path multiplies pairs of them: as [`rows`](super::rows)
//! has them, but nothing is widened, which is half of the work where four queries share a row. Products are exact either way,
//! but for numbers below 2^-126, which the processor takes for zero.

use super::quads::{self, Products, QUERIES};
use super::row_list::{BLOCK, RowList};
use super::{Isa, Native, Simd, SimdBf16Op, Unit};
use bytemuck::Zeroable;
use std::ops::Range;

/// Most columns of a row.
pub(super) const MOST_COLUMNS: usize = 256;
/// Columns of a vector of pairs.
const COLUMNS: usize = 32;

/// Whether bf16 holds each of them.
pub fn are_bf16(numbers: &[f32]) -> bool {
    numbers.iter().fold(0, |bits, x| bits | x.to_bits()) & 0xffff == 0
}

/// As [`rows::Dots`](super::rows::Dots), of rows of bf16 and queries that [`are_bf16`]. Panics on a path that [`PairDots::are_for`]
/// does not name, or when a slice is too short.
pub struct PairDots<'a> {
    /// The rows.
    pub rows: &'a RowList<'a>,
    /// Those of them that are wanted.
    pub range: Range<usize>,
    /// The query rows.
    pub queries: &'a [f32],
    /// Elements from one query row to the next.
    pub stride: usize,
    /// The inner products.
    pub scores: &'a mut [f32],
}

impl PairDots<'_> {
    /// Whether they are faster on a path than products in f32, and rows are of a width that this is for.
    pub fn are_for(isa: Isa, width: usize) -> bool {
        isa.has_fast_pairs() && width.is_multiple_of(COLUMNS) && width <= MOST_COLUMNS
    }
}

impl SimdBf16Op for PairDots<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        let PairDots { rows, range, queries, stride, scores } = self;
        assert!(<S::Bf16 as Unit<S>>::DEPTH == 2 && S::LANES == COLUMNS / 2, "a path that multiplies pairs");
        let (width, count) = (rows.width(), queries.len() / stride);
        assert!(width <= stride && width.is_multiple_of(COLUMNS) && width <= MOST_COLUMNS, "whole vectors of pairs");
        assert!(scores.len() >= count * BLOCK, "scores are too short");
        let some = queries[..count * stride].chunks(QUERIES * stride);
        for (queries, scores) in some.zip(scores.chunks_mut(QUERIES * BLOCK)) {
            let mut pairs = [[S::Bf16::zeroed(); MOST_COLUMNS / 2]; QUERIES];
            for (query, pairs) in queries.chunks_exact(stride).zip(&mut pairs) {
                let query = query[..width].chunks_exact(COLUMNS);
                for (columns, to) in query.zip(pairs.chunks_exact_mut(S::LANES)) {
                    S::Bf16::put(simd, to, simd.read(columns), simd.read(&columns[S::LANES..]));
                }
            }
            let (pairs, count) = (Pairs { width, pairs: &pairs }, queries.len() / stride);
            // SAFETY: the rows are bf16 and as wide as the pairs, of which there are as many as queries.
            unsafe { quads::put(simd, (rows, 2 * width), range.clone(), pairs, count, scores) };
        }
    }
}

/// Up to four queries as pairs of neighbours.
struct Pairs<'a, U> {
    width: usize,
    pairs: &'a [[U; MOST_COLUMNS / 2]; QUERIES],
}

impl<U> Clone for Pairs<'_, U> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<U> Copy for Pairs<'_, U> {}

impl<S: Simd, U: Unit<S>> Products<S> for Pairs<'_, U> {
    #[inline(always)]
    unsafe fn of<const ROWS: usize, const COUNT: usize>(
        self,
        simd: S,
        rows: [*const u8; ROWS],
    ) -> [[S::Vector; ROWS]; COUNT] {
        let mut sums = [[simd.splat(0.0); ROWS]; COUNT];
        // SAFETY: the caller's promise.
        unsafe {
            for at in (0..self.width / U::DEPTH).step_by(S::LANES) {
                for (query, sums) in sums.iter_mut().enumerate() {
                    let x = U::load(simd, self.pairs[query].as_ptr().add(at));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        *sum = U::mul_add(simd, x, U::load(simd, row.cast::<U>().add(at)), *sum);
                    }
                }
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::{self, Addresses};
    use super::*;
    use crate::device::simd::reader::Plain;
    use crate::tensor::{Rows, Strided};
    use half::bf16;

    #[test]
    fn products_are_those_in_f32() {
        let wide: Vec<bf16> = (0..256 * 128).map(|x| bf16::from_f32((x * 31 % 251) as f32 * 0.25 - 30.0)).collect();
        for isa in Isa::available().filter(|isa| isa.has_fast_pairs()) {
            for (count, width, queries) in
                [(1, 32, 1), (7, 64, 2), (40, 128, 3), (256, 128, 4), (9, 256, 5), (30, 96, 7)]
            {
                let rows = Rows::Bf16(Strided::new(&wide[..count * width], [width, 1], count, width));
                let source = |row: usize| rows.skip(row);
                let mut addresses = Addresses::default();
                let list =
                    RowList::collect(&mut addresses, [width, 2 * width], &source, 0..count, &source, 0..count, &mut []);
                let x: Vec<f32> = (0..queries * width).map(|at| (at * 7 % 23) as f32 * 0.5 - 5.0).collect();
                assert!(are_bf16(&x) && PairDots::are_for(isa, width));
                let (mut scores, mut expected) = (vec![0.0; queries * BLOCK], vec![0.0; queries * BLOCK]);
                let (range, stride) = (count.min(2)..count, width);
                isa.run_bf16(PairDots { rows: &list, range: range.clone(), queries: &x, stride, scores: &mut scores });
                let reader = Plain::<bf16>::NEW;
                isa.run(rows::Dots { reader, rows: &list, range, queries: &x, stride, scores: &mut expected });
                // Whole quarters of less than 2^24: no sum is rounded.
                assert_eq!(scores, expected, "{count} x {width}, {queries} queries");
            }
        }
        assert!(!are_bf16(&[1.0, 0.3]));
        // Where they are used at all.
        assert!(Isa::available().all(|isa| PairDots::are_for(isa, 128) == (isa.name() == "avx512-bf16")));
    }
}

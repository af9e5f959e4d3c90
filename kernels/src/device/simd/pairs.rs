//! Inner products with rows of bf16 where both sides are bf16 and the path multiplies pairs of them: as [`rows`](super::rows)
//! has them, but nothing is widened. Products are exact either way; where four queries share a row they are half of the work.

use super::row_list::{BLOCK, RowList};
use super::vector::each;
use super::{Isa, Native, Simd, SimdBf16Op, Unit};
use bytemuck::Zeroable;
use std::ops::Range;

/// Rows beside up to four queries.
const KEYS: usize = 4;
/// Most columns of a row.
const MOST_COLUMNS: usize = 256;
/// Columns of a vector of pairs.
const COLUMNS: usize = 32;

/// Whether bf16 holds each of them.
pub fn are_bf16(numbers: &[f32]) -> bool {
    numbers.iter().fold(0, |bits, x| bits | x.to_bits()) & 0xffff == 0
}

/// As [`rows::Dots`](super::rows::Dots), of rows of bf16 and queries that [`are_bf16`].
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
        assert!(range.start <= range.end && range.end <= rows.count(), "rows {range:?} of {}", rows.count());
        let width = rows.width();
        assert!(width <= stride && width.is_multiple_of(COLUMNS) && width <= MOST_COLUMNS, "whole vectors of pairs");
        for (queries, scores) in queries.chunks(4 * stride).zip(scores.chunks_mut(4 * BLOCK)) {
            let mut pairs = [[S::Bf16::zeroed(); MOST_COLUMNS / 2]; 4];
            for (query, pairs) in queries.chunks_exact(stride).zip(&mut pairs) {
                let query = query[..width].chunks_exact(COLUMNS);
                for (columns, to) in query.zip(pairs.chunks_exact_mut(S::LANES)) {
                    S::Bf16::put(simd, to, simd.read(columns), simd.read(&columns[S::LANES..]));
                }
            }
            let of = Of { rows, pairs: &pairs };
            match queries.len() / stride {
                1 => of.put::<S, 1>(simd, range.clone(), scores),
                2 => of.put::<S, 2>(simd, range.clone(), scores),
                3 => of.put::<S, 3>(simd, range.clone(), scores),
                _ => of.put::<S, 4>(simd, range.clone(), scores),
            }
        }
    }
}

/// Rows, and up to four queries as pairs.
struct Of<'a, U> {
    rows: &'a RowList<'a>,
    pairs: &'a [[U; MOST_COLUMNS / 2]; 4],
}

impl<U> Of<'_, U> {
    /// Writes the products of some rows of the list.
    #[inline(always)]
    fn put<S: Simd, const QUERIES: usize>(&self, simd: S, range: Range<usize>, scores: &mut [f32])
    where
        U: Unit<S>,
    {
        assert!(scores.len() >= (QUERIES - 1) * BLOCK + range.end, "scores are too short");
        let quads = range.end - range.len() % KEYS;
        // SAFETY: the range is one of the list's rows, as `run` asserts.
        unsafe {
            for key in (range.start..quads).step_by(KEYS) {
                self.rows.prefetch_rows::<S, KEYS>(simd, key, 2 * self.rows.width());
                let sums = self.products::<S, KEYS, QUERIES>(simd, key);
                for (query, sums) in sums.into_iter().enumerate() {
                    scores[query * BLOCK + key..][..KEYS].copy_from_slice(&simd.sums(sums));
                }
            }
            for key in quads..range.end {
                let sums = self.products::<S, 1, QUERIES>(simd, key);
                for (query, [sum]) in sums.into_iter().enumerate() {
                    scores[query * BLOCK + key] = simd.sum(sum);
                }
            }
        }
    }

    /// Products of rows and queries, to be summed over the lanes.
    ///
    /// # Safety
    /// The list has `ROWS` rows from `key` on.
    #[inline(always)]
    unsafe fn products<S: Simd, const ROWS: usize, const QUERIES: usize>(
        &self,
        simd: S,
        key: usize,
    ) -> [[S::Vector; ROWS]; QUERIES]
    where
        U: Unit<S>,
    {
        let mut sums = [[simd.splat(0.0); ROWS]; QUERIES];
        // SAFETY: the caller's promise; rows and queries are as wide as the list says.
        unsafe {
            let keys: [*const U; ROWS] = each(
                std::ptr::null(),
                #[inline(always)]
                |row| self.rows.row(key + row).cast(),
            );
            for at in (0..self.rows.width() / U::DEPTH).step_by(S::LANES) {
                for (query, sums) in sums.iter_mut().enumerate() {
                    let x = U::load(simd, self.pairs[query].as_ptr().add(at));
                    for (sum, key) in sums.iter_mut().zip(keys) {
                        *sum = U::mul_add(simd, x, U::load(simd, key.add(at)), *sum);
                    }
                }
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::{self, Places};
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
                let mut places = Places::default();
                let list =
                    RowList::collect(&mut places, [width, 2 * width], &source, 0..count, &source, 0..count, &mut []);
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
    }
}

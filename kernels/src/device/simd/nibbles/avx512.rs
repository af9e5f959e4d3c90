//! The products, where vectors have 16 lanes and words of two vectors can be permuted in one instruction.

use super::super::Unit;
use super::super::avx512::{Avx512, Bf16Pair, with, with_bf16};
use super::super::row_list::{BLOCK, RowList};
use super::super::vector::{Simd, each};
use super::{COLUMNS, Dots, MOST_COLUMNS, Nibbles};
use bytemuck::Zeroable;
use std::arch::x86_64::*;

/// Vectors of the columns that go through together.
const VECTORS: usize = COLUMNS / 16;
/// Rows of keys whose lanes are summed together.
const KEYS: usize = 4;
/// Rows of values that all columns are given before the next ones are read.
const CHUNK: usize = 16;

impl Nibbles {
    /// Weighted sums of all rows of a list onto one or two rows.
    ///
    /// # Safety
    /// The processor has AVX-512; `count` rows as wide as those of the list begin `stride` apart at `to`, and each has [`BLOCK`] weights.
    pub(super) unsafe fn sums(self, rows: &RowList<'_>, weights: *const f32, to: (*mut f32, usize), count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            with(
                #[inline(always)]
                |simd| match count {
                    1 => self.sum::<1>(simd, rows, weights, to),
                    _ => self.sum::<2>(simd, rows, weights, to),
                },
            );
        }
    }

    /// The codes of 128 columns, eight in each lane, and each lane's scale.
    ///
    /// # Safety
    /// The bytes of 128 columns begin at `from`.
    #[inline(always)]
    unsafe fn load<const BF16: bool>(self, _: Avx512<BF16>, from: *const u8) -> (__m512i, __m512) {
        // SAFETY: the caller's promise: 64 bytes from the first on and 64 up to the last are among them.
        unsafe {
            let (first, last) =
                (_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(self.at.bytes - 64).cast()));
            let codes = _mm512_loadu_si512(self.at.codes.as_ptr().cast());
            let scales = _mm512_loadu_si512(self.at.scales.as_ptr().cast());
            let scales = _mm512_castsi512_si256(_mm512_permutex2var_epi16(first, scales, last));
            (_mm512_permutex2var_epi16(first, codes, last), _mm512_cvtph_ps(scales))
        }
    }

    /// Weighted sums of all rows onto `OUTPUTS` rows.
    ///
    /// # Safety
    /// `OUTPUTS` rows as wide as those of the list begin `stride` apart at `to`, and each has [`BLOCK`] weights.
    #[inline(always)]
    unsafe fn sum<const OUTPUTS: usize>(
        self,
        simd: Avx512<false>,
        rows: &RowList<'_>,
        weights: *const f32,
        (to, stride): (*mut f32, usize),
    ) {
        // SAFETY: the caller's promise; rows are whole 128s of columns.
        unsafe {
            let levels = simd.load(self.levels.values.as_ptr());
            for (first, part) in parts(rows, CHUNK) {
                let (from_bytes, to) = (part * self.at.bytes, to.add(part * COLUMNS));
                let mut sums = [[simd.splat(0.0); VECTORS]; OUTPUTS];
                for (output, sums) in sums.iter_mut().enumerate() {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        *sum = simd.load(to.add(output * stride + 16 * vector));
                    }
                }
                for index in first..rows.count().min(first + CHUNK) {
                    rows.prefetch(simd, index, from_bytes, self.at.bytes);
                    let (codes, scales) = self.load(simd, rows.row(index).add(from_bytes));
                    let weight = |output: usize| simd.mul(scales, simd.splat(*weights.add(output * BLOCK + index)));
                    let weights: [__m512; OUTPUTS] = each(scales, weight);
                    for vector in 0..VECTORS {
                        let value = look_up(simd, codes, vector, levels);
                        for (sums, weight) in sums.iter_mut().zip(weights) {
                            sums[vector] = simd.mul_add(weight, value, sums[vector]);
                        }
                    }
                }
                for (output, sums) in sums.into_iter().enumerate() {
                    for (vector, sum) in sums.into_iter().enumerate() {
                        simd.store(to.add(output * stride + 16 * vector), sum);
                    }
                }
            }
        }
    }
}

/// The first row of each `step` rows of a list, and for each of them the parts of 128 columns.
#[inline(always)]
fn parts(rows: &RowList<'_>, step: usize) -> impl Iterator<Item = (usize, usize)> {
    let parts = rows.width() / COLUMNS;
    (0..rows.count()).step_by(step).flat_map(move |first| (0..parts).map(move |part| (first, part)))
}

/// What the `k`-th code of each lane stands for.
#[inline(always)]
fn look_up<const BF16: bool>(_: Avx512<BF16>, codes: __m512i, k: usize, levels: __m512) -> __m512 {
    // SAFETY: an `Avx512` exists only where the processor has the instructions. Of an index only the low four bits count.
    unsafe { _mm512_permutexvar_ps(_mm512_srl_epi32(codes, _mm_cvtsi64_si128(4 * k as i64)), levels) }
}

impl Dots<'_> {
    /// Computes them, in pairs of bf16 if so.
    ///
    /// # Safety
    /// The processor has AVX-512, and for pairs AVX512-BF16.
    pub(super) unsafe fn run(self, in_bf16: bool) {
        // SAFETY: the caller's promise.
        unsafe {
            match in_bf16 {
                true => with_bf16(
                    false,
                    #[inline(always)]
                    |simd| self.in_bf16(simd),
                ),
                false => with(
                    #[inline(always)]
                    |simd| self.in_f32(simd),
                ),
            }
        }
    }

    #[inline(always)]
    fn in_f32(self, simd: Avx512<false>) {
        let (levels, queries) = (simd.read(&self.nibbles.levels.values), self.queries.as_ptr());
        let operand = InF32 { simd, levels, queries, stride: self.stride };
        match self.queries.len() / self.stride {
            1 => self.each::<false, 1>(simd, operand),
            2 => self.each::<false, 2>(simd, operand),
            3 => self.each::<false, 3>(simd, operand),
            _ => self.each::<false, 4>(simd, operand),
        }
    }

    #[inline(always)]
    fn in_bf16(self, simd: Avx512<true>) {
        let mut pairs = [[Bf16Pair::zeroed(); MOST_COLUMNS / 2]; 4];
        for (row, to) in self.queries.chunks_exact(self.stride).zip(&mut pairs) {
            for (row, to) in row.as_chunks::<COLUMNS>().0.iter().zip(to.as_chunks_mut::<{ COLUMNS / 2 }>().0) {
                let (even, odd) = row.split_at(COLUMNS / 2);
                for ((even, odd), to) in even.chunks_exact(16).zip(odd.chunks_exact(16)).zip(to.chunks_exact_mut(16)) {
                    Bf16Pair::put_rows(simd, to, simd.read(even), simd.read(odd));
                }
            }
        }
        let levels = self.nibbles.levels.values;
        let levels = simd.read(&levels);
        // SAFETY: the processor has the instruction; the transmute renames the same 64 bytes.
        let levels = unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(levels, levels)) };
        let operand = InBf16 { simd, levels, pairs: &pairs };
        match self.queries.len() / self.stride {
            1 => self.each::<true, 1>(simd, operand),
            2 => self.each::<true, 2>(simd, operand),
            3 => self.each::<true, 3>(simd, operand),
            _ => self.each::<true, 4>(simd, operand),
        }
    }

    #[inline(always)]
    fn each<const BF16: bool, const QUERIES: usize>(self, simd: Avx512<BF16>, operand: impl Operand<QUERIES>) {
        let Dots { nibbles, rows, range, queries, stride, scores } = self;
        assert!(range.start <= range.end && range.end <= rows.count(), "rows {range:?} of {}", rows.count());
        assert!(rows.width() <= stride && queries.len() >= QUERIES * stride, "queries are too short");
        assert!(scores.len() >= (QUERIES - 1) * BLOCK + range.end, "scores are too short");
        let quads = range.end - range.len() % KEYS;
        // SAFETY: rows of the range are whole 128s of columns.
        unsafe {
            for key in (range.start..quads).step_by(KEYS) {
                rows.prefetch_rows::<_, KEYS>(simd, key, rows.width() / COLUMNS * nibbles.at.bytes);
                let sums = products::<_, _, KEYS, QUERIES>(simd, nibbles, operand, rows, key);
                for (query, sums) in sums.into_iter().enumerate() {
                    scores[query * BLOCK + key..][..KEYS].copy_from_slice(&simd.sums(sums));
                }
            }
            for key in quads..range.end {
                let sums = products::<_, _, 1, QUERIES>(simd, nibbles, operand, rows, key);
                for (query, [sum]) in sums.into_iter().enumerate() {
                    scores[query * BLOCK + key] = simd.sum(sum);
                }
            }
        }
    }
}

/// Products of some rows of a list and the queries, to be summed over the lanes.
///
/// # Safety
/// The list has `ROWS` rows from `key` on, and there are `QUERIES` queries.
#[inline(always)]
unsafe fn products<const BF16: bool, O: Operand<QUERIES>, const ROWS: usize, const QUERIES: usize>(
    simd: Avx512<BF16>,
    nibbles: Nibbles,
    operand: O,
    rows: &RowList<'_>,
    key: usize,
) -> [[__m512; ROWS]; QUERIES] {
    let mut sums = [[simd.splat(0.0); ROWS]; QUERIES];
    for part in 0..rows.width() / COLUMNS {
        for row in 0..ROWS {
            // SAFETY: the caller's promise.
            unsafe {
                let (codes, scales) = nibbles.load(simd, rows.row(key + row).add(part * nibbles.at.bytes));
                for (sums, sum) in sums.iter_mut().zip(operand.products(part, codes)) {
                    sums[row] = simd.mul_add(sum, scales, sums[row]);
                }
            }
        }
    }
    sums
}

/// What codes of keys are multiplied with.
trait Operand<const QUERIES: usize>: Copy {
    /// Sums of products of 128 columns, in lanes.
    ///
    /// # Safety
    /// `part` is one of the rows' 128s of columns, and there are `QUERIES` queries.
    unsafe fn products(self, part: usize, codes: __m512i) -> [__m512; QUERIES];
}

/// Queries as they are.
#[derive(Clone, Copy)]
struct InF32 {
    simd: Avx512<false>,
    levels: __m512,
    queries: *const f32,
    stride: usize,
}

impl<const QUERIES: usize> Operand<QUERIES> for InF32 {
    #[inline(always)]
    unsafe fn products(self, part: usize, codes: __m512i) -> [__m512; QUERIES] {
        let mut sums = [self.simd.splat(0.0); QUERIES];
        for vector in 0..VECTORS {
            let key = look_up(self.simd, codes, vector, self.levels);
            for (query, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let x = unsafe { self.simd.load(self.queries.add(query * self.stride + part * COLUMNS + 16 * vector)) };
                *sum = self.simd.mul_add(x, key, *sum);
            }
        }
        sums
    }
}

/// Queries in pairs: of the `k`-th codes of lanes and the ones four behind them, which are in the other half of a lane.
#[derive(Clone, Copy)]
struct InBf16<'a> {
    simd: Avx512<true>,
    levels: __m512i,
    pairs: &'a [[Bf16Pair; MOST_COLUMNS / 2]; 4],
}

impl<const QUERIES: usize> Operand<QUERIES> for InBf16<'_> {
    #[inline(always)]
    unsafe fn products(self, part: usize, codes: __m512i) -> [__m512; QUERIES] {
        let mut sums = [self.simd.splat(0.0); QUERIES];
        for vector in 0..VECTORS / 2 {
            // SAFETY: the processor has the instructions, and the caller's promise. Of an index the low five bits count, and levels are
            // there twice.
            unsafe {
                let index = _mm512_srl_epi16(codes, _mm_cvtsi64_si128(4 * vector as i64));
                let keys = _mm512_permutexvar_epi16(index, self.levels);
                for (query, sum) in sums.iter_mut().enumerate() {
                    let x = self.pairs[query].as_ptr().add(part * COLUMNS / 2 + 16 * vector);
                    *sum = Bf16Pair::mul_add(self.simd, Bf16Pair::load(self.simd, x), keys, *sum);
                }
            }
        }
        sums
    }
}

//! The products, where vectors have 16 lanes and words of two vectors can be permuted in one instruction.

use super::super::Unit;
use super::super::avx512::{Avx512, Bf16Pair, with, with_bf16};
use super::super::pairs::MOST_COLUMNS;
use super::super::quads::{self, Products, QUERIES};
use super::super::row_list::{BLOCK, RowList};
use super::super::vector::{Simd, each};
use super::{COLUMNS, Nibbles};
use bytemuck::Zeroable;
use std::arch::x86_64::*;
use std::ops::Range;

/// Vectors of the columns that go through together.
const VECTORS: usize = COLUMNS / 16;
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

    /// Products of some rows of a list with arranged queries, in pairs of bf16 if so.
    ///
    /// # Safety
    /// The processor has AVX-512, for pairs AVX512-BF16 too; rows are as wide as these are for, and queries at least so.
    pub(super) unsafe fn dots_with_keys(
        self,
        rows: (&RowList<'_>, Range<usize>),
        queries: (&[f32], usize),
        scores: &mut [f32],
        in_bf16: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match in_bf16 {
                true => with_bf16(
                    false,
                    #[inline(always)]
                    |simd| self.dots_in_bf16(simd, rows, queries, scores),
                ),
                false => with(
                    #[inline(always)]
                    |simd| self.dots_in_f32(simd, rows, queries, scores),
                ),
            }
        }
    }

    /// Bytes of a row.
    #[inline(always)]
    fn row_bytes(self) -> usize {
        self.width / COLUMNS * self.at.bytes
    }

    /// As [`Nibbles::dots_with_keys`].
    #[inline(always)]
    unsafe fn dots_in_f32(
        self,
        simd: Avx512<false>,
        (rows, range): (&RowList<'_>, Range<usize>),
        (queries, stride): (&[f32], usize),
        scores: &mut [f32],
    ) {
        for (queries, scores) in queries.chunks(QUERIES * stride).zip(scores.chunks_mut(QUERIES * BLOCK)) {
            let (of, count) = (InF32 { nibbles: self, queries: queries.as_ptr(), stride }, queries.len() / stride);
            // SAFETY: the caller's promise.
            unsafe { quads::put(simd, (rows, self.row_bytes()), range.clone(), of, count, scores) };
        }
    }

    /// As [`Nibbles::dots_with_keys`].
    #[inline(always)]
    unsafe fn dots_in_bf16(
        self,
        simd: Avx512<true>,
        (rows, range): (&RowList<'_>, Range<usize>),
        (queries, stride): (&[f32], usize),
        scores: &mut [f32],
    ) {
        let levels = simd.read(&self.levels.values);
        // SAFETY: the processor has the instruction; the transmute renames the same 64 bytes.
        let levels = unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(levels, levels)) };
        for (queries, scores) in queries.chunks(QUERIES * stride).zip(scores.chunks_mut(QUERIES * BLOCK)) {
            let mut pairs = [[Bf16Pair::zeroed(); MOST_COLUMNS / 2]; QUERIES];
            for (query, to) in queries.chunks_exact(stride).zip(&mut pairs) {
                let columns = query[..self.width].as_chunks::<COLUMNS>().0;
                for (columns, to) in columns.iter().zip(to.as_chunks_mut::<{ COLUMNS / 2 }>().0) {
                    let (low, high) = columns.split_at(COLUMNS / 2);
                    for ((low, high), to) in
                        low.chunks_exact(16).zip(high.chunks_exact(16)).zip(to.chunks_exact_mut(16))
                    {
                        Bf16Pair::put_rows(simd, to, simd.read(low), simd.read(high));
                    }
                }
            }
            let (of, count) = (InBf16 { nibbles: self, levels, pairs: &pairs }, queries.len() / stride);
            // SAFETY: the caller's promise.
            unsafe { quads::put(simd, (rows, self.row_bytes()), range.clone(), of, count, scores) };
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
                    let weights: [__m512; OUTPUTS] = each(
                        scales,
                        #[inline(always)]
                        |output| simd.mul(scales, simd.splat(*weights.add(output * BLOCK + index))),
                    );
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

/// Queries as they are, arranged.
#[derive(Clone, Copy)]
struct InF32 {
    nibbles: Nibbles,
    queries: *const f32,
    stride: usize,
}

impl Products<Avx512<false>> for InF32 {
    #[inline(always)]
    unsafe fn of<const ROWS: usize, const COUNT: usize>(
        self,
        simd: Avx512<false>,
        rows: [*const u8; ROWS],
    ) -> [[__m512; ROWS]; COUNT] {
        let mut sums = [[simd.splat(0.0); ROWS]; COUNT];
        // SAFETY: the caller's promise.
        unsafe {
            let levels = simd.load(self.nibbles.levels.values.as_ptr());
            for part in 0..self.nibbles.width / COLUMNS {
                let queries = self.queries.add(part * COLUMNS);
                for row in 0..ROWS {
                    let (codes, scales) = self.nibbles.load(simd, rows[row].add(part * self.nibbles.at.bytes));
                    let mut products = [simd.splat(0.0); COUNT];
                    for vector in 0..VECTORS {
                        let key = look_up(simd, codes, vector, levels);
                        for (query, product) in products.iter_mut().enumerate() {
                            let x = simd.load(queries.add(query * self.stride + 16 * vector));
                            *product = simd.mul_add(x, key, *product);
                        }
                    }
                    for (sums, product) in sums.iter_mut().zip(products) {
                        sums[row] = simd.mul_add(product, scales, sums[row]);
                    }
                }
            }
        }
        sums
    }
}

/// Queries in pairs: of the `k`-th codes of lanes and the ones four behind them, which are in the other half of a lane.
#[derive(Clone, Copy)]
struct InBf16<'a> {
    nibbles: Nibbles,
    levels: __m512i,
    pairs: &'a [[Bf16Pair; MOST_COLUMNS / 2]; QUERIES],
}

impl Products<Avx512<true>> for InBf16<'_> {
    #[inline(always)]
    unsafe fn of<const ROWS: usize, const COUNT: usize>(
        self,
        simd: Avx512<true>,
        rows: [*const u8; ROWS],
    ) -> [[__m512; ROWS]; COUNT] {
        let mut sums = [[simd.splat(0.0); ROWS]; COUNT];
        // SAFETY: the caller's promise, and the processor has the instructions.
        unsafe {
            for part in 0..self.nibbles.width / COLUMNS {
                for row in 0..ROWS {
                    let (codes, scales) = self.nibbles.load(simd, rows[row].add(part * self.nibbles.at.bytes));
                    let mut products = [simd.splat(0.0); COUNT];
                    for vector in 0..VECTORS / 2 {
                        // Of an index the low five bits count, and levels are there twice.
                        let index = _mm512_srl_epi16(codes, _mm_cvtsi64_si128(4 * vector as i64));
                        let keys = _mm512_permutexvar_epi16(index, self.levels);
                        for (query, product) in products.iter_mut().enumerate() {
                            let x = self.pairs[query].as_ptr().add(part * COLUMNS / 2 + 16 * vector);
                            *product = Bf16Pair::mul_add(simd, Bf16Pair::load(simd, x), keys, *product);
                        }
                    }
                    for (sums, product) in sums.iter_mut().zip(products) {
                        sums[row] = simd.mul_add(product, scales, sums[row]);
                    }
                }
            }
        }
        sums
    }
}

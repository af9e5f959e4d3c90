//! AVX512-VNNI: [`Integers`], where the processor multiplies codes.

mod unpack;

use super::Simd;
use super::avx512::{self, Avx512};
use super::integers::{Codes, GROUP, Integers, QUAD, Quad};
use super::linear::{AHEAD_BYTES, TILE};
use super::row_list::LINE_BYTES;
use super::vector::each;
use std::arch::x86_64::*;
use unpack::{Bytes, Levels, Nibbles, Q6K, SixBits, Unpack};

/// Computes `part`.
pub fn run(part: Integers<'_>) {
    let codes = part.codes;
    // SAFETY: `Integers::run` asserts that the processor has the instructions.
    unsafe {
        avx512::with_vnni(
            #[inline(always)]
            |simd| match codes {
                Codes::Row => part.over(simd, Bytes::<true>),
                Codes::Bytes => part.over(simd, Bytes::<false>),
                Codes::Nibbles { minimum: false, fifth: false } => part.over(simd, Nibbles::<false, false>),
                Codes::Nibbles { minimum: true, fifth: false } => part.over(simd, Nibbles::<true, false>),
                Codes::Nibbles { minimum: false, fifth: true } => part.over(simd, Nibbles::<false, true>),
                Codes::Nibbles { minimum: true, fifth: true } => part.over(simd, Nibbles::<true, true>),
                Codes::Levels(levels) => part.over(simd, Levels(levels)),
                Codes::SixBits { fifth: false } => part.over(simd, SixBits::<false>),
                Codes::SixBits { fifth: true } => part.over(simd, SixBits::<true>),
                Codes::Q6K => part.over(simd, Q6K),
            },
        );
    }
}

impl Integers<'_> {
    /// # Safety
    /// The processor has AVX512-VNNI, and the rows of `w` are what is unpacked.
    #[inline(always)]
    unsafe fn over<U: Unpack>(self, simd: Avx512<false>, unpack: U) {
        let Integers { columns: part, y, .. } = self;
        let (width, count) = (part.w.width(), part.w.count());
        assert!(Quad::count(width) <= part.stride && part.rows * part.stride <= part.x.len(), "whole quads of x");
        let groups = width.div_ceil(GROUP);
        assert!(groups * U::BYTES / (QUAD / GROUP) <= part.w.row_bytes(), "rows of w hold what is unpacked");
        let (span, stride_bytes) = part.w.span().expect("rows of a matrix lie along it");
        let row = |index: usize| span[index * stride_bytes..][..part.w.row_bytes()].as_ptr();
        for first in (0..count).step_by(TILE) {
            // Rows that are not there are the last one again.
            let rows: [*const u8; TILE] = each(std::ptr::null(), |offset| row((first + offset).min(count - 1)));
            let scales = U::ROW.then(|| {
                // SAFETY: such a row begins with its scale.
                rows.map(|row| unsafe { row.cast::<f32>().read_unaligned() })
            });
            let mut query = 0;
            while query < part.rows {
                // SAFETY: the caller's promise; rows of `w` are whole by `row`, rows of `x` by the assertion.
                query += unsafe {
                    let (x, stride) = (part.x.as_ptr().add(query * part.stride), part.stride);
                    let at = [query, first];
                    match part.rows - query {
                        1 => part.put(simd, y, tile::<U, 1>(simd, unpack, rows, groups, x, stride), scales, at),
                        2 | 3 => part.put(simd, y, tile::<U, 2>(simd, unpack, rows, groups, x, stride), scales, at),
                        4..8 => part.put(simd, y, tile::<U, 4>(simd, unpack, rows, groups, x, stride), scales, at),
                        _ => part.put(simd, y, tile::<U, 8>(simd, unpack, rows, groups, x, stride), scales, at),
                    }
                };
            }
        }
    }
}

/// Products of four rows of `w` and of `QUERIES` rows of `x`, to be summed over the lanes.
///
/// # Safety
/// The processor has AVX512-VNNI; rows of `w` hold so many groups, those of `x`, `stride` apart, as many quads as these take.
#[inline(always)]
unsafe fn tile<U: Unpack, const QUERIES: usize>(
    simd: Avx512<false>,
    unpack: U,
    rows: [*const u8; TILE],
    groups: usize,
    x: *const Quad,
    stride: usize,
) -> [[__m512; TILE]; QUERIES] {
    let mut tile = [[simd.splat(0.0); TILE]; QUERIES];
    for (index, row) in rows.into_iter().enumerate() {
        let (mut sums, mut least) = ([simd.splat(0.0); QUERIES], [simd.splat(0.0); QUERIES]);
        for quad in 0..groups.div_ceil(QUAD / GROUP) {
            // SAFETY: the caller's promise; a `Quad` is four vectors.
            unsafe {
                // Pieces of 16 bytes out of order are no stream that processors notice by themselves.
                for line in (0..U::BYTES).step_by(LINE_BYTES) {
                    simd.prefetch(row.wrapping_add(quad * U::BYTES + AHEAD_BYTES + line));
                }
                let w = unpack.quad(row, quad, groups - 1);
                for query in 0..QUERIES {
                    let x = x.add(query * stride + quad).cast::<__m512i>();
                    let [first, second] = [_mm512_load_si512(x), _mm512_load_si512(x.add(1))];
                    let [scales, of_codes] = [simd.load(x.add(2).cast()), simd.load(x.add(3).cast())];
                    let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.codes[0], first);
                    let zero = if U::HALVES { _mm512_setzero_si512() } else { dot };
                    let both = _mm512_dpbusd_epi32(zero, w.codes[1], second);
                    if U::HALVES {
                        let scale = simd.mul(w.scales[0], scales);
                        sums[query] = simd.mul_add(_mm512_cvtepi32_ps(dot), scale, sums[query]);
                    }
                    let scale = simd.mul(w.scales[1], scales);
                    sums[query] = simd.mul_add(_mm512_cvtepi32_ps(both), scale, sums[query]);
                    least[query] = simd.mul_add(w.least, of_codes, least[query]);
                }
            }
        }
        for (query, tile) in tile.iter_mut().enumerate() {
            tile[index] = simd.add(sums[query], least[query]);
        }
    }
    tile
}

//! llama.cpp's `iq4_xs`: super-blocks of 256 with the levels of `iq4_nl`, and a scale of six bits for each 32, `x = d (s - 32) level`.
//!
//! A word has the upper two bits of the eight scales, four bytes the lower four of two each. 136 bytes for 256 elements: 4.25 bits.

use super::blocks::{Blocks, coded, half_at, nibble, nibbles, put_half, put_nibbles};
use super::fit::{by_square, extreme, put_not_finite, signed, symmetric};
use super::iq4_nl::{LEVELS, nearest};
use crate::device::simd::Simd;
use crate::named::{Named, NamedError};

/// Super-blocks of levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Iq4Xs;

/// Where codes begin.
const CODES: usize = 8;

/// The scale of a group, out of the six bytes.
#[inline(always)]
fn scale(byte: impl Fn(usize) -> u8, group: usize) -> f32 {
    let bits = byte(2 + group / 2) >> (group % 2 * 4) & 15 | (byte(group / 4) >> (group % 4 * 2) & 3) << 4;
    f32::from(bits) - 32.0
}

impl Blocks for Iq4Xs {
    const NAME: &'static str = "iq4_xs";
    const ABOUT: &'static str = "weights: as llama.cpp: the levels of iq4_nl, a scale of six bits for each 32 of 256";
    const OF_WEIGHTS: bool = true;

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Iq4Xs)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        256
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        CODES + 128
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scales.
        unsafe {
            let scale = simd.splat(scale(|at| *block.add(2 + at), offset / 32));
            let scale = simd.mul(simd.splat_f16(block.cast()), scale);
            simd.mul(scale, nibbles(simd, block.add(CODES), offset, &LEVELS.values))
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            let scale = simd.splat(scale(|at| *block.add(2 + at), offset / 32));
            let scale = simd.mul(simd.splat_f16(block.cast()), scale);
            simd.load_32_nibbles(block.add(CODES + offset / 2), &LEVELS, (scale, None), to);
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        <Self as Blocks>::encode_weighted(self, block, &by_square(block), to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if put_not_finite(block, to, 0) {
            return;
        }
        to.fill(0);
        let groups = || block.chunks_exact(32);
        let of =
            |(group, weights)| symmetric(group, weights, |x| LEVELS.values[nearest(x)], LEVELS.values[0], (1.0, 7));
        let scales: Vec<f32> = groups().zip(weights.chunks_exact(32)).map(of).collect();
        let most = extreme(&scales);
        let per = if most == 0.0 { 0.0 } else { -32.0 / most };
        let d = put_half(to, 0, most / -32.0);
        for (group, (block, scale)) in groups().zip(&scales).enumerate() {
            let code = signed(32.0)(per * scale);
            let bits = (code + 32.0) as u8;
            to[2 + group / 4] |= bits >> 4 << (group % 4 * 2);
            to[4 + group / 2] |= (bits & 15) << (group % 2 * 4);
            let scale = d * code;
            let codes = coded(block, |x| nearest(if scale == 0.0 { 0.0 } else { x / scale }) as u8);
            put_nibbles(&codes, &mut to[CODES + 16 * group..][..16]);
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, 0);
        for (index, x) in to.iter_mut().enumerate() {
            let scale = d * scale(|at| block[2 + at], index / 32);
            *x = scale * LEVELS.values[usize::from(nibble(&block[CODES..], index))];
        }
    }
}

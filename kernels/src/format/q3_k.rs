//! llama.cpp's `q3_k`: super-blocks of 256, in which each 16 neighbours have a scale of six bits, `x = d (s - 32) (q - 4)`.
//!
//! The low two bits of codes lie as in `q2_k`, the third as the fifth of `q5_k`. Scales: eight bytes hold the low four bits of scales
//! `i` and `i + 8`, four bytes the upper two of `i`, `i + 4`, `i + 8`, `i + 12`. 110 bytes for 256 elements: 3.4375 bits.

use super::blocks::{Blocks, half_at, put_half};
use super::fit::{by_square, extreme, put_not_finite, signed, symmetric};
use crate::device::simd::Simd;
use crate::named::{Named, NamedError};

/// Super-blocks of three bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q3K;

/// Where the low bits, scales and the scale of all begin; third bits come first.
const LOW: usize = 32;
const SCALES: usize = 96;
const D: usize = 108;

/// The scale of a group, out of the twelve bytes.
#[inline(always)]
fn scale(byte: impl Fn(usize) -> u8, group: usize) -> f32 {
    let bits = byte(group % 8) >> (group / 8 * 4) & 15 | (byte(8 + group % 4) >> (group / 4 * 2) & 3) << 4;
    f32::from(bits) - 32.0
}

impl Blocks for Q3K {
    const NAME: &'static str = "q3_k";
    const ABOUT: &'static str = "weights: as llama.cpp: three bits, a scale of six bits for each 16 of 256";
    const OF_WEIGHTS: bool = true;

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q3K)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        256
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        D + 2
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            let at = offset % 128;
            let low = simd.load_bits(block.add(LOW + offset / 128 * 32 + at % 32), (at / 32 * 2) as u32, 3);
            let high = simd.load_bits(block.add(offset % 32), (offset / 32) as u32, 1);
            let scale = scale(|at| *block.add(SCALES + at), offset / 16);
            let scale = simd.mul(simd.splat_f16(block.add(D).cast()), simd.splat(scale));
            simd.mul(scale, simd.sub(simd.mul_add(simd.splat(4.0), high, low), simd.splat(4.0)))
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        <Self as Blocks>::encode_weighted(self, block, &by_square(block), to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if put_not_finite(block, to, D) {
            return;
        }
        to.fill(0);
        let groups = block.chunks_exact(16).zip(weights.chunks_exact(16));
        let scales: Vec<f32> =
            groups.map(|(group, weights)| symmetric(group, weights, signed(4.0), -4.0, (0.1, 9))).collect();
        let most = extreme(&scales);
        let per = if most == 0.0 { 0.0 } else { -32.0 / most };
        let d = put_half(to, D, most / -32.0);
        for (group, scale) in scales.iter().enumerate() {
            let code = signed(32.0)(per * scale);
            let bits = (code + 32.0) as u8;
            to[SCALES + group % 8] |= (bits & 15) << (group / 8 * 4);
            to[SCALES + 8 + group % 4] |= bits >> 4 << (group / 4 * 2);
            let scale = d * code;
            for (index, x) in (16 * group..).zip(&block[16 * group..][..16]) {
                let code = (if scale == 0.0 { 0.0 } else { signed(4.0)(x / scale) } + 4.0) as u8;
                let at = index % 128;
                to[LOW + index / 128 * 32 + at % 32] |= (code & 3) << (at / 32 * 2);
                to[index % 32] |= code >> 2 << (index / 32);
            }
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, D);
        for (index, x) in to.iter_mut().enumerate() {
            let at = index % 128;
            let low = block[LOW + index / 128 * 32 + at % 32] >> (at / 32 * 2) & 3;
            let high = block[index % 32] >> (index / 32) & 1;
            let scale = d * scale(|at| block[SCALES + at], index / 16);
            *x = scale * (f32::from(low | high << 2) - 4.0);
        }
    }
}

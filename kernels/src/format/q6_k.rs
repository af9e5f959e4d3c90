//! llama.cpp's `q6_k`: super-blocks of 256, in which each 16 neighbours have a scale of a signed byte, `x = d s (q - 32)`.
//!
//! Of each half of the super-block, 64 bytes hold the low four bits (of elements `i` and `i + 64`), 32 bytes the upper two (of
//! `i`, `i + 32`, `i + 64`, `i + 96`). 210 bytes for 256 elements: 6.5625 bits.

use super::blocks::{Blocks, half_at, put_half};
use super::fit::{by_square, extreme, put_not_finite, signed, symmetric};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Super-blocks of six bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q6K;

/// Where upper bits, scales and the scale of all begin.
const HIGH: usize = 128;
const SCALES: usize = 192;
const D: usize = 208;

impl Blocks for Q6K {
    const NAME: &'static str = "q6_k";
    const ABOUT: &'static str = "weights: as llama.cpp: six bits, a scale of eight bits for each 16 of 256";
    const OF_WEIGHTS: bool = true;

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q6K)
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
            let (half, at) = (offset / 128, offset % 128);
            let low = simd.load_bits(block.add(64 * half + at % 64), (at / 64 * 4) as u32, 15);
            let high = simd.load_bits(block.add(HIGH + 32 * half + at % 32), (at / 32 * 2) as u32, 3);
            let scale = f32::from((*block.add(SCALES + offset / 16)).cast_signed());
            let scale = simd.mul(simd.splat_f16(block.add(D).cast()), simd.splat(scale));
            simd.mul(scale, simd.sub(simd.mul_add(simd.splat(16.0), high, low), simd.splat(32.0)))
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Q6K)
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
            groups.map(|(group, weights)| symmetric(group, weights, signed(32.0), -32.0, (0.1, 9))).collect();
        let most = extreme(&scales);
        if most == 0.0 {
            return;
        }
        let d = put_half(to, D, most / -128.0);
        for (group, scale) in scales.iter().enumerate() {
            let byte = (scale * -128.0 / most).round_ties_even().min(127.0) as i8;
            to[SCALES + group] = byte.cast_unsigned();
            let scale = d * f32::from(byte);
            for (at, x) in (16 * group..).zip(&block[16 * group..][..16]) {
                let code = (if scale == 0.0 { 0.0 } else { signed(32.0)(x / scale) } + 32.0) as u8;
                let (half, at) = (at / 128, at % 128);
                to[64 * half + at % 64] |= (code & 15) << (at / 64 * 4);
                to[HIGH + 32 * half + at % 32] |= code >> 4 << (at / 32 * 2);
            }
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, D);
        for (index, x) in to.iter_mut().enumerate() {
            let (half, at) = (index / 128, index % 128);
            let low = block[64 * half + at % 64] >> (at / 64 * 4) & 15;
            let high = block[HIGH + 32 * half + at % 32] >> (at / 32 * 2) & 3;
            let scale = d * f32::from(block[SCALES + index / 16].cast_signed());
            *x = scale * (f32::from(low | high << 4) - 32.0);
        }
    }
}

//! llama.cpp's `q5_k`: as `q4_k`, with a fifth bit for each element.
//!
//! Bit `g` of byte `i` of the fifth bits belongs to element `i` of group `g`. 176 bytes for 256 elements: 5.5 bits.

use super::blocks::Blocks;
use super::fit::{Search, put_not_finite};
use super::six_bits;
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Super-blocks of five bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q5K;

const SEARCH: Search = Search { most: 31.0, start: -0.5, step: 0.1, steps: 15, squares: true };

/// Where fifth bits and the others begin.
const HIGH: usize = six_bits::BYTES;
const LOW: usize = HIGH + 32;

impl Blocks for Q5K {
    const NAME: &'static str = "q5_k";
    const ABOUT: &'static str =
        "weights: as llama.cpp: five bits, a scale and a minimum of six bits for each 32 of 256";
    const OF_WEIGHTS: bool = true;

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q5K)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        256
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        LOW + 128
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; fifth bits and codes stand behind the scales.
        unsafe {
            let (scale, least) = six_bits::scales(simd, block, offset);
            let (group, at) = (offset / 32, offset % 32);
            let low = simd.load_bits(block.add(LOW + group / 2 * 32 + at), (group % 2 * 4) as u32, 15);
            let high = simd.load_bits(block.add(HIGH + at), group as u32, 1);
            simd.mul_add(scale, simd.mul_add(simd.splat(16.0), high, low), least)
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::SixBits { fifth: true })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        encode(block, None, to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        encode(block, Some(weights), to);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        six_bits::decode(block, to, |at| {
            let (group, at) = (at / 32, at % 32);
            block[LOW + group / 2 * 32 + at] >> (group % 2 * 4) & 15 | (block[HIGH + at] >> group & 1) << 4
        });
    }
}

/// Writes a block.
fn encode(block: &[f32], weights: Option<&[f32]>, to: &mut [u8]) {
    if put_not_finite(block, to, 0) {
        return;
    }
    let codes = six_bits::encode(block, weights, to, &SEARCH);
    for (at, byte) in to[HIGH..LOW].iter_mut().enumerate() {
        *byte = (0..8).fold(0, |bits, group| bits | codes[32 * group + at] >> 4 << group);
    }
    for (at, byte) in to[LOW..].iter_mut().enumerate() {
        let first = at / 32 * 64 + at % 32;
        *byte = codes[first] & 15 | codes[first + 32] << 4;
    }
}

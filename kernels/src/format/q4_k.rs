//! llama.cpp's `q4_k`: super-blocks of 256, in which each 32 neighbours have a scale and a minimum of six bits ([`six_bits`]).
//!
//! `x = d s q - m l`: two f16 for the super-block, `s` and `l` of a group, and codes of four bits: 32 bytes hold the codes of two
//! groups, the first in the low halves. 144 bytes for 256 elements: 4.5 bits, as `q4_0`, with a minimum beside the scale.

use super::blocks::{Blocks, UNSIGNED};
use super::fit::{Search, put_not_finite};
use super::six_bits;
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Super-blocks of four bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q4K;

const SEARCH: Search = Search { most: 15.0, start: -1.0, step: 0.1, steps: 20, squares: true };

impl Blocks for Q4K {
    const NAME: &'static str = "q4_k";
    const ABOUT: &'static str =
        "weights: as llama.cpp: four bits, a scale and a minimum of six bits for each 32 of 256";
    const OF_WEIGHTS: bool = true;

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q4K)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        256
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        six_bits::BYTES + 128
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scales.
        unsafe {
            let (scale, least) = six_bits::scales(simd, block, offset);
            let codes = block.add(six_bits::BYTES + offset / 64 * 32 + offset % 32);
            simd.mul_add(scale, simd.load_nibbles(codes, (offset / 32 % 2 * 4) as u32, &UNSIGNED.values), least)
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            let scales = six_bits::scales(simd, block, offset);
            let codes = block.add(six_bits::BYTES + offset / 64 * 32);
            simd.load_32_of_bytes(codes, (offset / 32 % 2 * 4) as u32, &UNSIGNED.values, scales, to);
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::SixBits { fifth: false })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        encode(block, None, to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        encode(block, Some(weights), to);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        six_bits::decode(block, to, |at| block[six_bits::BYTES + at / 64 * 32 + at % 32] >> (at / 32 % 2 * 4) & 15);
    }
}

/// Writes a block.
fn encode(block: &[f32], weights: Option<&[f32]>, to: &mut [u8]) {
    if put_not_finite(block, to, 0) {
        return;
    }
    let codes = six_bits::encode(block, weights, to, &SEARCH);
    for (at, byte) in to[six_bits::BYTES..].iter_mut().enumerate() {
        let first = at / 32 * 64 + at % 32;
        *byte = codes[first] | codes[first + 32] << 4;
    }
}

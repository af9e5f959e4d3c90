//! llama.cpp's `q5_1`: five bits for each element, an f16 scale and an f16 minimum for each 32 neighbours, `x = d q + m`.
//!
//! `m = min x` and `d = (max - min) / 31`. Four bits of a code lie as in `q4_0`, the fifth bits of all 32 in a word of their own.
//! What is kept is, bit by bit, what ggml keeps: codes are found before `d` and `m` are rounded to f16, so that an element is
//! off by half a scale and by what f16 rounds of both. 24 bytes for 32 elements: 6 bits.

use super::blocks::{Blocks, UNSIGNED, coded, fifth_bits, half_at, largest, nibble, put_half, put_nibbles, with_fifth};
use super::fit::{finely, put_not_finite, with_minimum};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Five bits with a scale and a minimum for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q5_1;

/// Where the fifth bits and the others begin.
const HIGH: usize = 4;
const LOW: usize = 8;

impl Blocks for Q5_1 {
    const NAME: &'static str = "q5_1";
    const ABOUT: &'static str = "as llama.cpp: five bits for each element, an f16 scale and an f16 minimum for each 32";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q5_1)
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        24
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; fifth bits and codes stand behind the scale and the minimum.
        unsafe {
            let (d, m) = (simd.splat_f16(block.cast()), simd.splat_f16(block.add(2).cast()));
            simd.add(simd.mul(d, with_fifth(simd, block.add(HIGH), block.add(LOW), offset, &UNSIGNED.values)), m)
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Nibbles { minimum: true, fifth: true })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let bounds = (f32::INFINITY, f32::NEG_INFINITY);
        let (least, most) = block.iter().fold(bounds, |(least, most), &x| (least.min(x), most.max(x)));
        // The minimum passes a NaN on.
        put(block, (most - least) / 31.0, if largest(block).is_finite() { least } else { f32::NAN }, to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if !put_not_finite(block, to, 0) {
            let [d, least] = with_minimum(block, weights, &finely(31.0));
            put(block, d, -least, to);
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        let high = u32::from_le_bytes([block[HIGH], block[HIGH + 1], block[HIGH + 2], block[HIGH + 3]]);
        let code = |index: usize| nibble(&block[LOW..], index) | ((high >> index & 1) << 4) as u8;
        to.iter_mut().enumerate().for_each(|(index, x)| *x = d * f32::from(code(index)) + m);
    }
}

/// Writes a block under a scale and a minimum.
fn put(block: &[f32], d: f32, least: f32, to: &mut [u8]) {
    put_half(to, 0, d);
    put_half(to, 2, least);
    let per = if d == 0.0 { 0.0 } else { 1.0 / d };
    let codes = coded(block, |x| (((x - least) * per + 0.5) as u8).min(31));
    to[HIGH..LOW].copy_from_slice(&fifth_bits(&codes).to_le_bytes());
    put_nibbles(&codes, &mut to[LOW..]);
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use proptest::prelude::*;

    #[test]
    fn a_block_by_hand() {
        // From -8 to 7.5 in 31 steps of 0.5: -3.8 is step 8.4, and 0.2 step 16.4, whose fifth bit is set.
        let mut row = [0.0; 32];
        row[..4].copy_from_slice(&[-8.0, 7.5, -3.8, 0.2]);
        assert_eq!(there_and_back("q5_1", &row)[..5], [-8.0, 7.5, -4.0, 0.0, 0.0]);
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_scale_and_what_f16_rounds(
            row in prop::collection::vec(-1e3f32..1e3, 64),
            shift in -500f32..500.0,
        ) {
            let row: Vec<f32> = row.iter().map(|x| x + shift).collect();
            for (block, back) in row.chunks(32).zip(there_and_back("q5_1", &row).chunks(32)) {
                let bounds = (f32::INFINITY, f32::NEG_INFINITY);
                let (least, most) = block.iter().fold(bounds, |(least, most), &x| (least.min(x), most.max(x)));
                for (x, back) in block.iter().zip(back) {
                    let bound = (most - least) / 31.0 * 0.52 + least.abs() / 2048.0;
                    prop_assert!((x - back).abs() <= bound, "{x} became {back}, from {least} to {most}");
                }
            }
        }
    }
}

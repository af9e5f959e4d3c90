//! llama.cpp's `q4_0`: four bits for each element and an f16 scale for each 32 neighbours, `x = d (q - 8)`.
//!
//! The element of the largest magnitude is made -8, whatever its sign: `d = -x / 8`, and codes reach from -8 to 7. That is one
//! code more than symmetric `int4` has, and the other end of the range is cut off at 7/8 of the largest: an element is off by half a
//! scale, or by a whole one where it equals the largest with the other sign. What is kept is, bit by bit, what ggml keeps. 18 bytes for 32
//! elements: 4.5 bits.

use super::blocks::{Blocks, SIGNED, coded, half_at, largest, nibble, nibbles, put_half, put_nibbles, raised};
use super::fit::{put_not_finite, signed, symmetric};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::device::simd::nibbles::FourBits;
use crate::named::{Named, NamedError};

/// Four bits with a scale for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q4_0;

impl Blocks for Q4_0 {
    const NAME: &'static str = "q4_0";
    const AFFINE: bool = true;
    const ABOUT: &'static str = "as llama.cpp: four bits for each element, an f16 scale for each 32";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q4_0)
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        18
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale.
        unsafe { simd.mul(simd.splat_f16(block.cast()), nibbles(simd, block.add(2), offset, &SIGNED.values)) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe { simd.load_32_nibbles(block.add(2 + offset / 2), &SIGNED, (simd.splat_f16(block.cast()), None), to) }
    }

    #[inline(always)]
    unsafe fn affine<S: Simd>(self, simd: S, block: *const u8, offset: usize, x: &mut [S::Vector]) -> [S::Vector; 2] {
        // SAFETY: as above.
        unsafe {
            let d = simd.splat_f16(block.cast());
            raised(simd, block.add(2 + offset / 2), (d, simd.mul(d, simd.splat(-8.0))), x)
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Nibbles { minimum: false, fifth: false })
    }

    fn four_bits(self) -> Option<FourBits> {
        Some(FourBits { elements: 32, scale_first: true, levels: &SIGNED })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let most = largest(block);
        // Of equal magnitudes the first; none equals a NaN.
        put(block, block.iter().find(|x| x.abs() == most).map_or(f32::NAN, |x| x / -8.0), to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if !put_not_finite(block, to, 0) {
            put(block, symmetric(block, weights, signed(8.0), -8.0, (0.1, 9)), to);
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, 0);
        to.iter_mut().enumerate().for_each(|(index, x)| *x = d * (f32::from(nibble(&block[2..], index)) - 8.0));
    }
}

/// Writes a block under the scale `d`.
fn put(block: &[f32], d: f32, to: &mut [u8]) {
    let (scale, codes) = to.split_at_mut(2);
    put_half(scale, 0, d);
    let per = if d == 0.0 { 0.0 } else { 1.0 / d };
    put_nibbles(&coded(block, |x| ((x * per + 8.5) as u8).min(15)), codes);
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use proptest::prelude::*;

    #[test]
    fn a_block_by_hand() {
        // The largest is 4, so d is -0.5: 4 is -8 of it, -4 would be 8 and is cut off at 7, 0.7 is -1.4.
        let mut row = [0.0; 32];
        row[..4].copy_from_slice(&[4.0, -4.0, 0.7, -0.8]);
        assert_eq!(there_and_back("q4_0", &row)[..5], [4.0, -3.5, 0.5, -1.0, 0.0]);
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_a_scale_at_most(row in prop::collection::vec(-1e3f32..1e3, 64)) {
            for (block, back) in row.chunks(32).zip(there_and_back("q4_0", &row).chunks(32)) {
                let most = block.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
                for (x, back) in block.iter().zip(back) {
                    let other_end = x * most < 0.0 && x.abs() > most.abs() * 7.5 / 8.0;
                    let bound = most.abs() / 8.0 * if other_end { 1.01 } else { 0.51 };
                    prop_assert!((x - back).abs() <= bound, "{x} became {back}, largest {most}");
                }
            }
        }
    }
}

//! llama.cpp's `q5_0`: five bits for each element and an f16 scale for each 32 neighbours, `x = d (q - 16)`.
//!
//! As `q4_0`: the element of the largest magnitude is made -16, whatever its sign. Fifth bits lie as in `q5_1`. 22 bytes for 32
//! elements: 5.5 bits.

use super::blocks::{Blocks, coded, fifth_bits, half_at, largest, nibble, put_half, put_nibbles, with_fifth};
use super::fit::{put_not_finite, signed, symmetric};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Five bits with a scale for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q5_0;

/// Where the fifth bits and the others begin.
const HIGH: usize = 2;
const LOW: usize = 6;
/// What the low four bits of a code stand for where the fifth is not set.
const WITHOUT_FIFTH: [f32; 16] =
    [-16.0, -15.0, -14.0, -13.0, -12.0, -11.0, -10.0, -9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0];

impl Blocks for Q5_0 {
    const NAME: &'static str = "q5_0";
    const ABOUT: &'static str = "as llama.cpp: five bits for each element, an f16 scale for each 32";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q5_0)
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        22
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; fifth bits and codes stand behind the scale.
        unsafe {
            let codes = with_fifth(simd, block.add(HIGH), block.add(LOW), offset, &WITHOUT_FIFTH);
            simd.mul(simd.splat_f16(block.cast()), codes)
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Nibbles { minimum: false, fifth: true })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let most = largest(block);
        // Of equal magnitudes the first; none equals a NaN.
        put(block, block.iter().find(|x| x.abs() == most).map_or(f32::NAN, |x| x / -16.0), to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if !put_not_finite(block, to, 0) {
            put(block, symmetric(block, weights, signed(16.0), -16.0, (0.1, 9)), to);
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, 0);
        let high = u32::from_le_bytes([block[HIGH], block[HIGH + 1], block[HIGH + 2], block[HIGH + 3]]);
        let code = |index: usize| nibble(&block[LOW..], index) | ((high >> index & 1) << 4) as u8;
        to.iter_mut().enumerate().for_each(|(index, x)| *x = d * (f32::from(code(index)) - 16.0));
    }
}

/// Writes a block under the scale `d`.
fn put(block: &[f32], d: f32, to: &mut [u8]) {
    put_half(to, 0, d);
    let per = if d == 0.0 { 0.0 } else { 1.0 / d };
    let codes = coded(block, |x| ((x * per + 16.5) as u8).min(31));
    to[HIGH..LOW].copy_from_slice(&fifth_bits(&codes).to_le_bytes());
    put_nibbles(&codes, &mut to[LOW..]);
}

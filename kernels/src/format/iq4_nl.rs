//! llama.cpp's `iq4_nl`: four bits that choose one of 16 levels, denser near zero, and an f16 scale for each 32 neighbours.
//!
//! 18 bytes for 32 elements, laid out as `q4_0`: 4.5 bits.

use super::blocks::{Blocks, coded, half_at, nearest_level, nibble, nibbles, put_half, put_nibbles};
use super::fit::{by_square, put_not_finite, symmetric};
use crate::device::simd::integers::Codes;
use crate::device::simd::nibbles::FourBits;
use crate::device::simd::{Levels, Simd};
use crate::named::{Named, NamedError};

/// Levels with a scale for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Iq4Nl;

/// What the codes stand for, of a scale of 1.
const WHOLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The same.
pub const LEVELS: Levels = Levels::whole(WHOLE);

/// The nearest level.
pub fn nearest(x: f32) -> usize {
    nearest_level(&LEVELS.values, x).into()
}

impl Blocks for Iq4Nl {
    const NAME: &'static str = "iq4_nl";
    const ABOUT: &'static str = "as llama.cpp: four bits that choose one of 16 levels, an f16 scale for each 32";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Iq4Nl)
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        18
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale.
        unsafe { simd.mul(simd.splat_f16(block.cast()), nibbles(simd, block.add(2), offset, &LEVELS.values)) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe { simd.load_32_nibbles(block.add(2 + offset / 2), &LEVELS, (simd.splat_f16(block.cast()), None), to) }
    }

    fn four_bits(self) -> Option<FourBits> {
        Some(FourBits { elements: 32, scale_first: true, levels: &LEVELS })
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Levels(&WHOLE))
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        <Self as Blocks>::encode_weighted(self, block, &by_square(block), to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if put_not_finite(block, to, 0) {
            return;
        }
        let (scale, codes) = to.split_at_mut(2);
        let d =
            put_half(scale, 0, symmetric(block, weights, |x| LEVELS.values[nearest(x)], LEVELS.values[0], (1.0, 7)));
        put_nibbles(&coded(block, |x| nearest(if d == 0.0 { 0.0 } else { x / d }) as u8), codes);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, 0);
        to.iter_mut()
            .enumerate()
            .for_each(|(index, x)| *x = d * LEVELS.values[usize::from(nibble(&block[2..], index))]);
    }
}

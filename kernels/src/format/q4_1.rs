//! llama.cpp's `q4_1`: four bits for each element, an f16 scale and an f16 minimum for each 32 neighbours, `x = d q + m`.
//!
//! `m = min x` and `d = (max - min) / 15`, as in `q5_1` with a bit less. 20 bytes for 32 elements: 5 bits.

use super::blocks::{Blocks, UNSIGNED, coded, half_at, largest, nibble, nibbles, put_half, put_nibbles, raised};
use super::fit::{finely, put_not_finite, with_minimum};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Four bits with a scale and a minimum for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q4_1;

impl Blocks for Q4_1 {
    const NAME: &'static str = "q4_1";
    const AFFINE: bool = true;
    const ABOUT: &'static str = "as llama.cpp: four bits for each element, an f16 scale and an f16 minimum for each 32";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q4_1)
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        20
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale and the minimum.
        unsafe {
            let (d, m) = (simd.splat_f16(block.cast()), simd.splat_f16(block.add(2).cast()));
            simd.add(simd.mul(d, nibbles(simd, block.add(4), offset, &UNSIGNED.values)), m)
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            let (d, m) = (simd.splat_f16(block.cast()), simd.splat_f16(block.add(2).cast()));
            simd.load_32_nibbles(block.add(4 + offset / 2), &UNSIGNED, (d, Some(m)), to);
        }
    }

    #[inline(always)]
    unsafe fn affine<S: Simd>(self, simd: S, block: *const u8, offset: usize, x: &mut [S::Vector]) -> [S::Vector; 2] {
        // SAFETY: as above.
        unsafe {
            let (d, m) = (simd.splat_f16(block.cast()), simd.splat_f16(block.add(2).cast()));
            raised(simd, block.add(4 + offset / 2), (d, m), x)
        }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Nibbles { minimum: true, fifth: false })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let bounds = (f32::INFINITY, f32::NEG_INFINITY);
        let (least, most) = block.iter().fold(bounds, |(least, most), &x| (least.min(x), most.max(x)));
        // The minimum passes a NaN on.
        put(block, (most - least) / 15.0, if largest(block).is_finite() { least } else { f32::NAN }, to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        if !put_not_finite(block, to, 0) {
            let [d, least] = with_minimum(block, weights, &finely(15.0));
            put(block, d, -least, to);
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        to.iter_mut().enumerate().for_each(|(index, x)| *x = d * f32::from(nibble(&block[4..], index)) + m);
    }
}

/// Writes a block under a scale and a minimum.
fn put(block: &[f32], d: f32, least: f32, to: &mut [u8]) {
    put_half(to, 0, d);
    put_half(to, 2, least);
    let per = if d == 0.0 { 0.0 } else { 1.0 / d };
    put_nibbles(&coded(block, |x| (((x - least) * per + 0.5) as u8).min(15)), &mut to[4..]);
}

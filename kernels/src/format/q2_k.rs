//! llama.cpp's `q2_k`: super-blocks of 256, in which each 16 neighbours have a scale and a minimum of four bits, `x = d s q - m l`.
//!
//! Of each half of the super-block 32 bytes hold the codes of two bits, of `i`, `i + 32`, `i + 64`, `i + 96`. 84 bytes for 256
//! elements: 2.625 bits.

use super::blocks::{Blocks, half_at, put_half};
use super::fit::{Search, finely, of_scales, put_not_finite, with_minimum};
use crate::device::simd::Simd;
use crate::named::{Named, NamedError};

/// Super-blocks of two bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q2K;

const SEARCH: Search = Search { most: 3.0, start: -0.5, step: 0.1, steps: 15, squares: false };

/// Where codes and the scales of all begin.
const CODES: usize = 16;
const D: usize = 80;

impl Blocks for Q2K {
    const NAME: &'static str = "q2_k";
    const ABOUT: &'static str =
        "weights: as llama.cpp: two bits, a scale and a minimum of four bits for each 16 of 256";
    const OF_WEIGHTS: bool = true;

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q2K)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        256
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        D + 4
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            let at = offset % 128;
            let code = simd.load_bits(block.add(CODES + offset / 128 * 32 + at % 32), (at / 32 * 2) as u32, 3);
            let byte = *block.add(offset / 16);
            let scale = simd.mul(simd.splat_f16(block.add(D).cast()), simd.splat(f32::from(byte & 15)));
            let least = simd.mul(simd.splat_f16(block.add(D + 2).cast()), simd.splat(-f32::from(byte >> 4)));
            simd.mul_add(scale, code, least)
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        encode(block, None, to);
    }

    fn encode_weighted(self, block: &[f32], weights: &[f32], to: &mut [u8]) {
        encode(block, Some(weights), to);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (d, m) = (half_at(block, D), half_at(block, D + 2));
        for (index, x) in to.iter_mut().enumerate() {
            let (byte, at) = (block[index / 16], index % 128);
            let code = block[CODES + index / 128 * 32 + at % 32] >> (at / 32 * 2) & 3;
            *x = d * f32::from(byte & 15) * f32::from(code) - m * f32::from(byte >> 4);
        }
    }
}

/// Writes a block; errors weigh by `weights`, where there are some.
fn encode(block: &[f32], weights: Option<&[f32]>, to: &mut [u8]) {
    if put_not_finite(block, to, D) {
        return;
    }
    to.fill(0);
    let own: [f32; 256] = std::array::from_fn(|at| block[at].abs());
    let (each, search) = weights.map_or((&own[..], SEARCH), |weights| (weights, finely(3.0)));
    let groups = || block.chunks_exact(16).zip(each.chunks_exact(16));
    let found: Vec<[f32; 2]> = groups().map(|(group, weights)| with_minimum(group, weights, &search)).collect();
    let sums: Vec<f32> = groups().map(|(_, weights)| weights.iter().sum()).collect();
    let halves = [0, 1].map(|part| {
        let scales: Vec<f32> = found.iter().map(|found| found[part]).collect();
        let [per, scale] = of_scales(&scales, weights.map(|_| &sums[..]), 15.0);
        for (byte, found) in to[..16].iter_mut().zip(&scales) {
            *byte |= ((per * found).round_ties_even() as u8).min(15) << (4 * part);
        }
        put_half(to, D + 2 * part, scale)
    });
    for (index, x) in block.iter().enumerate() {
        let (byte, at) = (to[index / 16], index % 128);
        let (scale, least) = (halves[0] * f32::from(byte & 15), halves[1] * f32::from(byte >> 4));
        let code = if scale == 0.0 { 0.0 } else { ((x + least) / scale).round_ties_even().clamp(0.0, 3.0) };
        to[CODES + index / 128 * 32 + at % 32] |= (code as u8) << (at / 32 * 2);
    }
}

//! Eight scales and eight minima of six bits in twelve bytes, in front of which stand an f16 for all scales and one for all minima:
//! the head of llama.cpp's `q4_k` and `q5_k`.
//!
//! Bytes 0 to 3 hold scales 0 to 3 in their low six bits and the two upper bits of scales 4 to 7; bytes 4 to 7 the minima
//! likewise; bytes 8 to 11 the lower four bits of scales 4 to 7 and, above them, of minima 4 to 7.

use super::blocks::{half_at, put_half};
use super::fit::{Search, finely, of_scales, with_minimum};
use crate::device::simd::Simd;

/// Bytes of all.
pub const BYTES: usize = 16;
/// Elements that share a scale, and how many scales there are.
const GROUP: usize = 32;
const GROUPS: usize = 8;

/// The scale and the minimum of a group, out of the twelve bytes.
#[inline(always)]
fn unpack(byte: impl Fn(usize) -> u8, group: usize) -> [u8; 2] {
    match group {
        0..4 => [byte(group) & 63, byte(group + 4) & 63],
        _ => [byte(group + 4) & 15 | byte(group - 4) >> 6 << 4, byte(group + 4) >> 4 | byte(group) >> 6 << 4],
    }
}

/// Scale and minimum, its sign turned, of the group with the element at `offset`, in every lane.
///
/// # Safety
/// A block begins at `block`.
#[inline(always)]
pub unsafe fn scales<S: Simd>(simd: S, block: *const u8, offset: usize) -> (S::Vector, S::Vector) {
    // SAFETY: the caller's promise: a block begins with its head.
    unsafe {
        let [scale, least] = unpack(|at| *block.add(4 + at), offset / GROUP);
        let (d, m) = (simd.splat_f16(block.cast()), simd.splat_f16(block.add(2).cast()));
        (simd.mul(d, simd.splat(f32::from(scale))), simd.mul(m, simd.splat(-f32::from(least))))
    }
}

/// Reads a block by its codes.
pub fn decode(block: &[u8], to: &mut [f32], code: impl Fn(usize) -> u8) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (group, to) in to.chunks_exact_mut(GROUP).enumerate() {
        let [scale, least] = unpack(|at| block[4 + at], group).map(f32::from);
        let (scale, least) = (d * scale, m * least);
        to.iter_mut().enumerate().for_each(|(at, x)| *x = scale * f32::from(code(GROUP * group + at)) - least);
    }
}

/// Writes the head of a block, and returns the codes; errors weigh by `weights`, where there are some.
pub fn encode(block: &[f32], weights: Option<&[f32]>, to: &mut [u8], search: &Search) -> [u8; GROUP * GROUPS] {
    let (mut found, mut sums) = ([[0.0; 2]; GROUPS], [0.0; GROUPS]);
    for (index, group) in block.chunks_exact(GROUP).enumerate() {
        let mean = (group.iter().map(|x| x * x).sum::<f32>() / GROUP as f32).sqrt();
        let mut own = [0.0; GROUP];
        own.iter_mut().zip(group).for_each(|(weight, x)| *weight = mean + x.abs());
        found[index] = match weights.map(|weights| &weights[GROUP * index..][..GROUP]) {
            None => with_minimum(group, &own, search),
            Some(weights) => {
                sums[index] = weights.iter().sum();
                with_minimum(group, weights, &finely(search.most))
            }
        };
    }
    let mut packed = [[0u8; 2]; GROUPS];
    let halves = [0, 1].map(|part| {
        let [per, scale] = of_scales(&found.map(|found| found[part]), weights.map(|_| &sums[..]), 63.0);
        for (packed, found) in packed.iter_mut().zip(&found) {
            packed[part] = (per * found[part]).round_ties_even().min(63.0) as u8;
        }
        put_half(to, 2 * part, scale)
    });
    for group in 0..4 {
        for part in 0..2 {
            let (low, high) = (packed[group][part], packed[group + 4][part]);
            to[4 + 4 * part + group] = low | high >> 4 << 6;
        }
        to[12 + group] = packed[group + 4][0] & 15 | packed[group + 4][1] << 4;
    }
    let mut codes = [0; GROUP * GROUPS];
    for (index, (code, x)) in codes.iter_mut().zip(block).enumerate() {
        let [scale, least] = packed[index / GROUP].map(f32::from);
        let (scale, least) = (halves[0] * scale, halves[1] * least);
        let nearest = if scale == 0.0 { 0.0 } else { (x + least) / scale };
        *code = nearest.round_ties_even().clamp(0.0, search.most) as u8;
    }
    codes
}

//! What the passes over packed tiles share: strips of queries, and the rounding of extents.

use crate::device::simd::Simd;
use crate::device::simd::pack::Packed;
use crate::device::simd::product::ROWS;
use crate::tensor::Rows;

/// Queries of a head whose scores against a tile of keys are in the first-level cache at once.
pub const STRIP: usize = 8 * ROWS;
/// Vectors are at most 16 elements, and probabilities are written two vectors at a time: extents rounded up to these
/// serve every instruction path, so that the memory is the same on each.
pub const LANES: usize = 16;
/// Keys are taken in multiples of it.
pub const SPAN: usize = 2 * LANES;

/// Packs queries along the head dim, negated under a negative scale; rows of `to` past the last become zero.
#[inline(always)]
pub fn pack_queries<S: Simd, U: Packed<S>>(simd: S, rows: Rows<'_>, negative: bool, steps: usize, to: &mut [U]) {
    for (row, to) in to.chunks_exact_mut(steps).enumerate() {
        if row < rows.count() {
            U::along(simd, rows.skip(row).first(1), to);
            if negative {
                U::negate(to);
            }
        } else {
            to.fill(U::zeroed());
        }
    }
}

/// Cuts the start of a slice into parts.
pub fn cut<const N: usize>(mut slice: &mut [f32], parts: [usize; N]) -> [&mut [f32]; N] {
    parts.map(|len| {
        let (part, rest) = std::mem::take(&mut slice).split_at_mut(len);
        slice = rest;
        part
    })
}

//! How much each key of a list repeats the others, in linear memory.
//!
//! With unit keys `u`, `C = u u'` and a diagonal of zeros, R-KV takes the mean of each column of `C`, after each row `i`
//! has lost the entry of its latest near-duplicate (the largest `j` with `C_ij > 0.5`; entry 0 if there is none, as in
//! the authors' code). The column sums need no pairs: they are `u_j . sum(u) - |u_j|^2`. Only the search for near-
//! duplicates looks at pairs, a tile of keys after another from the latest on, and a row that has found its own is done.

use crate::attention::Shape;
use crate::device::simd::pack::transposed;
use crate::device::simd::product::{Extents, Left, ROWS, Right, product};
use crate::device::simd::{Isa, Simd, SimdOp, loops};
use crate::policy::List;
use crate::tensor::{DType, Rows};

/// Keys of a tile, a multiple of every path's vectors.
const TILE: usize = 192;
/// Rows that meet a tile at once.
const STRIP: usize = 8 * ROWS;
/// Cosine above which two keys are near-duplicates.
const NEAR: f32 = 0.5;

/// Scratch elements for a list: unit keys in whole strips, a mark for each, a packed tile, and a strip's cosines.
pub fn workspace(shape: &Shape) -> usize {
    let rows = shape.kv_len.next_multiple_of(STRIP);
    rows * shape.head_dim + rows + TILE * shape.head_dim + STRIP * TILE
}

/// Writes for each token of `list` the mean over all tokens of the cosine with it, without near-duplicates.
pub fn redundancy(isa: Isa, list: &List<'_>, width: usize, means: &mut [f32], scratch: &mut [f32]) {
    let rows = list.len.next_multiple_of(STRIP);
    let (units, scratch) = scratch.split_at_mut(rows * width);
    let (open, scratch) = scratch.split_at_mut(rows);
    let (tile, cosines) = scratch.split_at_mut(TILE * width);
    units[list.len * width..].fill(0.0);
    let mut sum = vec![0.0f64; width];
    list.keys(|slot, key| {
        let unit = &mut units[slot * width..][..width];
        // As the authors guard it: a key of zeros stays zero.
        let norm = loops::dot(isa, key, key).sqrt() + 1e-8;
        unit.iter_mut().zip(key).for_each(|(unit, x)| *unit = x / norm);
        sum.iter_mut().zip(&*unit).for_each(|(sum, &x)| *sum += f64::from(x));
    });
    for (mean, unit) in means.iter_mut().zip(units.chunks_exact(width)) {
        let total: f64 = unit.iter().zip(&sum).map(|(&x, sum)| f64::from(x) * (sum - f64::from(x))).sum();
        *mean = total as f32;
    }
    open.fill(0.0);
    open[..list.len].fill(1.0);
    isa.run(Search { width, len: list.len, units, open, tile, cosines, sums: means });
    for row in (1..list.len).filter(|&row| open[row] != 0.0) {
        means[0] -= loops::dot(isa, &units[row * width..][..width], &units[..width]);
    }
    means.iter_mut().for_each(|mean| *mean /= list.len as f32);
}

/// Takes each row's latest near-duplicate off its column's sum, and marks the row as no longer open.
struct Search<'a> {
    width: usize,
    len: usize,
    units: &'a [f32],
    open: &'a mut [f32],
    tile: &'a mut [f32],
    cosines: &'a mut [f32],
    sums: &'a mut [f32],
}

impl SimdOp for Search<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Search { width, len, units, open, tile, cosines, sums } = self;
        for first in (0..len).step_by(TILE).rev() {
            let count = TILE.min(len - first);
            let columns = count.next_multiple_of(S::LANES);
            let rows = |row: usize| {
                let from = &units[(first + row) * width..(first + count) * width];
                Rows::contiguous(DType::F32, bytemuck::cast_slice(from), [count - row, width])
            };
            transposed::<S, f32>(simd, rows, count, width, columns, tile, TILE);
            for (strip, open) in open.chunks_exact_mut(STRIP).enumerate() {
                if open.iter().all(|&open| open == 0.0) {
                    continue;
                }
                let left = Left { units: &units[strip * STRIP * width..], row_stride: width, step_stride: 1 };
                let right = Right { units: &*tile, stride: TILE };
                let extents = Extents { rows: STRIP, columns, steps: width };
                product::<S, f32, false>(simd, extents, left, right, cosines, TILE);
                for (row, (open, cosines)) in open.iter_mut().zip(cosines.chunks_exact_mut(TILE)).enumerate() {
                    if *open == 0.0 {
                        continue;
                    }
                    // A key is no duplicate of itself.
                    let itself = (strip * STRIP + row).wrapping_sub(first);
                    if let Some(own) = cosines[..count].get_mut(itself) {
                        *own = 0.0;
                    }
                    if let Some(latest) = latest_near(&cosines[..count]) {
                        sums[first + latest] -= cosines[latest];
                        *open = 0.0;
                    }
                }
            }
        }
    }
}

/// The last entry above [`NEAR`].
#[inline(always)]
fn latest_near(cosines: &[f32]) -> Option<usize> {
    const CHUNK: usize = 32;
    for (chunk, values) in cosines.chunks(CHUNK).enumerate().rev() {
        // Without an early exit, so that it becomes vector code: most chunks have none.
        if values.iter().fold(false, |any, &x| any | (x > NEAR)) {
            return values.iter().rposition(|&x| x > NEAR).map(|at| chunk * CHUNK + at);
        }
    }
    None
}

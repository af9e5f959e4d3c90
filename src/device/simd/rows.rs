//! Inner products with rows, and weighted sums of rows, that are read once, in their own type, where they lie: what
//! decoding does with a cache, at the speed of the memory.
//!
//! A [`RowList`] is some rows' addresses, so that rows of pages and rows of one tensor are the same thing and give the
//! same bits. Each row is widened in registers and used for up to four query rows at a time. The list also holds rows
//! behind those that are used: their cache lines are asked for meanwhile.

use super::{Element, Simd};
use crate::tensor::Rows;
use std::marker::PhantomData;

/// Most rows that a list is used for at a time.
pub const BLOCK: usize = 64;
/// How many rows ahead of the one that is read cache lines are asked for.
pub const AHEAD: usize = 32;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;
/// Rows of the register tile of inner products, beside up to four query rows.
const KEYS: usize = 4;

/// Addresses of up to [`BLOCK`] rows, and of up to [`AHEAD`] rows behind them.
pub struct RowList<'a, T> {
    /// Where each row begins; behind the last one listed, addresses that may not be read.
    at: [*const T; BLOCK + AHEAD],
    count: usize,
    width: usize,
    rows: PhantomData<&'a [T]>,
}

impl<'a, T: Element> RowList<'a, T> {
    /// The `count` rows from `first` on of rows of which there are `total`; `rows(i)` gives row `i` and as many after
    /// it as lie evenly. Rows whose elements are not neighbours are copied to `copies`, `count * width` elements.
    ///
    /// # Panics
    /// When there are more than [`BLOCK`] rows, rows of another type or width, or no room for copies.
    #[inline(always)]
    pub fn collect(
        rows: impl Fn(usize) -> Rows<'a>,
        first: usize,
        count: usize,
        total: usize,
        width: usize,
        copies: &'a mut [T],
    ) -> Self {
        assert!(count <= BLOCK && count <= total - first, "{count} rows of {total} from {first} on");
        let wanted = (count + AHEAD).min(total - first);
        let mut at = [copies.as_ptr(); BLOCK + AHEAD];
        let (mut listed, mut copies) = (0, copies);
        while listed < wanted {
            let run = T::rows(rows(first + listed)).expect("rows are of the type that their source names");
            let run = run.first(wanted - listed);
            assert!(run.width() == width && run.count() > 0, "rows of {} elements, not {width}", run.width());
            if let Some(span) = run.span() {
                let (start, stride) = (span.as_ptr(), run.row_stride());
                for (index, at) in at[listed..][..run.count()].iter_mut().enumerate() {
                    *at = start.wrapping_add(index * stride);
                }
            } else {
                // Rows behind the block are not worth a copy.
                for (index, at) in at[listed..].iter_mut().enumerate().take(run.count().min(count.saturating_sub(listed))) {
                    let (copy, rest) = copies.split_at_mut(width);
                    copy.iter_mut().enumerate().for_each(|(column, to)| *to = run.element(index, column));
                    (*at, copies) = (copy.as_ptr(), rest);
                }
            }
            listed += run.count();
        }
        RowList { at, count, width, rows: PhantomData }
    }

    /// Asks for bytes `from .. from + LEN` of the row [`AHEAD`] of row `index`.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, index: usize, from_bytes: usize, len_bytes: usize) {
        let row = self.at[index + AHEAD].cast::<u8>().wrapping_add(from_bytes);
        for line in (0..len_bytes).step_by(LINE_BYTES) {
            simd.prefetch(row.wrapping_add(line));
        }
    }
}

/// `scores[i][j] = queries[i] . rows[j]`: query row `i` begins at `i * stride` of `queries` and is followed by zeros up
/// to whole vectors, its scores begin at `i * BLOCK` of `scores`.
///
/// # Panics
/// When a slice is too short.
#[inline(always)]
pub fn dots<S: Simd, T: Element>(simd: S, rows: &RowList<'_, T>, queries: &[f32], stride: usize, scores: &mut [f32]) {
    let query_count = queries.len() / stride;
    assert!(rows.width <= stride && stride.is_multiple_of(S::LANES), "queries in whole vectors");
    assert!(scores.len() >= query_count * BLOCK, "scores are too short");
    let row_bytes = rows.width * size_of::<T>();
    let quads = rows.count - rows.count % KEYS;
    for key in (0..quads).step_by(KEYS) {
        (key..key + KEYS).for_each(|key| rows.prefetch(simd, key, 0, row_bytes));
        let keys: [*const T; KEYS] = std::array::from_fn(|offset| rows.at[key + offset]);
        let mut query = 0;
        while query < query_count {
            let scores = &mut scores[query * BLOCK..];
            // SAFETY: listed rows hold `width` elements; query rows from `query` on hold `stride`, whole vectors.
            query += unsafe {
                let from = queries.as_ptr().add(query * stride);
                match query_count - query {
                    1 => put(simd, tile::<S, T, KEYS, 1>(simd, keys, rows.width, from, stride), scores, key),
                    2 | 3 => put(simd, tile::<S, T, KEYS, 2>(simd, keys, rows.width, from, stride), scores, key),
                    _ if S::COLUMNS < 4 => {
                        put(simd, tile::<S, T, KEYS, 2>(simd, keys, rows.width, from, stride), scores, key)
                    }
                    _ => put(simd, tile::<S, T, KEYS, 4>(simd, keys, rows.width, from, stride), scores, key),
                }
            };
        }
    }
    for key in quads..rows.count {
        for query in 0..query_count {
            // SAFETY: as above.
            let [[sum]] = unsafe {
                tile::<S, T, 1, 1>(simd, [rows.at[key]], rows.width, queries.as_ptr().add(query * stride), stride)
            };
            scores[query * BLOCK + key] = simd.sum(sum);
        }
    }
}

/// Writes the sums of a tile's lanes; returns the number of its query rows.
#[inline(always)]
fn put<S: Simd, const QUERIES: usize>(
    simd: S,
    tile: [[S::Vector; KEYS]; QUERIES],
    scores: &mut [f32],
    key: usize,
) -> usize {
    for (query, sums) in tile.into_iter().enumerate() {
        scores[query * BLOCK + key..][..KEYS].copy_from_slice(&simd.sums(sums));
    }
    QUERIES
}

/// Inner products of rows and query rows, to be summed over the lanes.
///
/// # Safety
/// Each row holds `width` elements; `QUERIES` query rows, `stride` apart, hold whole vectors of at least as many.
#[inline(always)]
unsafe fn tile<S: Simd, T: Element, const ROWS: usize, const QUERIES: usize>(
    simd: S,
    rows: [*const T; ROWS],
    width: usize,
    queries: *const f32,
    stride: usize,
) -> [[S::Vector; ROWS]; QUERIES] {
    let mut sums = [[simd.splat(0.0); ROWS]; QUERIES];
    let tail = width % S::LANES;
    let whole = width - tail;
    // SAFETY: the caller's promise.
    unsafe {
        let mut column = 0;
        while column < whole {
            let keys: [S::Vector; ROWS] = std::array::from_fn(|row| T::load(simd, rows[row].add(column)));
            add(simd, &mut sums, keys, queries.add(column), stride);
            column += S::LANES;
        }
        if tail > 0 {
            let keys: [S::Vector; ROWS] = std::array::from_fn(|row| T::load_part(simd, rows[row].add(whole), tail));
            add(simd, &mut sums, keys, queries.add(whole), stride);
        }
    }
    sums
}

/// Adds the products of a vector of each row and of each query row.
///
/// # Safety
/// `QUERIES` vectors, `stride` apart, are readable.
#[inline(always)]
unsafe fn add<S: Simd, const ROWS: usize, const QUERIES: usize>(
    simd: S,
    sums: &mut [[S::Vector; ROWS]; QUERIES],
    keys: [S::Vector; ROWS],
    queries: *const f32,
    stride: usize,
) {
    for (query, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = unsafe { simd.load(queries.add(query * stride)) };
        for (sum, key) in sums.iter_mut().zip(keys) {
            *sum = simd.mul_add(x, key, *sum);
        }
    }
}

/// `outputs[i] += sum_j weights[i][j] * rows[j]`: output row `i` begins at `i * stride` of `outputs`, its weights at
/// `i * BLOCK` of `weights`. What lies behind a row's width, up to whole vectors, stays as it is.
///
/// # Panics
/// When a slice is too short.
#[inline(always)]
pub fn accumulate<S: Simd, T: Element>(
    simd: S,
    rows: &RowList<'_, T>,
    weights: &[f32],
    outputs: &mut [f32],
    stride: usize,
) {
    let output_count = outputs.len() / stride;
    assert!(rows.width <= stride && stride.is_multiple_of(S::LANES), "outputs in whole vectors");
    assert!(weights.len() >= output_count * BLOCK, "weights are too short");
    let mut output = 0;
    while output < output_count {
        // SAFETY: output rows from `output` on are there, `stride` apart, and weights for each of them.
        output += unsafe {
            let (to, weights) = (outputs.as_mut_ptr().add(output * stride), weights.as_ptr().add(output * BLOCK));
            match output_count - output {
                1 => panels::<S, T, 1>(simd, rows, weights, to, stride),
                2 | 3 => panels::<S, T, 2>(simd, rows, weights, to, stride),
                _ if S::COLUMNS < 4 => panels::<S, T, 2>(simd, rows, weights, to, stride),
                _ => panels::<S, T, 4>(simd, rows, weights, to, stride),
            }
        };
    }
}

/// Adds to `OUTPUTS` rows, panel by panel of columns; returns their number.
///
/// # Safety
/// `OUTPUTS` output rows of whole vectors, at least as wide as `rows`, are writable, `stride` apart; each has
/// [`BLOCK`] weights.
#[inline(always)]
unsafe fn panels<S: Simd, T: Element, const OUTPUTS: usize>(
    simd: S,
    rows: &RowList<'_, T>,
    weights: *const f32,
    outputs: *mut f32,
    stride: usize,
) -> usize {
    let mut column = 0;
    while column < rows.width {
        // SAFETY: the caller's promise; a panel is as wide as the columns that are left, or narrower.
        column += unsafe {
            let to = outputs.add(column);
            match (rows.width - column) / S::LANES {
                0 => panel::<S, T, OUTPUTS, 1, true>(simd, rows, column, weights, to, stride),
                1 => panel::<S, T, OUTPUTS, 1, false>(simd, rows, column, weights, to, stride),
                2 | 3 => panel::<S, T, OUTPUTS, 2, false>(simd, rows, column, weights, to, stride),
                _ => panel::<S, T, OUTPUTS, 4, false>(simd, rows, column, weights, to, stride),
            }
        };
    }
    OUTPUTS
}

/// Adds `VECTORS` vectors of columns from `column` on; if they are a `PART` of a vector, the columns that there are.
///
/// # Safety
/// As [`panels`], of those columns.
#[inline(always)]
unsafe fn panel<S: Simd, T: Element, const OUTPUTS: usize, const VECTORS: usize, const PART: bool>(
    simd: S,
    rows: &RowList<'_, T>,
    column: usize,
    weights: *const f32,
    outputs: *mut f32,
    stride: usize,
) -> usize {
    let part = rows.width - column;
    let mut sums = [[simd.splat(0.0); VECTORS]; OUTPUTS];
    // SAFETY: the caller's promise.
    unsafe {
        for (output, sums) in sums.iter_mut().enumerate() {
            *sums = std::array::from_fn(|vector| simd.load(outputs.add(output * stride + vector * S::LANES)));
        }
        for index in 0..rows.count {
            rows.prefetch(simd, index, column * size_of::<T>(), VECTORS * S::LANES * size_of::<T>());
            let from = rows.at[index].add(column);
            let values: [S::Vector; VECTORS] = std::array::from_fn(|vector| match PART {
                true => T::load_part(simd, from, part),
                false => T::load(simd, from.add(vector * S::LANES)),
            });
            for (output, sums) in sums.iter_mut().enumerate() {
                let weight = simd.splat(*weights.add(output * BLOCK + index));
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = simd.mul_add(weight, value, *sum);
                }
            }
        }
        for (output, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                simd.store(outputs.add(output * stride + vector * S::LANES), sum);
            }
        }
    }
    VECTORS * S::LANES
}

//! Inner products with rows, and weighted sums of rows, that are read once, in their own format, where they lie: what
//! decoding does with a cache, at the speed of the memory.
//!
//! Each row of a [`RowList`] is widened in registers and used for up to four query rows at a time. The memory is kept busy
//! by reading it in one order and asking for cache lines a fixed way ahead in that order, past the end of the list into
//! what will be read next. Lists are long, because each change of the place that is read costs time.

use super::reader::RowReader;
pub use super::row_list::{Addresses, BLOCK, RowList};
use super::vector::each;
use super::{Simd, SimdOp};
use crate::tensor::ChannelScales;
use std::ops::Range;

/// Rows of the register tile of inner products, beside up to four query rows.
const KEYS: usize = 4;
/// Rows that all outputs are given before the next ones are read: few enough for the first-level cache.
const CHUNK: usize = 16;

/// `scores[i][j] = queries[i] . rows[j]`: query row `i` begins at `i * stride` of `queries` and is followed by zeros up
/// to whole vectors, its scores begin at `i * BLOCK` of `scores`. Panics when a slice is too short.
pub struct Dots<'a, R> {
    /// What reads the list's rows.
    pub reader: R,
    /// The rows.
    pub rows: &'a RowList<'a>,
    /// Those of them that are wanted.
    pub range: Range<usize>,
    /// The query rows.
    pub queries: &'a [f32],
    /// Elements from one query row to the next.
    pub stride: usize,
    /// The inner products.
    pub scores: &'a mut [f32],
}

impl<R: RowReader> SimdOp for Dots<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        assert!(!R::OF_WEIGHTS, "a cache refuses formats of weights");
        // What there is to a row beside its elements counts where one query is all that few bytes are read for: a loop of its own, where
        // vectors have eight elements or more.
        match self.queries.len() / self.stride {
            1 if R::TOGETHER && S::LANES >= 8 => self.run_for(simd, 1),
            query_count => self.run_for(simd, query_count),
        }
    }
}

impl<R: RowReader> Dots<'_, R> {
    /// The products of so many query rows, as many as there are.
    #[inline(always)]
    fn run_for<S: Simd>(self, simd: S, query_count: usize) {
        let Dots { reader, rows, range, queries, stride, scores } = self;
        assert!(rows.width() <= stride && stride.is_multiple_of(S::LANES), "queries in whole vectors");
        assert!(queries.len() >= query_count * stride && scores.len() >= query_count * BLOCK, "scores are too short");
        let row_bytes = reader.row_bytes(rows.width());
        assert!(range.start <= range.end && range.end <= rows.count(), "rows {range:?} of {}", rows.count());
        let quads = range.end - range.len() % KEYS;
        for key in (range.start..quads).step_by(KEYS) {
            // SAFETY: `quads` is at most `count`.
            unsafe { rows.prefetch_rows::<S, KEYS>(simd, key, row_bytes) };
            let keys: [*const u8; KEYS] = each(
                std::ptr::null(),
                #[inline(always)]
                |offset| {
                    // SAFETY: as above.
                    unsafe { rows.row(key + offset) }
                },
            );
            let mut query = 0;
            while query < query_count {
                let scores = &mut scores[query * BLOCK..];
                // SAFETY: listed rows hold `width` elements; query rows from `query` on hold `stride`, whole vectors.
                query += unsafe {
                    let from = queries.as_ptr().add(query * stride);
                    match query_count - query {
                        1 => put(
                            simd,
                            tile::<S, R, KEYS, 1>(simd, reader, keys, 0..rows.width(), from, stride),
                            scores,
                            key,
                        ),
                        2 | 3 => put(
                            simd,
                            tile::<S, R, KEYS, 2>(simd, reader, keys, 0..rows.width(), from, stride),
                            scores,
                            key,
                        ),
                        _ if const { R::TOGETHER && S::LANES == 8 } => {
                            // What is widened with some trouble is widened once for four queries.
                            for (key, pair) in (key..).step_by(2).zip(keys.chunks_exact(2)) {
                                let pair = [pair[0], pair[1]];
                                let sums = tile::<S, R, 2, 4>(simd, reader, pair, 0..rows.width(), from, stride);
                                for row in 0..2 {
                                    let sums = simd.sums(each(simd.splat(0.0), |query: usize| sums[query][row]));
                                    for (query, sum) in sums.into_iter().enumerate() {
                                        scores[query * BLOCK + key + row] = sum;
                                    }
                                }
                            }
                            4
                        }
                        _ if const { S::COLUMNS < 4 } => put(
                            simd,
                            tile::<S, R, KEYS, 2>(simd, reader, keys, 0..rows.width(), from, stride),
                            scores,
                            key,
                        ),
                        _ => put(
                            simd,
                            tile::<S, R, KEYS, 4>(simd, reader, keys, 0..rows.width(), from, stride),
                            scores,
                            key,
                        ),
                    }
                };
            }
        }
        for key in quads..range.end {
            for query in 0..query_count {
                // SAFETY: as above.
                let [[sum]] = unsafe {
                    let from = queries.as_ptr().add(query * stride);
                    tile::<S, R, 1, 1>(simd, reader, [rows.row(key)], 0..rows.width(), from, stride)
                };
                scores[query * BLOCK + key] = simd.sum(sum);
            }
        }
        rows.scale(reader, range, &mut scores[..query_count * BLOCK]);
    }
}

/// Query rows for keys that share scales: `scaled[i] = scales * queries[i]`, element by element, and `added[i] = minimums . queries[i]`,
/// so that a product with a key is one with its codes, and what is added. Rows as in [`Dots`]. Panics when a slice is too short.
pub struct Fold<'a> {
    /// Of the group.
    pub channels: ChannelScales<'a>,
    /// The query rows.
    pub queries: &'a [f32],
    /// Elements from one query row to the next.
    pub stride: usize,
    /// The query rows for the group.
    pub scaled: &'a mut [f32],
    /// What is added to the products of each.
    pub added: &'a mut [f32],
}

impl SimdOp for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Fold { channels: ChannelScales { scales, minimums }, queries, stride, scaled, added } = self;
        assert!(scales.len().is_multiple_of(S::LANES) && scales.len() <= stride, "channels in whole vectors");
        assert_eq!(scales.len(), minimums.len(), "a scale and a minimum for each channel");
        let rows = queries.chunks_exact(stride).zip(scaled.chunks_exact_mut(stride));
        for ((query, scaled), added) in rows.zip(added) {
            let mut sum = simd.splat(0.0);
            for channel in (0..scales.len()).step_by(S::LANES) {
                // SAFETY: whole vectors, as asserted; rows are at least as long.
                unsafe {
                    let x = simd.load(query.as_ptr().add(channel));
                    let scale = simd.load_f16(scales.as_ptr().add(channel));
                    let minimum = simd.load_f16(minimums.as_ptr().add(channel));
                    simd.store(scaled.as_mut_ptr().add(channel), simd.mul(x, scale));
                    sum = simd.mul_add(x, minimum, sum);
                }
            }
            scaled[scales.len()..].fill(0.0);
            *added = simd.sum(sum);
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

/// Inner products of some columns of rows and of query rows, to be summed over the lanes.
///
/// # Safety
/// Each row holds the columns, of which the first begins a vector; `QUERIES` query rows, `stride` apart, hold whole vectors of at
/// least as many.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, R: RowReader, const ROWS: usize, const QUERIES: usize>(
    simd: S,
    reader: R,
    rows: [*const u8; ROWS],
    columns: Range<usize>,
    queries: *const f32,
    stride: usize,
) -> [[S::Vector; ROWS]; QUERIES] {
    let mut sums = [[simd.splat(0.0); ROWS]; QUERIES];
    let tail = columns.end % S::LANES;
    let whole = columns.end - tail;
    // SAFETY: the caller's promise.
    unsafe {
        let mut column = columns.start;
        if R::AFFINE && S::LANES == 8 && QUERIES == 1 {
            // One query is too little to widen codes for: what they are multiplied with waits for the sum of 32.
            while column + 4 * S::LANES <= whole {
                let mut query = [simd.splat(0.0); 4];
                for (part, to) in query.iter_mut().enumerate() {
                    *to = simd.load(queries.add(column + part * S::LANES));
                }
                let total = simd.add(simd.add(query[0], query[1]), simd.add(query[2], query[3]));
                for row in 0..ROWS {
                    let mut keys = [simd.splat(0.0); 4];
                    let [factor, more] = reader.load_affine(simd, rows[row], column, &mut keys);
                    let mut sum = simd.mul(query[0], keys[0]);
                    for part in 1..4 {
                        sum = simd.mul_add(query[part], keys[part], sum);
                    }
                    sums[0][row] = simd.mul_add(factor, sum, simd.mul_add(more, total, sums[0][row]));
                }
                column += 4 * S::LANES;
            }
        }
        if R::TOGETHER && S::LANES == 8 {
            // There are registers for one row's 32 elements.
            while column + 4 * S::LANES <= whole {
                for row in 0..ROWS {
                    let key = reader.load_many::<S, 4>(simd, rows[row], column);
                    for (part, key) in key.into_iter().enumerate() {
                        let from = queries.add(column + part * S::LANES);
                        for (query, sums) in sums.iter_mut().enumerate() {
                            sums[row] = simd.mul_add(simd.load(from.add(query * stride)), key, sums[row]);
                        }
                    }
                }
                column += 4 * S::LANES;
            }
        }
        if R::TOGETHER && S::LANES == 16 {
            while column + 2 * S::LANES <= whole {
                let keys: [[S::Vector; 2]; ROWS] = each(
                    [simd.splat(0.0); 2],
                    #[inline(always)]
                    |row| reader.load_many::<S, 2>(simd, rows[row], column),
                );
                for half in 0..2 {
                    let keys = each(simd.splat(0.0), |row: usize| keys[row][half]);
                    add(simd, &mut sums, keys, queries.add(column + half * S::LANES), stride);
                }
                column += 2 * S::LANES;
            }
        }
        while column < whole {
            let keys: [S::Vector; ROWS] = each(
                simd.splat(0.0),
                #[inline(always)]
                |row| reader.load(simd, rows[row], column),
            );
            add(simd, &mut sums, keys, queries.add(column), stride);
            column += S::LANES;
        }
        if tail > 0 {
            let keys: [S::Vector; ROWS] = each(
                simd.splat(0.0),
                #[inline(always)]
                |row| reader.load_part(simd, rows[row], whole, tail),
            );
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
/// `i * BLOCK` of `weights`, where they are lost: the factors that rows carry are multiplied with them. What lies behind a
/// row's width, up to whole vectors, stays as it is. Panics when a slice is too short.
pub struct Accumulate<'a, R> {
    /// What reads the list's rows.
    pub reader: R,
    /// The rows.
    pub rows: &'a RowList<'a>,
    /// The weights.
    pub weights: &'a mut [f32],
    /// The output rows.
    pub outputs: &'a mut [f32],
    /// Elements from one output row to the next.
    pub stride: usize,
}

impl<R: RowReader> SimdOp for Accumulate<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        assert!(!R::OF_WEIGHTS, "a cache refuses formats of weights");
        let Accumulate { reader, rows, weights, outputs, stride } = self;
        let output_count = outputs.len() / stride;
        assert!(rows.width() <= stride && stride.is_multiple_of(S::LANES), "outputs in whole vectors");
        assert!(weights.len() >= output_count * BLOCK, "weights are too short");
        rows.scale(reader, 0..rows.count(), &mut weights[..output_count * BLOCK]);
        for first in (0..rows.count()).step_by(CHUNK) {
            let end = rows.count().min(first + CHUNK);
            let mut output = 0;
            while output < output_count {
                // SAFETY: output rows from `output` on are there, `stride` apart, and `BLOCK` weights for each of them.
                output += unsafe {
                    let (weights, to) =
                        (weights.as_ptr().add(output * BLOCK), outputs.as_mut_ptr().add(output * stride));
                    let sum = Sum { reader, rows, first, end, weights, to, stride, prefetch: output == 0 };
                    match output_count - output {
                        1 => sum.panels::<S, 1>(simd),
                        2 | 3 => sum.panels::<S, 2>(simd),
                        _ if const { S::COLUMNS < 4 } => sum.panels::<S, 2>(simd),
                        _ => sum.panels::<S, 4>(simd),
                    }
                };
            }
        }
    }
}

/// The sums of rows `first .. end` for some outputs.
struct Sum<'a, R> {
    reader: R,
    rows: &'a RowList<'a>,
    first: usize,
    end: usize,
    weights: *const f32,
    to: *mut f32,
    stride: usize,
    /// Whether these are the first outputs that the rows are read for.
    prefetch: bool,
}

impl<R: RowReader> Sum<'_, R> {
    /// Adds to `OUTPUTS` rows, panel by panel of columns; returns their number.
    ///
    /// # Safety
    /// `OUTPUTS` output rows of whole vectors, at least as wide as `rows`, are writable, `stride` apart; each has
    /// [`BLOCK`] weights.
    #[inline(always)]
    unsafe fn panels<S: Simd, const OUTPUTS: usize>(&self, simd: S) -> usize {
        let mut column = 0;
        while column < self.rows.width() {
            // SAFETY: the caller's promise; a panel is as wide as the columns that are left, or narrower.
            column += unsafe {
                match (self.rows.width() - column) / S::LANES {
                    0 => self.panel::<S, OUTPUTS, 1, true>(simd, column),
                    1..4 => self.panel::<S, OUTPUTS, 1, false>(simd, column),
                    8.. if const { OUTPUTS <= 2 && S::COLUMNS == 4 } => {
                        self.panel::<S, OUTPUTS, 8, false>(simd, column)
                    }
                    _ => self.panel::<S, OUTPUTS, 4, false>(simd, column),
                }
            };
        }
        OUTPUTS
    }

    /// Adds `VECTORS` vectors of columns from `column` on, or the `PART` of a vector that there is; returns the number
    /// of columns.
    ///
    /// # Safety
    /// As [`Sum::panels`], of those columns.
    #[inline(always)]
    unsafe fn panel<S: Simd, const OUTPUTS: usize, const VECTORS: usize, const PART: bool>(
        &self,
        simd: S,
        column: usize,
    ) -> usize {
        let part = self.rows.width() - column;
        let (columns, reader) = (VECTORS * S::LANES, self.reader);
        let (first_byte, end_byte) = (reader.row_bytes(column), reader.row_bytes(column + columns));
        let mut sums = [[simd.splat(0.0); VECTORS]; OUTPUTS];
        // What is read for one output is multiplied once for a row, not in each vector, and added to in the end.
        let is_affine = const { R::AFFINE && S::LANES == 8 && OUTPUTS == 1 && VECTORS == 4 };
        let mut more_of_all = simd.splat(0.0);
        // SAFETY: the caller's promise.
        unsafe {
            let to = self.to.add(column);
            for (output, sums) in sums.iter_mut().enumerate() {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load(to.add(output * self.stride + vector * S::LANES));
                }
            }
            for index in self.first..self.end {
                if self.prefetch {
                    self.rows.prefetch(simd, index, first_byte, end_byte - first_byte);
                }
                let from = self.rows.row(index);
                if is_affine {
                    let mut values = [simd.splat(0.0); VECTORS];
                    let [factor, more] = reader.load_affine(simd, from, column, &mut values);
                    let weight = simd.splat(*self.weights.add(index));
                    let factor = simd.mul(weight, factor);
                    for (sum, value) in sums[0].iter_mut().zip(values) {
                        *sum = simd.mul_add(factor, value, *sum);
                    }
                    more_of_all = simd.mul_add(weight, more, more_of_all);
                    continue;
                }
                let values: [S::Vector; VECTORS] = match PART {
                    true => [reader.load_part(simd, from, column, part); VECTORS],
                    false => reader.load_many(simd, from, column),
                };
                for (output, sums) in sums.iter_mut().enumerate() {
                    let weight = simd.splat(*self.weights.add(output * BLOCK + index));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = simd.mul_add(weight, value, *sum);
                    }
                }
            }
            if is_affine {
                for sum in &mut sums[0] {
                    *sum = simd.add(*sum, more_of_all);
                }
            }
            for (output, sums) in sums.into_iter().enumerate() {
                for (vector, sum) in sums.into_iter().enumerate() {
                    simd.store(to.add(output * self.stride + vector * S::LANES), sum);
                }
            }
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;
    use crate::format::{FORMATS, KvFormat, RowFormat, with_codec};
    use crate::tensor::{Coded, DType, Rows, Strided};
    use half::{bf16, f16};

    /// Both functions against their definition in f64, for `queries` query rows, over rows in runs of `run`.
    struct Check<'a> {
        rows: Rows<'a>,
        run: usize,
        queries: usize,
    }

    impl Check<'_> {
        fn run<R: RowReader>(self, isa: Isa, reader: R) {
            let Check { rows, run, queries } = self;
            let (count, width) = (rows.count(), rows.width());
            let mut wide = vec![0.0; count * width];
            rows.widen(&mut wide);
            let element = |row: usize, column: usize| f64::from(wide[row * width + column]);
            let stride = width.next_multiple_of(16);
            let source = |row: usize| rows.skip(row).first(run - row % run);
            let mut copies = vec![0.0; count * width];
            let bytes = [width, reader.row_bytes(width)];
            let mut addresses = Addresses::default();
            let list = RowList::collect(&mut addresses, bytes, &source, 0..count, &source, 0..count, &mut copies);

            let mut x = vec![0.0; queries * stride];
            x.iter_mut()
                .enumerate()
                .for_each(|(at, x)| *x = if at % stride < width { (at % 13) as f32 - 6.0 } else { 0.0 });
            let mut scores = vec![f32::NAN; queries * BLOCK];
            isa.run(Dots { reader, rows: &list, range: 0..count, queries: &x, stride, scores: &mut scores });
            let mut weights = vec![f32::NAN; queries * BLOCK];
            for query in 0..queries {
                for row in 0..count {
                    let exact: f64 = (0..width).map(|d| f64::from(x[query * stride + d]) * element(row, d)).sum();
                    let got = f64::from(scores[query * BLOCK + row]);
                    assert!((got - exact).abs() < 1e-2, "query {query}, row {row}: {got}, not {exact}");
                    weights[query * BLOCK + row] = ((query + row) % 7) as f32 - 2.5;
                }
            }
            let mut sums = vec![1.0; queries * stride];
            isa.run(Accumulate { reader, rows: &list, weights: &mut weights, outputs: &mut sums, stride });
            for (at, &got) in sums.iter().enumerate() {
                let (query, d) = (at / stride, at % stride);
                let weight = |row: usize| ((query + row) % 7) as f64 - 2.5;
                let sum = |d| (0..count).map(|row| weight(row) * element(row, d)).sum::<f64>();
                let exact = 1.0 + if d < width { sum(d) } else { 0.0 };
                assert!((f64::from(got) - exact).abs() < 1e-1, "output {query}, column {d}: {got}, not {exact}");
            }
        }
    }

    #[test]
    fn products_with_rows_and_sums_of_rows_are_what_they_say() {
        let wide: Vec<f32> = (0..70_000).map(|x| (x % 251) as f32 * 0.25 - 30.0).collect();
        let bf16s: Vec<bf16> = wide.iter().map(|&x| bf16::from_f32(x)).collect();
        let f16s: Vec<f16> = wide.iter().map(|&x| f16::from_f32(x)).collect();
        let coded = FORMATS.iter().map(|entry| entry.name.parse::<RowFormat>().unwrap());
        // The rows of the others stand for rotated ones.
        let coded: Vec<_> = coded.filter(|format| format.dtype().is_none() && !format.is_rotated()).collect();
        let shapes = [(1, 1), (2, 7), (5, 8), (4, 15), (16, 16), (33, 40), (19, 64), (50, 111), (256, 128), (6, 256)];
        for (index, (count, width)) in shapes.into_iter().enumerate() {
            for strides in [[width, 1], [width + 3, 1], [1, count]] {
                for isa in Isa::available() {
                    for queries in [1, 2, 3, 4, 7] {
                        let run = [16, 1000, 7][(index + queries) % 3];
                        let check = |format: RowFormat, rows| {
                            with_codec!(format, reader => Check { rows, run, queries }.run(isa, reader));
                        };
                        let plain = RowFormat::plain;
                        check(plain(DType::F32), Rows::F32(Strided::new(&wide[..], strides, count, width)));
                        check(plain(DType::Bf16), Rows::Bf16(Strided::new(&bf16s, strides, count, width)));
                        check(plain(DType::F16), Rows::F16(Strided::new(&f16s, strides, count, width)));
                        for coded in &coded {
                            if KvFormat::both(*coded).check(width, 1024).is_ok() {
                                let mut bytes = vec![0; count * coded.row_bytes(width)];
                                coded.encode(&wide[..count * width], width, &mut bytes);
                                let rows = Rows::Coded(Coded::new(coded, &bytes, coded.row_bytes(width), width));
                                with_codec!(*coded, reader => Check { rows, run, queries }.run(isa, reader));
                            }
                        }
                    }
                }
            }
        }
    }
}

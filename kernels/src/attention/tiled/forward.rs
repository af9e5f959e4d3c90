//! The forward pass: blocks of queries against packed tiles of keys and values.

use super::TileSizes;
use crate::attention::online::{Logits, Running};
use crate::attention::source::token_biases;
use crate::attention::strip::{LANES, SPAN, STRIP, cut, pack_queries};
use crate::attention::{Forward, Outputs, Shape};
use crate::device::cpu::Slots;
use crate::device::simd::pack::{Packed, odd_lines, stacked, transposed, whole_lines};
use crate::device::simd::product::{Extents, Left, ROWS, Right, product};
use crate::device::simd::{Native, Simd, SimdBf16Op, narrow};
use crate::tensor::DType;
use rayon::prelude::*;

/// Keys whose weighted values are summed before the sum is added to the output: longer sums would round more.
const CHAIN: usize = 6 * SPAN;

/// The parts of a thread's scratch, in f32 words.
struct Layout {
    group: usize,
    /// Queries of each head, rounded up to whole register tiles.
    rows: usize,
    width: usize,
    /// The head dim, rounded up.
    columns: usize,
    /// Distance of rows whose columns are the keys of a tile.
    keys: usize,
}

impl Layout {
    fn new(shape: &Shape, tile: TileSizes) -> Self {
        Layout {
            group: shape.group(),
            rows: tile.br.next_multiple_of(ROWS),
            width: shape.head_dim,
            columns: shape.head_dim.next_multiple_of(LANES),
            keys: odd_lines(tile.bc.next_multiple_of(SPAN)),
        }
    }

    fn parts(&self) -> [usize; 6] {
        let rows = self.group * self.rows;
        let strip = STRIP.min(self.rows) * self.keys;
        let (keys, outputs) = (self.width * self.keys, rows * self.columns);
        whole_lines([rows * self.width, keys, self.keys * self.columns, strip, outputs, 2 * rows])
    }
}

/// Elements of one thread's scratch: queries, a tile of keys and one of values, scores, outputs, and the state of each
/// row.
pub(super) fn slot(shape: &Shape, tile: TileSizes) -> usize {
    Layout::new(shape, tile).parts().iter().sum()
}

/// `BR` queries of each query head that shares a KV head, and where their results go.
struct Unit<'a> {
    batch: usize,
    kv_head: usize,
    first: usize,
    results: Vec<(&'a mut [u8], &'a mut [f32])>,
}

pub(super) fn run(tile: TileSizes, call: &Forward<'_>, outputs: &mut Outputs, scratch: &mut [f32]) {
    let shape = call.shape;
    let dtype = outputs.o.dtype();
    let row_bytes = shape.head_dim * dtype.bytes();
    let heads = outputs.o.bytes_mut().chunks_mut(shape.q_len * row_bytes).zip(outputs.lse.chunks_mut(shape.q_len));
    let mut blocks: Vec<_> =
        heads.map(|(o, lse)| o.chunks_mut(tile.br * row_bytes).zip(lse.chunks_mut(tile.br))).collect();
    let mut units: Vec<Unit<'_>> = Vec::new();
    for (list, group) in blocks.chunks_mut(shape.group()).enumerate() {
        for first in (0..shape.q_len).step_by(tile.br) {
            let results = group.iter_mut().filter_map(Iterator::next).collect();
            units.push(Unit { batch: list / shape.kv_heads, kv_head: list % shape.kv_heads, first, results });
        }
    }
    // Under a causal mask late queries see most keys: threads take the heaviest units first, one at a time, so that none
    // ends alone.
    units.sort_by_key(|unit| std::cmp::Reverse(unit.first));
    let slots = Slots::new(scratch, call.cpu.threads());
    call.cpu.install(|| {
        units.into_iter().par_bridge().for_each(|unit| {
            slots.with(|slot| call.cpu.isa().run_bf16(Block { tile, call, dtype, unit, slot }));
        });
    });
}

/// The work on a unit.
struct Block<'a, 'u, 's> {
    tile: TileSizes,
    call: &'a Forward<'a>,
    dtype: DType,
    unit: Unit<'u>,
    slot: &'s mut [f32],
}

impl SimdBf16Op for Block<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        // Pairs hold what is bf16 already; everything else is computed in f32.
        if self.call.is_bf16() {
            block::<S, S::Bf16>(simd, self);
        } else {
            block::<S, f32>(simd, self);
        }
    }
}

#[inline(always)]
fn block<S: Simd, U: Packed<S>>(simd: S, work: Block<'_, '_, '_>) {
    let Block { tile, call, dtype, unit, slot } = work;
    let Forward { shape, params, kv, .. } = *call;
    let layout = Layout::new(&shape, tile);
    let Layout { rows: padded, width, columns, keys, .. } = layout;
    let steps = width.div_ceil(U::DEPTH);
    let (batch, kv_head, count) = (unit.batch, unit.kv_head, unit.results[0].1.len());
    let kv_len = kv.len(batch, kv_head);
    let visible = |i: usize| params.visible(unit.first + i, shape.q_len, kv_len);
    let (logits, bias) = (Logits::new(&params), kv.bias(batch, kv_head));

    let [q, k, v, scores, o, states] = cut(slot, layout.parts());
    let (q, k, v) = (bytemuck::cast_slice_mut(q), bytemuck::cast_slice_mut(k), bytemuck::cast_slice_mut(v));
    let states: &mut [Running] = bytemuck::cast_slice_mut(states);
    for (member, q) in q.chunks_exact_mut(padded * steps).take(layout.group).enumerate() {
        let rows = call.q.head(batch, kv_head * layout.group + member, unit.first).first(count);
        pack_queries::<S, U>(simd, rows, logits.negative, steps, q);
    }
    o.fill(0.0);
    states.fill(Running::EMPTY);

    // Tiles begin at multiples of `BC`, wherever the first visible key is: how a row is summed must not depend on the
    // block that it is in.
    let seen = visible(0).start..visible(count - 1).end;
    for start in (seen.start / tile.bc * tile.bc..seen.end).step_by(tile.bc) {
        let end = seen.end.min(start + tile.bc);
        let filled = (end - start).next_multiple_of(SPAN);
        let key_rows = |row: usize| kv.key_rows(batch, kv_head, start + row);
        let value_rows = |row: usize| kv.value_rows(batch, kv_head, start + row);
        transposed::<S, U>(simd, key_rows, end - start, width, filled, k, keys);
        let in_place = value_rows(0).first(end - start);
        let v = match U::stacked_in_place(&in_place) {
            Some(values) if in_place.count() == end - start && width == columns => values,
            _ => {
                stacked::<S, U>(simd, value_rows, end - start, v, columns);
                &*v
            }
        };
        let carried = token_biases::<{ TileSizes::MAX }>(kv, [batch, kv_head], start..end);
        // Shorter strips hug the edge of a mask, but where half of one is no whole number of tiles.
        let is_cut = visible(0).end < end || visible(count - 1).start > start;
        let len = if is_cut && !U::has_tiles(simd) { STRIP / 2 } else { STRIP };
        for strip in (0..shape.group() * padded).step_by(padded).flat_map(|head| strips(head, count, len)) {
            let (first, last) = (strip.first, strip.first + strip.count - 1);
            let seen = visible(first).start.max(start)..visible(last).end.min(end);
            if seen.is_empty() {
                continue;
            }
            // Of a tile on the diagonal only the columns that some query of the strip sees.
            let (from, to) = ((seen.start - start) / SPAN * SPAN, (seen.end - start).next_multiple_of(SPAN));
            let extents = Extents { rows: strip.count.next_multiple_of(ROWS), columns: to - from, steps };
            let queries = Left { units: &q[strip.row * steps..], row_stride: steps, step_stride: 1 };
            product::<S, U, false>(simd, extents, queries, Right { units: &k[from..], stride: keys }, scores, keys);
            let rows = scores.chunks_mut(keys).zip(o[strip.row * columns..].chunks_exact_mut(columns));
            for (i, ((row, o), state)) in rows.zip(&mut states[strip.row..]).take(strip.count).enumerate() {
                let (seen, within) = (visible(first + i), |key: usize| key.clamp(start + from, end) - start - from);
                let seen = within(seen.start)..within(seen.end).min(to - from);
                let far = match &carried {
                    Some(carried) => &carried[from..end - start],
                    None => {
                        let far = bias.map_or(&[][..], |bias| bias.far(unit.first + first + i, shape.q_len, kv_len));
                        far.get(start + from..).unwrap_or(&[])
                    }
                };
                state.absorb::<S, U>(simd, &logits, &mut row[..to - from], seen, far, o);
            }
            let to = to.min(end - start);
            // A matrix unit adds each product to the output itself: shorter sums would round no less.
            let longest = if U::has_tiles(simd) { to - from } else { CHAIN };
            for chain in (from..to).step_by(longest) {
                let extents = Extents { columns, steps: longest.min(to - chain).div_ceil(U::DEPTH), ..extents };
                let weights = bytemuck::cast_slice(&scores[(chain - from) / U::DEPTH..]);
                let weights = Left { units: weights, row_stride: keys, step_stride: 1 };
                let values = Right { units: &v[chain / U::DEPTH * columns..], stride: columns };
                product::<S, U, true>(simd, extents, weights, values, &mut o[strip.row * columns..], columns);
            }
        }
    }

    for (member, (target, lse)) in unit.results.into_iter().enumerate() {
        let rows = o[member * padded * columns..].chunks_exact_mut(columns).zip(&states[member * padded..]);
        for ((target, lse), (o, state)) in target.chunks_exact_mut(width * dtype.bytes()).zip(lse).zip(rows) {
            *lse = state.normalise(simd, o);
            narrow(simd, dtype, &o[..width], target);
        }
    }
}

/// Consecutive queries of a head.
struct Strip {
    /// Where they begin in the thread's scratch, in rows.
    row: usize,
    /// The first query, counted from the block's first.
    first: usize,
    count: usize,
}

/// The strips of `len` queries of a head whose `count` queries begin at row `head` of the scratch.
fn strips(head: usize, count: usize, len: usize) -> impl Iterator<Item = Strip> {
    (0..count).step_by(len).map(move |first| Strip { row: head + first, first, count: len.min(count - first) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_cover_every_query_once() {
        for count in [1, 47, 48, 49, 240] {
            let covered: Vec<usize> = strips(300, count, 48).flat_map(|s| s.first..s.first + s.count).collect();
            assert_eq!(covered, (0..count).collect::<Vec<_>>());
            assert!(strips(300, count, 48).all(|strip| strip.row == 300 + strip.first));
        }
    }
}

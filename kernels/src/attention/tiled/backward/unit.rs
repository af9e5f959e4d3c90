//! A block of keys of one KV head, and all queries that see it.

use super::scores::{Factors, Rows, Saved, gradients};
use super::{Blocks, Plan, QueryBlock, whole};
use crate::attention::strip::{LANES, SPAN, STRIP, cut, pack_queries};
use crate::attention::{Forward, KeyBias};
use crate::device::simd::math::scale;
use crate::device::simd::pack::{self, Packed, odd_lines, whole_lines};
use crate::device::simd::product::{Extents, Left, ROWS, Right, product};
use crate::device::simd::{Native, Simd, SimdBf16Op, narrow};
use crate::tensor::{DType, Rows as TensorRows};
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::PoisonError;

/// The parts of a thread's scratch, in 32-bit words: f32, or units of an operand.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    head_dim: usize,
    /// Rows of a block of queries, padded.
    queries: usize,
    /// Columns of a tile, padded.
    columns: usize,
    /// Distance of rows whose columns are keys.
    key_stride: usize,
    /// Distance of rows whose columns are the head dim.
    stride: usize,
    /// Width of a row of gradients.
    width: usize,
}

impl Layout {
    pub(super) fn of(blocks: &Blocks) -> Self {
        let columns = (blocks.keys + ROWS - 1).next_multiple_of(SPAN);
        let head_dim = blocks.shape.head_dim;
        Layout {
            head_dim,
            queries: whole(blocks.queries),
            columns,
            key_stride: odd_lines(columns),
            stride: odd_lines(head_dim),
            width: head_dim.next_multiple_of(LANES),
        }
    }

    /// The words of each part: `kᵀ`, `vᵀ`, `k`, `q`, `do`, scores, `dP`, `dq`, `dk`, `dv`, the bias of the keys and the
    /// gradient by it.
    fn parts(&self) -> [usize; 12] {
        let Layout { head_dim, queries, columns, key_stride, stride, width } = *self;
        let (transposed, stacked) = (head_dim * key_stride, queries * stride);
        let (tile, keys) = (queries * key_stride, columns * width);
        let (packed, rows) = (columns * stride, queries * width);
        whole_lines([transposed, transposed, packed, stacked, stacked, tile, tile, rows, keys, keys, columns, columns])
    }

    pub(super) fn words(&self) -> usize {
        self.parts().into_iter().sum()
    }
}

/// Columns that hold `keys` keys: whole vectors and, as rows of `dk` and `dv`, whole register tiles.
fn padded(keys: usize) -> usize {
    whole(keys).next_multiple_of(SPAN)
}

/// The work on one block of keys.
pub(super) struct KeyBlock<'p, 'a, 'g, 's> {
    pub(super) plan: &'p Plan<'a, 'g>,
    /// Which: `[key blocks, B * Hkv]`.
    pub(super) index: usize,
    pub(super) slot: &'s mut [f32],
}

impl SimdBf16Op for KeyBlock<'_, '_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        if self.plan.call.forward.is_bf16() && self.plan.call.grad_o.dtype() == DType::Bf16 {
            self.compute::<S, S::Bf16>(simd);
        } else {
            self.compute::<S, f32>(simd);
        }
    }
}

impl KeyBlock<'_, '_, '_, '_> {
    #[inline(always)]
    fn compute<S: Simd, U: Packed<S>>(self, simd: S) {
        let KeyBlock { plan, index, slot } = self;
        let (blocks, Forward { shape, params, q, kv, .. }) = (plan.blocks, plan.call.forward);
        let lists = shape.batch * shape.kv_heads;
        let (key_block, list) = (index / lists, index % lists);
        let (batch, kv_head) = (list / shape.kv_heads, list % shape.kv_heads);
        let layout = Layout::of(&blocks);
        let Layout { stride, width, .. } = layout;
        let [kt, vt, k, packed_q, packed_do, scores, grad_p, dq, dk, dv, bias, grad_bias] = cut(slot, layout.parts());
        let (kt, vt, k) = (bytemuck::cast_slice_mut(kt), bytemuck::cast_slice_mut(vt), bytemuck::cast_slice_mut(k));
        let (packed_q, packed_do) = (bytemuck::cast_slice_mut(packed_q), bytemuck::cast_slice_mut(packed_do));
        let keys = blocks.key_rows(key_block);
        let key_rows = |row| kv.key_rows(batch, kv_head, keys.start + row);
        let value_rows = |row| kv.value_rows(batch, kv_head, keys.start + row);
        pack::transposed::<S, U>(simd, key_rows, keys.len(), shape.head_dim, layout.columns, kt, layout.key_stride);
        pack::transposed::<S, U>(simd, value_rows, keys.len(), shape.head_dim, layout.columns, vt, layout.key_stride);
        stacked::<S, U>(simd, key_rows, keys.len(), layout.columns, k, stride);
        dk.fill(0.0);
        dv.fill(0.0);
        grad_bias.fill(0.0);
        let key_bias = kv.bias(batch, kv_head);
        if let Some(KeyBias { values, .. }) = key_bias {
            bias.iter_mut().zip(&values[keys.clone()]).for_each(|(to, value)| *to = value * LOG2_E);
        }

        let factors = Factors::new(simd, &params);
        let biases = Biases { of_keys: key_bias, bias, gradient: grad_bias };
        let mut tile = Tile { plan, layout, keys, factors, kt, vt, k, scores, grad_p, dq, dk, dv, biases };
        for q_head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
            let head = batch * shape.q_heads + q_head;
            for query_block in (0..blocks.query_blocks()).rev() {
                if !plan.turns(query_block).contains(&key_block) {
                    continue;
                }
                let rows = blocks.query_rows(query_block);
                let (first, count) = (rows.start, rows.len());
                let q = Queries::pack(simd, q.head(batch, q_head, first).first(count), packed_q, stride);
                let grad_o = plan.call.grad_o.head(batch, q_head, first).first(count);
                let grad_o = Queries::pack(simd, grad_o, packed_do, stride);
                // Where a mask cuts through a tile, strips of it are computed as far as they see.
                let sees_all = plan.sees_all(&rows, &tile.keys);
                let strip_rows = if sees_all { count } else { STRIP };
                let mut computed = 0..0;
                for start in (0..count).step_by(strip_rows) {
                    let strip = start..count.min(start + strip_rows);
                    let queries = first + strip.start..first + strip.end;
                    if tile.strip(simd, Strip { head, queries, start, sees_all }, &q, &grad_o) {
                        computed = if computed.is_empty() { strip } else { computed.start..strip.end };
                    }
                }

                let mut block = plan.wait(head, query_block, key_block);
                block.add(computed, tile.dq, width, params.scale, shape.head_dim);
                if let (true, QueryBlock { sum, encoded: Some(to), .. }) = (block.turns.is_empty(), &mut *block) {
                    narrow(simd, plan.dtype, sum, to);
                }
            }
        }

        if let Some(to) = plan.biases.get(index) {
            let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
            to.iter_mut().zip(&*tile.biases.gradient).for_each(|(to, from)| *to = *from);
        }
        let mut targets = plan.targets[index].lock().unwrap_or_else(PoisonError::into_inner);
        let row_bytes = shape.head_dim * plan.dtype.bytes();
        for (target, (sum, factor)) in targets.iter_mut().zip([(tile.dk, params.scale), (tile.dv, 1.0)]) {
            for (to, row) in target.chunks_exact_mut(row_bytes).zip(sum.chunks_exact_mut(width)) {
                let row = &mut row[..shape.head_dim];
                scale(simd, row, factor);
                narrow(simd, plan.dtype, row, to);
            }
        }
    }
}

/// Queries of a block that are computed together.
struct Strip {
    /// Counted over the batch.
    head: usize,
    queries: Range<usize>,
    /// Where they begin in their block.
    start: usize,
    /// They, and the rest of their block, see all keys of the tile.
    sees_all: bool,
}

/// The bias of a block of keys, if they have one.
struct Biases<'p, 's> {
    of_keys: Option<KeyBias<'p>>,
    /// In base 2, and the gradient by the bias, a column for each key.
    bias: &'s mut [f32],
    gradient: &'s mut [f32],
}

/// A packed block of keys, and what is computed of it.
struct Tile<'p, 'a, 'g, 's, S: Simd, U> {
    plan: &'p Plan<'a, 'g>,
    layout: Layout,
    keys: Range<usize>,
    factors: Factors<S>,
    kt: &'s mut [U],
    vt: &'s mut [U],
    k: &'s mut [U],
    scores: &'s mut [f32],
    grad_p: &'s mut [f32],
    /// `[queries, width]`, without the factor `scale`, as `dk` is.
    dq: &'s mut [f32],
    dk: &'s mut [f32],
    dv: &'s mut [f32],
    biases: Biases<'p, 's>,
}

impl<S: Simd, U: Packed<S>> Tile<'_, '_, '_, '_, S, U> {
    /// The five products of some queries: writes their rows of `dq`, adds to `dk` and `dv`. Columns that none of them
    /// sees are left out; false when that is all.
    #[inline(always)]
    fn strip(&mut self, simd: S, strip: Strip, q: &Queries<'_, U>, grad_o: &Queries<'_, U>) -> bool {
        let seen = self.plan.seen(&strip.queries);
        let seen = seen.start.max(self.keys.start)..seen.end.min(self.keys.end);
        if seen.is_empty() {
            return false;
        }
        let Layout { head_dim, key_stride, stride, width, .. } = self.layout;
        let from = (seen.start - self.keys.start) / SPAN * SPAN;
        let columns = padded(seen.end - self.keys.start - from);
        let rows = whole(strip.queries.len());

        let extents = Extents { rows, columns, steps: head_dim.div_ceil(U::DEPTH) };
        for (left, right, to) in [(q, &*self.kt, &mut *self.scores), (grad_o, &*self.vt, &mut *self.grad_p)] {
            let right = Right { units: &right[from..], stride: key_stride };
            product::<S, U, false>(simd, extents, left.along(strip.start), right, to, key_stride);
        }

        let masked = !(strip.sees_all && seen.len() == columns && strip.queries.len() == rows);
        let first_key = self.keys.start + from;
        for row in (0..rows).step_by(U::DEPTH) {
            let saved = (self.saved(&strip, row, first_key), self.saved(&strip, row + U::DEPTH - 1, first_key));
            let at = row * key_stride;
            let (scores, grad_p) = (&mut self.scores[at..], &mut self.grad_p[at..]);
            let biases = match self.biases.of_keys {
                Some(_) => [&mut self.biases.bias[from..], &mut self.biases.gradient[from..]],
                None => [&mut [][..], &mut [][..]],
            };
            let tile = Rows { scores, grad_p, stride: key_stride, columns, biases };
            gradients::<S, U>(simd, &self.factors, [&saved.0, &saved.1], tile, masked);
        }

        // Where `gradients` left `P` and `dS`, the latter both across rows and along them.
        let (p, along) = (bytemuck::cast_slice(self.scores), bytemuck::cast_slice(self.grad_p));
        let across = if U::DEPTH == 1 { along } else { &p[key_stride..] };
        let seen_keys = whole(seen.end - self.keys.start - from);
        let extents = Extents { rows: seen_keys, columns: width, steps: rows / U::DEPTH };
        for (units, right, to) in [(p, grad_o, &mut *self.dv), (across, q, &mut *self.dk)] {
            let left = Left { units, row_stride: 1, step_stride: U::DEPTH * key_stride };
            product::<S, U, true>(simd, extents, left, right.across(strip.start), &mut to[from * width..], width);
        }
        let left = Left { units: along, row_stride: key_stride, step_stride: 1 };
        let right = Right { units: &self.k[from / U::DEPTH * stride..], stride };
        let extents = Extents { rows, columns: width, steps: columns / U::DEPTH };
        product::<S, U, false>(simd, extents, left, right, &mut self.dq[strip.start * width..], width);
        true
    }

    /// What was saved of a query of a strip, or nothing for a row that pads it.
    #[inline(always)]
    fn saved(&self, strip: &Strip, row: usize, first_key: usize) -> Saved {
        let (query, Forward { shape, params, .. }) = (strip.queries.start + row, self.plan.call.forward);
        if query >= strip.queries.end {
            return Saved::NOTHING;
        }
        let seen = params.visible(query, shape.q_len, shape.kv_len);
        let (from, to) = (seen.start.max(first_key), seen.end.min(self.keys.end));
        let seen = from - first_key..to.max(from) - first_key;
        let far = self.biases.of_keys.map_or(0, |bias| bias.far(query, shape.q_len, shape.kv_len).len());
        let (far, row) = (far.saturating_sub(first_key), strip.head * shape.q_len + query);
        Saved { lse: self.plan.call.lse[row], delta: self.plan.delta[row], seen, far }
    }
}

/// Rows packed one above the other, zeros up to `padded` rows.
#[inline(always)]
fn stacked<'a, S: Simd, U: Packed<S>>(
    simd: S,
    rows: impl Fn(usize) -> TensorRows<'a>,
    count: usize,
    padded: usize,
    to: &mut [U],
    stride: usize,
) {
    pack::stacked(simd, rows, count, to, stride);
    to[count.div_ceil(U::DEPTH) * stride..padded.div_ceil(U::DEPTH) * stride].fill(U::zeroed());
}

/// Rows of `q` or `do` of a block, packed both as a left and as a right operand; padding rows are zero.
struct Queries<'s, U> {
    along: &'s [U],
    along_stride: usize,
    across: &'s [U],
    stride: usize,
}

impl<'s, U> Queries<'s, U> {
    #[inline(always)]
    fn pack<S: Simd>(simd: S, rows: TensorRows<'_>, to: &'s mut [U], stride: usize) -> Self
    where
        U: Packed<S>,
    {
        let (count, padded) = (rows.count(), whole(rows.count()));
        let (across, along) = to.split_at_mut(padded / U::DEPTH * stride);
        stacked(
            simd,
            #[inline(always)]
            |row| rows.skip(row),
            count,
            padded,
            across,
            stride,
        );
        if U::DEPTH == 1 {
            // An element is its own unit: one layout serves both.
            let across = &*across;
            return Queries { along: across, along_stride: stride, across, stride };
        }
        let along_stride = stride / U::DEPTH;
        let along = &mut along[..padded * along_stride];
        pack_queries(simd, rows, false, along_stride, along);
        Queries { along, along_stride, across, stride }
    }

    /// Rows from `first` on, their elements along the inner extent.
    #[inline(always)]
    fn along(&self, first: usize) -> Left<'_, U> {
        Left { units: &self.along[first * self.along_stride..], row_stride: self.along_stride, step_stride: 1 }
    }

    /// Rows from `first` on, which is even, being the inner extent.
    #[inline(always)]
    fn across<S: Simd>(&self, first: usize) -> Right<'_, U>
    where
        U: Packed<S>,
    {
        Right { units: &self.across[first / U::DEPTH * self.stride..], stride: self.stride }
    }
}

impl QueryBlock<'_> {
    /// Adds a tile's share of `dq` and passes the turn on.
    #[inline(always)]
    fn add(&mut self, rows: Range<usize>, dq: &[f32], width: usize, scale: f32, head_dim: usize) {
        if std::mem::take(&mut self.empty) {
            self.sum.fill(0.0);
        }
        for row in rows {
            let from = &dq[row * width..][..head_dim];
            self.sum[row * head_dim..][..head_dim].iter_mut().zip(from).for_each(|(to, from)| *to += scale * from);
        }
        self.turns.start += 1;
    }
}

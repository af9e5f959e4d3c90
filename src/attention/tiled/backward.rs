//! The backward pass: `dq` by query tiles, `dk` and `dv` by key tiles, probabilities recomputed in both.

use super::TileSizes;
use crate::attention::backward::{Grad, score_gradients};
use crate::attention::{Backward, Forward, Gradients, Shape};
use crate::device::cpu::Slots;
use crate::device::gemm::{Matrix, product};
use rayon::prelude::*;
use std::ops::Range;

/// Elements of one thread's scratch: tiles of q, do, k, v, two of gradients of the larger extent, and two of scores.
pub(super) fn slot(shape: &Shape, tile: TileSizes) -> usize {
    let gradients = 2 * tile.br.max(tile.bc) * shape.head_dim;
    2 * (tile.br + tile.bc) * shape.head_dim + gradients + 2 * tile.br * tile.bc
}

/// A thread's scratch, cut up.
struct Tiles<'s> {
    q: &'s mut [f32],
    grad_o: &'s mut [f32],
    k: &'s mut [f32],
    v: &'s mut [f32],
    p: &'s mut [f32],
    ds: &'s mut [f32],
    gradients: &'s mut [f32],
}

impl<'s> Tiles<'s> {
    fn cut(slot: &'s mut [f32], tile: TileSizes, width: usize) -> Self {
        let (q, rest) = slot.split_at_mut(tile.br * width);
        let (grad_o, rest) = rest.split_at_mut(tile.br * width);
        let (k, rest) = rest.split_at_mut(tile.bc * width);
        let (v, rest) = rest.split_at_mut(tile.bc * width);
        let (p, rest) = rest.split_at_mut(tile.br * tile.bc);
        let (ds, gradients) = rest.split_at_mut(tile.br * tile.bc);
        Tiles { q, grad_o, k, v, p, ds, gradients }
    }
}

pub(super) fn run(tile: TileSizes, call: &Backward<'_>, gradients: &mut Gradients, scratch: &mut [f32]) {
    let Forward { shape, cpu, .. } = call.forward;
    let (delta, scratch) = scratch.split_at_mut(shape.rows());
    call.row_deltas(delta);
    let delta = &*delta;
    let slots = Slots::new(scratch, cpu.threads());
    let dtype = gradients.q.dtype();
    let row_bytes = shape.head_dim * dtype.bytes();
    let row_bytes = &row_bytes;
    cpu.install(|| {
        let heads = gradients.q.bytes_mut().chunks_mut(shape.q_len * row_bytes).enumerate();
        let mut units: Vec<(usize, usize, &mut [u8])> = heads
            .flat_map(|(head, rows)| {
                let blocks = rows.chunks_mut(tile.br * row_bytes).enumerate();
                blocks.map(move |(block, rows)| (head, block * tile.br, rows))
            })
            .collect();
        units.sort_by_key(|&(_, first, _)| std::cmp::Reverse(first));
        units.into_par_iter().with_max_len(1).for_each(|(head, first, target)| {
            slots.with(|slot| {
                let rows = first..first + target.len() / row_bytes;
                dtype.encode(query_block(tile, call, delta, head, rows, slot), target);
            });
        });

        let keys = gradients.k.bytes_mut().chunks_mut(shape.kv_len * row_bytes);
        let values = gradients.v.bytes_mut().chunks_mut(shape.kv_len * row_bytes);
        let units: Vec<(usize, usize, &mut [u8], &mut [u8])> = keys
            .zip(values)
            .enumerate()
            .flat_map(|(head, (keys, values))| {
                let blocks = keys.chunks_mut(tile.bc * row_bytes).zip(values.chunks_mut(tile.bc * row_bytes));
                blocks.enumerate().map(move |(block, (keys, values))| (head, block * tile.bc, keys, values))
            })
            .collect();
        units.into_par_iter().with_max_len(1).for_each(|(head, first, grad_k, grad_v)| {
            slots.with(|slot| {
                let columns = first..first + grad_k.len() / row_bytes;
                let (dk, dv) = key_block(tile, call, delta, head, columns, slot);
                dtype.encode(dk, grad_k);
                dtype.encode(dv, grad_v);
            });
        });
    });
}

/// Recomputes a tile of probabilities `p` and of score gradients `ds`.
fn recompute(
    call: &Backward<'_>,
    delta: &[f32],
    row_base: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    operands: [Matrix<'_>; 4],
    [p, ds]: [&mut [f32]; 2],
) {
    let Forward { shape, params, cpu, .. } = call.forward;
    let [q, grad_o, k, v] = operands;
    let count = columns.len();
    product(p, count, q, k.transposed(), false, 1);
    product(ds, count, grad_o, v.transposed(), false, 1);
    let saved = row_base + rows.start..row_base + rows.end;
    let tile = Grad { lse: &call.lse[saved.clone()], delta: &delta[saved], columns: count };
    score_gradients(cpu.isa(), &params, &tile, p, ds, |i| {
        let seen = params.visible(rows.start + i, shape.q_len, shape.kv_len);
        let from = seen.start.clamp(columns.start, columns.end);
        from - columns.start..seen.end.clamp(from, columns.end) - columns.start
    });
}

/// `dq` of some queries of query head `head` (counted over the batch).
fn query_block<'s>(
    tile: TileSizes,
    call: &Backward<'_>,
    delta: &[f32],
    head: usize,
    rows: Range<usize>,
    slot: &'s mut [f32],
) -> &'s [f32] {
    let Forward { shape, params, q, kv, .. } = call.forward;
    let (width, batch, q_head) = (shape.head_dim, head / shape.q_heads, head % shape.q_heads);
    let (kv_head, count) = (q_head / shape.group(), rows.len());
    let tiles = Tiles::cut(slot, tile, width);
    let dq = &mut tiles.gradients[..count * width];
    dq.fill(0.0);
    let q = Matrix::new(q.rows(batch, q_head, rows.start, count, tiles.q), count, width);
    let grad_o = Matrix::new(call.grad_o.rows(batch, q_head, rows.start, count, tiles.grad_o), count, width);
    let seen = params.visible(rows.start, shape.q_len, shape.kv_len).start
        ..params.visible(rows.end - 1, shape.q_len, shape.kv_len).end;
    for start in seen.clone().step_by(tile.bc) {
        let columns = start..seen.end.min(start + tile.bc);
        let k = Matrix::new(kv.keys(batch, kv_head, start, columns.len(), tiles.k), columns.len(), width);
        let v = Matrix::new(kv.values(batch, kv_head, start, columns.len(), tiles.v), columns.len(), width);
        let p = &mut tiles.p[..count * columns.len()];
        let ds = &mut tiles.ds[..count * columns.len()];
        recompute(call, delta, head * shape.q_len, rows.clone(), columns.clone(), [q, grad_o, k, v], [p, ds]);
        product(dq, width, Matrix::new(ds, count, columns.len()), k, true, 1);
    }
    dq
}

/// `dk` and `dv` of some keys of KV head `head` (counted over the batch), summed over its group of query heads.
fn key_block<'s>(
    tile: TileSizes,
    call: &Backward<'_>,
    delta: &[f32],
    head: usize,
    columns: Range<usize>,
    slot: &'s mut [f32],
) -> (&'s [f32], &'s [f32]) {
    let Forward { shape, params, q, kv, .. } = call.forward;
    let (width, batch, kv_head) = (shape.head_dim, head / shape.kv_heads, head % shape.kv_heads);
    let count = columns.len();
    let tiles = Tiles::cut(slot, tile, width);
    let (dk, rest) = tiles.gradients.split_at_mut(count * width);
    let dv = &mut rest[..count * width];
    dk.fill(0.0);
    dv.fill(0.0);
    let k = Matrix::new(kv.keys(batch, kv_head, columns.start, count, tiles.k), count, width);
    let v = Matrix::new(kv.values(batch, kv_head, columns.start, count, tiles.v), count, width);
    for member in 0..shape.group() {
        let q_head = kv_head * shape.group() + member;
        for first in (0..shape.q_len).step_by(tile.br) {
            let rows = first..shape.q_len.min(first + tile.br);
            let seen_from = params.visible(rows.start, shape.q_len, shape.kv_len).start;
            let seen_to = params.visible(rows.end - 1, shape.q_len, shape.kv_len).end;
            if seen_to <= columns.start || seen_from >= columns.end {
                continue;
            }
            let q = Matrix::new(q.rows(batch, q_head, first, rows.len(), tiles.q), rows.len(), width);
            let grad_o =
                Matrix::new(call.grad_o.rows(batch, q_head, first, rows.len(), tiles.grad_o), rows.len(), width);
            let p = &mut tiles.p[..rows.len() * count];
            let ds = &mut tiles.ds[..rows.len() * count];
            let row_base = (batch * shape.q_heads + q_head) * shape.q_len;
            recompute(call, delta, row_base, rows.clone(), columns.clone(), [q, grad_o, k, v], [p, ds]);
            product(dv, width, Matrix::new(p, rows.len(), count).transposed(), grad_o, true, 1);
            product(dk, width, Matrix::new(ds, rows.len(), count).transposed(), q, true, 1);
        }
    }
    (dk, dv)
}

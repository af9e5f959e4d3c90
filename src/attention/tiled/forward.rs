//! The forward pass: one unit of work is `BR` queries of one head.

use super::TileSizes;
use crate::attention::online::Running;
use crate::attention::{Forward, Outputs, Shape};
use crate::device::cpu::Slots;
use crate::device::gemm::{Matrix, product};
use rayon::prelude::*;

/// Elements of one thread's scratch: tiles of q, o, k or v, and scores, and each row's running state. K and V share
/// one tile: the scores are done with the keys before the values are read.
pub(super) fn slot(shape: &Shape, tile: TileSizes) -> usize {
    2 * tile.br * shape.head_dim + tile.bc * shape.head_dim + tile.br * tile.bc + 2 * tile.br
}

/// `BR` queries of one head, and where their results go.
struct Unit<'a> {
    batch: usize,
    q_head: usize,
    first: usize,
    o: &'a mut [u8],
    lse: &'a mut [f32],
}

pub(super) fn run(tile: TileSizes, call: &Forward<'_>, outputs: &mut Outputs, scratch: &mut [f32]) {
    let shape = call.shape;
    let row_bytes = shape.head_dim * outputs.o.dtype().bytes();
    let dtype = outputs.o.dtype();
    let heads = outputs.o.bytes_mut().chunks_mut(shape.q_len * row_bytes).zip(outputs.lse.chunks_mut(shape.q_len));
    let mut units: Vec<Unit<'_>> = heads
        .enumerate()
        .flat_map(|(head, (o, lse))| {
            let blocks = o.chunks_mut(tile.br * row_bytes).zip(lse.chunks_mut(tile.br));
            blocks.enumerate().map(move |(block, (o, lse))| Unit {
                batch: head / shape.q_heads,
                q_head: head % shape.q_heads,
                first: block * tile.br,
                o,
                lse,
            })
        })
        .collect();
    // Under a causal mask late queries see most keys: the heaviest units go first, so that no thread ends alone.
    units.sort_by_key(|unit| std::cmp::Reverse(unit.first));
    let slots = Slots::new(scratch, call.cpu.threads());
    call.cpu.install(|| {
        units.into_par_iter().with_max_len(1).for_each(|unit| {
            slots.with(|slot| {
                let rows = unit.lse.len();
                let o = block(tile, call, unit.batch, unit.q_head, unit.first, unit.lse, slot);
                dtype.encode(&o[..rows * shape.head_dim], unit.o);
            });
        });
    });
}

/// Computes the queries `first .. first + lse.len()` of a head; returns their output in f32.
fn block<'s>(
    tile: TileSizes,
    call: &Forward<'_>,
    batch: usize,
    q_head: usize,
    first: usize,
    lse: &mut [f32],
    slot: &'s mut [f32],
) -> &'s [f32] {
    let (width, isa, rows) = (call.shape.head_dim, call.cpu.isa(), lse.len());
    let kv_head = q_head / call.shape.group();
    let kv_len = call.kv.len(batch, kv_head);
    let visible = |i: usize| call.params.visible(first + i, call.shape.q_len, kv_len);
    let (q_tile, rest) = slot.split_at_mut(tile.br * width);
    let (kv_tile, rest) = rest.split_at_mut(tile.bc * width);
    let (scores, rest) = rest.split_at_mut(tile.br * tile.bc);
    let (o, states) = rest.split_at_mut(tile.br * width);
    let o = &mut o[..rows * width];
    let states: &mut [Running] = bytemuck::cast_slice_mut(&mut states[..2 * rows]);
    let q = Matrix::new(call.q.rows(batch, q_head, first, rows, q_tile), rows, width);
    o.fill(0.0);
    states.fill(Running::EMPTY);

    for start in (visible(0).start..visible(rows - 1).end).step_by(tile.bc) {
        let count = tile.bc.min(visible(rows - 1).end - start);
        let k = Matrix::new(call.kv.keys(batch, kv_head, start, count, kv_tile), count, width);
        let scores = &mut scores[..rows * count];
        product(scores, count, q, k.transposed(), false, 1);
        let rows = scores.chunks_exact_mut(count).zip(o.chunks_exact_mut(width)).zip(&mut *states);
        for (i, ((row, o), state)) in rows.enumerate() {
            let seen = visible(i);
            let from = seen.start.saturating_sub(start).min(count);
            let to = seen.end.saturating_sub(start).clamp(from, count);
            row[..from].fill(0.0);
            row[to..].fill(0.0);
            state.absorb(isa, &call.params, &mut row[from..to], o);
        }
        let v = Matrix::new(call.kv.values(batch, kv_head, start, count, kv_tile), count, width);
        product(o, width, Matrix::new(scores, lse.len(), count), v, true, 1);
    }
    for ((lse, o), state) in lse.iter_mut().zip(o.chunks_exact_mut(width)).zip(states) {
        *lse = state.finish(isa, o);
    }
    o
}

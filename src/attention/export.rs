//! Attention statistics without a score matrix: column sums of the softmax, from the saved log-sum-exp.
//!
//! Policies ask "how much attention did key `j` receive from these queries?". With the rows' log-sum-exps at hand,
//! each tile of probabilities can be recomputed on its own, so a pass over key tiles sums them in linear memory. All
//! queries give H2O's accumulated attention, the last few SnapKV's window, the last one TOVA's.

use super::online::logits;
use super::{Forward, Shape};
use crate::device::cpu::Slots;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::loops;
use rayon::prelude::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Queries and keys of a tile.
const BR: usize = 64;
const BC: usize = 256;

fn slot(shape: &Shape) -> usize {
    (BR.min(shape.q_len) + BC.min(shape.kv_len)) * shape.head_dim + BR.min(shape.q_len) * BC.min(shape.kv_len)
}

/// Scratch elements of [`column_sums`].
pub fn workspace(shape: &Shape, threads: usize) -> usize {
    threads * slot(shape)
}

/// For each key, the softmax probabilities that `queries` (a range of `0..Lq`) give it, summed over these queries and
/// averaged over the group's query heads.
///
/// `lse` is `[B, Hq, Lq]` of the whole call; `sums` is `[B, Hkv, shape.kv_len]` and is overwritten (columns past the
/// length of a shorter list get zero); `scratch` holds [`workspace`] elements.
pub fn column_sums(call: &Forward<'_>, lse: &[f32], queries: Range<usize>, sums: &mut [f32], scratch: &mut [f32]) {
    let shape = call.shape;
    let bc = BC.min(shape.kv_len);
    let slots = Slots::new(scratch, call.cpu.threads());
    let units: Vec<(usize, usize, &mut [f32])> = sums
        .chunks_mut(shape.kv_len)
        .enumerate()
        .flat_map(|(head, sums)| sums.chunks_mut(bc).enumerate().map(move |(tile, sums)| (head, tile * bc, sums)))
        .collect();
    call.cpu.install(|| {
        units.into_par_iter().with_max_len(1).for_each(|(head, first, sums)| {
            sums.fill(0.0);
            let keys = first..(first + sums.len()).min(call.kv.len(head / shape.kv_heads, head % shape.kv_heads));
            if !keys.is_empty() {
                slots.with(|slot| {
                    key_tile(call, lse, queries.clone(), head, keys.clone(), &mut sums[..keys.len()], slot)
                });
            }
        });
    });
}

fn key_tile(
    call: &Forward<'_>,
    lse: &[f32],
    queries: Range<usize>,
    head: usize,
    keys: Range<usize>,
    sums: &mut [f32],
    slot: &mut [f32],
) {
    let (shape, isa, width) = (call.shape, call.cpu.isa(), call.shape.head_dim);
    let (batch, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
    let kv_len = call.kv.len(batch, kv_head);
    let (k_tile, rest) = slot.split_at_mut(BC.min(shape.kv_len) * width);
    let (q_tile, scores) = rest.split_at_mut(BR.min(shape.q_len) * width);
    let k = Matrix::new(call.kv.keys(batch, kv_head, keys.start, keys.len(), k_tile), keys.len(), width);
    for q_head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
        let lse = &lse[(batch * shape.q_heads + q_head) * shape.q_len..][..shape.q_len];
        for first in queries.clone().step_by(BR) {
            let rows = first..queries.end.min(first + BR);
            let seen = call.params.visible(rows.start, shape.q_len, kv_len).start
                ..call.params.visible(rows.end - 1, shape.q_len, kv_len).end;
            if seen.end <= keys.start || seen.start >= keys.end {
                continue;
            }
            let q = Matrix::new(call.q.rows(batch, q_head, first, rows.len(), q_tile), rows.len(), width);
            let scores = &mut scores[..rows.len() * keys.len()];
            product(scores, keys.len(), q, k.transposed(), false, 1);
            for (i, row) in rows.clone().zip(scores.chunks_exact_mut(keys.len())) {
                let seen = call.params.visible(i, shape.q_len, kv_len);
                let from = seen.start.clamp(keys.start, keys.end) - keys.start;
                let to = seen.end.clamp(keys.start + from, keys.end) - keys.start;
                let row = &mut row[from..to];
                logits(isa, &call.params, row);
                loops::exp2_sum(isa, row, lse[i] * LOG2_E);
                loops::add(isa, &mut sums[from..to], row);
            }
        }
    }
    loops::scale(isa, sums, 1.0 / shape.group() as f32);
}

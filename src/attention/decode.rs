//! Decode: few queries against a long cache, split over the keys.
//!
//! The unit of work is one KV head and [`SPLIT`] of its keys, for all query heads of the group: each key and value
//! row is read once for the whole group. Partial results are merged in the order of the splits, so the result does
//! not depend on the number of threads (Flash-Decoding).

use super::online::Running;
use super::{AttentionError, Forward, Kernel, KernelEntry, Outputs, Params, Shape, Workspace, WorkspaceSize};
use crate::device::cpu::Slots;
use crate::device::simd::loops;
use crate::tensor::DType;
use rayon::prelude::*;

/// Attention for short queries.
pub struct Decode;

/// Keys of one unit of work.
const SPLIT: usize = 1024;
/// Keys that are scored before their values are read.
const BLOCK: usize = 64;

/// Query rows that share a KV head.
fn group_rows(shape: &Shape) -> usize {
    shape.group() * shape.q_len
}

/// Units of work.
fn units(shape: &Shape) -> usize {
    shape.batch * shape.kv_heads * shape.kv_len.div_ceil(SPLIT)
}

/// Elements of a thread's scratch: its query rows, a block of keys or values, and a block of scores.
fn slot(shape: &Shape) -> usize {
    (group_rows(shape) + BLOCK) * shape.head_dim + group_rows(shape) * BLOCK
}

/// The registry's line.
pub const ENTRY: KernelEntry = KernelEntry {
    name: "decode",
    about: "few queries against a long cache, split over the keys",
    parameters: &[],
    build: |_| Ok(Box::new(Decode)),
};

impl Kernel for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> WorkspaceSize {
        // Each partial result is an output row, a maximum and a sum.
        let partials = units(shape) * group_rows(shape) * (shape.head_dim + 2);
        WorkspaceSize { scores: 0, scratch: partials + threads * slot(shape) }
    }

    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let (shape, isa) = (call.shape, call.cpu.isa());
        let (width, rows) = (shape.head_dim, group_rows(&shape));
        let splits = shape.kv_len.div_ceil(SPLIT);
        let (partial_o, rest) = workspace.scratch.split_at_mut(units(&shape) * rows * width);
        let (partial_state, scratch) = rest.split_at_mut(units(&shape) * rows * 2);
        let states: &mut [Running] = bytemuck::cast_slice_mut(partial_state);
        let slots = Slots::new(scratch, call.cpu.threads());
        let row_bytes = width * outputs.o.dtype().bytes();
        let dtype = outputs.o.dtype();
        call.cpu.install(|| {
            let partials = partial_o.par_chunks_mut(rows * width).zip(states.par_chunks_mut(rows));
            partials.enumerate().with_max_len(1).for_each(|(unit, (o, states))| {
                slots.with(|slot| partial(call, unit / splits, unit % splits * SPLIT, o, states, slot));
            });

            let results = outputs.o.bytes_mut().par_chunks_mut(row_bytes).zip(outputs.lse.par_iter_mut());
            results.enumerate().for_each(|(index, (target, lse))| {
                let (head, i) = (index / shape.q_len, index % shape.q_len);
                let (batch, q_head) = (head / shape.q_heads, head % shape.q_heads);
                let kv_head = batch * shape.kv_heads + q_head / shape.group();
                let row = q_head % shape.group() * shape.q_len + i;
                let mut o = [0.0; Shape::MAX_HEAD_DIM];
                let o = &mut o[..width];
                let mut state = Running::EMPTY;
                for split in 0..splits {
                    let at = (kv_head * splits + split) * rows + row;
                    state.merge(isa, o, states[at], &partial_o[at * width..][..width]);
                }
                *lse = state.finish(isa, o);
                dtype.encode(o, target);
            });
        });
        Ok(())
    }
}

/// The partial results of all query rows of KV head `head` (counted over the batch) over the keys from `start` on.
fn partial(call: &Forward<'_>, head: usize, start: usize, o: &mut [f32], states: &mut [Running], slot: &mut [f32]) {
    let (shape, isa, width) = (call.shape, call.cpu.isa(), call.shape.head_dim);
    let (batch, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
    let rows = group_rows(&shape);
    let (q, rest) = slot.split_at_mut(rows * width);
    let (block, scores) = rest.split_at_mut(BLOCK * width);
    for (member, q) in q.chunks_exact_mut(shape.q_len * width).enumerate() {
        call.q.read_rows(batch, kv_head * shape.group() + member, 0, q);
    }
    o.fill(0.0);
    states.fill(Running::EMPTY);
    let kv_len = call.kv.len(batch, kv_head);
    let visible = |row: usize| call.params.visible(row % shape.q_len, shape.q_len, kv_len);
    let seen = visible(0).start.max(start)..visible(shape.q_len - 1).end.min(start + SPLIT);

    for first in seen.clone().step_by(BLOCK) {
        let count = BLOCK.min(seen.end - first);
        let keys = call.kv.keys(batch, kv_head, first, count, block);
        for (row, q) in q.chunks_exact(width).enumerate() {
            let scores = &mut scores[row * BLOCK..][..count];
            loops::row_dots(isa, q, keys, scores);
            let seen = visible(row);
            let from = seen.start.saturating_sub(first).min(count);
            let to = seen.end.saturating_sub(first).clamp(from, count);
            scores[..from].fill(0.0);
            scores[to..].fill(0.0);
            states[row].absorb(isa, &call.params, &mut scores[from..to], &mut o[row * width..][..width]);
        }
        let values = call.kv.values(batch, kv_head, first, count, block);
        for (row, o) in o.chunks_exact_mut(width).enumerate() {
            loops::weighted_rows(isa, &scores[row * BLOCK..][..count], values, o);
        }
    }
}

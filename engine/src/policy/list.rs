//! One list of cached tokens, as scorers read it.

use super::Context;
use crate::attention::Shape;
use crate::attention::rope::Unrotation;
use rayon::prelude::*;
use std::ops::Range;

/// The cached tokens of one (sequence, KV head).
pub struct List<'a> {
    context: &'a Context<'a>,
    /// Number of the list, `batch * Hkv + head`.
    pub index: usize,
    /// Sequence.
    pub batch: usize,
    /// KV head.
    pub head: usize,
    /// Tokens.
    pub len: usize,
}

impl<'a> List<'a> {
    /// Most rows of a block: what the matrix product takes at a time.
    pub const BLOCK: usize = 48;

    /// A list of a context.
    pub fn new(context: &'a Context<'a>, index: usize) -> Self {
        let (batch, head) = context.list_at(index);
        List { context, index, batch, head, len: context.len(index) }
    }

    /// Calls `visit(slot, key)` for every key `[D]`, in order.
    pub fn keys(&self, mut visit: impl FnMut(usize, &[f32])) {
        self.key_blocks(0..self.len, |start, rows| {
            rows.chunks_exact(self.width()).enumerate().for_each(|(index, key)| visit(start + index, key));
        });
    }

    /// Calls `visit(slot, value)` for every value `[D]`, in order.
    pub fn values(&self, mut visit: impl FnMut(usize, &[f32])) {
        self.value_blocks(0..self.len, |start, rows| {
            rows.chunks_exact(self.width()).enumerate().for_each(|(index, value)| visit(start + index, value));
        });
    }

    /// Calls `visit(start, keys)` for the keys of a range of slots, in blocks of up to [`List::BLOCK`] rows `[_, D]`.
    pub fn key_blocks(&self, range: Range<usize>, mut visit: impl FnMut(usize, &[f32])) {
        let kv = self.context.call.kv;
        Self::blocks(range, |start, count, scratch| {
            visit(start, kv.keys(self.batch, self.head, start, count, scratch));
        });
    }

    /// As [`List::key_blocks`], of keys as they were before RoPE, which may be changed; `None` where the inputs do not
    /// tell.
    pub fn keys_before_rope(&self, range: Range<usize>, mut visit: impl FnMut(usize, &mut [f32])) -> Option<()> {
        let before = self.context.before_rope?;
        let mut unrotation = Unrotation::new(before.frequencies);
        let mut block = [0.0; List::BLOCK * Shape::MAX_HEAD_DIM];
        self.key_blocks(range, |start, rows| {
            let block = &mut block[..rows.len()];
            block.copy_from_slice(rows);
            for (index, row) in block.chunks_exact_mut(self.width()).enumerate() {
                let position = self.position(start + index);
                match before.k {
                    Some(recorded) => recorded.read_rows(self.batch, self.head, position, row),
                    None => unrotation.unrotate(row, position),
                }
            }
            visit(start, block);
        });
        Some(())
    }

    /// As [`List::key_blocks`], of values.
    pub fn value_blocks(&self, range: Range<usize>, mut visit: impl FnMut(usize, &[f32])) {
        let kv = self.context.call.kv;
        Self::blocks(range, |start, count, scratch| {
            visit(start, kv.values(self.batch, self.head, start, count, scratch));
        });
    }

    /// Position in its sequence of the token in a slot.
    pub fn position(&self, slot: usize) -> usize {
        (self.context.positions)(self.index, slot)
    }

    /// Elements of a head.
    pub fn width(&self) -> usize {
        self.context.call.shape.head_dim
    }

    fn blocks(range: Range<usize>, mut work: impl FnMut(usize, usize, &mut [f32])) {
        let mut scratch = [0.0; List::BLOCK * Shape::MAX_HEAD_DIM];
        for start in range.clone().step_by(List::BLOCK) {
            work(start, List::BLOCK.min(range.end - start), &mut scratch);
        }
    }
}

/// Runs `work(list, scores of its tokens, its part of the scratch)` for every list, in parallel. `scratch` is divided
/// evenly over the lists; it may be empty.
pub fn each_list(
    context: &Context<'_>,
    scores: &mut [f32],
    scratch: &mut [f32],
    work: impl Fn(&List<'_>, &mut [f32], &mut [f32]) + Sync,
) {
    let share = scratch.len() / context.lists();
    // An empty slice for each list where there is no scratch.
    let parts: Vec<&mut [f32]> = match share {
        0 => (0..context.lists()).map(|_| Default::default()).collect(),
        share => scratch.chunks_mut(share).collect(),
    };
    context.call.cpu.install(|| {
        scores.par_chunks_mut(context.call.shape.kv_len).zip(parts).enumerate().for_each(
            |(index, (scores, scratch))| {
                let list = List::new(context, index);
                let len = list.len;
                work(&list, &mut scores[..len], scratch);
            },
        );
    });
}

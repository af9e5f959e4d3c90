//! One list of cached tokens, as scorers read it.

use super::Context;
use crate::attention::Shape;
use rayon::prelude::*;

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
    /// A list of a context.
    pub fn new(context: &'a Context<'a>, index: usize) -> Self {
        let (batch, head) = context.list_at(index);
        List { context, index, batch, head, len: context.len(index) }
    }

    /// Calls `visit(slot, key)` for every key `[D]`, in order.
    pub fn keys(&self, mut visit: impl FnMut(usize, &[f32])) {
        let kv = self.context.call.kv;
        self.blocks(|start, count, scratch| {
            let rows = kv.keys(self.batch, self.head, start, count, scratch);
            rows.chunks_exact(self.width()).enumerate().for_each(|(index, key)| visit(start + index, key));
        });
    }

    /// Calls `visit(slot, value)` for every value `[D]`, in order.
    pub fn values(&self, mut visit: impl FnMut(usize, &[f32])) {
        let kv = self.context.call.kv;
        self.blocks(|start, count, scratch| {
            let rows = kv.values(self.batch, self.head, start, count, scratch);
            rows.chunks_exact(self.width()).enumerate().for_each(|(index, value)| visit(start + index, value));
        });
    }

    /// Calls `visit(slot, key)` for every key as it was before RoPE; `None` where the inputs do not tell.
    pub fn keys_before_rope(&self, mut visit: impl FnMut(usize, &[f32])) -> Option<()> {
        let before = self.context.before_rope?;
        let mut row = [0.0; Shape::MAX_HEAD_DIM];
        let row = &mut row[..self.width()];
        self.keys(|slot, key| {
            row.copy_from_slice(key);
            before.key(self.batch, self.head, self.position(slot), row);
            visit(slot, row);
        });
        Some(())
    }

    /// Position in its sequence of the token in a slot.
    pub fn position(&self, slot: usize) -> usize {
        (self.context.positions)(self.index, slot)
    }

    /// Elements of a head.
    pub fn width(&self) -> usize {
        self.context.call.shape.head_dim
    }

    fn blocks(&self, mut work: impl FnMut(usize, usize, &mut [f32])) {
        const BLOCK: usize = 64;
        let mut scratch = [0.0; BLOCK * Shape::MAX_HEAD_DIM];
        for start in (0..self.len).step_by(BLOCK) {
            work(start, BLOCK.min(self.len - start), &mut scratch);
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

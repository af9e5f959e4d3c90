//! Knorm (arXiv 2406.11430): keys of small norm attract attention, so the score is the negative L2 norm of the key.

use super::{Context, Needs, Policy, PolicyEntry, PolicyError, Scorer};
use crate::attention::KvRows;
use crate::named::Parameter;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "knorm",
    about: "keeps the keys of smallest L2 norm",
    paper: "2406.11430",
    parameters: &[Parameter {
        name: "every",
        default: "0",
        about: "decode steps between evictions; 0: only after prefill",
    }],
    needs: Needs::Keys,
    build: |named| Ok(Policy::after_prefill(Knorm).every(named.count("every", 0, 0)?)),
};

pub(super) struct Knorm;

impl Scorer for Knorm {
    fn needs(&self) -> Needs {
        Needs::Keys
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, |keys, scores| {
            keys.each(|slot, key| scores[slot] = -key.iter().map(|x| x * x).sum::<f32>().sqrt());
        });
        Ok(())
    }
}

/// The keys of one list.
pub(super) struct Keys<'a> {
    kv: &'a dyn KvRows,
    batch: usize,
    head: usize,
    len: usize,
    width: usize,
}

impl Keys<'_> {
    /// Calls `visit(slot, key)` for every key `[D]`, in order.
    pub fn each(&self, mut visit: impl FnMut(usize, &[f32])) {
        const BLOCK: usize = 64;
        let mut scratch = [0.0; BLOCK * crate::attention::Shape::MAX_HEAD_DIM];
        for start in (0..self.len).step_by(BLOCK) {
            let count = BLOCK.min(self.len - start);
            let rows = self.kv.keys(self.batch, self.head, start, count, &mut scratch);
            rows.chunks_exact(self.width).enumerate().for_each(|(index, key)| visit(start + index, key));
        }
    }
}

/// Runs `work(keys of a list, scores of its tokens)` for every list, in parallel.
pub(super) fn each_list(context: &Context<'_>, scores: &mut [f32], work: impl Fn(&Keys<'_>, &mut [f32]) + Sync) {
    use rayon::prelude::*;
    let (shape, kv) = (context.call.shape, context.call.kv);
    context.call.cpu.install(|| {
        scores.par_chunks_mut(shape.kv_len).enumerate().for_each(|(list, scores)| {
            let (batch, head) = (list / shape.kv_heads, list % shape.kv_heads);
            let len = kv.len(batch, head);
            work(&Keys { kv, batch, head, len, width: shape.head_dim }, &mut scores[..len]);
        });
    });
}

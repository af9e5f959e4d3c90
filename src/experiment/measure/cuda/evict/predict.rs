//! Peak memory of the measure on a GPU, from the shapes.

use super::Evict;
use crate::attention::{Outputs, Shape};
use crate::cache::cuda::DeviceCache;
use crate::policy::Decoding;
use crate::policy::cuda::{judgement_bytes, looks_at_attention};
use crate::tensor::Tensor;
use std::iter::repeat_n;

impl Evict {
    /// Peak bytes besides the inputs: prefill or its judgement, or decoding. Exact where all lists keep the same number
    /// of tokens, else an upper bound, as on the CPU.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.prefill_bytes().max(self.decode_bytes())
    }

    /// Whether the log-sum-exps of all layers are held for the judgement.
    pub(super) fn observes(&self) -> bool {
        self.judges() && looks_at_attention(&self.policy)
    }

    fn prefill_bytes(&self) -> u64 {
        let (cell, cache) = (&self.cell, self.cache_shape());
        let held = DeviceCache::bytes(&cache, repeat_n(cell.context_tokens, cache.lists()), 0).values().sum::<u64>();
        let layer = Shape { batch: cell.batch, ..cell.shape() };
        let copies = Tensor::bytes_of(cell.dtype, layer.q_dims()) + 2 * Tensor::bytes_of(cell.dtype, layer.kv_dims());
        let attention = copies + Outputs::bytes(&layer, cell.dtype) + self.prefill.workspace.bytes();
        let lse = if self.observes() { 4 * cell.shape().rows() as u64 } else { 0 };
        held + lse + attention.max(self.judging_bytes(cell.context_tokens))
    }

    fn decode_bytes(&self) -> u64 {
        let (cell, cache, step) = (&self.cell, self.cache_shape(), self.step_shape());
        let tokens = self.late_tokens();
        let of =
            |most_pages| DeviceCache::bytes(&cache, repeat_n(tokens, cache.lists()), most_pages).values().sum::<u64>();
        // Where lists differ, each may have begun a page more.
        let even = !self.judges() || self.policy.is_even();
        let held = if even { of(0) } else { of(0).max(of(cache.lists() * (cache.pages(tokens) + 1))) };
        let again = match self.policy.schedule.decoding {
            Decoding::EverySteps(steps) if self.judges() && steps <= cell.new_tokens => self.judging_bytes(step.kv_len),
            _ => 0,
        };
        let accumulated = if self.accumulates() { 4 * (cache.lists() * step.kv_len) as u64 } else { 0 };
        let query = Tensor::bytes_of(cell.dtype, step.q_dims());
        held + query + Outputs::bytes(&step, cell.dtype) + self.step.workspace.bytes() + again.max(accumulated)
    }

    /// A judgement of lists of at most `width` tokens, with the attention that is added before it.
    fn judging_bytes(&self, width: usize) -> u64 {
        let lists = self.cache_shape().lists();
        let accumulated = if self.accumulates() { 4 * (lists * width) as u64 } else { 0 };
        accumulated.max(judgement_bytes(&self.policy, lists, width, self.cell.head_dim))
    }
}

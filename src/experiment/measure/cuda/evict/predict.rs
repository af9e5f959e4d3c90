//! Peak memory of the measure on a GPU, from the shapes.

use super::{Chunk, Evict};
use crate::attention::{Outputs, Shape};
use crate::cache::cuda::DeviceCache;
use crate::policy::Decoding;
use crate::policy::cuda::{eviction_bytes, looks_at_attention};
use crate::tensor::Tensor;
use std::iter::repeat_n;

impl Evict {
    /// Peak bytes besides the inputs: a chunk of prefill or its eviction step, or decoding. Exact where all lists keep the same
    /// number of tokens, else an upper bound, as on the CPU.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.prefill_bytes().max(self.decode_bytes())
    }

    /// Whether the log-sum-exps of all layers are held for the eviction step.
    pub(super) fn observes(&self) -> bool {
        self.evicts() && looks_at_attention(&self.policy)
    }

    fn prefill_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| self.chunk_bytes(chunk)).max().unwrap_or(0)
    }

    /// Attention of a chunk, and its eviction step.
    fn chunk_bytes(&self, chunk: &Chunk) -> u64 {
        let (cell, layer) = (&self.cell, chunk.plan.shape());
        let is_first = chunk.tokens.start == 0;
        let tokens = self.lengths().before(chunk.tokens.start) + layer.q_len;
        let copies = Tensor::bytes_of(cell.dtype, layer.q_dims()) + self.copied_bytes(chunk).iter().sum::<u64>();
        let attention = copies + Outputs::bytes(&layer, cell.dtype) + chunk.plan.workspace.bytes();
        let lse = if self.observes() { 4 * (cell.layers * layer.rows()) as u64 } else { 0 };
        let is_rotated = self.rotates() && tokens < chunk.tokens.end;
        let rotated = if is_rotated { self.query_bytes(layer.q_len) } else { 0 };
        let eviction = self.accumulated(layer.kv_len).max(self.eviction(layer.kv_len));
        self.held(tokens, is_first || self.lengths().is_even()) + lse + rotated + attention.max(eviction)
    }

    fn decode_bytes(&self) -> u64 {
        let (cell, step, lengths) = (&self.cell, self.step_shape(), self.lengths());
        let again = match self.policy.schedule.decoding {
            Decoding::EverySteps(steps) if steps <= cell.new_tokens => self.late_eviction(step.kv_len),
            Decoding::Delayed => self.eviction(step.kv_len),
            _ => 0,
        };
        let steps = self.query_bytes(1) + Outputs::bytes(&step, cell.dtype) + self.step.workspace.bytes();
        let recent = self.again.as_ref().map_or(0, |plan| self.query_bytes(plan.shape().q_len));
        self.held(lengths.late(), lengths.is_even()) + steps + recent + again.max(self.accumulated(step.kv_len))
    }

    /// An eviction step between decode steps; the latest queries are asked once more before it.
    fn late_eviction(&self, width: usize) -> u64 {
        let Some(plan) = &self.again else { return self.eviction(width) };
        let (dtype, shape) = (self.cell.dtype, plan.shape());
        let pass = Outputs::bytes(&shape, dtype) + plan.workspace.bytes();
        self.query_bytes(shape.q_len) + pass.max(4 * shape.rows() as u64 + self.eviction(width))
    }

    /// Queries of all layers, so many of each head.
    pub(super) fn query_bytes(&self, queries: usize) -> u64 {
        Tensor::bytes_of(self.cell.dtype, Shape { q_len: queries, ..self.cell.shape() }.q_dims())
    }

    /// The cache when its lists hold `tokens` tokens on average; all the same number if `is_even`.
    fn held(&self, tokens: usize, is_even: bool) -> u64 {
        let cache = self.cache_shape();
        let of =
            |most_pages| DeviceCache::bytes(&cache, repeat_n(tokens, cache.lists()), most_pages).values().sum::<u64>();
        // Where lists differ, each may have begun a page more.
        if is_even { of(0) } else { of(0).max(of(cache.lists() * (cache.pages(tokens) + 1))) }
    }

    /// The attention that tokens of lists of at most `width` received, before it is added.
    fn accumulated(&self, width: usize) -> u64 {
        if self.accumulates() { 4 * (self.cache_shape().lists() * width) as u64 } else { 0 }
    }

    /// An eviction step of lists of at most `width` tokens.
    fn eviction(&self, width: usize) -> u64 {
        eviction_bytes(&self.policy, self.cache_shape().lists(), width, self.cell.head_dim)
    }
}

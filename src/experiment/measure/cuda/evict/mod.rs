//! `evict` on a GPU: prefill, an eviction step over the context, then decode steps over what is retained.
//!
//! The turn of the CPU ([`crate::experiment::measure`]'s `evict`) with the cache in the GPU's memory from the first token
//! on: keys and values are appended, scored, compacted and read there. Prefill attends, in one piece or in chunks, layer by
//! layer to a contiguous copy of what the cache holds (its times are those of the cell's kernel); where heads have kept
//! different numbers of tokens, the decode kernel reads the pages instead. Only what is reported comes to the host, in the
//! checked trial, and for budget allocations by scores these scores. What follows the late queries is told by the same code as on
//! the CPU.

mod predict;
mod trial;

use super::{Bench, CudaTrial, Trial, TrialError, gpu_rows};
use crate::attention::cuda::{CudaKernel, Plan, decode_paged};
use crate::attention::{AttentionError, Shape};
use crate::cache::{self, CacheShape, PAGE_TOKENS};
use crate::device::cuda::{Limits, Program};
use crate::experiment::cell::Cell;
use crate::experiment::measure::evict::lengths::Lengths;
use crate::experiment::measure::prepared::budget_tokens;
use crate::format::GpuRows;
use crate::policy::{Policy, Registry, Statistic};
use std::ops::Range;

struct Evict {
    cell: Cell,
    rows: GpuRows,
    /// Keeps everything where nothing is evicted.
    policy: Policy,
    budget_tokens: usize,
    chunks: Vec<Chunk>,
    /// A decode step of all layers.
    step: Plan,
    /// The same with the latest queries, which eviction steps between decode steps look at.
    again: Option<Plan>,
}

/// A chunk of the context.
struct Chunk {
    tokens: Range<usize>,
    /// Its attention in one layer.
    plan: Plan,
    /// Over the pages, and not over a copy.
    paged: bool,
}

pub(in crate::experiment::measure) fn task(
    cell: &Cell,
    registry: &Registry,
    kernel: &dyn CudaKernel,
    limits: &Limits,
) -> Result<Box<dyn CudaTrial>, String> {
    let policy = match &cell.policy {
        Some(name) => {
            let policy = cell.build_policy(registry).map_err(|error| error.to_string())?.unwrap_or_else(Policy::full);
            policy.check_device(name).map_err(|error| error.to_string())?;
            policy
        }
        None => Policy::full(),
    };
    let budget_tokens = budget_tokens(cell, Some(&policy))?;
    let planned = Evict::plan(cell, policy, budget_tokens, kernel, limits);
    planned.map(|evict| Box::new(evict) as Box<dyn CudaTrial>).map_err(|error| error.to_string())
}

impl Evict {
    fn plan(
        cell: &Cell,
        policy: Policy,
        budget_tokens: usize,
        kernel: &dyn CudaKernel,
        limits: &Limits,
    ) -> Result<Self, AttentionError> {
        let (params, context) = (cell.params(), cell.context_tokens);
        let lengths = Lengths { cell, evicting: Some(&policy).filter(|policy| policy.scorer.is_some()), budget_tokens };
        let rows = gpu_rows(cell)?;
        let paged = |shape: &Shape| decode_paged(shape, &params, rows, limits, PAGE_TOKENS);
        let step =
            paged(&Shape { q_len: 1, kv_len: lengths.longest(lengths.late(), lengths.grown()), ..cell.shape() })?;
        let again = lengths.recent().map(|q_len| paged(&Shape { q_len, ..step.shape() })).transpose()?;
        let chunk = |start: usize| {
            let tokens = start..context.min(start + lengths.chunk());
            let (q_len, is_paged) = (tokens.len(), start > 0 && !lengths.is_even());
            let old = lengths.before(start);
            let kv_len = if is_paged { lengths.longest(old + q_len, q_len) } else { old + q_len };
            let layer = Shape { batch: cell.batch, q_len, kv_len, ..cell.shape() };
            let plan = if is_paged { paged(&layer)? } else { kernel.plan(&layer, &params, rows, limits)? };
            Ok(Chunk { tokens, plan, paged: is_paged })
        };
        let chunks = (0..context).step_by(lengths.chunk()).map(chunk).collect::<Result<_, AttentionError>>()?;
        Ok(Evict { cell: cell.clone(), rows, policy, budget_tokens, chunks, step, again })
    }

    fn evicts(&self) -> bool {
        self.policy.scorer.is_some()
    }

    fn lengths(&self) -> Lengths<'_> {
        let evicting = Some(&self.policy).filter(|_| self.evicts());
        Lengths { cell: &self.cell, evicting, budget_tokens: self.budget_tokens }
    }

    fn accumulates(&self) -> bool {
        self.evicts() && self.policy.looks_at(Statistic::AccumulatedAttention)
    }

    /// Whether keys and queries are rotated to positions inside the cache.
    fn rotates(&self) -> bool {
        self.evicts() && self.policy.rerotates
    }

    /// Bytes of the copies of keys and of values that a layer's attention reads, where it does not read pages.
    fn copied_bytes(&self, chunk: &Chunk) -> [u64; 2] {
        let Shape { batch, kv_heads, kv_len, head_dim, .. } = chunk.plan.shape();
        let bytes = self.rows.lists_bytes(batch * kv_heads, kv_len, head_dim);
        if chunk.paged { [0; 2] } else { bytes.map(|bytes| bytes as u64) }
    }

    /// A decode step of all layers.
    fn step_shape(&self) -> Shape {
        self.step.shape()
    }

    fn cache_shape(&self) -> CacheShape {
        let cell = &self.cell;
        CacheShape {
            batch: cell.layers * cell.batch,
            kv_heads: cell.kv_heads,
            head_dim: cell.head_dim,
            format: cell.kv_format(),
            max_tokens: self.lengths().most(),
            page_tokens: PAGE_TOKENS,
            columns: if self.evicts() { self.policy.columns() } else { &[] },
        }
    }
}

impl CudaTrial for Evict {
    fn bytes(&self) -> u64 {
        self.peak_bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.plan.workspace.bytes()).max().unwrap_or(0)
    }

    fn programs(&self) -> Vec<Program> {
        let (dtype, head_dim) = (self.cell.dtype, self.cell.head_dim);
        let plans = self.chunks.iter().map(|chunk| &chunk.plan).chain([&self.step]).chain(&self.again);
        let own = [cache::cuda::program(self.rows, head_dim), cache::cuda::program(dtype.into(), head_dim)]
            .into_iter()
            .chain(self.policy.programs(self.rows, head_dim));
        plans.flat_map(Plan::programs).chain(own).collect()
    }

    fn trial(&self, bench: Bench<'_>) -> Result<Trial, TrialError> {
        trial::trial(self, bench)
    }
}

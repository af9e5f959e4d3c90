//! `evict` on a GPU: prefill, judgement of the context by a policy, then decode steps over what stayed.
//!
//! The turn of the CPU ([`crate::experiment::measure`]'s `evict`) with the cache in the GPU's memory from the first token
//! on: keys and values are appended, scored, compacted and read there. Prefill takes the context in one piece, layer by
//! layer, as a contiguous copy of a layer's tensors (its times are those of the cell's kernel). Only what is reported
//! comes to the host, in the checked turn, and for allotments by scores these scores. What follows the late queries is
//! told by the same code as on the CPU.

mod predict;
mod turn;

use super::{Bench, Task, Turn, TurnError};
use crate::attention::Shape;
use crate::attention::cuda::{CudaKernel, Plan, decode_paged};
use crate::cache::{CacheShape, Column, PAGE_TOKENS};
use crate::device::cuda::Limits;
use crate::experiment::cell::Cell;
use crate::experiment::measure::budget_tokens;
use crate::policy::{Decoding, Policy, Registry, Statistic};

struct Evict {
    cell: Cell,
    /// Keeps everything where nothing is evicted.
    policy: Policy,
    budget_tokens: usize,
    /// The context of one layer.
    prefill: Plan,
    /// A decode step of all layers.
    step: Plan,
}

pub(super) fn task(cell: &Cell, kernel: &dyn CudaKernel, limits: &Limits) -> Result<Box<dyn Task>, String> {
    let policy = match &cell.policy {
        Some(name) => {
            let policy = Registry::default().policy(name).map_err(|error| error.to_string())?;
            policy.check_device(name).map_err(|error| error.to_string())?;
            refuse(&policy).map_or(Ok(()), |reason| Err(format!("policy '{name}': {reason}; use --device cpu")))?;
            policy
        }
        None => Policy::full(),
    };
    let budget_tokens = budget_tokens(cell, Some(&policy))?;
    let (params, layer) = (cell.params(), Shape { batch: cell.batch, ..cell.shape() });
    let prefill = kernel.plan(&layer, &params, cell.dtype, limits).map_err(|error| error.to_string())?;
    let mut evict = Evict { cell: cell.clone(), policy, budget_tokens, step: prefill.clone(), prefill };
    let step = evict.step_shape();
    evict.step = decode_paged(&step, &params, cell.dtype, limits, PAGE_TOKENS).map_err(|error| error.to_string())?;
    Ok(Box::new(evict))
}

/// What no turn on a GPU does yet, beside what no judgement there does.
fn refuse(policy: &Policy) -> Option<&'static str> {
    let again = policy.schedule.decoding != Decoding::Never;
    let recent = policy.scorer.as_ref().map_or(1, |scorer| scorer.recent_queries());
    let looks_back = recent > 1 && policy.looks_at(Statistic::RecentAttention);
    match () {
        () if policy.schedule.chunk_tokens.is_some() => Some("no prefill in chunks on CUDA yet"),
        () if policy.schedule.decoding == Decoding::Delayed => Some("no delayed judgements on CUDA yet"),
        () if policy.rerotates => Some("keys are turned on CUDA by evict alone, not in experiments yet"),
        () if again && looks_back => Some("judgements between decode steps look at one query on CUDA; add +once"),
        () => None,
    }
}

impl Evict {
    fn judges(&self) -> bool {
        self.policy.scorer.is_some()
    }

    fn accumulates(&self) -> bool {
        self.judges() && self.policy.looks_at(Statistic::AccumulatedAttention)
    }

    /// Decode steps after which the cache is back at its budget; all of them where it is never cut.
    fn grown(&self) -> usize {
        match self.policy.schedule.decoding {
            Decoding::EverySteps(steps) if self.judges() => steps.min(self.cell.new_tokens),
            _ => self.cell.new_tokens,
        }
    }

    /// Tokens of a list on average, at most, while decoding.
    fn late_tokens(&self) -> usize {
        let most = self.cell.context_tokens + self.cell.new_tokens;
        if self.judges() { (self.budget_tokens + self.grown()).min(most) } else { most }
    }

    /// Tokens of the longest list while decoding, at most.
    fn longest(&self) -> usize {
        let (cell, tokens) = (&self.cell, self.late_tokens());
        if !self.judges() || self.policy.is_even() {
            return tokens;
        }
        (self.budget_tokens * cell.kv_heads * cell.layers).min(cell.context_tokens) + self.grown()
    }

    /// A decode step of all layers.
    fn step_shape(&self) -> Shape {
        Shape { q_len: 1, kv_len: self.longest(), ..self.cell.shape() }
    }

    fn cache_shape(&self) -> CacheShape {
        let cell = &self.cell;
        CacheShape {
            batch: cell.layers * cell.batch,
            kv_heads: cell.kv_heads,
            head_dim: cell.head_dim,
            dtype: cell.dtype,
            max_tokens: cell.context_tokens + cell.new_tokens,
            page_tokens: PAGE_TOKENS,
            columns: if self.accumulates() { &[Column::Attention] } else { &[] },
        }
    }
}

impl Task for Evict {
    fn bytes(&self) -> u64 {
        self.peak_bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        self.prefill.workspace.bytes()
    }

    fn turn(&self, bench: Bench<'_>) -> Result<Turn, TurnError> {
        turn::turn(self, bench)
    }
}

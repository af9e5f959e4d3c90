//! What a cell does: one file for each measure, all with the same three parts.
//!
//! `predict` computes the peak memory from the shapes, before anything is allocated; `turn` allocates, runs and times
//! one sample, and in its first, checked turn also compares the result with the f64 reference. Everything a turn
//! allocates is gone when it ends, so every turn of a cell is the same.

mod backward;
mod check;
mod decode;
pub mod eval;
mod evict;
mod forward;
pub mod serve;

pub use check::Truth;

use super::cell::{Cell, Measure};
use super::record::{Drift, Eviction};
use crate::attention::{AttentionError, DenseKv, Forward, Kernel, Shape, kernel};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError};
use crate::policy::{Budget, Policy, PolicyError, Registry};
use crate::workload::{Extents, Workload};
use std::collections::BTreeMap;
use std::time::Instant;

/// A cell with everything its names stand for.
pub struct Prepared {
    /// The cell.
    pub cell: Cell,
    /// Its kernel.
    pub kernel: Box<dyn Kernel>,
    /// Its policy; one that keeps everything where nothing is evicted.
    pub policy: Option<Policy>,
    /// Tokens that each KV head may keep.
    pub budget_tokens: usize,
}

/// Where and on what a turn runs.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The threads.
    pub cpu: &'a Cpu,
    /// The arena in which the inputs live and everything else is allocated.
    pub arena: &'a Arena,
    /// The inputs.
    pub workload: &'a Workload,
    /// What the f64 reference says; present in the checked turn.
    pub truth: Option<&'a Truth>,
}

/// What one turn gave.
#[derive(Default)]
pub struct Turn {
    /// Nanoseconds by phase.
    pub samples_ns: BTreeMap<&'static str, u64>,
    /// Distance from the reference, in a checked turn.
    pub drift: Option<Drift>,
    /// What a policy did, in a checked turn.
    pub eviction: Option<Eviction>,
    /// What a reader should know.
    pub warnings: Vec<String>,
}

/// Why a turn gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// The memory limit was met.
    #[error(transparent)]
    Memory(#[from] ArenaError),
    /// The result is not to be trusted.
    #[error("{0}")]
    Failed(String),
}

impl From<AttentionError> for TurnError {
    fn from(error: AttentionError) -> Self {
        match error {
            AttentionError::Arena(error) => TurnError::Memory(error),
            error => TurnError::Failed(error.to_string()),
        }
    }
}

impl From<PolicyError> for TurnError {
    fn from(error: PolicyError) -> Self {
        match error {
            PolicyError::Arena(error) => TurnError::Memory(error),
            error => TurnError::Failed(error.to_string()),
        }
    }
}

impl Prepared {
    /// Resolves a cell's names.
    ///
    /// # Errors
    /// In words, when a name or the budget means nothing.
    pub fn new(cell: Cell, registry: &Registry) -> Result<Self, String> {
        let kernel = kernel(&cell.kernel).map_err(|error| error.to_string())?;
        let policy = match &cell.policy {
            Some(name) => Some(registry.policy(name).map_err(|error| error.to_string())?),
            None => None,
        };
        let budget: Option<Budget> = match &cell.budget {
            Some(text) => Some(text.parse().map_err(|error: crate::policy::BudgetError| error.to_string())?),
            None => None,
        };
        let budget_tokens = match (&policy, &cell.policy) {
            (Some(policy), Some(name)) => {
                let token_bytes = (2 * cell.head_dim * cell.dtype.bytes()) as u64;
                let lists = cell.shape().batch * cell.kv_heads;
                policy
                    .budget_tokens(name, budget.as_ref(), cell.context_tokens, token_bytes, lists)
                    .map_err(|error| error.to_string())?
            }
            _ => cell.context_tokens,
        };
        Ok(Prepared { cell, kernel, policy, budget_tokens })
    }

    /// Whether the budget leaves its policy nothing to evict. A policy that keeps everything whatever its budget is
    /// another matter: it runs, and is found out.
    pub fn budget_holds_context(&self) -> bool {
        let context = self.cell.context_tokens;
        if let Some(reader) = self.policy.as_ref().and_then(|policy| policy.reader.as_ref()) {
            return self.cell.budget.is_some() && reader.reads_all(self.budget_tokens, context);
        }
        let judges = self.policy.as_ref().is_some_and(|policy| policy.scorer.is_some());
        judges && self.cell.budget.is_some() && self.budget_tokens >= context
    }

    /// Extents of the inputs.
    pub fn extents(&self) -> Extents {
        let Cell { layers, batch, q_heads, kv_heads, head_dim, context_tokens, new_tokens, dtype, .. } = self.cell;
        Extents { layers, batch, q_heads, kv_heads, head_dim, context_tokens, new_tokens, dtype }
    }

    /// Peak bytes of a turn, inputs included, from the shapes alone.
    pub fn predict(&self, threads: usize) -> u64 {
        Workload::bytes(&self.extents())
            + match self.cell.measure {
                Measure::Forward => forward::predict(self, threads),
                Measure::Backward => backward::predict(self, threads),
                Measure::Decode => decode::predict(self, threads),
                Measure::Evict => evict::predict(self, threads),
                Measure::Serve | Measure::Eval => 0,
            }
    }

    /// Bytes of the kernel's scratch memory and materialised scores.
    pub fn workspace_bytes(&self, threads: usize) -> u64 {
        let (shape, params) = (self.cell.shape(), self.cell.params());
        match self.cell.measure {
            Measure::Backward => {
                self.kernel.backward_workspace(&shape, &params, self.cell.dtype, threads).map_or(0, |size| size.bytes())
            }
            _ => self.kernel.workspace(&shape, &params, self.cell.dtype, threads).bytes(),
        }
    }

    /// Floating-point operations of the pass that is timed, and KV bytes that one decode step reads at most.
    pub fn work(&self) -> (u64, u64) {
        let flops = self.cell.shape().flops(&self.cell.params());
        let token_bytes = (2 * self.cell.head_dim * self.cell.dtype.bytes()) as u64;
        let read = |tokens: usize| (self.cell.shape().batch * self.cell.kv_heads * tokens) as u64 * token_bytes;
        match self.cell.measure {
            Measure::Forward => (flops, 0),
            Measure::Backward => (flops * 5 / 2, 0),
            Measure::Decode => (flops, read(self.cell.context_tokens)),
            Measure::Evict => match self.policy.as_ref().and_then(|policy| policy.reader.as_ref()) {
                Some(reader) => {
                    let context = self.cell.context_tokens;
                    (flops, reader.step_bytes(&evict::cache_shape(self), self.budget_tokens, context, context))
                }
                None => (flops, read(self.budget_tokens)),
            },
            Measure::Serve | Measure::Eval => (0, 0),
        }
    }

    /// The phase whose interval decides when sampling stops.
    pub fn main_phase(&self) -> &'static str {
        match self.cell.measure {
            Measure::Forward => "forward",
            Measure::Backward => "backward",
            Measure::Decode | Measure::Evict | Measure::Eval => "decode",
            Measure::Serve => "serve",
        }
    }

    /// Runs and times one sample.
    ///
    /// # Errors
    /// When memory ran out or the result is not to be trusted.
    pub fn turn(&self, bench: Bench<'_>) -> Result<Turn, TurnError> {
        match self.cell.measure {
            Measure::Forward => forward::turn(self, bench),
            Measure::Backward => backward::turn(self, bench),
            Measure::Decode => decode::turn(self, bench),
            Measure::Evict => evict::turn(self, bench),
            Measure::Serve => Err(TurnError::Failed("a simulation takes no turns".into())),
            Measure::Eval => Err(TurnError::Failed("an evaluation takes no turns".into())),
        }
    }
}

impl<'a> Bench<'a> {
    /// Keys and values of the first `tokens` tokens.
    fn dense(&self, tokens: usize) -> Result<DenseKv<'a>, AttentionError> {
        DenseKv::new(self.workload.k.view().tokens(0..tokens), self.workload.v.view().tokens(0..tokens))
    }

    /// A forward pass of the first `shape.q_len` queries over `kv`.
    fn forward<'x>(&'x self, cell: &Cell, shape: Shape, kv: &'x DenseKv<'_>) -> Forward<'x> {
        let q = self.workload.q.view().tokens(0..shape.q_len);
        Forward { shape, params: cell.params(), q, kv, cpu: self.cpu }
    }
}

/// Nanoseconds that `work` takes, and its result.
fn timed<R>(work: impl FnOnce() -> R) -> (u64, R) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_nanos() as u64, result)
}

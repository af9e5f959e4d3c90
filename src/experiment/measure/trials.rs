//! Trials: how the cells of a measure over tensors run, one sample after another.
//!
//! A measure that takes trials predicts the peak of one from the shapes, before anything is allocated; allocates, runs and
//! times one sample; and in the first, checked trial also compares the result with the f64 reference. Everything that a trial
//! allocates is gone when it ends, so every trial of a cell is the same.

use super::Prepared;
use super::check::Truth;
use super::cuda;
use crate::attention::cuda::CudaKernel;
use crate::attention::{AttentionError, DenseKv, Forward, Shape};
use crate::device::Cpu;
use crate::device::cuda::{CudaError, Limits};
use crate::experiment::cell::Cell;
use crate::experiment::engine::InputError;
use crate::experiment::record::{Drift, Eviction, Refused};
use crate::memory::{Arena, ArenaError};
use crate::policy::cuda::DevicePolicyError;
use crate::policy::{PolicyError, Registry};
use crate::ranks::RankError;
use crate::workload::{Workload, WorkloadError};
use std::collections::BTreeMap;
use std::time::Instant;

/// A measure whose cells take trials, on the CPU and, planned by [`Trials::task`], on a GPU.
pub trait Trials: Sync {
    /// Rows `[batch, query head, token]` of the dense result that a cell is checked on.
    fn checked_rows(&self, cell: &Cell, shape: &Shape) -> Vec<[usize; 3]>;

    /// Peak bytes of a trial on the CPU besides its inputs, from the shapes alone.
    fn predict(&self, prepared: &Prepared, threads: usize) -> u64;

    /// Bytes of the kernel's scratch memory and materialised scores in the pass that is measured.
    fn workspace_bytes(&self, prepared: &Prepared, threads: usize) -> u64 {
        let Cell { dtype, .. } = prepared.cell;
        prepared.kernel().workspace(&prepared.cell.shape(), &prepared.cell.params(), dtype, threads).bytes()
    }

    /// What a trial computes and reads.
    fn work(&self, prepared: &Prepared) -> TrialWork;

    /// Runs and times one sample on the CPU.
    ///
    /// # Errors
    /// When memory ran out or the result is not to be trusted.
    fn trial(&self, prepared: &Prepared, bench: Bench<'_>) -> Result<Trial, TrialError>;

    /// What the trials of a cell do on a GPU with `limits`.
    ///
    /// # Errors
    /// In words, when they cannot run there.
    fn task(
        &self,
        cell: &Cell,
        registry: &Registry,
        kernel: &dyn CudaKernel,
        limits: &Limits,
    ) -> Result<Box<dyn cuda::CudaTrial>, String>;
}

/// What a trial computes and reads.
pub struct TrialWork {
    /// Floating-point operations of the pass that is timed.
    pub flops: u64,
    /// The phase that does them.
    pub phase: &'static str,
    /// KV bytes that one decode step reads at most.
    pub kv_bytes_read: u64,
    /// How often a trial does these operations, on average: warm-up passes and forward passes before a backward one count.
    pub passes: f64,
    /// How often it reads these bytes.
    pub reads: f64,
}

/// Where and on what a trial of the CPU runs.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The threads.
    pub cpu: &'a Cpu,
    /// The arena in which the inputs live and everything else is allocated.
    pub arena: &'a Arena,
    /// The inputs.
    pub workload: &'a Workload,
    /// What the f64 reference says; present in the checked trial.
    pub truth: Option<&'a Truth>,
}

/// What one trial gave.
#[derive(Default)]
pub struct Trial {
    /// Nanoseconds by phase.
    pub samples_ns: BTreeMap<&'static str, u64>,
    /// Distance from the reference, in a checked trial.
    pub drift: Option<Drift>,
    /// What a policy did, in a checked trial.
    pub eviction: Option<Eviction>,
    /// What a reader should know.
    pub warnings: Vec<String>,
}

/// Why a trial gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The memory limit was met.
    #[error(transparent)]
    Memory(#[from] ArenaError),
    /// A GPU refused, memory or something else.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The result is not to be trusted.
    #[error("{0}")]
    Failed(String),
}

impl TrialError {
    /// Whether the GPU's context was lost with it ([`CudaError::is_fatal`]).
    pub fn is_fatal(&self) -> bool {
        matches!(self, TrialError::Cuda(error) if error.is_fatal())
    }

    /// Whether there was not enough memory.
    pub fn is_memory(&self) -> bool {
        match self {
            TrialError::Memory(_) => true,
            TrialError::Cuda(error) => error.is_memory(),
            TrialError::Failed(_) => false,
        }
    }

    /// The memory that was not given, if this is why and it is known how much.
    pub fn refused(&self) -> Option<Refused> {
        let (TrialError::Memory(arena) | TrialError::Cuda(CudaError::Arena(arena))) = self else {
            let TrialError::Cuda(CudaError::OutOfMemory { label, requested_bytes, free_bytes }) = *self else {
                return None;
            };
            return Some(Refused { label: label.name().into(), requested_bytes, free_bytes: Some(free_bytes) });
        };
        Some(match *arena {
            ArenaError::Limit { label, requested_bytes, live_bytes, limit_bytes } => {
                Refused { label: label.name().into(), requested_bytes, free_bytes: Some(limit_bytes - live_bytes) }
            }
            ArenaError::System { label, requested_bytes, .. } => {
                Refused { label: label.name().into(), requested_bytes, free_bytes: None }
            }
        })
    }
}

impl From<InputError> for TrialError {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Workload(WorkloadError::Arena(error)) => TrialError::Memory(error),
            InputError::Workload(error) => TrialError::Failed(error.to_string()),
            InputError::Host(_) => TrialError::Failed(error.to_string()),
            InputError::Cuda(error) => TrialError::Cuda(error),
        }
    }
}

impl From<AttentionError> for TrialError {
    fn from(error: AttentionError) -> Self {
        match error {
            AttentionError::Arena(error) => TrialError::Memory(error),
            error => TrialError::Failed(error.to_string()),
        }
    }
}

impl From<RankError> for TrialError {
    fn from(error: RankError) -> Self {
        match error {
            RankError::Arena(error) | RankError::Attention(AttentionError::Arena(error)) => TrialError::Memory(error),
            error => TrialError::Failed(error.to_string()),
        }
    }
}

impl From<PolicyError> for TrialError {
    fn from(error: PolicyError) -> Self {
        match error {
            PolicyError::Arena(error) => TrialError::Memory(error),
            error => TrialError::Failed(error.to_string()),
        }
    }
}

impl From<DevicePolicyError> for TrialError {
    fn from(error: DevicePolicyError) -> Self {
        match error {
            DevicePolicyError::Policy(error) => error.into(),
            DevicePolicyError::Cuda(error) => error.into(),
        }
    }
}

impl<'a> Bench<'a> {
    /// Keys and values of the first `tokens` tokens.
    pub(super) fn dense(&self, tokens: usize) -> Result<DenseKv<'a>, AttentionError> {
        DenseKv::new(self.workload.k.view().tokens(0..tokens), self.workload.v.view().tokens(0..tokens))
    }

    /// A forward pass of the first `shape.q_len` queries over `kv`.
    pub(super) fn forward<'x>(&'x self, cell: &Cell, shape: Shape, kv: &'x DenseKv<'_>) -> Forward<'x> {
        let q = self.workload.q.view().tokens(0..shape.q_len);
        Forward { shape, params: cell.params(), q, kv, cpu: self.cpu }
    }
}

/// Nanoseconds that `work` takes, and its result.
pub(super) fn timed<R>(work: impl FnOnce() -> R) -> (u64, R) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_nanos() as u64, result)
}

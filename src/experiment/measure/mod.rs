//! What a cell does: one file for each measure, all with the same three parts.
//!
//! `predict` computes the peak memory from the shapes, before anything is allocated; `turn` allocates, runs and times
//! one sample, and in its first, checked turn also compares the result with the f64 reference. Everything a turn
//! allocates is gone when it ends, so every turn of a cell is the same. The files here are the CPU's; [`cuda`] has those
//! of a GPU, and [`Place`] says which of the two a cell has.

mod backward;
mod check;
pub mod cuda;
mod decode;
pub mod eval;
mod evict;
mod forward;
pub mod serve;

pub use check::Truth;

use super::cell::{Cell, Device, Measure};
use super::engine::{Engine, InputError, Inputs, Tensors};
use super::record::{Drift, Eviction, Refused};
use crate::attention::cuda::cuda_kernel;
use crate::attention::{AttentionError, DenseKv, Forward, Kernel, Shape, kernel};
use crate::device::Cpu;
use crate::device::cuda::CudaError;
use crate::memory::{Arena, ArenaError};
use crate::policy::cuda::DevicePolicyError;
use crate::policy::{Budget, BudgetError, Policy, PolicyError, Registry};
use crate::workload::{Extents, Workload, WorkloadError};
use std::collections::BTreeMap;
use std::time::Instant;

/// A cell with everything its names stand for.
pub struct Prepared {
    /// The cell.
    pub cell: Cell,
    /// Its kernel, where it runs.
    pub place: Place,
    /// Its policy; one that keeps everything where nothing is evicted.
    pub policy: Option<Policy>,
    /// Tokens that each KV head may keep.
    pub budget_tokens: usize,
}

/// What the name of a cell's kernel stands for on the device of the run.
pub enum Place {
    /// A kernel of the CPU.
    Cpu(Box<dyn Kernel>),
    /// What is planned for a GPU.
    Cuda(Box<dyn cuda::Task>),
    /// Nothing that runs there, and why: the cell is skipped.
    Nowhere(String),
}

/// Where and on what a turn of the CPU runs.
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
    /// A GPU refused, memory or something else.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The result is not to be trusted.
    #[error("{0}")]
    Failed(String),
}

impl TurnError {
    /// Whether the GPU's context was lost with it ([`CudaError::is_fatal`]).
    pub fn is_fatal(&self) -> bool {
        matches!(self, TurnError::Cuda(error) if error.is_fatal())
    }

    /// Whether there was not enough memory.
    pub fn is_memory(&self) -> bool {
        match self {
            TurnError::Memory(_) => true,
            TurnError::Cuda(error) => error.is_memory(),
            TurnError::Failed(_) => false,
        }
    }

    /// The memory that was not given, if this is why and it is known how much.
    pub fn refused(&self) -> Option<Refused> {
        let (TurnError::Memory(arena) | TurnError::Cuda(CudaError::Arena(arena))) = self else {
            let TurnError::Cuda(CudaError::OutOfMemory { label, asked_bytes, free_bytes }) = *self else { return None };
            return Some(Refused { label: label.name().into(), asked_bytes, free_bytes: Some(free_bytes) });
        };
        Some(match *arena {
            ArenaError::Limit { label, asked_bytes, live_bytes, limit_bytes } => {
                Refused { label: label.name().into(), asked_bytes, free_bytes: Some(limit_bytes - live_bytes) }
            }
            ArenaError::System { label, asked_bytes, .. } => {
                Refused { label: label.name().into(), asked_bytes, free_bytes: None }
            }
        })
    }
}

impl From<InputError> for TurnError {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Workload(WorkloadError::Arena(error)) => TurnError::Memory(error),
            InputError::Workload(error) => TurnError::Failed(error.to_string()),
            InputError::Host(_) => TurnError::Failed(error.to_string()),
            InputError::Cuda(error) => TurnError::Cuda(error),
        }
    }
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

impl From<DevicePolicyError> for TurnError {
    fn from(error: DevicePolicyError) -> Self {
        match error {
            DevicePolicyError::Policy(error) => error.into(),
            DevicePolicyError::Cuda(error) => error.into(),
        }
    }
}

/// Says whether a cell's kernel is known, here or on another device, and does what the cell measures where every kernel
/// does it or none.
///
/// # Errors
/// In words, when it could never run.
pub fn known(cell: &Cell) -> Result<(), String> {
    let here = match cell.device {
        Device::Cpu => kernel(&cell.kernel).map(|_| ()),
        Device::Cuda => cuda_kernel(&cell.kernel).map(|_| ()),
    };
    let elsewhere = match cell.device {
        Device::Cpu => cuda_kernel(&cell.kernel).is_ok(),
        Device::Cuda => kernel(&cell.kernel).is_ok(),
    };
    match (here, cell.device) {
        (Ok(()), Device::Cpu) => {
            let kernel = kernel(&cell.kernel).map_err(|error| error.to_string())?;
            let pass = kernel.backward_workspace(&cell.shape(), &cell.params(), cell.dtype, 1);
            match cell.measure == Measure::Backward && pass.is_none() {
                true => Err(format!("kernel '{}' has no backward pass; use naive or tiled", cell.kernel)),
                false => Ok(()),
            }
        }
        (Ok(()), Device::Cuda) => Ok(()),
        // Experiments that name kernels of the CPU run on a GPU all the same; those cells are skipped.
        (Err(_), Device::Cuda) if elsewhere => Ok(()),
        (Err(_), Device::Cpu) if elsewhere => Err(format!("kernel '{}' runs on a GPU: --device cuda", cell.kernel)),
        (Err(error), _) => Err(error.to_string()),
    }
}

/// Tokens that each KV head of a cell may keep.
fn budget_tokens(cell: &Cell, policy: Option<&Policy>) -> Result<usize, String> {
    let budget: Option<Budget> = match &cell.budget {
        Some(text) => Some(text.parse().map_err(|error: BudgetError| error.to_string())?),
        None => None,
    };
    let (Some(policy), Some(name)) = (policy, &cell.policy) else { return Ok(cell.context_tokens) };
    let token_bytes = cell.kv_format().token_bytes(cell.head_dim);
    let lists = cell.shape().batch * cell.kv_heads;
    let tokens = policy.budget_tokens(name, budget.as_ref(), cell.context_tokens, token_bytes, lists);
    tokens.map_err(|error| error.to_string())
}

impl Prepared {
    /// Resolves a cell's names.
    ///
    /// # Errors
    /// In words, when a name or the budget means nothing.
    pub fn new(cell: Cell, registry: &Registry, engine: Engine<'_>) -> Result<Self, String> {
        let place = engine.place(&cell, registry).unwrap_or_else(Place::Nowhere);
        let policy = cell.build_policy(registry).map_err(|error| error.to_string())?;
        let budget_tokens = budget_tokens(&cell, policy.as_ref())?;
        Ok(Prepared { cell, place, policy, budget_tokens })
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

    /// The kernel of a cell that runs on the CPU.
    fn kernel(&self) -> &dyn Kernel {
        match &self.place {
            Place::Cpu(kernel) => &**kernel,
            _ => unreachable!("the CPU's form of a measure runs for cells of the CPU"),
        }
    }

    /// Peak bytes of a turn, inputs included, from the shapes alone; 0 for a cell that has no place.
    pub fn predict(&self, engine: Engine<'_>) -> u64 {
        let threads = engine.cpu().threads();
        let turn_bytes = match &self.place {
            Place::Nowhere(_) => return 0,
            Place::Cuda(task) => task.bytes(),
            Place::Cpu(_) => match self.cell.measure {
                Measure::Forward => forward::predict(self, threads),
                Measure::Backward => backward::predict(self, threads),
                Measure::Decode => decode::predict(self, threads),
                Measure::Evict => evict::predict(self, threads),
                Measure::Serve | Measure::Eval => 0,
            },
        };
        engine.input_bytes(&self.extents()) + turn_bytes
    }

    /// Bytes of the kernel's scratch memory and materialised scores.
    pub fn workspace_bytes(&self, threads: usize) -> u64 {
        let (shape, params, dtype) = (self.cell.shape(), self.cell.params(), self.cell.dtype);
        match (&self.place, self.cell.measure) {
            (Place::Nowhere(_), _) => 0,
            (Place::Cuda(task), _) => task.workspace_bytes(),
            (Place::Cpu(kernel), Measure::Backward) => {
                kernel.backward_workspace(&shape, &params, dtype, threads).map_or(0, |size| size.bytes())
            }
            (Place::Cpu(kernel), _) => kernel.workspace(&shape, &params, dtype, threads).bytes(),
        }
    }

    /// Whose matrix products the kernel uses, where that depends on what is installed.
    pub fn products(&self, engine: Engine<'_>) -> Option<String> {
        match (&self.place, engine) {
            (Place::Cuda(task), Engine::Cuda(gpu)) => task.products(&*gpu.runtime().ok()?),
            _ => None,
        }
    }

    /// Floating-point operations of the pass that is timed, and KV bytes that one decode step reads at most.
    pub fn work(&self) -> (u64, u64) {
        let flops = self.cell.shape().flops(&self.cell.params());
        let token_bytes = self.cell.kv_format().token_bytes(self.cell.head_dim);
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

    /// Runs and times one sample; with `truth`, which is the checked turn, the result is compared.
    ///
    /// # Errors
    /// When memory ran out or the result is not to be trusted.
    pub fn turn(&self, engine: Engine<'_>, inputs: &Inputs, truth: Option<&Truth>) -> Result<Turn, TurnError> {
        let arena = &inputs.arena;
        match (&self.place, &inputs.tensors, engine) {
            (Place::Cuda(task), Tensors::Gpu(inputs), Engine::Cuda(gpu)) => {
                let runtime = gpu.runtime()?;
                let turned = task.turn(cuda::Bench { runtime: &runtime, arena, inputs, truth });
                // All that the turn began ends here, so that what it broke is its own failure and not that of who comes next.
                runtime.device().wait()?;
                turned
            }
            (Place::Cpu(_), Tensors::Host(workload), Engine::Cpu(cpu)) => {
                self.turn_on_cpu(Bench { cpu, arena, workload, truth })
            }
            (Place::Nowhere(reason), ..) => Err(TurnError::Failed(reason.clone())),
            _ => Err(TurnError::Failed("the inputs are on another device than the kernel".into())),
        }
    }

    fn turn_on_cpu(&self, bench: Bench<'_>) -> Result<Turn, TurnError> {
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

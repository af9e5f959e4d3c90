//! A cell that takes trials, with everything that its names stand for: its kernel or its plan for a GPU, its policy, its budget.

use super::check::Truth;
use super::cuda;
use super::trials::{Bench, Trial, TrialError, TrialWork, Trials};
use crate::attention::Kernel;
use crate::device::Cpu;
use crate::experiment::cell::Cell;
use crate::experiment::engine::{Engine, Inputs, Tensors};
use crate::policy::{Budget, BudgetError, Decoding, Policy, Registry};
use crate::workload::{Extents, Workload};

/// A cell with everything its names stand for.
pub struct Prepared {
    /// The cell.
    pub cell: Cell,
    /// How its measure takes trials.
    trials: &'static dyn Trials,
    /// Its kernel, where it runs.
    pub implementation: Implementation,
    /// Its policy; one that keeps everything where nothing is evicted.
    pub policy: Option<Policy>,
    /// Tokens that each KV head may keep.
    pub budget_tokens: usize,
}

/// What the name of a cell's kernel stands for on the device of the run.
pub enum Implementation {
    /// A kernel of the CPU.
    Cpu(Box<dyn Kernel>),
    /// What is planned for a GPU.
    Cuda(Box<dyn cuda::CudaTrial>),
    /// Nothing that runs there, and why: the cell is skipped.
    Missing(String),
}

/// Tokens that each KV head of a cell may keep.
pub(super) fn budget_tokens(cell: &Cell, policy: Option<&Policy>) -> Result<usize, String> {
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
        let trials = cell.measure.trials().ok_or_else(|| format!("{} takes no trials", cell.measure.name()))?;
        let implementation = engine.implementation(&cell, registry).unwrap_or_else(Implementation::Missing);
        let policy = cell.build_policy(registry).map_err(|error| error.to_string())?;
        let budget_tokens = budget_tokens(&cell, policy.as_ref())?;
        Ok(Prepared { cell, trials, implementation, policy, budget_tokens })
    }

    /// Whether the budget leaves its policy nothing to evict. A policy that keeps everything whatever its budget is
    /// another matter: it runs, and is found out.
    pub fn budget_holds_context(&self) -> bool {
        let context = self.cell.context_tokens;
        if let Some(selection) = self.policy.as_ref().and_then(|policy| policy.selection.as_ref()) {
            return self.cell.budget.is_some() && selection.reads_all(self.budget_tokens, context);
        }
        let Some(policy) = self.policy.as_ref().filter(|policy| policy.is_bound_by_budget()) else { return false };
        let held = match policy.schedule.decoding {
            // As many as there are at the last of its evictions.
            Decoding::EverySteps(steps) => context + self.cell.new_tokens / steps * steps,
            _ => context,
        };
        self.cell.budget.is_some() && self.budget_tokens >= held
    }

    /// Extents of the inputs.
    pub fn extents(&self) -> Extents {
        let Cell { layers, batch, q_heads, kv_heads, head_dim, context_tokens, new_tokens, dtype, .. } = self.cell;
        Extents { layers, batch, q_heads, kv_heads, head_dim, context_tokens, new_tokens, dtype }
    }

    /// The kernel of a cell that runs on the CPU.
    pub(super) fn kernel(&self) -> &dyn Kernel {
        match &self.implementation {
            Implementation::Cpu(kernel) => &**kernel,
            _ => unreachable!("the CPU's form of a measure runs for cells of the CPU"),
        }
    }

    /// Peak bytes of a trial, inputs included, from the shapes alone; 0 for a cell that has none.
    pub fn predict(&self, engine: Engine<'_>) -> u64 {
        let threads = engine.cpu().threads();
        let trial_bytes = match &self.implementation {
            Implementation::Missing(_) => return 0,
            Implementation::Cuda(task) => task.bytes(),
            Implementation::Cpu(_) => self.trials.predict(self, threads),
        };
        engine.input_bytes(&self.extents()) + trial_bytes
    }

    /// Bytes of the kernel's scratch memory and materialised scores; 0 for a cell that has none.
    pub fn workspace_bytes(&self, threads: usize) -> u64 {
        match &self.implementation {
            Implementation::Missing(_) => 0,
            Implementation::Cuda(task) => task.workspace_bytes(),
            Implementation::Cpu(_) => self.trials.workspace_bytes(self, threads),
        }
    }

    /// Whose GEMM the kernel uses, where that depends on what is installed.
    pub fn gemm(&self, engine: Engine<'_>) -> Option<String> {
        match (&self.implementation, engine) {
            (Implementation::Cuda(task), Engine::Cuda(gpu)) => task.gemm(&*gpu.runtime().ok()?),
            _ => None,
        }
    }

    /// What a trial computes and reads.
    pub fn work(&self) -> TrialWork {
        self.trials.work(self)
    }

    /// What the f64 reference says of it ([`Truth::compute`]).
    ///
    /// # Errors
    /// When the inputs do not fit together.
    pub fn truth(&self, workload: &Workload, cpu: &Cpu) -> Result<Truth, TrialError> {
        Truth::compute(self.trials, &self.cell, workload, cpu)
    }

    /// Bytes of keys and values of so many tokens in every list.
    pub(super) fn kv_bytes(&self, tokens: usize) -> u64 {
        let list_bytes = self.cell.kv_format().list_bytes(self.cell.head_dim, tokens);
        (self.cell.shape().batch * self.cell.kv_heads) as u64 * list_bytes
    }

    /// Runs and times one sample; with `truth`, which is the checked trial, the result is compared.
    ///
    /// # Errors
    /// When memory ran out or the result is not to be trusted.
    pub fn trial(&self, engine: Engine<'_>, inputs: &Inputs, truth: Option<&Truth>) -> Result<Trial, TrialError> {
        let arena = &inputs.arena;
        match (&self.implementation, &inputs.tensors, engine) {
            (Implementation::Cuda(task), Tensors::Gpu(inputs), Engine::Cuda(gpu)) => {
                let runtime = gpu.runtime()?;
                let done = task.trial(cuda::Bench { runtime: &runtime, arena, inputs, truth });
                // All that the trial began ends here, so that what it broke is its own failure and not that of who comes next.
                runtime.device().wait()?;
                done
            }
            (Implementation::Cpu(_), Tensors::Host(workload), Engine::Cpu(cpu)) => {
                self.trials.trial(self, Bench { cpu, arena, workload, truth })
            }
            (Implementation::Missing(reason), ..) => Err(TrialError::Failed(reason.clone())),
            _ => Err(TrialError::Failed("the inputs are on another device than the kernel".into())),
        }
    }
}

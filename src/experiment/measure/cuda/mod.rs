//! What a cell does on a GPU: one file for each measure.
//!
//! Everything that a trial on the CPU promises holds here: memory comes from the arena, which counts the GPU's, is gone
//! when the trial ends, and is what `bytes` said; the checked trial fills outputs with NaN, reads them back and compares
//! them with the f64 reference. Times are the GPU's own, by events, with a cold L2 ([`Runtime::sweep_l2`]).

pub(super) mod backward;
pub(super) mod decode;
pub(super) mod evict;
pub(super) mod forward;
mod inputs;
mod written;

pub use inputs::Inputs;
use written::Written;

use super::{Trial, TrialError, Truth};
use crate::attention::AttentionError;
use crate::attention::cuda::cuda_kernel;
use crate::device::cuda::{Limits, Program, Runtime};
use crate::experiment::cell::Cell;
use crate::format::GpuRows;
use crate::memory::Arena;
use crate::policy::Registry;

/// What a trial does on a GPU, planned.
pub trait CudaTrial {
    /// Bytes that a trial takes at its peak besides the inputs.
    fn bytes(&self) -> u64;

    /// Bytes of the kernel's scratch memory and materialised scores.
    fn workspace_bytes(&self) -> u64;

    /// Everything that its trials may compile.
    fn programs(&self) -> Vec<Program>;

    /// Whose GEMM the kernel uses, where it could use cuBLAS's.
    fn gemm(&self, _runtime: &Runtime) -> Option<String> {
        None
    }

    /// Runs and times one sample.
    ///
    /// # Errors
    /// When memory ran out, the GPU failed, or the result is not to be trusted.
    fn trial(&self, bench: Bench<'_>) -> Result<Trial, TrialError>;
}

/// Where and on what a trial runs.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The GPU and its compiler.
    pub runtime: &'a Runtime,
    /// The arena that counts the GPU's memory.
    pub arena: &'a Arena,
    /// The inputs, in the GPU's memory.
    pub inputs: &'a Inputs,
    /// What the f64 reference says; present in the checked trial.
    pub truth: Option<&'a Truth>,
}

/// What a cell's trials do on a GPU with `limits`, with the policies of `registry`.
///
/// # Errors
/// In words, when they cannot run there.
pub(in crate::experiment) fn task(
    cell: &Cell,
    registry: &Registry,
    limits: &Limits,
) -> Result<Box<dyn CudaTrial>, String> {
    let kernel = cuda_kernel(&cell.kernel).map_err(|error| error.to_string())?;
    gpu_rows(cell).map_err(|error| error.to_string())?;
    let trials = cell.measure.trials().ok_or_else(|| format!("{} takes no trials", cell.measure.name()))?;
    trials.task(cell, registry, kernel, limits)
}

/// How the rows of a cell lie in a GPU's memory.
fn gpu_rows(cell: &Cell) -> Result<GpuRows, AttentionError> {
    GpuRows::new(cell.dtype, cell.kv_format()).map_err(AttentionError::Option)
}

/// A task, or what its kernel cannot do.
type Planned = Result<Box<dyn CudaTrial>, AttentionError>;

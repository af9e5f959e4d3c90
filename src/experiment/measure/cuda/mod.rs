//! What a cell does on a GPU: one file for each measure.
//!
//! Everything that a turn on the CPU promises holds here: memory comes from the arena, which counts the GPU's, is gone
//! when the turn ends, and is what `bytes` said; the checked turn fills outputs with NaN, reads them back and compares
//! them with the f64 reference. Times are the GPU's own, by events, with a cold L2 ([`Runtime::sweep_l2`]).

mod backward;
mod decode;
mod evict;
mod forward;
mod inputs;
mod pages;

pub use inputs::Inputs;

use super::{Truth, Turn, TurnError};
use crate::attention::cuda::{CudaKernel, Results, cuda_kernel};
use crate::attention::{AttentionError, Outputs, Shape};
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Limits, Runtime};
use crate::experiment::cell::{Cell, Measure};
use crate::memory::{Arena, Label};
use crate::tensor::DType;

/// What a turn does on a GPU, planned.
pub trait Task {
    /// Bytes that a turn takes at its peak besides the inputs.
    fn bytes(&self) -> u64;

    /// Bytes of the kernel's scratch memory and materialised scores.
    fn workspace_bytes(&self) -> u64;

    /// Runs and times one sample.
    ///
    /// # Errors
    /// When memory ran out, the GPU failed, or the result is not to be trusted.
    fn turn(&self, bench: Bench<'_>) -> Result<Turn, TurnError>;
}

/// Where and on what a turn runs.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The GPU and its compiler.
    pub runtime: &'a Runtime,
    /// The arena that counts the GPU's memory.
    pub arena: &'a Arena,
    /// The inputs, in the GPU's memory.
    pub inputs: &'a Inputs,
    /// What the f64 reference says; present in the checked turn.
    pub truth: Option<&'a Truth>,
}

/// What a cell's turns do on a GPU with `limits`.
///
/// # Errors
/// In words, when they cannot run there.
pub(in crate::experiment) fn task(cell: &Cell, limits: &Limits) -> Result<Box<dyn Task>, String> {
    let kernel = cuda_kernel(&cell.kernel).map_err(|error| error.to_string())?;
    let task = match cell.measure {
        Measure::Forward => forward::task(cell, kernel, limits),
        Measure::Backward => backward::task(kernel),
        Measure::Decode => decode::task(cell, kernel, limits),
        Measure::Evict => evict::task(kernel),
        Measure::Serve => return Err("a simulation needs no GPU".into()),
    };
    task.map_err(|error: AttentionError| error.to_string())
}

/// A task, or what its kernel cannot do.
type Planned = Result<Box<dyn Task>, AttentionError>;

/// A measure that no kernel has on a GPU yet.
fn not_yet(kernel: &dyn CudaKernel, what: &'static str) -> Planned {
    Err(AttentionError::Unsupported { kernel: kernel.name(), what, instead: "--device cpu" })
}

/// What a forward pass writes, in a GPU's memory.
struct Written {
    shape: Shape,
    dtype: DType,
    o: DeviceBuffer,
    lse: DeviceBuffer,
}

impl Written {
    /// As much as [`Outputs::bytes`] says. In a checked turn it is filled with NaN, so that what a kernel does not write
    /// is seen.
    fn allocate(bench: Bench<'_>, shape: Shape, dtype: DType) -> Result<Self, CudaError> {
        let device: &Device = bench.runtime.device();
        let lse_bytes = DType::F32.bytes() as u64 * shape.rows() as u64;
        let o_bytes = Outputs::bytes(&shape, dtype) - lse_bytes;
        let mut o = device.alloc(bench.arena, Label::Activations, o_bytes)?;
        let mut lse = device.alloc(bench.arena, Label::Activations, lse_bytes)?;
        if bench.truth.is_some() {
            o.fill(0xff)?;
            lse.fill(0xff)?;
        }
        Ok(Written { shape, dtype, o, lse })
    }

    fn results(&mut self) -> Results<'_> {
        Results { o: &mut self.o, lse: &mut self.lse }
    }

    /// A copy on the host, outside every measured arena.
    fn read(&self) -> Result<Outputs, TurnError> {
        let mut outputs = Outputs::allocate(&Arena::unlimited(), &self.shape, self.dtype)?;
        self.o.read(outputs.o.bytes_mut())?;
        self.lse.read(bytemuck::cast_slice_mut(&mut outputs.lse))?;
        Ok(outputs)
    }
}

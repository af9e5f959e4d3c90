//! A planned pass over tensors in a GPU's memory.

use super::Plan;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Operands, Problem, Runtime};
use crate::memory::{Arena, Label};

/// What a pass reads.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub k: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub v: &'a DeviceBuffer,
}

/// What a pass writes.
pub struct Results<'a> {
    /// `[B, Hq, Lq, D]`, in the inputs' type.
    pub o: &'a mut DeviceBuffer,
    /// `[B, Hq, Lq]` in f32.
    pub lse: &'a mut DeviceBuffer,
}

/// Scratch memory of a pass on the GPU, reusable for passes of the same plan.
pub struct Scratch {
    scores: DeviceBuffer,
    partials: DeviceBuffer,
}

impl Plan {
    /// Takes the scratch memory: [`super::WorkspaceSize::bytes`] of the plan's workspace.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn scratch(&self, device: &Device, arena: &Arena) -> Result<Scratch, CudaError> {
        Ok(Scratch {
            scores: device.alloc(arena, Label::Scores, 4 * self.workspace.scores as u64)?,
            partials: device.alloc(arena, Label::Workspace, 4 * self.workspace.scratch as u64)?,
        })
    }

    /// Runs the pass and waits for it; the GPU's own time for it in nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is smaller than the plan's extents say, [`CudaError::Compile`] and
    /// [`CudaError::Driver`] when the kernels do not compile or run.
    pub fn forward(
        &self,
        runtime: &Runtime,
        inputs: Inputs<'_>,
        results: Results<'_>,
        scratch: &mut Scratch,
    ) -> Result<u64, CudaError> {
        let Inputs { q, k, v } = inputs;
        let Results { o, lse } = results;
        let mut operands = Operands { q, k, v, o, lse, scores: &mut scratch.scores, partials: &mut scratch.partials };
        let problem = Problem::new(&self.extents, &mut operands)?;
        runtime.device().run(&*runtime.module(&self.program)?, &self.launches, &[&problem])
    }
}

//! A planned backward pass on a GPU.

use super::{Inputs, Plan, Scratch};
use crate::attention::WorkspaceSize;
use crate::device::cuda::{Argument, BackwardOperands, CudaError, Device, DeviceBuffer, Program, Runtime, backward};
use crate::memory::Arena;

/// What runs for one backward pass: of `partials` the first part is `rowsum(do * o)`.
#[derive(Debug, Clone)]
pub struct BackwardPlan(pub(super) Plan);

/// What a backward pass reads.
#[derive(Clone, Copy)]
pub struct BackwardInputs<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub k: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub v: &'a DeviceBuffer,
    /// What the forward pass wrote, `[B, Hq, Lq, D]`.
    pub o: &'a DeviceBuffer,
    /// What the forward pass wrote, `[B, Hq, Lq]` in f32.
    pub lse: &'a DeviceBuffer,
    /// Gradient of the loss by `o`, `[B, Hq, Lq, D]`.
    pub grad_o: &'a DeviceBuffer,
}

/// What a backward pass writes, in the inputs' type; of `k` and `v` summed over the group's query heads.
pub struct BackwardResults<'a> {
    /// By `q`, `[B, Hq, Lq, D]`.
    pub q: &'a mut DeviceBuffer,
    /// By `k`, `[B, Hkv, Lk, D]`.
    pub k: &'a mut DeviceBuffer,
    /// By `v`, `[B, Hkv, Lk, D]`.
    pub v: &'a mut DeviceBuffer,
}

impl BackwardPlan {
    /// Everything that running it may compile.
    pub fn programs(&self) -> Vec<Program> {
        self.0.programs()
    }

    /// Scratch memory: the size that is allocated, and the size that is predicted.
    pub fn workspace(&self) -> WorkspaceSize {
        self.0.workspace
    }

    /// Takes the scratch memory.
    ///
    /// # Errors
    /// As [`Plan::scratch`].
    pub fn scratch(&self, device: &Device, arena: &Arena) -> Result<Scratch, CudaError> {
        self.0.scratch(device, arena)
    }

    /// Runs the pass and waits for it; the GPU's own time for it in nanoseconds.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn run(
        &self,
        runtime: &Runtime,
        inputs: BackwardInputs<'_>,
        results: BackwardResults<'_>,
        scratch: &mut Scratch,
    ) -> Result<u64, CudaError> {
        let BackwardInputs { q, k, v, o, lse, grad_o } = inputs;
        let BackwardResults { q: grad_q, k: grad_k, v: grad_v } = results;
        let Scratch { scores, partials } = scratch;
        let extents = &self.0.extents;
        let maps = match &self.0.tma_tiles {
            Some(tma_tiles) => {
                let [q_map, k_map, v_map] = tma_tiles.maps(extents, Inputs { q, k, v })?;
                vec![q_map, k_map, v_map, tma_tiles.map_of_queries(extents, grad_o)?]
            }
            None => Vec::new(),
        };
        let mut operands = BackwardOperands { q, k, v, o, lse, grad_o, grad_q, grad_k, grad_v, scores, partials };
        let (problem, gradients) = backward(extents, &mut operands)?;
        // A kernel takes as many of the arguments as it has parameters.
        let mut arguments: Vec<&dyn Argument> = vec![&problem, &gradients];
        arguments.extend(maps.iter().map(|map| map as &dyn Argument));
        runtime.device().run(&*runtime.module(&self.0.program)?, &self.0.launches, &arguments)
    }
}

//! A planned pass over tensors in a GPU's memory.

use super::{LibraryPass, Plan, TmaTiles};
use crate::attention::{Outputs, WorkspaceSize};
use crate::device::cuda::{
    Argument, Cublas, CudaError, Device, DeviceBuffer, Extents, Operands, PagedKv, Pages, Problem, Ready, Runtime,
    TensorMap,
};
use crate::memory::{Arena, Label};
use std::sync::MutexGuard;

/// What a pass reads.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: &'a DeviceBuffer,
    /// `[B, Hkv, Lk]` rows, as [`crate::format::GpuRows::lists_bytes`] has them.
    pub k: &'a DeviceBuffer,
    /// Likewise.
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
    pub(super) scores: DeviceBuffer,
    pub(super) partials: DeviceBuffer,
}

impl Scratch {
    /// Takes so much.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn take(device: &Device, arena: &Arena, size: WorkspaceSize) -> Result<Self, CudaError> {
        Ok(Scratch {
            scores: device.alloc(arena, Label::Scores, 4 * size.scores as u64)?,
            partials: device.alloc(arena, Label::Workspace, 4 * size.scratch as u64)?,
        })
    }

    /// Whether it has room for a plan.
    pub fn fits(&self, plan: &Plan) -> bool {
        let has = |buffer: &DeviceBuffer, elements: usize| buffer.bytes() >= 4 * elements as u64;
        has(&self.scores, plan.workspace.scores) && has(&self.partials, plan.workspace.scratch)
    }
}

impl Plan {
    /// Takes the scratch memory: [`super::WorkspaceSize::bytes`] of the plan's workspace.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn scratch(&self, device: &Device, arena: &Arena) -> Result<Scratch, CudaError> {
        Scratch::take(device, arena, self.workspace)
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
        if let Some(library) = &self.library
            && let Some(cublas) = runtime.cublas()
        {
            return self.forward_library(runtime, library, cublas, inputs, results, scratch);
        }
        let ready = self.ready(runtime)?;
        runtime.device().timed(|| self.begin(runtime.device(), &ready, inputs, results, scratch))
    }

    /// Its launches, with their functions looked up.
    ///
    /// # Errors
    /// [`CudaError::Compile`] and [`CudaError::Driver`] when the kernels do not compile.
    pub fn ready(&self, runtime: &Runtime) -> Result<Vec<Ready>, CudaError> {
        runtime.device().ready(&*runtime.module(&self.program)?, &self.launches)
    }

    /// Begins the pass with this project's fallback GEMM: inside [`Device::timed`].
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn begin(
        &self,
        device: &Device,
        ready: &[Ready],
        inputs: Inputs<'_>,
        Results { o, lse }: Results<'_>,
        Scratch { scores, partials }: &mut Scratch,
    ) -> Result<(), CudaError> {
        let Inputs { q, k, v } = inputs;
        let mut operands = Operands { q, k: Some(k), v: Some(v), o, lse, scores, partials };
        let problem = Problem::new(&self.extents, &mut operands)?;
        let maps = self.tma_tiles.map(|tma_tiles| tma_tiles.maps(&self.extents, inputs)).transpose()?;
        let mut arguments: Vec<&dyn Argument> = vec![&problem];
        arguments.extend(maps.iter().flatten().map(|map| map as &dyn Argument));
        device.begin(ready, &arguments)
    }

    /// Whose matrix products the pass uses, where it could use cuBLAS's: as `cuBLAS 13.0`, or `fallback GEMM`.
    pub fn gemm(&self, runtime: &Runtime) -> Option<String> {
        self.library.as_ref().map(|_| runtime.gemm())
    }

    fn forward_library(
        &self,
        runtime: &Runtime,
        library: &LibraryPass,
        mut cublas: MutexGuard<'_, Cublas>,
        Inputs { q, k, v }: Inputs<'_>,
        Results { o, lse }: Results<'_>,
        Scratch { scores, partials }: &mut Scratch,
    ) -> Result<u64, CudaError> {
        let device = runtime.device();
        let softmax = device.ready(&*runtime.module(&library.program)?, &[library.softmax])?;
        let mut operands = Operands { q, k: Some(k), v: Some(v), o, lse, scores, partials };
        device.timed(|| {
            cublas.begin(&library.scores, k, q, operands.scores)?;
            device.begin(&softmax, &[&Problem::new(&self.extents, &mut operands)?])?;
            cublas.begin(&library.output, v, operands.scores, operands.o)
        })
    }

    /// Runs a pass that [`super::decode_paged`] planned; as [`Plan::forward`]. Lists may be shorter than the plan's
    /// `kv_len`; of a longer one the first `kv_len` tokens are read.
    ///
    /// # Errors
    /// As [`Plan::forward`]; [`CudaError::Operand`] when the plan is not for these pages.
    pub fn forward_paged(
        &self,
        runtime: &Runtime,
        q: &DeviceBuffer,
        kv: &PagedKv<'_>,
        results: Results<'_>,
        scratch: &mut Scratch,
    ) -> Result<u64, CudaError> {
        let ready = self.ready(runtime)?;
        runtime.device().timed(|| self.begin_paged(runtime.device(), &ready, q, kv, results, scratch))
    }

    /// Runs such a pass for its log-sum-exps alone, `[B, Hq, Lq]` in f32, and takes the memory for it; returns the GPU's
    /// time too.
    ///
    /// # Errors
    /// As [`Plan::forward_paged`]; at the arena's limit, or when the GPU has no room.
    pub fn ask_paged(
        &self,
        runtime: &Runtime,
        arena: &Arena,
        q: &DeviceBuffer,
        kv: &PagedKv<'_>,
    ) -> Result<(u64, DeviceBuffer), CudaError> {
        let (device, shape) = (runtime.device(), self.shape());
        let mut scratch = self.scratch(device, arena)?;
        let lse_bytes = 4 * shape.rows() as u64;
        let o_bytes = Outputs::bytes(&shape, self.extents.dtype) - lse_bytes;
        let mut o = device.alloc(arena, Label::Policy, o_bytes)?;
        let mut lse = device.alloc(arena, Label::Policy, lse_bytes)?;
        let ns = self.forward_paged(runtime, q, kv, Results { o: &mut o, lse: &mut lse }, &mut scratch)?;
        Ok((ns, lse))
    }

    /// Begins such a pass: inside [`Device::timed`].
    ///
    /// # Errors
    /// As [`Plan::forward_paged`].
    pub fn begin_paged(
        &self,
        device: &Device,
        ready: &[Ready],
        q: &DeviceBuffer,
        kv: &PagedKv<'_>,
        Results { o, lse }: Results<'_>,
        Scratch { scores, partials }: &mut Scratch,
    ) -> Result<(), CudaError> {
        let Extents { batch, kv_heads, kv_len, .. } = self.extents;
        if self.program.macros.iter().all(|&(name, value)| name != "PAGE_TOKENS" || value != kv.page_tokens) {
            let tokens = kv.page_tokens;
            return Err(CudaError::Operand(format!("the pass was not planned for pages of {tokens} tokens")));
        }
        let pages = Pages::new(kv, batch * kv_heads, kv_len, self.row_bytes)?;
        let mut operands = Operands { q, k: None, v: None, o, lse, scores, partials };
        let problem = Problem::new(&self.extents, &mut operands)?;
        device.begin(ready, &[&problem, &pages])
    }
}

impl TmaTiles {
    /// Maps of q, k and v.
    pub(super) fn maps<'a>(&self, extents: &Extents, inputs: Inputs<'a>) -> Result<[TensorMap<'a>; 3], CudaError> {
        let Extents { batch, kv_heads, kv_len, head_dim, dtype, .. } = *extents;
        let keys = [batch * kv_heads, kv_len, head_dim];
        Ok([
            self.map_of_queries(extents, inputs.q)?,
            TensorMap::new(inputs.k, dtype, keys, self.kv_rows)?,
            TensorMap::new(inputs.v, dtype, keys, self.kv_rows)?,
        ])
    }

    /// The map of a tensor that has q's extents.
    pub(super) fn map_of_queries<'a>(
        &self,
        extents: &Extents,
        tensor: &'a DeviceBuffer,
    ) -> Result<TensorMap<'a>, CudaError> {
        let Extents { batch, q_heads, q_len, head_dim, dtype, .. } = *extents;
        TensorMap::new(tensor, dtype, [batch * q_heads, q_len, head_dim], self.q_rows)
    }
}

//! Attention of one sequence on a GPU: one new token over the pages as they lie, several over a copy of their layer's.
//!
//! The copy is what the kernel for many queries reads: keys and values of one layer behind one another as they lie, `workspace`
//! in the arena. A single token reads its list once, where it lies; so do several where lists differ in length, after an
//! eviction.
//!
//! A single token's pass is planned again when the longest list of its layer is another: that is arithmetic of the host,
//! over scratch memory that is enough for every length.

use crate::attention::cuda::{CudaKernel, Inputs, Plan, Results, Scratch, cuda_kernel, decode_paged, step_workspace};
use crate::attention::{Params, Shape};
use crate::cache::PAGE_TOKENS;
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Ready, Runtime};
use crate::format::GpuRows;
use crate::memory::{Arena, Label};
use crate::model::decoder::params;
use crate::model::{Config, ModelError, Setup};

/// A plan with its functions.
type Planned = (Plan, Vec<Ready>);

/// What attention of a sequence needs.
pub(super) struct Attend {
    /// For many queries.
    kernel: &'static dyn CudaKernel,
    /// Of a single token, for each layer: for the length of its longest list now.
    steps: Vec<Planned>,
    step_scratch: Scratch,
    /// Of several tokens, for each layer: for the lengths that come next, over pages or over copies.
    chunks: Vec<Planned>,
    paged: bool,
    chunk_scratch: Scratch,
    /// A layer's keys and values.
    gathered: [DeviceBuffer; 2],
    lse: DeviceBuffer,
}

/// Extents of a layer's queries over lists of at most `kv_len` tokens.
pub(super) fn attended(config: &Config, q_len: usize, kv_len: usize) -> Shape {
    let Config { q_heads, kv_heads, head_dim, .. } = *config;
    Shape { batch: 1, q_heads, kv_heads, q_len, kv_len, head_dim }
}

/// Plans of all layers.
fn plans(
    config: &Config,
    runtime: &Runtime,
    plan: impl Fn(&Params) -> Result<Plan, ModelError>,
) -> Result<Vec<Planned>, ModelError> {
    let of_layer = |layer| {
        let plan = plan(&params(config, layer))?;
        let ready = plan.ready(runtime)?;
        Ok((plan, ready))
    };
    (0..config.layers).map(of_layer).collect()
}

impl Attend {
    /// Takes what is needed and compiles the kernels.
    ///
    /// # Errors
    /// When there is no such kernel or it cannot do what the model needs, the arena or the GPU has no room, and as [`Runtime::module`].
    pub fn new(config: &Config, setup: &Setup<'_>, runtime: &Runtime, arena: &Arena) -> Result<Self, ModelError> {
        let (device, most) = (runtime.device(), setup.max_tokens);
        let stored = GpuRows::new(setup.dtype, setup.kv_format).map_err(CudaError::Operand)?;
        let longest = attended(config, 1, most);
        let steps =
            plans(config, runtime, |params| Ok(decode_paged(&longest, params, stored, device.limits(), PAGE_TOKENS)?))?;
        let room = |layer| step_workspace(&longest, &params(config, layer), stored, device.limits(), PAGE_TOKENS);
        let roomiest = (0..config.layers).map(room).max_by_key(|size| size.scratch).unwrap_or_default();
        let rows = setup.chunk_tokens.min(most);
        let kernel = cuda_kernel(setup.kernel)?;
        let chunks = Self::plan_chunk(kernel, config, runtime, stored, rows, most)?;
        let copied = if rows > 1 { stored.lists_bytes(config.kv_heads, most, config.head_dim) } else { [0; 2] };
        let room = |part: usize| device.alloc(arena, Label::Workspace, copied[part] as u64);
        Ok(Attend {
            kernel,
            step_scratch: Scratch::take(device, arena, roomiest)?,
            chunk_scratch: chunks[0].0.scratch(device, arena)?,
            steps,
            chunks,
            paged: false,
            gathered: [room(0)?, room(1)?],
            lse: device.alloc(arena, Label::Activations, 4 * (rows * config.q_heads) as u64)?,
        })
    }

    fn plan_chunk(
        kernel: &dyn CudaKernel,
        config: &Config,
        runtime: &Runtime,
        rows: GpuRows,
        q_len: usize,
        kv_len: usize,
    ) -> Result<Vec<Planned>, ModelError> {
        let shape = attended(config, q_len, kv_len);
        let limits = runtime.device().limits();
        plans(config, runtime, |params| Ok(kernel.plan(&shape, params, rows, limits)?))
    }

    /// Plans the next pass, of `count` tokens at the end of lists that hold them already; they are `ragged` once tokens
    /// were evicted.
    ///
    /// # Errors
    /// As [`Attend::new`].
    pub fn prepare(
        &mut self,
        config: &Config,
        (runtime, arena): (&Runtime, &Arena),
        cache: &DeviceCache,
        count: usize,
        ragged: bool,
    ) -> Result<(), ModelError> {
        let (device, rows) = (runtime.device(), cache.rows());
        if count == 1 {
            return self.prepare_step(config, device, cache);
        }
        let longest = cache.max_len();
        self.paged = ragged;
        self.chunks = match ragged {
            false => Self::plan_chunk(self.kernel, config, runtime, rows, count, longest)?,
            true => plans(config, runtime, |params| {
                Ok(decode_paged(&attended(config, count, longest), params, rows, device.limits(), PAGE_TOKENS)?)
            })?,
        };
        let plan = &self.chunks[0].0;
        if !self.chunk_scratch.fits(plan) {
            self.chunk_scratch = plan.scratch(device, arena)?;
        }
        Ok(())
    }

    /// Plans the pass of a single token: splits for the keys that are there.
    fn prepare_step(&mut self, config: &Config, device: &Device, cache: &DeviceCache) -> Result<(), ModelError> {
        let lists = cache.lens().chunks(config.kv_heads);
        for (layer, ((plan, ready), lens)) in self.steps.iter_mut().zip(lists).enumerate() {
            let longest = lens.iter().copied().max().unwrap_or(0);
            if longest != plan.extents.kv_len {
                let (shape, params) = (attended(config, 1, longest), params(config, layer));
                *plan = decode_paged(&shape, &params, cache.rows(), device.limits(), PAGE_TOKENS)?;
                plan.launches.iter().zip(ready).for_each(|(launch, ready)| ready.set_grid(launch.grid));
            }
        }
        Ok(())
    }

    /// Log-sum-exps of the queries of the last layer that was begun, `[Hq, count]`.
    pub fn lse(&self) -> &DeviceBuffer {
        &self.lse
    }

    /// Begins the attention of `count` tokens in a layer, as it was prepared: `q` and `o` are `[Hq, count, D]`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small, [`CudaError::Driver`] when a launch fails.
    pub fn begin(
        &mut self,
        runtime: &Runtime,
        cache: &DeviceCache,
        layer: usize,
        count: usize,
        [q, o]: [&mut DeviceBuffer; 2],
    ) -> Result<(), CudaError> {
        let heads = cache.shape().kv_heads;
        let lists = layer * heads..(layer + 1) * heads;
        let (device, lse): (&Device, _) = (runtime.device(), &mut self.lse);
        if count == 1 {
            let (plan, ready) = &self.steps[layer];
            let kv = cache.kv_from(lists.start);
            return plan.begin_paged(device, ready, q, &kv, Results { o, lse }, &mut self.step_scratch);
        }
        let (plan, ready) = &self.chunks[layer];
        if self.paged {
            let kv = cache.kv_from(lists.start);
            return plan.begin_paged(device, ready, q, &kv, Results { o, lse }, &mut self.chunk_scratch);
        }
        let [k, v] = &mut self.gathered;
        cache.gather(runtime, lists, [&mut *k, &mut *v], plan.extents.kv_len)?;
        plan.begin(device, ready, Inputs { q, k, v }, Results { o, lse }, &mut self.chunk_scratch)
    }
}

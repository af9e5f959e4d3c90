//! `decode` on a GPU: one new query against a cache of the whole context, in pages or contiguous.
//!
//! The cache is filled in the GPU's memory in the order in which the CPU's measure fills its own; with `page_tokens` 0 the
//! kernel reads the contiguous tensors.

use super::{Bench, CudaTrial, Planned, Trial, TrialError, Truth, Written, gpu_rows};
use crate::attention::cuda::{CudaKernel, Inputs, Plan, decode_paged};
use crate::attention::{AttentionError, Forward, Outputs};
use crate::cache::cuda::DeviceCache;
use crate::cache::{self, PagedCache};
use crate::device::Cpu;
use crate::device::cuda::{Limits, Program, Runtime};
use crate::experiment::cell::Cell;
use crate::experiment::engine::{InputError, host_arena};
use crate::experiment::measure::decode::{cache_shape, fill};
use crate::format::GpuRows;
use crate::workload::Workload;
use std::iter::repeat_n;

/// Steps that make one sample; their mean is recorded.
const STEPS: u64 = 4;

struct Decode {
    cell: Cell,
    rows: GpuRows,
    plan: Plan,
}

pub(in crate::experiment::measure) fn task(cell: &Cell, kernel: &dyn CudaKernel, limits: &Limits) -> Planned {
    let (shape, params, rows) = (cell.shape(), cell.params(), gpu_rows(cell)?);
    let plan = match (cell.page_tokens, kernel.name()) {
        (Some(0), _) => kernel.plan(&shape, &params, rows, limits)?,
        (_, "decode") => decode_paged(&shape, &params, rows, limits, cache_shape(cell).page_tokens)?,
        _ => {
            let (what, instead) = ("decode steps over pages on CUDA", "decode, or page_tokens = \"contiguous\"");
            return Err(AttentionError::Unsupported { kernel: kernel.name(), what, instead });
        }
    };
    Ok(Box::new(Decode { cell: cell.clone(), rows, plan }))
}

impl Decode {
    fn is_paged(&self) -> bool {
        self.cell.page_tokens != Some(0)
    }

    /// The cache of the cell in the GPU's memory.
    fn cache(&self, bench: Bench<'_>) -> Result<DeviceCache, TrialError> {
        let Bench { runtime, arena, inputs, .. } = bench;
        let tokens = self.cell.context_tokens;
        let mut cache = DeviceCache::new(runtime.device(), arena, cache_shape(&self.cell), self.cell.dtype)?;
        let step = self.cell.page_tokens.unwrap_or(tokens);
        for start in (0..tokens).step_by(step) {
            cache.append(runtime, [&inputs.k, &inputs.v], tokens, start..tokens.min(start + step))?;
        }
        Ok(cache)
    }

    /// What the f64 reference says of the cache as its format has it.
    fn held(&self, workload: &Workload) -> Result<Truth, TrialError> {
        let cpu = Cpu::new(None).map_err(|error| TrialError::Failed(error.to_string()))?;
        let (cell, arena) = (&self.cell, host_arena());
        // Not the GPU's memory.
        let mut cache = PagedCache::new(&arena, cache_shape(cell)).map_err(InputError::Host)?;
        fill(&mut cache, cell, workload.k.view(), workload.v.view()).map_err(InputError::Host)?;
        let q = workload.q.view().tokens(cell.context_tokens - 1..cell.context_tokens);
        Ok(Truth::of_call(&Forward { shape: cell.shape(), params: cell.params(), q, kv: &cache, cpu: &cpu }))
    }
}

impl CudaTrial for Decode {
    fn bytes(&self) -> u64 {
        let cache = || {
            let shape = cache_shape(&self.cell);
            let lens = repeat_n(self.cell.context_tokens, shape.lists());
            DeviceCache::bytes(&shape, lens, 0).values().sum()
        };
        let cache = if self.is_paged() { cache() } else { 0 };
        cache + Outputs::bytes(&self.cell.shape(), self.cell.dtype) + self.workspace_bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        self.plan.workspace.bytes()
    }

    fn programs(&self) -> Vec<Program> {
        let own = self.is_paged().then(|| cache::cuda::program(self.rows, self.cell.head_dim));
        self.plan.programs().into_iter().chain(own).collect()
    }

    fn gemm(&self, runtime: &Runtime) -> Option<String> {
        self.plan.gemm(runtime)
    }

    fn trial(&self, bench: Bench<'_>) -> Result<Trial, TrialError> {
        let Bench { runtime, arena, inputs, truth } = bench;
        let cache = if self.is_paged() { Some(self.cache(bench)?) } else { None };
        let mut scratch = self.plan.scratch(runtime.device(), arena)?;
        let mut written = Written::allocate(bench, self.cell.shape(), self.cell.dtype)?;
        let mut steps_ns = 0;
        for _ in 0..STEPS {
            let (q, results) = (&inputs.last_q, written.results());
            steps_ns += match &cache {
                Some(cache) => self.plan.forward_paged(runtime, q, &cache.kv(), results, &mut scratch)?,
                None => {
                    let read = Inputs { q, k: &inputs.k, v: &inputs.v };
                    self.plan.forward(runtime, read, results, &mut scratch)?
                }
            };
        }

        let mut trial = Trial { samples_ns: [("decode", steps_ns / STEPS)].into(), ..Trial::default() };
        if let Some(truth) = truth {
            trial.drift = Some(match (self.cell.kv_format, &inputs.host) {
                // What the cache's format rounds is a result; the kernel is held to what the cache holds.
                (Some(_), Some(workload)) => {
                    written.check(&self.held(workload)?, |_| 0)?;
                    written.drift(truth, |_| 0)?
                }
                _ => written.check(truth, |_| 0)?,
            });
        }
        Ok(trial)
    }
}

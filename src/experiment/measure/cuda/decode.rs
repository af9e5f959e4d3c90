//! `decode` on a GPU: one new query against a cache of the whole context, in pages or contiguous.
//!
//! The pages are those of the CPU's measure, filled on the host in the same order and copied; with `page_tokens` 0 the
//! kernel reads the contiguous tensors.

use super::pages::Pages;
use super::{Bench, CudaTrial, Planned, Trial, TrialError, Truth, Written, gpu_rows};
use crate::attention::cuda::{CudaKernel, Inputs, Plan, decode_paged};
use crate::attention::{AttentionError, Forward, Outputs};
use crate::cache::PagedCache;
use crate::device::Cpu;
use crate::device::cuda::{DeviceBuffer, Limits, Program, Runtime};
use crate::experiment::cell::Cell;
use crate::experiment::engine::{InputError, host_arena};
use crate::experiment::measure::decode::{cache_shape, fill};
use crate::memory::Label;
use crate::tensor::Tensor;
use crate::workload::Workload;

/// Steps that make one sample; their mean is recorded.
const STEPS: u64 = 4;

struct Decode {
    cell: Cell,
    plan: Plan,
}

pub(in crate::experiment::measure) fn task(cell: &Cell, kernel: &dyn CudaKernel, limits: &Limits) -> Planned {
    let (shape, params) = (cell.shape(), cell.params());
    let plan = match (cell.page_tokens, kernel.name()) {
        (Some(0), _) => kernel.plan(&shape, &params, cell.dtype.into(), limits)?,
        (_, "decode") => decode_paged(&shape, &params, gpu_rows(cell)?, limits, cache_shape(cell).page_tokens)?,
        _ => {
            let (what, instead) = ("decode steps over pages on CUDA", "decode, or page_tokens = \"contiguous\"");
            return Err(AttentionError::Unsupported { kernel: kernel.name(), what, instead });
        }
    };
    Ok(Box::new(Decode { cell: cell.clone(), plan }))
}

impl Decode {
    fn is_paged(&self) -> bool {
        self.cell.page_tokens != Some(0)
    }

    /// The cache of the cell in the GPU's memory.
    fn pages(&self, bench: Bench<'_>) -> Result<Pages, TrialError> {
        let cache = self.filled(bench).map_err(|error| match error {
            // Not the GPU's memory.
            TrialError::Memory(error) => InputError::Host(error).into(),
            error => error,
        })?;
        Ok(Pages::upload(bench.runtime.device(), bench.arena, &cache)?)
    }

    /// What the f64 reference says of the cache as its format has it.
    fn held(&self, bench: Bench<'_>, workload: &Workload) -> Result<Truth, TrialError> {
        let cpu = Cpu::new(Some(1)).map_err(|error| TrialError::Failed(error.to_string()))?;
        let (cache, cell) = (self.filled(bench)?, &self.cell);
        let q = workload.q.view().tokens(cell.context_tokens - 1..cell.context_tokens);
        Ok(Truth::of_call(&Forward { shape: cell.shape(), params: cell.params(), q, kv: &cache, cpu: &cpu }))
    }

    /// The cache on the host, whose memory is not what is measured.
    fn filled(&self, bench: Bench<'_>) -> Result<PagedCache, TrialError> {
        let arena = host_arena();
        let mut cache = PagedCache::new(&arena, cache_shape(&self.cell))?;
        if let Some(workload) = &bench.inputs.host {
            fill(&mut cache, &self.cell, workload.k.view(), workload.v.view())?;
            return Ok(cache);
        }
        // Blank inputs are on the GPU alone.
        let read = |there: &DeviceBuffer| -> Result<Tensor, TrialError> {
            let mut tensor = Tensor::zeros(&arena, Label::Input, self.cell.dtype, self.cell.shape().kv_dims())?;
            there.read(tensor.bytes_mut())?;
            Ok(tensor)
        };
        let (k, v) = (read(&bench.inputs.k)?, read(&bench.inputs.v)?);
        fill(&mut cache, &self.cell, k.view(), v.view())?;
        Ok(cache)
    }
}

impl CudaTrial for Decode {
    fn bytes(&self) -> u64 {
        let pages = if self.is_paged() { Pages::bytes(&cache_shape(&self.cell), self.cell.context_tokens) } else { 0 };
        pages + Outputs::bytes(&self.cell.shape(), self.cell.dtype) + self.workspace_bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        self.plan.workspace.bytes()
    }

    fn programs(&self) -> Vec<Program> {
        self.plan.programs()
    }

    fn gemm(&self, runtime: &Runtime) -> Option<String> {
        self.plan.gemm(runtime)
    }

    fn trial(&self, bench: Bench<'_>) -> Result<Trial, TrialError> {
        let Bench { runtime, arena, inputs, truth } = bench;
        let pages = if self.is_paged() { Some(self.pages(bench)?) } else { None };
        let mut scratch = self.plan.scratch(runtime.device(), arena)?;
        let mut written = Written::allocate(bench, self.cell.shape(), self.cell.dtype)?;
        let mut steps_ns = 0;
        for _ in 0..STEPS {
            let (q, results) = (&inputs.last_q, written.results());
            steps_ns += match &pages {
                Some(pages) => self.plan.forward_paged(runtime, q, &pages.kv(), results, &mut scratch)?,
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
                    written.check(&self.held(bench, workload)?, |_| 0)?;
                    written.drift(truth, |_| 0)?
                }
                _ => written.check(truth, |_| 0)?,
            });
        }
        Ok(trial)
    }
}

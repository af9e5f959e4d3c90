//! `decode`: one new query against a cache of the whole context, in pages or contiguous.
//!
//! Without `page_tokens` the cache has its usual pages and is filled at once, list by list, so that the pages of a list
//! lie behind one another. With it the cache is filled page by page over all lists, as it fills up when sequences are
//! decoded side by side: neighbours in a list lie apart in memory, which is what paging costs. With 0 there is no cache
//! and the kernel reads the contiguous tensors.

use super::check::{Truth, accurate, finite, rows_of};
use super::pass::{self, fields_of_passes};
use super::trials::timed;
use super::{Bench, Measurement, Prepared, Runs, Scope, Trial, TrialError, TrialWork, Trials, cuda};
use crate::attention::cuda::CudaKernel;
use crate::attention::{Forward, KvRows, Outputs, Shape};
use crate::cache::{CacheShape, PAGE_TOKENS, PagedCache};
use crate::device::cuda::Limits;
use crate::experiment::cell::Cell;
use crate::experiment::spec::Grid;
use crate::memory::ArenaError;
use crate::policy::Registry;
use crate::tensor::TensorView;

/// Steps that make one sample, at least, whose mean is recorded.
const STEPS: u64 = 4;
/// Time that a sample takes at least, so that short steps are not lost in the clock's grain and the scheduler's.
const LEAST_NS: u64 = 1_000_000;

/// The cache that a cell's step reads.
pub(super) fn cache_shape(cell: &Cell) -> CacheShape {
    CacheShape {
        batch: cell.batch,
        kv_heads: cell.kv_heads,
        head_dim: cell.head_dim,
        format: cell.kv_format(),
        max_tokens: cell.context_tokens,
        page_tokens: cell.page_tokens.unwrap_or(PAGE_TOKENS),
        columns: &[],
    }
}

/// `Lq = 1`, `Lk = context_tokens`.
pub(super) struct Decode;

impl Measurement for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn about(&self) -> &'static str {
        "one new query against a cached context, in pages or contiguous"
    }

    fn fields(&self) -> &'static [&'static str] {
        fields_of_passes!("kv_format", "page_tokens")
    }

    fn q_len(&self, _context_tokens: usize) -> usize {
        1
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        pass::expand(grid, scope, "decode", 0)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InTrials(self)
    }
}

/// Fills the cache of a cell with the context of `k` and `v`.
pub(super) fn fill<'a>(
    cache: &mut PagedCache,
    cell: &Cell,
    k: TensorView<'a>,
    v: TensorView<'a>,
) -> Result<(), ArenaError> {
    let tokens = cell.context_tokens;
    let step = cell.page_tokens.unwrap_or(tokens);
    (0..tokens).step_by(step).try_for_each(|start| cache.append(k, v, start..tokens.min(start + step)))
}

impl Trials for Decode {
    fn checked_rows(&self, cell: &Cell, shape: &Shape) -> Vec<[usize; 3]> {
        rows_of(shape, &[cell.context_tokens - 1])
    }

    fn work(&self, prepared: &Prepared) -> TrialWork {
        let flops = prepared.cell.shape().flops(&prepared.cell.params());
        let seen = prepared.cell.window.unwrap_or(usize::MAX).min(prepared.cell.context_tokens);
        let kv_bytes_read = prepared.kv_bytes(seen);
        TrialWork { flops, phase: self.phase(), kv_bytes_read, passes: 0.0, reads: STEPS as f64 }
    }

    fn task(
        &self,
        cell: &Cell,
        _registry: &Registry,
        kernel: &dyn CudaKernel,
        limits: &Limits,
    ) -> Result<Box<dyn cuda::CudaTrial>, String> {
        cuda::decode::task(cell, kernel, limits).map_err(|error| error.to_string())
    }

    fn predict(&self, prepared: &Prepared, threads: usize) -> u64 {
        let outputs = Outputs::bytes(&prepared.cell.shape(), prepared.cell.dtype);
        let cache_bytes = match prepared.cell.page_tokens {
            Some(0) => 0,
            _ => {
                let cache = cache_shape(&prepared.cell);
                let lens = std::iter::repeat_n(prepared.cell.context_tokens, cache.lists());
                cache.bytes(lens, 0).values().sum::<u64>()
            }
        };
        cache_bytes + outputs + self.workspace_bytes(prepared, threads)
    }

    fn trial(&self, prepared: &Prepared, bench: Bench<'_>) -> Result<Trial, TrialError> {
        let cell = &prepared.cell;
        let (shape, params, tokens) = (cell.shape(), cell.params(), cell.context_tokens);
        let (dense, cache);
        let kv: &dyn KvRows = if cell.page_tokens == Some(0) {
            dense = bench.dense(tokens)?;
            &dense
        } else {
            let mut filled = PagedCache::new(bench.arena, cache_shape(cell))?;
            fill(&mut filled, cell, bench.workload.k.view(), bench.workload.v.view())?;
            cache = filled;
            &cache
        };
        let mut workspace =
            prepared.kernel().workspace(&shape, &params, cell.dtype, bench.cpu.threads()).allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        bench.poison(&mut outputs);
        let q = bench.workload.q.view().tokens(tokens - 1..tokens);
        let call = Forward { shape, params, q, kv, cpu: bench.cpu };
        // The first step also writes back what filling the cache left in the processor's caches: no step of a real run.
        prepared.kernel().forward(&call, &mut outputs, &mut workspace)?;
        let (mut steps, mut steps_ns) = (0, 0);
        while steps < STEPS || steps_ns < LEAST_NS {
            let batch = STEPS.max(steps);
            let (batch_ns, result) =
                timed(|| (0..batch).try_for_each(|_| prepared.kernel().forward(&call, &mut outputs, &mut workspace)));
            result?;
            (steps, steps_ns) = (steps + batch, steps_ns + batch_ns);
        }

        let mut trial = Trial { samples_ns: [("decode", steps_ns / steps)].into(), ..Trial::default() };
        if let Some(truth) = bench.truth {
            finite(&outputs)?;
            let o = outputs.o.view();
            let drift =
                |truth: &Truth| truth.drift(cell.head_dim, |[batch, head, _], row| o.read_rows(batch, head, 0, row));
            let from_given = drift(truth);
            // What the cache's format rounds is a result; the kernel is held to what the cache holds.
            match cell.kv_format {
                Some(_) => accurate(&drift(&Truth::of_call(&call)), cell.dtype)?,
                None => accurate(&from_given, cell.dtype)?,
            }
            trial.drift = Some(from_given);
        }
        Ok(trial)
    }
}

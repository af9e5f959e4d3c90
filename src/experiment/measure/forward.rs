//! `forward`: a pass over the whole context.

use super::check::{accurate, finite, sample_rows};
use super::pass::{self, fields_of_passes};
use super::trials::timed;
use super::{Bench, Measurement, Prepared, Runs, Scope, Trial, TrialError, TrialWork, Trials, cuda};
use crate::attention::cuda::CudaKernel;
use crate::attention::{Outputs, Shape};
use crate::device::cuda::Limits;
use crate::experiment::cell::Cell;
use crate::experiment::spec::Grid;
use crate::policy::Registry;

/// `Lq = Lk = context_tokens`.
pub(super) struct Forward;

impl Measurement for Forward {
    fn name(&self) -> &'static str {
        "forward"
    }

    fn about(&self) -> &'static str {
        "a forward pass over the whole context"
    }

    fn fields(&self) -> &'static [&'static str] {
        fields_of_passes!()
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        pass::expand(grid, scope, "tiled", 0)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InTrials(self)
    }
}

impl Trials for Forward {
    fn checked_rows(&self, _cell: &Cell, shape: &Shape) -> Vec<[usize; 3]> {
        sample_rows(shape)
    }

    fn predict(&self, prepared: &Prepared, threads: usize) -> u64 {
        Outputs::bytes(&prepared.cell.shape(), prepared.cell.dtype) + self.workspace_bytes(prepared, threads)
    }

    fn work(&self, prepared: &Prepared) -> TrialWork {
        let flops = prepared.cell.shape().flops(&prepared.cell.params());
        TrialWork { flops, phase: self.phase(), kv_bytes_read: 0, passes: 1.0, reads: 0.0 }
    }

    fn task(
        &self,
        cell: &Cell,
        _registry: &Registry,
        kernel: &dyn CudaKernel,
        limits: &Limits,
    ) -> Result<Box<dyn cuda::CudaTrial>, String> {
        cuda::forward::task(cell, kernel, limits).map_err(|error| error.to_string())
    }

    fn trial(&self, prepared: &Prepared, bench: Bench<'_>) -> Result<Trial, TrialError> {
        let cell = &prepared.cell;
        let (shape, params) = (cell.shape(), cell.params());
        let size = prepared.kernel().workspace(&shape, &params, cell.dtype, bench.cpu.threads());
        let mut workspace = size.allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        bench.poison(&mut outputs);
        let kv = bench.dense(cell.context_tokens)?;
        let call = bench.forward(cell, shape, &kv);
        let (forward_ns, result) = timed(|| prepared.kernel().forward(&call, &mut outputs, &mut workspace));
        result?;

        let mut trial = Trial { samples_ns: [("forward", forward_ns)].into(), ..Trial::default() };
        if let Some(truth) = bench.truth {
            finite(&outputs)?;
            let o = outputs.o.view();
            let drift = truth.drift(cell.head_dim, |[batch, head, token], row| o.read_rows(batch, head, token, row));
            accurate(&drift, cell.dtype)?;
            trial.drift = Some(drift);
        }
        Ok(trial)
    }
}

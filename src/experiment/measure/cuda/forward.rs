//! `forward` on a GPU: a pass over the whole context.

use super::{Bench, CudaTrial, Planned, Trial, TrialError, Written};
use crate::attention::Outputs;
use crate::attention::cuda::{CudaKernel, Inputs, Plan};
use crate::device::cuda::{Limits, Program, Runtime};
use crate::experiment::cell::Cell;

struct Forward {
    cell: Cell,
    plan: Plan,
}

pub(in crate::experiment::measure) fn task(cell: &Cell, kernel: &dyn CudaKernel, limits: &Limits) -> Planned {
    let plan = kernel.plan(&cell.shape(), &cell.params(), cell.dtype.into(), limits)?;
    Ok(Box::new(Forward { cell: cell.clone(), plan }))
}

impl CudaTrial for Forward {
    fn bytes(&self) -> u64 {
        Outputs::bytes(&self.cell.shape(), self.cell.dtype) + self.workspace_bytes()
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
        let mut scratch = self.plan.scratch(runtime.device(), arena)?;
        let mut written = Written::allocate(bench, self.cell.shape(), self.cell.dtype)?;
        let read = Inputs { q: &inputs.q, k: &inputs.k, v: &inputs.v };
        let forward_ns = self.plan.forward(runtime, read, written.results(), &mut scratch)?;

        let mut trial = Trial { samples_ns: [("forward", forward_ns)].into(), ..Trial::default() };
        if let Some(truth) = truth {
            trial.drift = Some(written.check(truth, |token| token)?);
        }
        Ok(trial)
    }
}

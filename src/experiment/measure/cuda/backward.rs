//! `backward` on a GPU: the gradients of a pass over the whole context. As on the CPU the gradient by `o` is `q`.

use super::{Bench, CudaTrial, Planned, Trial, TrialError, Written};
use crate::attention::cuda::{BackwardInputs, BackwardPlan, BackwardResults, CudaKernel, Inputs, Plan};
use crate::attention::{Gradients, Outputs};
use crate::device::Cpu;
use crate::device::cuda::{DeviceBuffer, Limits, Program, Runtime};
use crate::experiment::cell::Cell;
use crate::experiment::measure::backward::check_gradients;
use crate::memory::{Arena, Label};

struct Backward {
    cell: Cell,
    forward: Plan,
    backward: BackwardPlan,
}

pub(in crate::experiment::measure) fn task(cell: &Cell, kernel: &dyn CudaKernel, limits: &Limits) -> Planned {
    let (shape, params) = (cell.shape(), cell.params());
    let forward = kernel.plan(&shape, &params, cell.dtype.into(), limits)?;
    let backward = kernel.plan_backward(&shape, &params, cell.dtype, limits)?;
    Ok(Box::new(Backward { cell: cell.clone(), forward, backward }))
}

impl CudaTrial for Backward {
    fn bytes(&self) -> u64 {
        let (shape, dtype) = (self.cell.shape(), self.cell.dtype);
        let backward = Gradients::bytes(&shape, dtype) + self.workspace_bytes();
        Outputs::bytes(&shape, dtype) + self.forward.workspace.bytes().max(backward)
    }

    fn workspace_bytes(&self) -> u64 {
        self.backward.workspace().bytes()
    }

    fn programs(&self) -> Vec<Program> {
        [self.forward.programs(), self.backward.programs()].concat()
    }

    fn gemm(&self, runtime: &Runtime) -> Option<String> {
        self.forward.gemm(runtime)
    }

    fn trial(&self, bench: Bench<'_>) -> Result<Trial, TrialError> {
        let Bench { runtime, arena, inputs, truth } = bench;
        let (shape, dtype) = (self.cell.shape(), self.cell.dtype);
        let mut written = Written::allocate(bench, shape, dtype)?;
        let mut scratch = self.forward.scratch(runtime.device(), arena)?;
        let read = Inputs { q: &inputs.q, k: &inputs.k, v: &inputs.v };
        self.forward.forward(runtime, read, written.results(), &mut scratch)?;
        drop(scratch);

        let mut scratch = self.backward.scratch(runtime.device(), arena)?;
        let unwritten = |like: &DeviceBuffer| {
            let mut buffer = runtime.device().alloc(arena, Label::Activations, like.bytes())?;
            if truth.is_some() {
                buffer.fill(0xff)?;
            }
            Ok::<_, TrialError>(buffer)
        };
        let (mut q, mut k, mut v) = (unwritten(&inputs.q)?, unwritten(&inputs.k)?, unwritten(&inputs.v)?);
        let read = BackwardInputs {
            q: &inputs.q,
            k: &inputs.k,
            v: &inputs.v,
            o: &written.o,
            lse: &written.lse,
            grad_o: &inputs.q,
        };
        let results = BackwardResults { q: &mut q, k: &mut k, v: &mut v };
        let backward_ns = self.backward.run(runtime, read, results, &mut scratch)?;

        let mut trial = Trial { samples_ns: [("backward", backward_ns)].into(), ..Trial::default() };
        if let Some(truth) = truth {
            trial.drift = Some(written.check(truth, |token| token)?);
        }
        if let (Some(_), Some(workload)) = (truth, &inputs.host) {
            let outputs = written.read()?;
            let mut gradients = Gradients::allocate(&Arena::unlimited(), &shape, dtype)?;
            q.read(gradients.q.bytes_mut())?;
            k.read(gradients.k.bytes_mut())?;
            v.read(gradients.v.bytes_mut())?;
            let cpu = Cpu::new(None).map_err(|error| TrialError::Failed(error.to_string()))?;
            check_gradients(&self.cell, workload, &outputs, &gradients, &cpu)?;
        }
        Ok(trial)
    }
}

//! `backward`: the gradients of a pass over the whole context. The gradient by `o` is taken to be `q`, which has its
//! shape; its values do not matter for memory or time.

use super::check::{accurate, finite, sample_rows};
use super::pass::{self, fields_of_passes};
use super::trials::timed;
use super::{Bench, Measurement, Prepared, Runs, Scope, Trial, TrialError, TrialWork, Trials, cuda};
use crate::attention::cuda::CudaKernel;
use crate::attention::reference::QueryGradient;
use crate::attention::{self, DenseKv, Forward, Gradients, Outputs, Shape, reference};
use crate::device::Cpu;
use crate::device::cuda::Limits;
use crate::experiment::cell::{Cell, Device};
use crate::experiment::spec::Grid;
use crate::policy::Registry;
use crate::tensor::{DType, Tensor};
use crate::workload::Workload;

/// Queries of each head whose gradients are compared with the reference's.
const CHECKED_GRADIENTS: usize = 8;

/// `Lq = Lk = context_tokens`.
pub(super) struct Backward;

impl Measurement for Backward {
    fn name(&self) -> &'static str {
        "backward"
    }

    fn about(&self) -> &'static str {
        "a backward pass over the whole context"
    }

    fn fields(&self) -> &'static [&'static str] {
        fields_of_passes!()
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        let cells = pass::expand(grid, scope, "tiled", 0)?;
        let has_none = |cell: &&Cell| {
            let kernel = attention::kernel(&cell.kernel);
            let pass = |kernel: &dyn attention::Kernel| {
                kernel.backward_workspace(&cell.shape(), &cell.params(), cell.dtype, 1).is_some()
            };
            cell.device == Device::Cpu && kernel.is_ok_and(|kernel| !pass(&*kernel))
        };
        match cells.iter().find(has_none) {
            Some(cell) => Err(format!("kernel '{}' has no backward pass; use naive or tiled", cell.kernel)),
            None => Ok(cells),
        }
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InTrials(self)
    }
}

impl Trials for Backward {
    fn checked_rows(&self, _cell: &Cell, shape: &Shape) -> Vec<[usize; 3]> {
        sample_rows(shape)
    }

    fn workspace_bytes(&self, prepared: &Prepared, threads: usize) -> u64 {
        let (shape, params) = (prepared.cell.shape(), prepared.cell.params());
        let size = prepared.kernel().backward_workspace(&shape, &params, prepared.cell.dtype, threads);
        size.map_or(0, |size| size.bytes())
    }

    fn work(&self, prepared: &Prepared) -> TrialWork {
        let flops = prepared.cell.shape().flops(&prepared.cell.params());
        // Five products where the forward pass, which comes first, has two.
        TrialWork { flops: flops * 5 / 2, phase: self.phase(), kv_bytes_read: 0, passes: 1.4, reads: 0.0 }
    }

    fn task(
        &self,
        cell: &Cell,
        _registry: &Registry,
        kernel: &dyn CudaKernel,
        limits: &Limits,
    ) -> Result<Box<dyn cuda::CudaTrial>, String> {
        cuda::backward::task(cell, kernel, limits).map_err(|error| error.to_string())
    }

    fn predict(&self, prepared: &Prepared, threads: usize) -> u64 {
        let cell = &prepared.cell;
        let (shape, params) = (cell.shape(), cell.params());
        let forward = prepared.kernel().workspace(&shape, &params, cell.dtype, threads).bytes();
        let backward = Gradients::bytes(&shape, cell.dtype) + self.workspace_bytes(prepared, threads);
        Outputs::bytes(&shape, cell.dtype) + forward.max(backward)
    }

    fn trial(&self, prepared: &Prepared, bench: Bench<'_>) -> Result<Trial, TrialError> {
        let cell = &prepared.cell;
        let (shape, params, threads) = (cell.shape(), cell.params(), bench.cpu.threads());
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        bench.poison(&mut outputs);
        let kv = bench.dense(cell.context_tokens)?;
        let forward = bench.forward(cell, shape, &kv);
        let mut workspace = prepared.kernel().workspace(&shape, &params, cell.dtype, threads).allocate(bench.arena)?;
        prepared.kernel().forward(&forward, &mut outputs, &mut workspace)?;
        drop(workspace);

        let size = prepared.kernel().backward_workspace(&shape, &params, cell.dtype, threads).unwrap_or_default();
        let mut workspace = size.allocate(bench.arena)?;
        let mut gradients = Gradients::allocate(bench.arena, &shape, cell.dtype)?;
        if bench.truth.is_some() {
            let all = [&mut gradients.q, &mut gradients.k, &mut gradients.v];
            all.into_iter().for_each(|tensor| tensor.bytes_mut().fill(0xff));
        }
        let call = attention::Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: forward.q };
        let (backward_ns, result) = timed(|| prepared.kernel().backward(&call, &mut gradients, &mut workspace));
        result?;

        let mut trial = Trial { samples_ns: [("backward", backward_ns)].into(), ..Trial::default() };
        if let Some(truth) = bench.truth {
            finite(&outputs)?;
            let o = outputs.o.view();
            let drift = truth.drift(cell.head_dim, |[batch, head, token], row| o.read_rows(batch, head, token, row));
            accurate(&drift, cell.dtype)?;
            trial.drift = Some(drift);
            check_gradients(cell, bench.workload, &outputs, &gradients, bench.cpu)?;
        }
        Ok(trial)
    }
}

/// Checks gradients of a loss whose gradient by `o` is `q`: that by `q` against the f64 reference, in a few rows of each head,
/// and those by `k` and `v` by two identities that hold for every attention. The output is linear in v, so
/// `<dv, v> = <do, o>`; scores depend on q and k only through `q.k`, so `<dq, q> = <dk, k>`. The second holds for wrong
/// gradients of scores too, which is why dq has a reference.
pub(super) fn check_gradients(
    cell: &Cell,
    workload: &Workload,
    outputs: &Outputs,
    gradients: &Gradients,
    cpu: &Cpu,
) -> Result<(), TrialError> {
    let tokens = cell.context_tokens;
    let kv = DenseKv::new(workload.k.view().tokens(0..tokens), workload.v.view().tokens(0..tokens))?;
    let call = Forward { shape: cell.shape(), params: cell.params(), q: workload.q.view(), kv: &kv, cpu };
    let at = reference::sample_rows(&call.shape, CHECKED_GRADIENTS);
    let expected = reference::query_gradients(&call, &call.q, &at);
    let (mut row, mut sums, mut alone) = (vec![0.0; cell.head_dim], [0.0; 3], false);
    for (&[batch, head, token], QueryGradient { dq, terms }) in at.iter().zip(&expected) {
        gradients.q.view().read_rows(batch, head, token, &mut row);
        // Of one key nothing is left but rounding, which must not make room for the others' mistakes.
        if dq.iter().all(|&x| x == 0.0) {
            alone |= row.iter().any(|&x| f64::from(x).abs() > limits(cell.dtype).1 * terms || x.is_nan());
            continue;
        }
        sums[0] += row.iter().zip(dq).map(|(&got, wanted)| (f64::from(got) - wanted).powi(2)).sum::<f64>();
        sums[1] += dq.iter().map(|x| x * x).sum::<f64>();
        sums[2] += terms * terms;
    }
    let ([off, size, terms], (limit, rounding)) = (sums.map(f64::sqrt), limits(cell.dtype));
    // A NaN is not within it.
    let most = limit * size + rounding * terms;
    if alone || off.is_nan() || off > most {
        let what = if alone { "dq of a query that sees one key".to_string() } else { format!("dq, {size:.2e} long,") };
        let dtype = cell.dtype;
        return Err(TrialError::Failed(format!(
            "{what} is {off:.2e} from the f64 reference; with {dtype} it must be within {most:.2e}"
        )));
    }
    let pairs = [
        ("<dv, v> = <do, o>", inner(&gradients.v, &workload.v), inner(&workload.q, &outputs.o)),
        ("<dq, q> = <dk, k>", inner(&gradients.q, &workload.q), inner(&gradients.k, &workload.k)),
    ];
    for (identity, (left, left_size), (right, right_size)) in pairs {
        // Rounding of single elements averages out; 1% of the absolute sum is far above it and far below a mistake.
        let agree = (left - right).abs() <= 0.01 * (left_size + right_size);
        if !agree {
            return Err(TrialError::Failed(format!("gradients break {identity}: {left:e} and {right:e}")));
        }
    }
    Ok(())
}

/// How far dq may be from the reference, relative to it, and to the terms that cancel in it: a missing mask, scale or `<do, o>`
/// puts it off by about its own size.
fn limits(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F32 => (1e-3, f64::from(f32::EPSILON)),
        DType::F16 => (2e-2, 1.0 / 1024.0),
        DType::Bf16 => (1e-1, 1.0 / 128.0),
    }
}

/// Inner product of two tensors of one shape, and the sum of its absolute terms.
fn inner(a: &Tensor, b: &Tensor) -> (f64, f64) {
    let [d0, d1, d2, width] = a.dims();
    let (mut left, mut right) = (vec![0.0; width], vec![0.0; width]);
    let (mut sum, mut size) = (0.0, 0.0);
    for row in 0..d0 * d1 * d2 {
        let (i, j, k) = (row / (d1 * d2), row / d2 % d1, row % d2);
        a.view().read_rows(i, j, k, &mut left);
        b.view().read_rows(i, j, k, &mut right);
        for (&x, &y) in left.iter().zip(&right) {
            let term = f64::from(x) * f64::from(y);
            sum += term;
            size += term.abs();
        }
    }
    (sum, size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Backward;
    use crate::experiment::{Experiment, Spec};
    use crate::memory::{Arena, Label};

    /// Gradients of scores that are none, or half of what they should be, pass both identities; the reference tells.
    #[test]
    fn wrong_gradients_of_scores_are_seen() {
        let text =
            "name = \"x\"\n[[grid]]\nmeasure = \"backward\"\nheads = \"4/2\"\nhead_dim = 16\ncontext_tokens = 48";
        let spec = Spec::parse(text, "x.toml").unwrap();
        let experiment = Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).unwrap();
        let cell = experiment.in_trials().next().unwrap();
        let (shape, params, cpu, arena) = (cell.shape(), cell.params(), Cpu::new(Some(1)).unwrap(), Arena::unlimited());
        let tensor = |dims: [usize; 4], seed: usize| {
            let values = (0..dims.iter().product()).map(|at: usize| ((at * 7919 + seed) % 997) as f32 / 400.0 - 1.2);
            Tensor::from_f32(&arena, Label::Input, cell.dtype, dims, &values.collect::<Vec<_>>()).unwrap()
        };
        let [q, k, v] = [tensor(shape.q_dims(), 1), tensor(shape.kv_dims(), 2), tensor(shape.kv_dims(), 3)];
        let workload = Workload { q, k, v, needles: Vec::new(), rope: None };
        let kv = DenseKv::new(workload.k.view(), workload.v.view()).unwrap();
        let forward = Forward { shape, params, q: workload.q.view(), kv: &kv, cpu: &cpu };
        let kernel = attention::kernel("naive").unwrap();
        let mut outputs = Outputs::allocate(&arena, &shape, cell.dtype).unwrap();
        let mut workspace = kernel.workspace(&shape, &params, cell.dtype, 1).allocate(&arena).unwrap();
        kernel.forward(&forward, &mut outputs, &mut workspace).unwrap();
        let mut gradients = Gradients::allocate(&arena, &shape, cell.dtype).unwrap();
        let size = kernel.backward_workspace(&shape, &params, cell.dtype, 1).unwrap();
        let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: workload.q.view() };
        kernel.backward(&call, &mut gradients, &mut size.allocate(&arena).unwrap()).unwrap();
        let check = |gradients: &Gradients| check_gradients(cell, &workload, &outputs, gradients, &cpu);
        check(&gradients).unwrap();
        for factor in [0.5, 0.0] {
            for tensor in [&mut gradients.q, &mut gradients.k] {
                let scaled: Vec<f32> = tensor.to_f32().iter().map(|x| factor * x).collect();
                cell.dtype.encode(&scaled, tensor.bytes_mut());
            }
            let error = check(&gradients).unwrap_err().to_string();
            assert!(error.starts_with("dq, ") && error.contains("from the f64 reference"), "{error}");
        }
    }
}

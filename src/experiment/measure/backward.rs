//! `backward`: the gradients of a pass over the whole context. The gradient by `o` is taken to be `q`, which has its
//! shape; its values do not matter for memory or time.

use super::check::{accurate, finite};
use super::{Bench, Prepared, Turn, TurnError, timed};
use crate::attention::{Backward, Gradients, Outputs};
use crate::tensor::Tensor;
use crate::workload::Workload;

pub(super) fn predict(prepared: &Prepared, threads: usize) -> u64 {
    let cell = &prepared.cell;
    let (shape, params) = (cell.shape(), cell.params());
    let forward = prepared.kernel().workspace(&shape, &params, cell.dtype, threads).bytes();
    let backward = Gradients::bytes(&shape, cell.dtype) + prepared.workspace_bytes(threads);
    Outputs::bytes(&shape, cell.dtype) + forward.max(backward)
}

pub(super) fn turn(prepared: &Prepared, bench: Bench<'_>) -> Result<Turn, TurnError> {
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
    let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: forward.q };
    let (backward_ns, result) = timed(|| prepared.kernel().backward(&call, &mut gradients, &mut workspace));
    result?;

    let mut turn = Turn { samples_ns: [("backward", backward_ns)].into(), ..Turn::default() };
    if let Some(truth) = bench.truth {
        finite(&outputs)?;
        let o = outputs.o.view();
        let drift = truth.drift(cell.head_dim, |[batch, head, token], row| o.read_rows(batch, head, token, row));
        accurate(&drift, cell.dtype)?;
        turn.drift = Some(drift);
        identities(bench.workload, &outputs, &gradients)?;
    }
    Ok(turn)
}

/// Two identities that hold for every attention: the output is linear in v, so `<dv, v> = <do, o>`; scores depend on
/// q and k only through `q.k`, so `<dq, q> = <dk, k>`.
pub(super) fn identities(workload: &Workload, outputs: &Outputs, gradients: &Gradients) -> Result<(), TurnError> {
    let pairs = [
        ("<dv, v> = <do, o>", inner(&gradients.v, &workload.v), inner(&workload.q, &outputs.o)),
        ("<dq, q> = <dk, k>", inner(&gradients.q, &workload.q), inner(&gradients.k, &workload.k)),
    ];
    for (identity, (left, left_size), (right, right_size)) in pairs {
        // Rounding of single elements averages out; 1% of the absolute sum is far above it and far below a mistake.
        let agree = (left - right).abs() <= 0.01 * (left_size + right_size);
        // A NaN agrees with nothing.
        if !agree {
            return Err(TurnError::Failed(format!("gradients break {identity}: {left:e} and {right:e}")));
        }
    }
    Ok(())
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

//! `forward`: a pass over the whole context.

use super::check::{accurate, finite};
use super::{Bench, Prepared, Turn, TurnError, timed};
use crate::attention::Outputs;

pub(super) fn predict(prepared: &Prepared, threads: usize) -> u64 {
    Outputs::bytes(&prepared.cell.shape(), prepared.cell.dtype) + prepared.workspace_bytes(threads)
}

pub(super) fn turn(prepared: &Prepared, bench: Bench<'_>) -> Result<Turn, TurnError> {
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

    let mut turn = Turn { samples_ns: [("forward", forward_ns)].into(), ..Turn::default() };
    if let Some(truth) = bench.truth {
        finite(&outputs)?;
        let o = outputs.o.view();
        let drift = truth.drift(cell.head_dim, |[batch, head, token], row| o.read_rows(batch, head, token, row));
        accurate(&drift, cell.dtype)?;
        turn.drift = Some(drift);
    }
    Ok(turn)
}

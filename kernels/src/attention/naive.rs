//! The baseline: the score matrix of every head is materialised, then the softmax, then the product with V.
//!
//! The products are those of the `gemm` crate, so that what it costs is what materialising costs and not slow code.
//! Scores are f32 whatever the inputs' type. Nothing is skipped under a mask, as in the textbook formulation.

use super::backward::{Biases, Grad, score_gradients};
use super::online::{add_bias, logits};
use super::{
    AttentionError, Backward, Forward, Gradients, Kernel, KernelEntry, Outputs, Params, Shape, Workspace, WorkspaceSize,
};
use crate::device::cpu::Slots;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::loops;
use crate::tensor::DType;
use rayon::prelude::*;
use std::f32::consts::LN_2;

/// Attention with materialised scores.
pub struct Naive;

impl Naive {
    /// One thread's copies of a head's rows in f32: queries or outputs, keys or values.
    fn slot(shape: &Shape) -> usize {
        (shape.q_len + shape.kv_len) * shape.head_dim
    }
}

/// Runs `work(head, scores of the head, slot, threads)` for every query head: heads side by side where there are
/// enough of them, else one after another with all threads inside each product.
fn each_head(
    call: &Forward<'_>,
    chunks: Vec<&mut [f32]>,
    scratch: &mut [f32],
    work: impl Fn(usize, &mut [f32], &mut [f32], usize) + Sync,
) {
    let threads = call.cpu.threads();
    if chunks.len() >= threads {
        let slots = Slots::new(scratch, threads);
        chunks.into_par_iter().enumerate().with_max_len(1).for_each(|(head, scores)| {
            slots.with(|slot| work(head, scores, slot, 1));
        });
    } else {
        chunks.into_iter().enumerate().for_each(|(head, scores)| work(head, scores, scratch, threads));
    }
}

/// Adds the biases of the keys of a list to the logits of its query `i`; whether there are any.
fn add_biases(call: &Forward<'_>, [batch, kv_head]: [usize; 2], i: usize, row: &mut [f32]) -> bool {
    if let Some(bias) = call.kv.bias(batch, kv_head) {
        add_bias(bias.far(i, call.shape.q_len, row.len()), row);
        return true;
    }
    let mut start = 0;
    while start < row.len() {
        let Some(run) = call.kv.token_bias(batch, kv_head, start) else { return false };
        add_bias(run, &mut row[start..]);
        start += run.len();
    }
    start > 0
}

/// The registry's line.
pub const ENTRY: KernelEntry = KernelEntry {
    name: "naive",
    about: "materialises the scores of every head: the baseline, quadratic memory",
    parameters: &[],
    build: |_| Ok(Box::new(Naive)),
};

impl Kernel for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> WorkspaceSize {
        WorkspaceSize { scores: shape.scores(), scratch: threads * Self::slot(shape) }
    }

    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let Shape { q_heads, q_len, kv_len, head_dim: width, .. } = call.shape;
        let isa = call.cpu.isa();
        let place = |head: usize| (head / q_heads, head % q_heads, head % q_heads / call.shape.group());
        let dtype = outputs.o.dtype();
        // There may be room for longer lists than these.
        let (scores, scratch) = (&mut workspace.scores[..call.shape.scores()], &mut workspace.scratch);
        call.cpu.install(|| {
            let heads = scores.chunks_mut(q_len * kv_len).collect();
            each_head(call, heads, scratch, |head, scores, slot, threads| {
                let (batch, q_head, kv_head) = place(head);
                let keys = call.kv.len(batch, kv_head);
                let (q_slot, kv_slot) = slot.split_at_mut(q_len * width);
                let q = Matrix::new(call.q.rows(batch, q_head, 0, q_len, q_slot), q_len, width);
                let k = Matrix::new(call.kv.keys(batch, kv_head, 0, keys, kv_slot), keys, width);
                product(scores, kv_len, q, k.transposed(), false, threads);
            });

            scores.par_chunks_mut(kv_len).zip(outputs.lse.par_iter_mut()).enumerate().for_each(
                |(index, (row, lse))| {
                    let (batch, _, kv_head) = place(index / q_len);
                    let visible = call.params.visible(index % q_len, q_len, call.kv.len(batch, kv_head));
                    let mut max = logits(isa, &call.params, row);
                    let keys = call.kv.len(batch, kv_head);
                    if add_biases(call, [batch, kv_head], index % q_len, &mut row[..keys]) {
                        max = row[..keys].iter().copied().fold(f32::MIN, f32::max);
                    }
                    row[..visible.start].fill(0.0);
                    row[visible.end..].fill(0.0);
                    let seen = &mut row[visible];
                    if seen.is_empty() {
                        *lse = f32::NEG_INFINITY;
                        return;
                    }
                    // The maximum over masked keys too is only a shift; the seen ones may be far below it.
                    let max = if seen.len() == kv_len { max } else { seen.iter().copied().fold(f32::MIN, f32::max) };
                    let sum = loops::exp2_sum(isa, seen, max);
                    loops::scale(isa, seen, 1.0 / sum);
                    *lse = (max + sum.log2()) * LN_2;
                },
            );

            let row_bytes = width * dtype.bytes();
            let heads: Vec<_> = outputs.o.bytes_mut().chunks_mut(q_len * row_bytes).collect();
            let scores = &*scores;
            let outputs: Vec<_> = heads.into_iter().map(std::sync::Mutex::new).collect();
            let empty = (0..outputs.len()).map(|_| &mut [][..]).collect();
            each_head(call, empty, scratch, |head, _, slot, threads| {
                let (batch, _, kv_head) = place(head);
                let keys = call.kv.len(batch, kv_head);
                let (o, v_slot) = slot.split_at_mut(q_len * width);
                let p = Matrix::new(&scores[head * q_len * kv_len..][..q_len * kv_len], q_len, keys);
                let v = Matrix::new(call.kv.values(batch, kv_head, 0, keys, v_slot), keys, width);
                product(o, width, p.with_row_stride(kv_len), v, false, threads);
                dtype.encode(o, &mut outputs[head].lock().expect("each head is written once"));
            });
        });
        Ok(())
    }

    fn backward_workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> Option<WorkspaceSize> {
        let gradients = (shape.q_len + 2 * shape.kv_len) * shape.head_dim;
        let inputs = (2 * shape.q_len + 2 * shape.kv_len) * shape.head_dim;
        Some(WorkspaceSize { scores: 2 * shape.scores(), scratch: shape.rows() + threads * (inputs + gradients) })
    }

    fn backward(
        &self,
        call: &Backward<'_>,
        gradients: &mut Gradients,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let Forward { shape, params, cpu, q, kv, .. } = call.forward;
        let Shape { q_len, kv_len, head_dim: width, .. } = shape;
        let (group, isa, dtype) = (shape.group(), cpu.isa(), gradients.q.dtype());
        let (delta, scratch) = workspace.scratch.split_at_mut(shape.rows());
        call.row_deltas(delta);
        let delta = &*delta;
        let (q_bytes, kv_bytes) = (q_len * width * dtype.bytes(), kv_len * width * dtype.bytes());
        let slots = Slots::new(scratch, cpu.threads());
        let grad_biases: Vec<Option<&mut [f32]>> = match &mut gradients.bias {
            Some(bias) => bias.chunks_mut(kv_len).map(Some).collect(),
            None => (0..shape.batch * shape.kv_heads).map(|_| None).collect(),
        };
        cpu.install(|| {
            // One unit of work is a KV head with its group of query heads, in order: sums are always the same.
            workspace
                .scores
                .par_chunks_mut(2 * group * q_len * kv_len)
                .zip(gradients.q.bytes_mut().par_chunks_mut(group * q_bytes))
                .zip(gradients.k.bytes_mut().par_chunks_mut(kv_bytes))
                .zip(gradients.v.bytes_mut().par_chunks_mut(kv_bytes))
                .zip(grad_biases)
                .enumerate()
                .with_max_len(1)
                .for_each(|(unit, ((((scores, grad_q), grad_k), grad_v), grad_bias))| {
                    slots.with(|slot| {
                        let (batch, kv_head) = (unit / shape.kv_heads, unit % shape.kv_heads);
                        let (q_slot, rest) = slot.split_at_mut(q_len * width);
                        let (do_slot, rest) = rest.split_at_mut(q_len * width);
                        let (k_slot, rest) = rest.split_at_mut(kv_len * width);
                        let (v_slot, rest) = rest.split_at_mut(kv_len * width);
                        let (dq, rest) = rest.split_at_mut(q_len * width);
                        let (dk, rest) = rest.split_at_mut(kv_len * width);
                        let dv = &mut rest[..kv_len * width];
                        let k = Matrix::new(kv.keys(batch, kv_head, 0, kv_len, k_slot), kv_len, width);
                        let v = Matrix::new(kv.values(batch, kv_head, 0, kv_len, v_slot), kv_len, width);
                        let bias = kv.bias(batch, kv_head);
                        let far = |i: usize| bias.map_or(&[][..], |bias| bias.far(i, q_len, kv_len));
                        let mut grad_bias = grad_bias;
                        if let Some(grad_bias) = &mut grad_bias {
                            grad_bias.fill(0.0);
                        }
                        for (member, (pair, grad_q)) in
                            scores.chunks_mut(2 * q_len * kv_len).zip(grad_q.chunks_mut(q_bytes)).enumerate()
                        {
                            let q_head = kv_head * group + member;
                            let rows = (batch * shape.q_heads + q_head) * q_len;
                            let q = Matrix::new(q.rows(batch, q_head, 0, q_len, q_slot), q_len, width);
                            let grad_o = Matrix::new(call.grad_o.rows(batch, q_head, 0, q_len, do_slot), q_len, width);
                            let (p, ds) = pair.split_at_mut(q_len * kv_len);
                            product(p, kv_len, q, k.transposed(), false, 1);
                            product(ds, kv_len, grad_o, v.transposed(), false, 1);
                            let tile = Grad {
                                lse: &call.lse[rows..][..q_len],
                                delta: &delta[rows..][..q_len],
                                columns: kv_len,
                            };
                            let biases = Biases { far: &far, gradient: grad_bias.as_deref_mut() };
                            score_gradients(isa, &params, &tile, p, ds, biases, |i| params.visible(i, q_len, kv_len));
                            let p = Matrix::new(p, q_len, kv_len);
                            let ds = Matrix::new(ds, q_len, kv_len);
                            product(dv, width, p.transposed(), grad_o, member > 0, 1);
                            product(dk, width, ds.transposed(), q, member > 0, 1);
                            product(dq, width, ds, k, false, 1);
                            dtype.encode(dq, grad_q);
                        }
                        dtype.encode(dk, grad_k);
                        dtype.encode(dv, grad_v);
                    });
                });
        });
        Ok(())
    }
}

//! The oracle: attention in f64, one query row at a time, as simple as it can be written.
//!
//! Every other kernel is checked against it before it is timed. Its cost is linear in the number of rows, so long
//! contexts are checked on a sample of rows ([`rows`]) and short ones in full.

use super::source::token_biases;
use super::{AttentionError, Forward, Kernel, KernelEntry, Outputs, Params, Shape, Workspace, WorkspaceSize};
use crate::device::cpu::Slots;
use crate::tensor::{DType, TensorView};
use rayon::prelude::*;

/// The f64 reference as a kernel.
pub struct Reference;

/// Keys and values are widened in blocks of this many rows.
const BLOCK: usize = 64;

/// One row of the result in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Output, `[D]`.
    pub o: Vec<f64>,
    /// Natural log of the sum of exponentials; `-inf` where the row sees no key.
    pub lse: f64,
}

impl Params {
    /// The logit of an inner product in f64: scale, then soft-cap.
    pub fn logit(&self, inner: f64) -> f64 {
        let scaled = f64::from(self.scale) * inner;
        self.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
    }
}

/// f32 elements of the scratch memory for one row: its logits in f64, and a block of keys or values. Even, so that
/// slots laid end to end keep the alignment of f64.
fn slot(shape: &Shape) -> usize {
    2 * shape.kv_len + BLOCK * shape.head_dim
}

/// Computes query row `i` of query head `q_head` in f64: writes its output to `o` and returns its log-sum-exp.
fn row(call: &Forward<'_>, [batch, q_head, i]: [usize; 3], o: &mut [f64], slot: &mut [f32]) -> f64 {
    let Forward { shape, params, q, kv, .. } = *call;
    let (width, kv_head) = (shape.head_dim, q_head / shape.group());
    let (logits, block) = slot.split_at_mut(2 * shape.kv_len);
    let visible = call.sight([batch, kv_head]).visible(i);
    let logits = &mut bytemuck::cast_slice_mut::<f32, f64>(logits)[..visible.len()];
    o.fill(0.0);
    if visible.is_empty() {
        return f64::NEG_INFINITY;
    }
    let mut query = [0.0; Shape::MAX_HEAD_DIM];
    let query = &mut query[..width];
    q.read_rows(batch, q_head, i, query);

    for (start, logits) in visible.clone().step_by(BLOCK).zip(logits.chunks_mut(BLOCK)) {
        let keys = kv.keys(batch, kv_head, start, logits.len(), block).chunks_exact(width);
        for (logit, key) in logits.iter_mut().zip(keys) {
            let inner = query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            *logit = params.logit(inner);
        }
        if let Some(biases) = token_biases::<BLOCK>(kv, [batch, kv_head], start..start + logits.len()) {
            logits.iter_mut().zip(biases).for_each(|(logit, bias)| *logit += f64::from(bias));
        }
    }
    if let Some(bias) = kv.bias(batch, kv_head) {
        let far = bias.far(i, shape.q_len, kv.len(batch, kv_head)).iter().skip(visible.start);
        logits.iter_mut().zip(far).for_each(|(logit, &bias)| *logit += f64::from(bias));
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();

    for (start, logits) in visible.step_by(BLOCK).zip(logits.chunks(BLOCK)) {
        let values = kv.values(batch, kv_head, start, logits.len(), block).chunks_exact(width);
        for (value, logit) in values.zip(logits) {
            let probability = (logit - max).exp() / sum;
            o.iter_mut().zip(value).for_each(|(out, &v)| *out += probability * f64::from(v));
        }
    }
    max + sum.ln()
}

/// Computes the given query rows `[batch, query head, query]` in f64.
pub fn rows(call: &Forward<'_>, at: &[[usize; 3]]) -> Vec<Row> {
    each(call, at, |at, slot| {
        let mut o = vec![0.0; call.shape.head_dim];
        let lse = row(call, at, &mut o, slot);
        Row { o, lse }
    })
}

/// The gradient by a query row in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryGradient {
    /// The gradient, `[D]`.
    pub dq: Vec<f64>,
    /// Size of what it is added up from before that cancels, `scale P_j |do| |v_j| |k_j|` over the keys, as a root of squares:
    /// times a type's rounding error, as much as `dq` may be off where it is next to nothing.
    pub terms: f64,
}

/// Computes the gradient by the given query rows in f64 from that by the output, `[B, Hq, Lq, D]`; of lists without biases.
pub fn query_gradients(call: &Forward<'_>, grad_o: &TensorView<'_>, at: &[[usize; 3]]) -> Vec<QueryGradient> {
    each(call, at, |at, slot| query_gradient(call, grad_o, at, slot))
}

/// What `one` makes of each row, in parallel and with scratch memory of its own: an oracle is no part of what is measured.
fn each<T: Send>(call: &Forward<'_>, at: &[[usize; 3]], one: impl Fn([usize; 3], &mut [f32]) -> T + Sync) -> Vec<T> {
    let scratch = || vec![0.0f64; slot(&call.shape) / 2];
    let one = |scratch: &mut Vec<f64>, &at: &[usize; 3]| one(at, bytemuck::cast_slice_mut(scratch));
    call.cpu.install(|| at.par_iter().map_init(scratch, one).collect())
}

/// `dq = scale * sum_j dS_j k_j` with `dS_j = P_j (dP_j - <do, o>)`, `dP_j = <do, v_j>`, times the slope of the soft-cap.
fn query_gradient(
    call: &Forward<'_>,
    grad_o: &TensorView<'_>,
    [batch, q_head, i]: [usize; 3],
    slot: &mut [f32],
) -> QueryGradient {
    let Forward { shape, params, kv, .. } = *call;
    let (width, kv_head) = (shape.head_dim, q_head / shape.group());
    let (mut o, mut gradient) = (vec![0.0; width], vec![0.0; width]);
    let lse = row(call, [batch, q_head, i], &mut o, slot);
    let mut grad = vec![0.0; width];
    grad_o.read_rows(batch, q_head, i, &mut grad);
    let delta: f64 = grad.iter().zip(&o).map(|(&grad, o)| f64::from(grad) * o).sum();
    let visible = call.sight([batch, kv_head]).visible(i);
    // What `row` left: the logits.
    let (logits, block) = slot.split_at_mut(2 * shape.kv_len);
    let logits = &bytemuck::cast_slice::<f32, f64>(logits)[..visible.len()];
    let (mut slopes, mut sizes, mut terms) = ([0.0; BLOCK], [0.0; BLOCK], 0.0);
    let norm = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let grad_norm = norm(&grad);
    for (start, logits) in visible.step_by(BLOCK).zip(logits.chunks(BLOCK)) {
        let (slopes, sizes) = (&mut slopes[..logits.len()], &mut sizes[..logits.len()]);
        let values = kv.values(batch, kv_head, start, logits.len(), block).chunks_exact(width);
        for ((slope, size), (value, logit)) in slopes.iter_mut().zip(&mut *sizes).zip(values.zip(logits)) {
            let grad_p: f64 = grad.iter().zip(value).map(|(&grad, &v)| f64::from(grad) * f64::from(v)).sum();
            let cap_slope = params.softcap.map_or(1.0, |cap| 1.0 - (logit / f64::from(cap)).powi(2));
            let factor = f64::from(params.scale) * (logit - lse).exp() * cap_slope;
            (*slope, *size) = (factor * (grad_p - delta), factor * grad_norm * norm(value));
        }
        let keys = kv.keys(batch, kv_head, start, logits.len(), block).chunks_exact(width);
        for (key, (slope, size)) in keys.zip(slopes.iter().zip(&*sizes)) {
            gradient.iter_mut().zip(key).for_each(|(sum, &k)| *sum += slope * f64::from(k));
            terms += (size * norm(key)).powi(2);
        }
    }
    QueryGradient { dq: gradient, terms: terms.sqrt() }
}

/// Query rows to check: all of them for at most `most` queries, else `most` queries spread evenly from the first to
/// the last, in every head.
pub fn sample_rows(shape: &Shape, most: usize) -> Vec<[usize; 3]> {
    let count = shape.q_len.min(most.max(1));
    let query = |index: usize| if count == 1 { shape.q_len - 1 } else { index * (shape.q_len - 1) / (count - 1) };
    let mut at = Vec::with_capacity(shape.batch * shape.q_heads * count);
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            at.extend((0..count).map(|index| [batch, head, query(index)]));
        }
    }
    at
}

/// Relative L2 distance of rows of an output from the reference: `|o - reference| / |reference|` over all of them.
pub fn relative_error(o: &TensorView<'_>, at: &[[usize; 3]], expected: &[Row]) -> f64 {
    let mut row = vec![0.0; o.dims()[3]];
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&[batch, head, i], expected) in at.iter().zip(expected) {
        o.read_rows(batch, head, i, &mut row);
        for (&got, &wanted) in row.iter().zip(&expected.o) {
            difference += (f64::from(got) - wanted).powi(2);
            norm += wanted * wanted;
        }
    }
    match (difference, norm) {
        (0.0, 0.0) => 0.0,
        _ => (difference / norm).sqrt(),
    }
}

/// The registry's line.
pub const ENTRY: KernelEntry = KernelEntry {
    name: "reference",
    about: "f64, one row at a time: the oracle that every kernel is checked against (slow)",
    parameters: &[],
    build: |_| Ok(Box::new(Reference)),
};

impl Kernel for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> WorkspaceSize {
        WorkspaceSize { scores: 0, scratch: threads * slot(shape) }
    }

    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let Shape { q_heads, q_len, head_dim: width, .. } = call.shape;
        let dtype = outputs.o.dtype();
        let slots = Slots::new(&mut workspace.scratch, call.cpu.threads());
        call.cpu.install(|| {
            let results = outputs.o.bytes_mut().par_chunks_mut(width * dtype.bytes()).zip(outputs.lse.par_iter_mut());
            results.enumerate().for_each(|(index, (target, lse))| {
                let (head, i) = (index / q_len, index % q_len);
                let (mut o, mut narrow) = ([0.0; Shape::MAX_HEAD_DIM], [0.0; Shape::MAX_HEAD_DIM]);
                let at = [head / q_heads, head % q_heads, i];
                *lse = slots.with(|slot| row(call, at, &mut o[..width], slot)) as f32;
                narrow.iter_mut().zip(&o[..width]).for_each(|(narrow, &wide)| *narrow = wide as f32);
                dtype.encode(&narrow[..width], target);
            });
        });
        Ok(())
    }
}

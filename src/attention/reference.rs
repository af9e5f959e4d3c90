//! The oracle: attention in f64, one query row at a time, as simple as it can be written.
//!
//! Every other kernel is checked against it before it is timed. Its cost is linear in the number of rows, so long
//! contexts are checked on a sample of rows ([`rows`]) and short ones in full.

use super::{AttentionError, Forward, Kernel, KernelEntry, KvRows, Outputs, Params, Shape, Workspace, WorkspaceSize};
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
    pub(super) fn logit(&self, inner: f64) -> f64 {
        let scaled = f64::from(self.scale) * inner;
        self.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
    }
}

/// Computes query row `i` of query head `q_head` in f64.
fn row(shape: &Shape, params: &Params, q: &TensorView<'_>, kv: &dyn KvRows, at: [usize; 3]) -> Row {
    let [batch, q_head, i] = at;
    let (width, kv_head) = (shape.head_dim, q_head / shape.group());
    let mut query = vec![0.0; width];
    q.read_rows(batch, q_head, i, &mut query);
    let visible = params.visible(i, shape.q_len, kv.len(batch, kv_head));
    let mut block = vec![0.0; BLOCK * width];

    let mut logits = Vec::with_capacity(visible.len());
    for start in visible.clone().step_by(BLOCK) {
        let count = BLOCK.min(visible.end - start);
        for key in kv.keys(batch, kv_head, start, count, &mut block).chunks_exact(width) {
            let inner = query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            logits.push(params.logit(inner));
        }
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return Row { o: vec![0.0; width], lse: f64::NEG_INFINITY };
    }
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();

    let mut o = vec![0.0; width];
    for start in visible.clone().step_by(BLOCK) {
        let count = BLOCK.min(visible.end - start);
        let values = kv.values(batch, kv_head, start, count, &mut block);
        for (value, logit) in values.chunks_exact(width).zip(&logits[start - visible.start..]) {
            let probability = (logit - max).exp() / sum;
            o.iter_mut().zip(value).for_each(|(out, &v)| *out += probability * f64::from(v));
        }
    }
    Row { o, lse: max + sum.ln() }
}

/// Computes the given query rows `[batch, query head, query]` in f64, in parallel.
pub fn rows(call: &Forward<'_>, at: &[[usize; 3]]) -> Vec<Row> {
    call.cpu.install(|| at.par_iter().map(|&at| row(&call.shape, &call.params, &call.q, call.kv, at)).collect())
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

    fn workspace(&self, _: &Shape, _: &Params, _: DType, _: usize) -> WorkspaceSize {
        WorkspaceSize::default()
    }

    fn forward(&self, call: &Forward<'_>, outputs: &mut Outputs, _: &mut Workspace) -> Result<(), AttentionError> {
        let at = sample_rows(&call.shape, call.shape.q_len);
        let row_bytes = call.shape.head_dim * outputs.o.dtype().bytes();
        let dtype = outputs.o.dtype();
        let (o, lse) = (outputs.o.bytes_mut(), &mut outputs.lse);
        call.cpu.install(|| {
            o.par_chunks_mut(row_bytes).zip(lse.par_iter_mut()).zip(&at).for_each(|((o, lse), &at)| {
                let row = row(&call.shape, &call.params, &call.q, call.kv, at);
                let narrow: Vec<f32> = row.o.iter().map(|&x| x as f32).collect();
                dtype.encode(&narrow, o);
                *lse = row.lse as f32;
            });
        });
        Ok(())
    }
}

//! What the decoded tokens gave, and how much of the dense result is in it.

use crate::attention::Outputs;
use crate::attention::reference::Row;
use crate::experiment::cell::Cell;
use crate::memory::Buffer;
use crate::workload::{Needle, Workload};

/// Outputs `[T, layers * B, Hq, D]` and log-sum-exps `[T, layers * B, Hq]` of the decoded tokens.
pub(in crate::experiment::measure) struct Late {
    pub o: Buffer<f32>,
    pub lse: Buffer<f32>,
    /// KV bytes of pages in use in each step.
    pub live_bytes: Vec<u64>,
    /// KV bytes that all steps together read.
    pub read_bytes: u64,
    /// KV bytes that were there in all steps together.
    pub all_bytes: u64,
}

impl Late {
    pub fn store(&mut self, step: usize, outputs: &Outputs) {
        let (o_len, lse_len) = (outputs.o.dims().iter().product::<usize>(), outputs.lse.len());
        outputs.o.dtype().decode(outputs.o.bytes(), &mut self.o[step * o_len..][..o_len]);
        self.lse[step * lse_len..][..lse_len].copy_from_slice(&outputs.lse);
    }

    fn row(cell: &Cell, [batch, head, token]: [usize; 3]) -> usize {
        ((token - cell.context_tokens) * cell.layers * cell.batch + batch) * cell.q_heads + head
    }

    pub fn o(&self, cell: &Cell, at: [usize; 3]) -> &[f32] {
        &self.o[Self::row(cell, at) * cell.head_dim..][..cell.head_dim]
    }

    /// Fraction of the dense attention mass that stayed for a row: `exp(lse - lse_dense)`, since a log-sum-exp over fewer
    /// keys is the log of a part of the same sum. Where keys are changed (by merging, or rotated to other positions) it is
    /// the mass that they now draw, at most 1. `None` where keys are codes: what these draw tells of their errors as much as
    /// of what is gone.
    pub fn mass_kept(&self, cell: &Cell, at: [usize; 3], dense: &Row) -> Option<f64> {
        cell.kv_format().k.dtype()?;
        Some((f64::from(self.lse[Self::row(cell, at)]) - dense.lse).exp().min(1.0))
    }
}

/// Fraction of asked needles whose value the asking queries retrieve: of all needles of the KV head, the right one's
/// value has the largest cosine with the output. Averaged over the query heads of the group.
pub(super) fn needle_recall(cell: &Cell, workload: &Workload, late: &Late) -> Option<f64> {
    let group = cell.q_heads / cell.kv_heads;
    let value = |needle: &Needle| {
        let mut row = vec![0.0; cell.head_dim];
        workload.v.view().read_rows(needle.batch, needle.kv_head, needle.position, &mut row);
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        row.iter_mut().for_each(|x| *x /= norm);
        row
    };
    let needles: Vec<(&Needle, Vec<f32>)> = workload.needles.iter().map(|needle| (needle, value(needle))).collect();
    let (mut found, mut asked) = (0, 0);
    for (needle, _) in &needles {
        for head in needle.kv_head * group..(needle.kv_head + 1) * group {
            let o = late.o(cell, [needle.batch, head, needle.asked_by]);
            let inner = |value: &[f32]| -> f32 { o.iter().zip(value).map(|(a, b)| a * b).sum() };
            let rivals =
                needles.iter().filter(|(other, _)| (other.batch, other.kv_head) == (needle.batch, needle.kv_head));
            let best = rivals.max_by(|a, b| inner(&a.1).total_cmp(&inner(&b.1)));
            found += usize::from(best.is_some_and(|(best, _)| best.position == needle.position));
            asked += 1;
        }
    }
    (asked > 0).then(|| found as f64 / asked as f64)
}

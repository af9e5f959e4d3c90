//! What the backward passes share: `delta = rowsum(do * o)`, and the step from scores to their gradients.
//!
//! With `P = exp(logit - lse)` recomputed from the saved `lse` and `dP = do vᵀ`, the gradient of the inner product
//! is `dS = P * (dP - delta) * scale`, times `1 - (logit / cap)²` under a soft-cap; then `dv = Pᵀ do`, `dq = dS k`,
//! `dk = dSᵀ q` (FlashAttention-2, arXiv 2307.08691, section 3.1). A bias is added behind the cap, so that the gradient by
//! that of a key is the sum of `P * (dP - delta)` over the queries, of all heads of the group, for which it counts.

use super::online::{add_bias, logits};
use super::{Backward, Params};
use crate::device::simd::Isa;
use crate::device::simd::loops;
use rayon::prelude::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

impl Backward<'_> {
    /// Writes `delta` `[B, Hq, Lq]`: the inner product of each row of `do` with the same row of `o`.
    pub(super) fn row_deltas(&self, delta: &mut [f32]) {
        let (shape, isa) = (self.forward.shape, self.forward.cpu.isa());
        self.forward.cpu.install(|| {
            delta.par_chunks_mut(shape.q_len).enumerate().for_each(|(head, delta)| {
                let (batch, q_head) = (head / shape.q_heads, head % shape.q_heads);
                let (mut o, mut grad_o) = ([0.0; super::Shape::MAX_HEAD_DIM], [0.0; super::Shape::MAX_HEAD_DIM]);
                for (i, delta) in delta.iter_mut().enumerate() {
                    let o = self.o.rows(batch, q_head, i, 1, &mut o);
                    *delta = loops::dot(isa, o, self.grad_o.rows(batch, q_head, i, 1, &mut grad_o));
                }
            });
        });
    }
}

/// Saved values of the rows of a tile.
pub(super) struct Grad<'a> {
    /// Log-sum-exp of each row, natural log.
    pub lse: &'a [f32],
    /// `rowsum(do * o)` of each row.
    pub delta: &'a [f32],
    /// Columns of the tile.
    pub columns: usize,
}

/// Biases of the keys of a tile.
pub(super) struct Biases<'a, 'k> {
    /// Those that count for a row: of the first keys.
    pub far: &'a dyn Fn(usize) -> &'k [f32],
    /// Where the gradient is added, if it is wanted.
    pub gradient: Option<&'a mut [f32]>,
}

/// In place: `p` from inner products to probabilities, `ds` from `dP` to the gradients of the inner products. Keys
/// outside `visible(row)` get zero in both.
pub(super) fn score_gradients(
    isa: Isa,
    params: &Params,
    tile: &Grad<'_>,
    p: &mut [f32],
    ds: &mut [f32],
    mut biases: Biases<'_, '_>,
    visible: impl Fn(usize) -> Range<usize>,
) {
    let rows = p.chunks_exact_mut(tile.columns).zip(ds.chunks_exact_mut(tile.columns));
    for (i, ((p, ds), (&lse, &delta))) in rows.zip(tile.lse.iter().zip(tile.delta)).enumerate() {
        let seen = visible(i);
        for row in [&mut *p, &mut *ds] {
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        let far = (biases.far)(i);
        let far = &far[seen.start.min(far.len())..seen.end.min(far.len())];
        let gradient = biases.gradient.as_deref_mut().map(|gradient| &mut gradient[seen.clone()]);
        let (p, ds) = (&mut p[seen.clone()], &mut ds[seen]);
        logits(isa, params, p);
        if let Some(gradient) = gradient {
            let pairs = far.iter().zip(&*p).zip(&*ds);
            for (to, ((bias, logit), dp)) in gradient.iter_mut().zip(pairs) {
                *to += (logit + (bias - lse) * LOG2_E).exp2() * (dp - delta);
            }
        }
        loops::shift_scale(isa, ds, -delta, params.scale);
        if let Some(cap) = params.softcap {
            loops::cap_slope(isa, ds, p, cap * LOG2_E);
        }
        add_bias(far, p);
        loops::exp2_sum(isa, p, lse * LOG2_E);
        loops::multiply(isa, ds, p);
    }
}

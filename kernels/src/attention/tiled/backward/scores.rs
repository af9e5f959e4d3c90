//! From a tile of inner products and of `dP` to probabilities and score gradients, in one pass and in place.

use crate::attention::Params;
use crate::device::simd::math::{exp2, tanh};
use crate::device::simd::{Simd, Unit};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// What turns an inner product into a base-2 logit.
pub(super) struct Factors<S: Simd> {
    /// `scale * log2(e)`, or with a soft-cap `scale / cap`.
    inner: S::Vector,
    /// `cap * log2(e)`.
    outer: S::Vector,
    capped: bool,
}

impl<S: Simd> Factors<S> {
    #[inline(always)]
    pub(super) fn new(simd: S, params: &Params) -> Self {
        let (inner, outer) = match params.softcap {
            None => (params.scale * LOG2_E, 0.0),
            Some(cap) => (params.scale / cap, cap * LOG2_E),
        };
        Factors { inner: simd.splat(inner), outer: simd.splat(outer), capped: params.softcap.is_some() }
    }
}

/// What was saved of a query.
#[derive(Clone)]
pub(super) struct Saved {
    /// Log-sum-exp, natural log.
    pub(super) lse: f32,
    /// `rowsum(do * o)`.
    pub(super) delta: f32,
    /// Columns of the tile that it sees.
    pub(super) seen: Range<usize>,
    /// Columns whose bias counts for it: the first ones.
    pub(super) far: usize,
}

impl Saved {
    /// A row that pads a tile.
    pub(super) const NOTHING: Saved = Saved { lse: 0.0, delta: 0.0, seen: 0..0, far: 0 };
}

/// A query's values in every lane.
struct Row<S: Simd> {
    shift: S::Vector,
    delta: S::Vector,
    from: S::Vector,
    to: S::Vector,
    far: S::Vector,
}

impl<S: Simd> Row<S> {
    #[inline(always)]
    fn new(simd: S, saved: &Saved) -> Self {
        Row {
            shift: simd.splat(-saved.lse * LOG2_E),
            delta: simd.splat(saved.delta),
            from: simd.splat(saved.seen.start as f32),
            to: simd.splat(saved.seen.end as f32),
            far: simd.splat(saved.far as f32),
        }
    }

    /// Probabilities, and the gradients of the logits, of the first vector of inner products and of `dP`; with `MASKED`
    /// zeros in columns that the query does not see; with `BIASED` it looks at the bias of the columns, which begin at `first`,
    /// and adds the query's share to the gradient by it.
    #[inline(always)]
    fn gradients<const MASKED: bool, const CAPPED: bool, const BIASED: bool>(
        &self,
        simd: S,
        factors: &Factors<S>,
        (columns, first): (S::Vector, usize),
        scores: &[f32],
        grad_p: &[f32],
        biases: &mut [&mut [f32]; 2],
    ) -> [S::Vector; 2] {
        let (score, grad_p) = (simd.read(scores), simd.read(grad_p));
        let slope = simd.sub(grad_p, self.delta);
        let zero = simd.splat(0.0);
        let shift = match BIASED {
            true => simd.add(self.shift, simd.select_less(columns, self.far, simd.read(&biases[0][first..]), zero)),
            false => self.shift,
        };
        // Not one multiply-add: the forward pass rounded these products, and where they are rounded otherwise the row's gradients
        // no longer add up to zero, which an offset that all keys share makes large.
        let [mut p, mut ds] = if CAPPED {
            let bounded = tanh(simd, simd.mul(score, factors.inner));
            let p = exp2(simd, simd.add(simd.mul(bounded, factors.outer), shift));
            let cap_slope = simd.sub(simd.splat(1.0), simd.mul(bounded, bounded));
            [p, simd.mul(simd.mul(p, slope), cap_slope)]
        } else {
            let p = exp2(simd, simd.add(simd.mul(score, factors.inner), shift));
            [p, simd.mul(p, slope)]
        };
        if MASKED {
            for x in [&mut p, &mut ds] {
                *x = simd.select_less(columns, self.to, *x, zero);
                *x = simd.select_less(columns, self.from, zero, *x);
            }
        }
        if BIASED {
            let share = simd.select_less(columns, self.far, simd.mul(p, slope), zero);
            let sum = &mut biases[1][first..];
            simd.write(sum, simd.add(simd.read(sum), share));
        }
        [p, ds]
    }
}

/// Rows of a tile, [`Unit::DEPTH`] of them, each as long as the tile is wide: a multiple of `DEPTH * LANES`.
pub(super) struct Rows<'t> {
    /// Inner products.
    pub(super) scores: &'t mut [f32],
    /// `dP`.
    pub(super) grad_p: &'t mut [f32],
    /// Distance of the rows of either.
    pub(super) stride: usize,
    pub(super) columns: usize,
    /// Bias of the columns in base 2, and the gradient by it; both empty without a bias.
    pub(super) biases: [&'t mut [f32]; 2],
}

/// The gradients of the logits still lack the factor `scale`, which is left to the sums. Single rows: `scores` becomes
/// `P`, `grad_p` `dS`. Two rows: the first of `scores` becomes `P` and the second `dS`, in units that hold an element
/// of each row; each of `grad_p` becomes its own `dS`, in units along it.
#[inline(always)]
pub(super) fn gradients<S: Simd, U: Unit<S>>(
    simd: S,
    factors: &Factors<S>,
    saved: [&Saved; 2],
    rows: Rows<'_>,
    masked: bool,
) {
    match (factors.capped, masked, rows.biases[0].is_empty()) {
        (true, _, true) => convert::<S, U, true, true, false>(simd, factors, saved, rows),
        (true, _, false) => convert::<S, U, true, true, true>(simd, factors, saved, rows),
        (false, true, true) => convert::<S, U, true, false, false>(simd, factors, saved, rows),
        (false, false, true) => convert::<S, U, false, false, false>(simd, factors, saved, rows),
        (false, _, false) => convert::<S, U, true, false, true>(simd, factors, saved, rows),
    }
}

#[inline(always)]
fn convert<S: Simd, U: Unit<S>, const MASKED: bool, const CAPPED: bool, const BIASED: bool>(
    simd: S,
    factors: &Factors<S>,
    saved: [&Saved; 2],
    rows: Rows<'_>,
) {
    let Rows { scores, grad_p, stride, columns, mut biases } = rows;
    let ascending: [f32; 16] = std::array::from_fn(|lane| lane as f32);
    let step = simd.splat(S::LANES as f32);
    let mut at = simd.read(&ascending);
    let even = Row::new(simd, saved[0]);
    if U::DEPTH == 1 {
        let tile = scores[..columns].chunks_exact_mut(S::LANES).zip(grad_p[..columns].chunks_exact_mut(S::LANES));
        for (index, (score, grad_p)) in tile.enumerate() {
            let [p, ds] = even.gradients::<MASKED, CAPPED, BIASED>(
                simd,
                factors,
                (at, index * S::LANES),
                score,
                grad_p,
                &mut biases,
            );
            simd.write(score, p);
            simd.write(grad_p, ds);
            at = simd.add(at, step);
        }
        return;
    }
    let odd = Row::new(simd, saved[1]);
    let (scores, odd_scores) = scores.split_at_mut(stride);
    let (grad_p, odd_grad_p) = grad_p.split_at_mut(stride);
    let (scores, odd_scores) = (&mut scores[..columns], &mut odd_scores[..columns]);
    let (grad_p, odd_grad_p) = (&mut grad_p[..columns], &mut odd_grad_p[..columns]);
    for first in (0..columns).step_by(2 * S::LANES) {
        let (low, high) = (first..first + S::LANES, first + S::LANES..first + 2 * S::LANES);
        let [p, ds] = even.gradients::<MASKED, CAPPED, BIASED>(
            simd,
            factors,
            (at, first),
            &scores[first..],
            &grad_p[first..],
            &mut biases,
        );
        let [odd_p, odd_ds] = odd.gradients::<MASKED, CAPPED, BIASED>(
            simd,
            factors,
            (at, first),
            &odd_scores[first..],
            &odd_grad_p[first..],
            &mut biases,
        );
        at = simd.add(at, step);
        let [p_high, ds_high] = even.gradients::<MASKED, CAPPED, BIASED>(
            simd,
            factors,
            (at, high.start),
            &scores[high.start..],
            &grad_p[high.start..],
            &mut biases,
        );
        let [odd_p_high, odd_ds_high] = odd.gradients::<MASKED, CAPPED, BIASED>(
            simd,
            factors,
            (at, high.start),
            &odd_scores[high.start..],
            &odd_grad_p[high.start..],
            &mut biases,
        );
        at = simd.add(at, step);
        U::put_rows(simd, bytemuck::cast_slice_mut(&mut scores[low.clone()]), p, odd_p);
        U::put_rows(simd, bytemuck::cast_slice_mut(&mut scores[high.clone()]), p_high, odd_p_high);
        U::put_rows(simd, bytemuck::cast_slice_mut(&mut odd_scores[low]), ds, odd_ds);
        U::put_rows(simd, bytemuck::cast_slice_mut(&mut odd_scores[high]), ds_high, odd_ds_high);
        U::put(simd, bytemuck::cast_slice_mut(&mut grad_p[first / 2..][..S::LANES]), ds, ds_high);
        U::put(simd, bytemuck::cast_slice_mut(&mut odd_grad_p[first / 2..][..S::LANES]), odd_ds, odd_ds_high);
    }
}

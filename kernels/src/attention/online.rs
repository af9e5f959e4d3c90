//! The online softmax: a running maximum and sum to which blocks of scores are added.
//!
//! Rows of `tiled` and partial results of `decode` are the same thing, an unnormalised output with the maximum and
//! the sum it was built with, and [`Running::merge`] is associative: tiles, splits of the keys and threads all meet
//! here. Scores are in base 2 (`scale * log2(e)` folded into one factor) so that the exponential is `exp2`.

use super::Params;
use crate::device::simd::{Isa, Simd, Unit, loops, math};
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// Maximum and sum of the exponentials seen so far, in base 2. Two floats, so that scratch memory can hold them.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Running {
    max: f32,
    sum: f32,
}

/// Turns inner products into base-2 logits in place and returns the largest.
pub fn logits(isa: Isa, params: &Params, row: &mut [f32]) -> f32 {
    match params.softcap {
        None => loops::scale_max(isa, row, params.scale * LOG2_E),
        Some(cap) => {
            loops::soft_cap(isa, row, params.scale, cap);
            loops::scale_max(isa, row, LOG2_E)
        }
    }
}

/// Adds the biases of the first keys of a row to its base-2 logits.
pub fn add_bias(far: &[f32], row: &mut [f32]) {
    row.iter_mut().zip(far).for_each(|(logit, bias)| *logit += bias * LOG2_E);
}

/// How inner products become base-2 logits in a tile: `factor * x` of a product whose queries were negated if
/// `negative`, or of its soft-cap.
pub struct Logits {
    /// The scale is below zero. The largest product times the scale is then the smallest logit, so that the queries
    /// carry the sign instead.
    pub negative: bool,
    factor: f32,
    cap: Option<SoftCap>,
}

/// `cap * tanh(x / cap)` with the scale folded into both factors.
struct SoftCap {
    inner: f32,
    cap: f32,
}

impl Logits {
    /// The mathematics of `params`.
    pub fn new(params: &Params) -> Self {
        // Never quite zero: a masked product is -inf, and must stay so.
        let scale = params.scale.abs().max(f32::MIN_POSITIVE);
        let (factor, cap) = match params.softcap {
            None => (scale * LOG2_E, None),
            Some(cap) => (1.0, Some(SoftCap { inner: scale / cap, cap: cap * LOG2_E })),
        };
        Logits { negative: params.scale < 0.0, factor, cap }
    }

    /// Caps a row of products, adds the biases `far` of its first keys, and makes those that are not `seen` minus infinity.
    #[inline(always)]
    fn mask<S: Simd>(&self, simd: S, row: &mut [f32], seen: Range<usize>, far: &[f32]) {
        if let Some(SoftCap { inner, cap }) = self.cap {
            let (inner, cap) = (simd.splat(inner), simd.splat(cap));
            math::map(
                simd,
                row,
                #[inline(always)]
                |x| simd.mul(cap, math::tanh(simd, simd.mul(x, inner))),
            );
        }
        let unit = LOG2_E / self.factor;
        row.iter_mut().zip(far).for_each(|(x, bias)| *x += bias * unit);
        row[..seen.start].fill(f32::NEG_INFINITY);
        row[seen.end..].fill(f32::NEG_INFINITY);
    }

    /// Makes a row of products, whole vectors of which `seen` are visible and whose first keys have `biases`, probabilities;
    /// `lse` is the row's log-sum-exp.
    #[inline(always)]
    pub fn probabilities<S: Simd>(&self, simd: S, row: &mut [f32], (seen, biases): (Range<usize>, &[f32]), lse: f32) {
        self.mask(simd, row, seen, biases);
        let (factor, shift) = (simd.splat(self.factor), simd.splat(-lse * LOG2_E));
        math::map(
            simd,
            row,
            #[inline(always)]
            |x| math::exp2(simd, simd.add(simd.mul(x, factor), shift)),
        );
    }

    /// Adds the probabilities of a row of products, as [`Logits::probabilities`], to `sums`.
    #[inline(always)]
    pub fn add_probabilities<S: Simd>(
        &self,
        simd: S,
        row: &mut [f32],
        (seen, biases): (Range<usize>, &[f32]),
        lse: f32,
        sums: &mut [f32],
    ) {
        self.mask(simd, row, seen, biases);
        let (factor, shift) = (simd.splat(self.factor), simd.splat(-lse * LOG2_E));
        for (x, sum) in row.chunks_exact(S::LANES).zip(sums.chunks_exact_mut(S::LANES)) {
            let p = math::exp2(simd, simd.add(simd.mul(simd.read(x), factor), shift));
            simd.write(sum, simd.add(simd.read(sum), p));
        }
    }
}

impl Running {
    /// Takes in a row of inner products, a whole number of double vectors, of which the keys in `seen` are visible:
    /// leaves their unnormalised probabilities at the start of `row` as units, zeros for the others, and rescales
    /// `output`, to which the caller then adds their product with the values. `far` are biases of the row's first keys.
    /// Products that overflowed make the sum NaN.
    #[inline(always)]
    pub fn absorb<S: Simd, U: Unit<S>>(
        &mut self,
        simd: S,
        logits: &Logits,
        row: &mut [f32],
        seen: Range<usize>,
        far: &[f32],
        output: &mut [f32],
    ) {
        if seen.is_empty() {
            row.fill(0.0);
            return;
        }
        logits.mask(simd, row, seen, far);
        let mut largest = [simd.splat(f32::NEG_INFINITY); 2];
        for pair in row.chunks_exact(2 * S::LANES) {
            let (low, high) = pair.split_at(S::LANES);
            largest = [simd.max(simd.read(low), largest[0]), simd.max(simd.read(high), largest[1])];
        }
        let max = simd.largest(simd.max(largest[0], largest[1])) * logits.factor;
        self.raise(simd, max, output);
        self.sum += math::weights::<S, U>(simd, row, logits.factor, self.max);
    }

    /// Normalises `output` and returns the natural log-sum-exp; zeros and `-inf` if nothing was seen.
    #[inline(always)]
    pub fn normalise<S: Simd>(&self, simd: S, output: &mut [f32]) -> f32 {
        if self.sum == 0.0 {
            output.fill(0.0);
            return f32::NEG_INFINITY;
        }
        math::scale(simd, output, 1.0 / self.sum);
        (self.max + self.sum.log2()) * LN_2
    }

    /// Nothing seen yet: the neutral element of [`Running::merge`].
    pub const EMPTY: Running = Running { max: f32::NEG_INFINITY, sum: 0.0 };

    /// The state of a normalised output with this log-sum-exp.
    pub fn of(lse: f32) -> Running {
        if lse == f32::NEG_INFINITY { Running::EMPTY } else { Running { max: lse * LOG2_E, sum: 1.0 } }
    }

    /// Takes in another partial result over other keys.
    #[inline(always)]
    pub fn merge<S: Simd>(&mut self, simd: S, output: &mut [f32], other: Running, other_output: &[f32]) {
        if other.sum == 0.0 {
            return;
        }
        self.raise(simd, other.max, output);
        let factor = (other.max - self.max).exp2();
        self.sum += factor * other.sum;
        let factors = simd.splat(factor);
        for (target, source) in output.chunks_exact_mut(S::LANES).zip(other_output.chunks_exact(S::LANES)) {
            simd.write(target, simd.mul_add(factors, simd.read(source), simd.read(target)));
        }
    }

    /// Rescales everything if `max` is larger than what was seen.
    #[inline(always)]
    fn raise<S: Simd>(&mut self, simd: S, max: f32, output: &mut [f32]) {
        if max > self.max {
            let factor = (self.max - max).exp2();
            self.max = max;
            self.sum *= factor;
            math::scale(simd, output, factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::simd::SimdOp;
    use proptest::prelude::*;

    struct Absorb<'a> {
        state: &'a mut Running,
        row: &'a mut [f32],
        seen: Range<usize>,
    }

    impl SimdOp for Absorb<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            self.state.absorb::<S, f32>(simd, &Logits::new(&Params::new(1, false)), self.row, self.seen, &[], &mut []);
        }
    }

    struct Merge<'a>(&'a mut (Running, [f32; 16]), (Running, [f32; 16]));

    impl SimdOp for Merge<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let Merge((state, output), (other, other_output)) = self;
            state.merge(simd, output, other, &other_output);
        }
    }

    struct Finish((Running, [f32; 16]));

    impl SimdOp for Finish {
        type Output = (f32, [f32; 16]);

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> (f32, [f32; 16]) {
            let Finish((state, mut output)) = self;
            (state.normalise(simd, &mut output), output)
        }
    }

    /// The running state and output over some scores, with value rows `[1, score]` and zeros.
    fn over(scores: &[f32]) -> (Running, [f32; 16]) {
        let (mut state, mut output) = (Running::EMPTY, [0.0; 16]);
        let mut row = scores.to_vec();
        row.resize(scores.len().next_multiple_of(32), f32::NAN);
        Isa::fastest().run(Absorb { state: &mut state, row: &mut row, seen: 0..scores.len() });
        for (weight, score) in row.iter().zip(scores) {
            output[0] += weight;
            output[1] += weight * score;
        }
        (state, output)
    }

    proptest! {
        #[test]
        fn merging_is_the_same_in_every_grouping(
            parts in prop::collection::vec(prop::collection::vec(-60.0f32..60.0, 0..20), 3),
        ) {
            let [a, b, c] = [0, 1, 2].map(|part: usize| over(&parts[part]));
            let merged = |mut left: (Running, [f32; 16]), right: (Running, [f32; 16])| {
                Isa::fastest().run(Merge(&mut left, right));
                left
            };
            let finish = |partial: (Running, [f32; 16])| Isa::fastest().run(Finish(partial));
            let whole = finish(over(&parts.concat()));
            for (lse, output) in [finish(merged(merged(a, b), c)), finish(merged(a, merged(b, c))), finish(merged(merged(c, a), b))] {
                prop_assert!(lse == whole.0 || (lse - whole.0).abs() < 1e-4, "{lse} {}", whole.0);
                prop_assert!((output[1] - whole.1[1]).abs() < 1e-3 * (1.0 + whole.1[1].abs()));
            }
            prop_assert_eq!(finish(merged(over(&[]), a)), finish(a));
        }
    }
}

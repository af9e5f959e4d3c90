//! Loops over rows of f32 that the compiler vectorises by itself, compiled for each path.

use super::math::{Exp2, SoftCap};
use super::{Isa, Simd, SimdOp, narrow};
use crate::tensor::DType;

const LANES: usize = 16;

/// A loop to be compiled for each instruction set.
struct Loop<F>(F);

impl<R, F: FnMut() -> R> SimdOp for Loop<F> {
    type Output = R;

    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) -> R {
        (self.0)()
    }
}

/// Runs `work`, a closure marked `inline(always)`, with the instructions of `isa`. A bare closure would be called
/// through `FnOnce`, for which one that borrows has a shim that need not be inlined; the loop would then be compiled
/// for the baseline, at a tenth of the speed. `Loop` calls it by reference, which reaches the closure itself.
#[inline(always)]
pub fn vectorised<R>(isa: Isa, work: impl FnMut() -> R) -> R {
    isa.run(Loop(work))
}

/// Combines the lanes in halves, which stays in vector registers and rounds less than one after the other.
#[inline(always)]
fn reduce(mut lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Folds `combine` over the elements in lanes, then over the lanes.
#[inline(always)]
fn fold(values: &[f32], start: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = combine(lanes[lane], chunk[lane]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(tail) {
        *lane = combine(*lane, value);
    }
    reduce(lanes, combine)
}

/// `row *= factor`, and the largest element after it (`-inf` for an empty row).
pub fn scale_max(isa: Isa, row: &mut [f32], factor: f32) -> f32 {
    vectorised(
        isa,
        #[inline(always)]
        || {
            row.iter_mut().for_each(|x| *x *= factor);
            fold(row, f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
        },
    )
}

/// `row = cap * tanh(row * factor / cap)`.
pub fn soft_cap(isa: Isa, row: &mut [f32], factor: f32, cap: f32) {
    isa.run(SoftCap { row, factor, cap });
}

/// `row = 2^(row - shift)`, and the sum of the result.
pub fn exp2_sum(isa: Isa, row: &mut [f32], shift: f32) -> f32 {
    isa.run(Exp2 { row: &mut *row, shift });
    vectorised(
        isa,
        #[inline(always)]
        || fold(row, 0.0, |a, b| a + b),
    )
}

/// `row *= factor`.
pub fn scale(isa: Isa, row: &mut [f32], factor: f32) {
    vectorised(
        isa,
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x *= factor),
    )
}

/// `row = (row + shift) * factor`.
pub fn shift_scale(isa: Isa, row: &mut [f32], shift: f32, factor: f32) {
    vectorised(
        isa,
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x = (*x + shift) * factor),
    )
}

/// `row *= 1 - (capped / cap)²`: the slope of a soft-cap where it gave `capped`.
pub fn cap_slope(isa: Isa, row: &mut [f32], capped: &[f32], cap: f32) {
    vectorised(
        isa,
        #[inline(always)]
        || {
            for (x, y) in row.iter_mut().zip(capped) {
                *x *= 1.0 - (y / cap) * (y / cap);
            }
        },
    )
}

/// `target *= source`.
pub fn multiply(isa: Isa, target: &mut [f32], source: &[f32]) {
    vectorised(
        isa,
        #[inline(always)]
        || target.iter_mut().zip(source).for_each(|(to, from)| *to *= from),
    )
}

/// Rounds `source` into raw elements of a type, which `target` holds, as [`DType::encode`] but for what is too small for a normal
/// number, which may become zero.
pub fn encode(isa: Isa, dtype: DType, source: &[f32], target: &mut [u8]) {
    struct Encode<'a>(DType, &'a [f32], &'a mut [u8]);

    impl SimdOp for Encode<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            narrow(simd, self.0, self.1, self.2);
        }
    }
    isa.run(Encode(dtype, source, target));
}

/// `target += factor * source`.
pub fn add_scaled(isa: Isa, target: &mut [f32], factor: f32, source: &[f32]) {
    vectorised(
        isa,
        #[inline(always)]
        || target.iter_mut().zip(source).for_each(|(to, from)| *to = factor.mul_add(*from, *to)),
    )
}

/// Inner products of `query` with rows. Written with explicit vectors: a compiler splits the lanes of one sum into
/// pairs when it sees them added up at the end.
struct RowDots<'a> {
    query: &'a [f32],
    rows: &'a [f32],
    scores: &'a mut [f32],
}

impl SimdOp for RowDots<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let whole = self.query.len() - self.query.len() % S::LANES;
        let (query, query_tail) = self.query.split_at(whole);
        for (score, row) in self.scores.iter_mut().zip(self.rows.chunks_exact(self.query.len())) {
            let (row, row_tail) = row.split_at(whole);
            let mut lanes = simd.splat(0.0);
            for (x, y) in query.chunks_exact(S::LANES).zip(row.chunks_exact(S::LANES)) {
                lanes = simd.mul_add(simd.read(x), simd.read(y), lanes);
            }
            let tail: f32 = query_tail.iter().zip(row_tail).map(|(x, y)| x * y).sum();
            *score = simd.sum(lanes) + tail;
        }
    }
}

/// `scores[j] = query . rows[j]` for the rows (`query.len()` wide) of a block of keys.
pub fn row_dots(isa: Isa, query: &[f32], rows: &[f32], scores: &mut [f32]) {
    isa.run(RowDots { query, rows, scores });
}

/// Inner product of two vectors of the same length.
pub fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    let mut score = [0.0];
    row_dots(isa, a, b, &mut score);
    score[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn loops_equal_their_scalar_definition(values in prop::collection::vec(-4.0f32..4.0, 1..70), factor in -3.0f32..3.0, which in 0usize..4) {
            let isa = Isa::available().nth(which % Isa::available().count()).unwrap();
            let mut row = values.clone();
            let max = scale_max(isa, &mut row, factor);
            prop_assert_eq!(max, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let mut powers = row.clone();
            let sum = exp2_sum(isa, &mut powers, max);
            let exact: f64 = row.iter().map(|&x| f64::from(x - max).exp2()).sum();
            prop_assert!((f64::from(sum) - exact).abs() < 1e-5 * exact);
            let mut sums = row.clone();
            add_scaled(isa, &mut sums, -2.5, &values);
            for ((sum, before), x) in sums.iter().zip(&row).zip(&values) {
                prop_assert!((before - 2.5 * x - sum).abs() < 1e-5, "{} {}", sum, x);
            }
            let exact: f64 = values.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            prop_assert!((f64::from(dot(isa, &values, &row)) - exact).abs() < 1e-3);
            let mut capped = values.clone();
            soft_cap(isa, &mut capped, factor, 2.0);
            for (x, y) in values.iter().zip(&capped) {
                prop_assert!((2.0 * (x * factor / 2.0).tanh() - y).abs() < 1e-6);
            }
        }
    }
}

//! The inner loops that are not matrix products: written once, compiled for each instruction set.
//!
//! This is the one place that a faster, hand-written path has to replace. Every function takes the dispatch point
//! ([`pulp::Arch`], from [`super::Cpu::arch`]), whose closure is compiled with AVX-512, AVX2 + FMA, or the target's
//! baseline. A result depends on the instruction set only through the order in which lanes are summed.

use pulp::{Arch, NullaryFnOnce, Simd, WithSimd};

const LANES: usize = 16;
/// Taylor coefficients of `2^f` on `[-0.5, 0.5]`; the first term left out is below half a unit in the last place.
const EXP2: [f32; 8] =
    [1.525_273_4e-5, 1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0];
/// Coefficients of `tanh(y) / y` in powers of `y²`, highest first; below [`TANH_SERIES`] the first term left out is
/// below half a unit in the last place.
const TANH: [f32; 6] = [-8.863_235e-3, 2.186_948_8e-2, -5.396_825_4e-2, 1.333_333_4e-1, -3.333_333_4e-1, 1.0];
const TANH_SERIES: f32 = 0.35;
/// Adding it rounds an f32 to the nearest integer and leaves that integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// `2^x` for `x` up to 127, zero below -126. A NaN stays one: what went wrong must show in the result.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let clamped = if x < -126.0 { -126.0 } else { x };
    let shifted = clamped + ROUND;
    let fraction = clamped - (shifted - ROUND);
    let mut power = EXP2[0];
    for coefficient in &EXP2[1..] {
        power = power.mul_add(fraction, *coefficient);
    }
    let exponent = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    // Below the smallest normal number a probability is zero, as a masked one must be.
    if x < -126.0 { 0.0 } else { power * exponent }
}

/// A loop to be compiled for each instruction set.
struct Loop<F>(F);

impl<R, F: FnMut() -> R> NullaryFnOnce for Loop<F> {
    type Output = R;

    #[inline(always)]
    fn call(mut self) -> R {
        (self.0)()
    }
}

/// Runs `work`, a closure marked `inline(always)`, with the instructions of `arch`. A bare closure would be called
/// through `FnOnce`, for which one that borrows has a shim that need not be inlined; the loop would then be compiled
/// for the baseline, at a tenth of the speed. [`Loop`] calls it by reference, which reaches the closure itself.
#[inline(always)]
fn vectorised<R>(arch: Arch, work: impl FnMut() -> R) -> R {
    arch.dispatch(Loop(work))
}

/// `tanh(y)`. The series serves small `y`, where `1 - t` cancels and a large soft-cap would magnify the error.
#[inline(always)]
fn tanh(y: f32) -> f32 {
    let square = y * y;
    let mut series = TANH[0];
    for coefficient in &TANH[1..] {
        series = series.mul_add(square, *coefficient);
    }
    let t = exp2(-2.0 * std::f32::consts::LOG2_E * y.abs());
    let magnitude = (1.0 - t) / (1.0 + t);
    if y.abs() < TANH_SERIES { y * series } else { magnitude.copysign(y) }
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
pub fn scale_max(arch: Arch, row: &mut [f32], factor: f32) -> f32 {
    vectorised(
        arch,
        #[inline(always)]
        || {
            row.iter_mut().for_each(|x| *x *= factor);
            fold(row, f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
        },
    )
}

/// `row = cap * tanh(row * factor / cap)`.
pub fn soft_cap(arch: Arch, row: &mut [f32], factor: f32, cap: f32) {
    let inner = factor / cap;
    vectorised(
        arch,
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x = cap * tanh(*x * inner)),
    )
}

/// `row = 2^(row - shift)`, and the sum of the result.
pub fn exp2_sum(arch: Arch, row: &mut [f32], shift: f32) -> f32 {
    vectorised(
        arch,
        #[inline(always)]
        || {
            row.iter_mut().for_each(|x| *x = exp2(*x - shift));
            fold(row, 0.0, |a, b| a + b)
        },
    )
}

/// `row *= factor`.
pub fn scale(arch: Arch, row: &mut [f32], factor: f32) {
    vectorised(
        arch,
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x *= factor),
    )
}

/// `row = (row + shift) * factor`.
pub fn shift_scale(arch: Arch, row: &mut [f32], shift: f32, factor: f32) {
    vectorised(
        arch,
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x = (*x + shift) * factor),
    )
}

/// `row *= 1 - (capped / cap)²`: the slope of a soft-cap where it gave `capped`.
pub fn cap_slope(arch: Arch, row: &mut [f32], capped: &[f32], cap: f32) {
    vectorised(
        arch,
        #[inline(always)]
        || {
            for (x, y) in row.iter_mut().zip(capped) {
                *x *= 1.0 - (y / cap) * (y / cap);
            }
        },
    )
}

/// `target *= source`.
pub fn multiply(arch: Arch, target: &mut [f32], source: &[f32]) {
    vectorised(
        arch,
        #[inline(always)]
        || target.iter_mut().zip(source).for_each(|(to, from)| *to *= from),
    )
}

/// `target += source`.
pub fn add(arch: Arch, target: &mut [f32], source: &[f32]) {
    vectorised(
        arch,
        #[inline(always)]
        || target.iter_mut().zip(source).for_each(|(to, from)| *to += from),
    )
}

/// Inner products of `query` with rows. Written with explicit vectors: a compiler splits the lanes of one sum into
/// pairs when it sees them added up at the end.
struct RowDots<'a> {
    query: &'a [f32],
    rows: &'a [f32],
    scores: &'a mut [f32],
}

impl WithSimd for RowDots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (query, query_tail) = S::as_simd_f32s(self.query);
        for (score, row) in self.scores.iter_mut().zip(self.rows.chunks_exact(self.query.len())) {
            let (row, row_tail) = S::as_simd_f32s(row);
            let mut lanes = simd.splat_f32s(0.0);
            for (&x, &y) in query.iter().zip(row) {
                lanes = simd.mul_add_e_f32s(x, y, lanes);
            }
            let tail: f32 = query_tail.iter().zip(row_tail).map(|(x, y)| x * y).sum();
            *score = simd.reduce_sum_f32s(lanes) + tail;
        }
    }
}

/// `scores[j] = query . rows[j]` for the rows (`query.len()` wide) of a block of keys.
pub fn row_dots(arch: Arch, query: &[f32], rows: &[f32], scores: &mut [f32]) {
    arch.dispatch(RowDots { query, rows, scores });
}

/// Inner product of two vectors of the same length.
pub fn dot(arch: Arch, a: &[f32], b: &[f32]) -> f32 {
    let mut score = [0.0];
    row_dots(arch, a, b, &mut score);
    score[0]
}

/// `output += sum_j weights[j] * rows[j]` for the rows (`output.len()` wide) of a block of values. Four rows at a time,
/// in order, so that the output is read and written once for all four.
pub fn weighted_rows(arch: Arch, weights: &[f32], rows: &[f32], output: &mut [f32]) {
    vectorised(
        arch,
        #[inline(always)]
        || {
            let width = output.len();
            let (fours, rest) = weights.as_chunks::<4>();
            let (four_rows, rest_rows) = rows.split_at(4 * fours.len() * width);
            for ([a, b, c, d], rows) in fours.iter().zip(four_rows.chunks_exact(4 * width)) {
                let ((first, second), (third, fourth)) =
                    (rows[..2 * width].split_at(width), rows[2 * width..].split_at(width));
                for ((out, (w, x)), (y, z)) in
                    output.iter_mut().zip(first.iter().zip(second)).zip(third.iter().zip(fourth))
                {
                    *out = d.mul_add(*z, c.mul_add(*y, b.mul_add(*x, a.mul_add(*w, *out))));
                }
            }
            for (&weight, row) in rest.iter().zip(rest_rows.chunks_exact(width)) {
                for (out, &value) in output.iter_mut().zip(row) {
                    *out = weight.mul_add(value, *out);
                }
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exp2_is_within_two_units_in_the_last_place() {
        for step in 0..200_000 {
            let x = -125.9 + step as f32 * 0.00125;
            let exact = f64::from(x).exp2();
            let error = (f64::from(exp2(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "exp2({x}) is off by {error:e}");
        }
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(-200.0), 0.0);
        assert_eq!(exp2(0.0), 1.0);
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_four_units_in_the_last_place() {
        for step in -200_000..200_000 {
            let y = step as f32 * 1e-4;
            let exact = f64::from(y).tanh();
            let error = (f64::from(tanh(y)) - exact).abs();
            assert!(error <= 4.8e-7 * exact.abs(), "tanh({y}) is off by {error:e}");
        }
        assert_eq!([f32::NEG_INFINITY, 1e-30, f32::INFINITY].map(tanh), [-1.0, 1e-30, 1.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    proptest! {
        #[test]
        fn loops_equal_their_scalar_definition(values in prop::collection::vec(-4.0f32..4.0, 1..70), factor in -3.0f32..3.0) {
            let arch = Arch::new();
            let mut row = values.clone();
            let max = scale_max(arch, &mut row, factor);
            prop_assert_eq!(max, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let mut powers = row.clone();
            let sum = exp2_sum(arch, &mut powers, max);
            let exact: f64 = row.iter().map(|&x| f64::from(x - max).exp2()).sum();
            prop_assert!((f64::from(sum) - exact).abs() < 1e-5 * exact);
            let mut sums = row.clone();
            let rows: Vec<f32> = (0..7).flat_map(|j| values.iter().map(move |x| x * j as f32)).collect();
            weighted_rows(arch, &[1.0, -2.0, 0.5, 0.0, 3.0, 1.5, -1.0], &rows, &mut sums);
            for ((sum, before), x) in sums.iter().zip(&row).zip(&values) {
                prop_assert!((before + 12.5 * x - sum).abs() < 1e-4, "{} {}", sum, x);
            }
            let exact: f64 = values.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            prop_assert!((f64::from(dot(arch, &values, &row)) - exact).abs() < 1e-3);
            let mut capped = values.clone();
            soft_cap(arch, &mut capped, factor, 2.0);
            for (x, y) in values.iter().zip(&capped) {
                prop_assert!((2.0 * (x * factor / 2.0).tanh() - y).abs() < 1e-6);
            }
        }
    }
}

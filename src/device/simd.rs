//! The inner loops that are not matrix products: written once, compiled for each instruction set.
//!
//! This is the one place that a faster, hand-written path has to replace. Every function takes the dispatch point
//! ([`pulp::Arch`], from [`super::Cpu::arch`]), whose closure is compiled with AVX-512, AVX2 + FMA, or the target's
//! baseline. Sums run over 16 fixed lanes, so that a result depends on the instruction set only through rounding.

use pulp::Arch;

const LANES: usize = 16;
/// Taylor coefficients of `2^f` on `[-0.5, 0.5]`; the first term left out is below half a unit in the last place.
const EXP2: [f32; 8] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    2.402_265_1e-1,
    6.931_472e-1,
    1.0,
];
/// Coefficients of `tanh(y) / y` in powers of `y²`, highest first; below [`TANH_SERIES`] the first term left out is
/// below half a unit in the last place.
const TANH: [f32; 6] = [-8.863_235_5e-3, 2.186_948_8e-2, -5.396_825_4e-2, 1.333_333_4e-1, -3.333_333_4e-1, 1.0];
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
    lanes.into_iter().fold(start, combine)
}

/// `row *= factor`, and the largest element after it (`-inf` for an empty row).
pub fn scale_max(arch: Arch, row: &mut [f32], factor: f32) -> f32 {
    arch.dispatch(
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
    arch.dispatch(
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x = cap * tanh(*x * inner)),
    )
}

/// `row = 2^(row - shift)`, and the sum of the result.
pub fn exp2_sum(arch: Arch, row: &mut [f32], shift: f32) -> f32 {
    arch.dispatch(
        #[inline(always)]
        || {
            row.iter_mut().for_each(|x| *x = exp2(*x - shift));
            fold(row, 0.0, |a, b| a + b)
        },
    )
}

/// `row *= factor`.
pub fn scale(arch: Arch, row: &mut [f32], factor: f32) {
    arch.dispatch(
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x *= factor),
    )
}

/// `row = (row + shift) * factor`.
pub fn shift_scale(arch: Arch, row: &mut [f32], shift: f32, factor: f32) {
    arch.dispatch(
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x = (*x + shift) * factor),
    )
}

/// `row *= 1 - (capped / cap)²`: the slope of a soft-cap where it gave `capped`.
pub fn cap_slope(arch: Arch, row: &mut [f32], capped: &[f32], cap: f32) {
    arch.dispatch(
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
    arch.dispatch(
        #[inline(always)]
        || target.iter_mut().zip(source).for_each(|(to, from)| *to *= from),
    )
}

/// `target += source`.
pub fn add(arch: Arch, target: &mut [f32], source: &[f32]) {
    arch.dispatch(
        #[inline(always)]
        || target.iter_mut().zip(source).for_each(|(to, from)| *to += from),
    )
}

/// Inner product of two vectors of the same length.
#[inline(always)]
fn dot_lanes(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (lane, (x, y)) in lanes.iter_mut().zip(tail) {
        *lane = x * y;
    }
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
    }
    lanes.into_iter().sum()
}

/// Inner product of two vectors of the same length.
pub fn dot(arch: Arch, a: &[f32], b: &[f32]) -> f32 {
    arch.dispatch(
        #[inline(always)]
        || dot_lanes(a, b),
    )
}

/// `scores[j] = query . rows[j]` for the rows (`query.len()` wide) of a block of keys.
pub fn row_dots(arch: Arch, query: &[f32], rows: &[f32], scores: &mut [f32]) {
    arch.dispatch(
        #[inline(always)]
        || {
            for (score, row) in scores.iter_mut().zip(rows.chunks_exact(query.len())) {
                *score = dot_lanes(query, row);
            }
        },
    )
}

/// `output += sum_j weights[j] * rows[j]` for the rows (`output.len()` wide) of a block of values.
pub fn weighted_rows(arch: Arch, weights: &[f32], rows: &[f32], output: &mut [f32]) {
    arch.dispatch(
        #[inline(always)]
        || {
            for (&weight, row) in weights.iter().zip(rows.chunks_exact(output.len())) {
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

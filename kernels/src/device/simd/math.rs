//! Exponentials of vectors, as polynomials.

use super::{Simd, SimdOp, Unit};

/// Coefficients of `2^f` on `[-0.5, 0.5]`, highest power first, of the least relative error (9.2e-8, a bit and a half
/// of f32) among those that give exactly 1 at 0; found by iterated least squares.
#[allow(clippy::approx_constant)] // fitted, not the logarithm of 2
const EXP2: [f32; 6] = [0.001_326_472_7, 0.009_671_513, 0.055_507_336, 0.240_222_42, 0.693_147, 1.0];
/// Coefficients of `tanh(y) / y` in powers of `y²`, highest first; below [`TANH_SERIES`] the first term left out is
/// below half a unit in the last place.
const TANH: [f32; 6] = [-8.863_235e-3, 2.186_948_8e-2, -5.396_825_4e-2, 1.333_333_4e-1, -3.333_333_4e-1, 1.0];
const TANH_SERIES: f32 = 0.35;

/// `2^x` for `x` up to 127, zero below -126: a probability below the smallest normal number is zero, as a masked one
/// must be. A NaN stays one: what went wrong must show in the result.
#[inline(always)]
pub fn exp2<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let whole = simd.round(x);
    let fraction = simd.sub(x, whole);
    let mut power = simd.splat(EXP2[0]);
    for coefficient in &EXP2[1..] {
        power = simd.mul_add(power, fraction, simd.splat(*coefficient));
    }
    simd.scale_or_zero(power, whole, x)
}

/// `tanh(y)`. The series serves small `y`, where `1 - t` cancels and a large soft-cap would magnify the error.
#[inline(always)]
pub fn tanh<S: Simd>(simd: S, y: S::Vector) -> S::Vector {
    let zero = simd.splat(0.0);
    let size = simd.max(simd.sub(zero, y), y);
    let square = simd.mul(y, y);
    let mut series = simd.splat(TANH[0]);
    for coefficient in &TANH[1..] {
        series = simd.mul_add(series, square, simd.splat(*coefficient));
    }
    let t = exp2(simd, simd.mul(size, simd.splat(-2.0 * std::f32::consts::LOG2_E)));
    let one = simd.splat(1.0);
    let large = simd.div(simd.sub(one, t), simd.add(one, t));
    let signed = simd.select_less(y, zero, simd.sub(zero, large), large);
    simd.select_less(size, simd.splat(TANH_SERIES), simd.mul(y, series), signed)
}

/// `row = f(row)`, whatever its length. Mark a closure `inline(always)`.
#[inline(always)]
pub fn map<S: Simd>(simd: S, row: &mut [f32], f: impl Fn(S::Vector) -> S::Vector) {
    let whole = row.len() - row.len() % S::LANES;
    let (whole, tail) = row.split_at_mut(whole);
    for x in whole.chunks_exact_mut(S::LANES) {
        simd.write(x, f(simd.read(x)));
    }
    if !tail.is_empty() {
        let mut lanes = [0.0; 16];
        lanes[..tail.len()].copy_from_slice(tail);
        let result = f(simd.read(&lanes));
        simd.write(&mut lanes, result);
        tail.copy_from_slice(&lanes[..tail.len()]);
    }
}

/// Makes a row of products, a whole number of double vectors, weights `2^(row * factor - max)`, which it leaves at its start
/// as units, and returns their sum before they were rounded.
#[inline(always)]
pub fn weights<S: Simd, U: Unit<S>>(simd: S, row: &mut [f32], factor: f32, max: f32) -> f32 {
    let (factor, max, less) = (simd.splat(factor), simd.splat(max), simd.splat(-max));
    let mut sums = [simd.splat(0.0); 2];
    // Counted, and without bounds: what a turn does besides its exponentials keeps the next one's from beginning.
    for at in (0..row.len() / (2 * S::LANES)).map(|pair| 2 * S::LANES * pair) {
        // SAFETY: `at` begins a double vector of the row, and the units of it lie in the row before that, or in it.
        let (low, high, to) = unsafe {
            let from = row.as_mut_ptr().add(at);
            let to = row.as_mut_ptr().add(at / U::DEPTH).cast::<U>();
            let to = std::slice::from_raw_parts_mut(to, 2 * S::LANES / U::DEPTH);
            (simd.load(from), simd.load(from.add(S::LANES)), to)
        };
        // Of f32 not one multiply-add: the largest must become exactly 1, so that a single key returns its value. Weights
        // that are rounded to bf16 are that either way.
        let (low, high) = match U::DEPTH {
            1 => (simd.sub(simd.mul(low, factor), max), simd.sub(simd.mul(high, factor), max)),
            _ => (simd.mul_add(low, factor, less), simd.mul_add(high, factor, less)),
        };
        let (low, high) = (exp2(simd, low), exp2(simd, high));
        sums = [simd.add(sums[0], low), simd.add(sums[1], high)];
        U::put(simd, to, low, high);
    }
    simd.sum(simd.add(sums[0], sums[1]))
}

/// `row *= factor`.
#[inline(always)]
pub fn scale<S: Simd>(simd: S, row: &mut [f32], factor: f32) {
    let factor = simd.splat(factor);
    map(
        simd,
        row,
        #[inline(always)]
        |x| simd.mul(x, factor),
    );
}

/// `2^(row - shift)` in place of a row.
pub struct Exp2<'a> {
    /// The exponents.
    pub row: &'a mut [f32],
    /// Taken off each.
    pub shift: f32,
}

impl SimdOp for Exp2<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let shift = simd.splat(self.shift);
        map(
            simd,
            self.row,
            #[inline(always)]
            |x| exp2(simd, simd.sub(x, shift)),
        );
    }
}

/// `cap * tanh(row * factor / cap)` in place of a row.
pub struct SoftCap<'a> {
    /// The inner products.
    pub row: &'a mut [f32],
    /// Their factor.
    pub factor: f32,
    /// The bound that is never reached.
    pub cap: f32,
}

impl SimdOp for SoftCap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (inner, cap) = (simd.splat(self.factor / self.cap), simd.splat(self.cap));
        map(
            simd,
            self.row,
            #[inline(always)]
            |x| simd.mul(cap, tanh(simd, simd.mul(x, inner))),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::simd::Isa;

    #[test]
    fn exp2_is_within_two_units_in_the_last_place() {
        let exponents: Vec<f32> = (0..200_000).map(|step| -125.9 + step as f32 * 0.00125).collect();
        for isa in Isa::available() {
            let mut powers = exponents.clone();
            isa.run(Exp2 { row: &mut powers, shift: 0.0 });
            for (&x, power) in exponents.iter().zip(powers) {
                let exact = f64::from(x).exp2();
                let error = (f64::from(power) - exact).abs() / exact;
                assert!(error < 2.4e-7, "{}: exp2({x}) is off by {error:e}", isa.name());
            }
            let mut edges = [f32::NEG_INFINITY, -200.0, -126.5, -1e30, 0.0, 100.0, f32::NAN, f32::INFINITY];
            isa.run(Exp2 { row: &mut edges, shift: 0.0 });
            assert_eq!(edges[..6], [0.0, 0.0, 0.0, 0.0, 1.0, 100f32.exp2()], "{}", isa.name());
            assert!(edges[6].is_nan() && !edges[7].is_finite(), "{}: {edges:?}", isa.name());
        }
    }

    #[test]
    fn tanh_is_within_four_units_in_the_last_place() {
        let points: Vec<f32> = (-200_000..200_000).map(|step| step as f32 * 1e-4).collect();
        for isa in Isa::available() {
            let mut values = points.clone();
            isa.run(SoftCap { row: &mut values, factor: 1.0, cap: 1.0 });
            for (&y, value) in points.iter().zip(values) {
                let exact = f64::from(y).tanh();
                let error = (f64::from(value) - exact).abs();
                assert!(error <= 4.8e-7 * exact.abs(), "{}: tanh({y}) is off by {error:e}", isa.name());
            }
            let mut edges = [f32::NEG_INFINITY, 1e-30, f32::INFINITY, f32::NAN];
            isa.run(SoftCap { row: &mut edges, factor: 1.0, cap: 1.0 });
            assert_eq!(edges[..3], [-1.0, 1e-30, 1.0], "{}", isa.name());
            assert!(edges[3].is_nan(), "{}", isa.name());
        }
    }
}

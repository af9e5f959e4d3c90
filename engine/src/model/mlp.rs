//! What stands between the halves of an MLP: `activation(gate) * up`, in place of the gate.

use super::config::Activation;
use super::norm::SERIAL;
use crate::device::Cpu;
use crate::device::simd::math::{exp2, tanh};
use crate::device::simd::{Isa, Simd, SimdOp};
use rayon::prelude::*;

/// One row.
struct Row<'a> {
    activation: Activation,
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl SimdOp for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.activation {
            Activation::Silu => each(
                simd,
                self.gate,
                self.up,
                #[inline(always)]
                |x| silu(simd, x),
            ),
            Activation::GeluTanh => each(
                simd,
                self.gate,
                self.up,
                #[inline(always)]
                |x| gelu_tanh(simd, x),
            ),
        }
    }
}

#[inline(always)]
fn each<S: Simd>(simd: S, gate: &mut [f32], up: &[f32], f: impl Fn(S::Vector) -> S::Vector) {
    assert_eq!(gate.len(), up.len(), "gate and up differ in length");
    let whole = gate.len() - gate.len() % S::LANES;
    let ((gate, gate_tail), (up, up_tail)) = (gate.split_at_mut(whole), up.split_at(whole));
    for (gate, up) in gate.chunks_exact_mut(S::LANES).zip(up.chunks_exact(S::LANES)) {
        simd.write(gate, simd.mul(f(simd.read(gate)), simd.read(up)));
    }
    if !gate_tail.is_empty() {
        let mut lanes = [0.0; 16];
        lanes[..gate_tail.len()].copy_from_slice(gate_tail);
        let result = f(simd.read(&lanes));
        simd.write(&mut lanes, result);
        gate_tail.iter_mut().zip(up_tail).zip(&lanes).for_each(|((gate, up), x)| *gate = x * up);
    }
}

/// `x / (1 + e^-x)`.
#[inline(always)]
fn silu<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let exponent = simd.mul(x, simd.splat(-std::f32::consts::LOG2_E));
    // Beyond 2^126 the quotient is zero as far as f32 can tell; a NaN fails the comparison and stays one.
    let most = simd.splat(126.0);
    let exponent = simd.select_less(most, exponent, most, exponent);
    let one = simd.splat(1.0);
    simd.div(x, simd.add(one, exp2(simd, exponent)))
}

/// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`.
#[inline(always)]
fn gelu_tanh<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let cube = simd.mul(simd.mul(x, x), simd.mul(x, simd.splat(0.044_715)));
    let inner = simd.mul(simd.add(x, cube), simd.splat(0.797_884_6));
    let half = simd.mul(x, simd.splat(0.5));
    simd.mul_add(half, tanh(simd, inner), half)
}

/// `gate = activation(gate) * up` for one row.
pub(crate) fn row(isa: Isa, activation: Activation, gate: &mut [f32], up: &[f32]) {
    isa.run(Row { activation, gate, up });
}

/// `gate = activation(gate) * up` for rows of `gate` that lie `stride` apart and rows of `up` that lie side by side.
pub(super) fn activate(cpu: &Cpu, activation: Activation, gate: &mut [f32], stride: usize, up: &[f32], width: usize) {
    let work = |(gate, up): (&mut [f32], &[f32])| row(cpu.isa(), activation, &mut gate[..width], up);
    match up.len() < SERIAL {
        true => gate.chunks_mut(stride).zip(up.chunks_exact(width)).for_each(work),
        false => cpu.install(|| gate.par_chunks_mut(stride).zip(up.par_chunks_exact(width)).for_each(work)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_are_what_they_say_on_every_path() {
        let x: Vec<f32> = (-70..70).map(|x| x as f32 * 0.31).chain([-1e4, 1e4, -95.0, 0.0]).collect();
        let exact = |activation, x: f64| match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
        };
        let up: Vec<f32> = (0..x.len()).map(|index| 1.0 + (index % 3) as f32).collect();
        for isa in Isa::available() {
            for activation in [Activation::Silu, Activation::GeluTanh] {
                let mut gate = x.clone();
                isa.run(Row { activation, gate: &mut gate, up: &up });
                for ((&x, &up), &got) in x.iter().zip(&up).zip(&gate) {
                    let expected = exact(activation, f64::from(x)) * f64::from(up);
                    assert!((f64::from(got) - expected).abs() < 1e-5 * (1.0 + expected.abs()), "{activation:?} {x}");
                }
            }
            let mut gate = [f32::NAN];
            isa.run(Row { activation: Activation::Silu, gate: &mut gate, up: &[1.0] });
            assert!(gate[0].is_nan());
        }
    }
}

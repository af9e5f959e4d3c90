//! The inner part of a gated MLP (arXiv 2002.05202), `p = activation(gate) * up`, and its gradient.
//!
//! A row of `gate_up` is `ffn` elements of gate, then `ffn` of up. In the backward pass it becomes its own gradient.

use super::PIECE_ROWS;
use crate::device::Cpu;
use crate::device::simd::Isa;
use crate::device::simd::loops::{soft_cap, vectorised};
use crate::device::simd::math::Exp2;
use crate::model::config::Activation;
use crate::model::mlp;
use rayon::prelude::*;
use std::f32::consts::LOG2_E;

/// Largest exponent of [`Exp2`] that stays finite; `silu` is 0 in f32 long before.
const MOST: f32 = 126.0;

/// Writes `p` `[rows, ffn]` of `gate_up` `[rows, 2 * ffn]`.
pub(super) fn forward(cpu: &Cpu, activation: Activation, gate_up: &[f32], p: &mut [f32], ffn: usize) {
    cpu.install(|| {
        p.par_chunks_mut(PIECE_ROWS * ffn).zip(gate_up.par_chunks(PIECE_ROWS * 2 * ffn)).for_each(|(p, gate_up)| {
            for (p, gate_up) in p.chunks_exact_mut(ffn).zip(gate_up.chunks_exact(2 * ffn)) {
                let (gate, up) = gate_up.split_at(ffn);
                p.copy_from_slice(gate);
                mlp::row(cpu.isa(), activation, p, up);
            }
        });
    });
}

/// Replaces `gate_up` by the gradient by it, from `dp` `[rows, ffn]`.
pub(super) fn backward(cpu: &Cpu, activation: Activation, dp: &[f32], gate_up: &mut [f32], ffn: usize) {
    let row = match activation {
        Activation::Silu => silu,
        Activation::GeluTanh => gelu_tanh,
    };
    cpu.install(|| {
        gate_up.par_chunks_mut(PIECE_ROWS * 2 * ffn).zip(dp.par_chunks(PIECE_ROWS * ffn)).for_each(|(gate_up, dp)| {
            let mut scratch = vec![0.0; ffn];
            for (gate_up, dp) in gate_up.chunks_exact_mut(2 * ffn).zip(dp.chunks_exact(ffn)) {
                let (gate, up) = gate_up.split_at_mut(ffn);
                row(cpu.isa(), gate, up, dp, &mut scratch);
            }
        });
    });
}

/// With `s = 1 / (1 + e^-g)`: the slope of `silu(g) = g s` is `s + g s (1 - s)`.
fn silu(isa: Isa, gate: &mut [f32], up: &mut [f32], dp: &[f32], e: &mut [f32]) {
    vectorised(
        isa,
        #[inline(always)]
        || e.iter_mut().zip(&*gate).for_each(|(e, g)| *e = (-LOG2_E * g).min(MOST)),
    );
    isa.run(Exp2 { row: e, shift: 0.0 });
    vectorised(
        isa,
        #[inline(always)]
        || {
            for (((g, u), dp), e) in gate.iter_mut().zip(&mut *up).zip(dp).zip(&*e) {
                let s = 1.0 / (1.0 + e);
                let silu = *g * s;
                *g = dp * *u * (s + silu * (1.0 - s));
                *u = dp * silu;
            }
        },
    );
}

/// With `t = tanh(c (g + a g³))`: the slope of `g (1 + t) / 2` is `(1 + t) / 2 + g (1 - t²) c (1 + 3 a g²) / 2`.
fn gelu_tanh(isa: Isa, gate: &mut [f32], up: &mut [f32], dp: &[f32], t: &mut [f32]) {
    const C: f32 = 0.797_884_6;
    const A: f32 = 0.044_715;
    vectorised(
        isa,
        #[inline(always)]
        || t.iter_mut().zip(&*gate).for_each(|(t, g)| *t = C * (g + A * g * g * g)),
    );
    soft_cap(isa, t, 1.0, 1.0);
    vectorised(
        isa,
        #[inline(always)]
        || {
            for (((g, u), dp), t) in gate.iter_mut().zip(&mut *up).zip(dp).zip(&*t) {
                let half = 0.5 * (1.0 + t);
                let gelu = *g * half;
                *g = dp * *u * (half + 0.5 * *g * (1.0 - t * t) * C * (1.0 + 3.0 * A * *g * *g));
                *u = dp * gelu;
            }
        },
    );
}

//! The inner part of a SwiGLU MLP (arXiv 2002.05202): `p = silu(gate) * up` with `silu(g) = g / (1 + e^-g)`.
//!
//! A row of `gate_up` is `ffn` elements of gate, then `ffn` of up. In the backward pass it becomes its own gradient.

use super::PIECE_ROWS;
use crate::device::Cpu;
use crate::device::simd::Isa;
use crate::device::simd::loops::vectorised;
use crate::device::simd::math::Exp2;
use rayon::prelude::*;
use std::f32::consts::LOG2_E;

/// Largest exponent of [`Exp2`] that stays finite; `silu` is 0 in f32 long before.
const MOST: f32 = 126.0;

/// `e = e^-gate`.
fn exponentials(isa: Isa, gate: &[f32], e: &mut [f32]) {
    vectorised(
        isa,
        #[inline(always)]
        || e.iter_mut().zip(gate).for_each(|(e, g)| *e = (-LOG2_E * g).min(MOST)),
    );
    isa.run(Exp2 { row: e, shift: 0.0 });
}

/// Writes `p` `[rows, ffn]` of `gate_up` `[rows, 2 * ffn]`.
pub(super) fn forward(cpu: &Cpu, gate_up: &[f32], p: &mut [f32], ffn: usize) {
    let isa = cpu.isa();
    cpu.install(|| {
        p.par_chunks_mut(PIECE_ROWS * ffn).zip(gate_up.par_chunks(PIECE_ROWS * 2 * ffn)).for_each(|(p, gate_up)| {
            for (p, gate_up) in p.chunks_exact_mut(ffn).zip(gate_up.chunks_exact(2 * ffn)) {
                let (gate, up) = gate_up.split_at(ffn);
                exponentials(isa, gate, p);
                vectorised(
                    isa,
                    #[inline(always)]
                    || p.iter_mut().zip(gate).zip(up).for_each(|((p, g), u)| *p = g / (1.0 + *p) * u),
                );
            }
        });
    });
}

/// Replaces `gate_up` by the gradient by it, from `dp` `[rows, ffn]`.
pub(super) fn backward(cpu: &Cpu, dp: &[f32], gate_up: &mut [f32], ffn: usize) {
    let isa = cpu.isa();
    cpu.install(|| {
        gate_up.par_chunks_mut(PIECE_ROWS * 2 * ffn).zip(dp.par_chunks(PIECE_ROWS * ffn)).for_each(|(gate_up, dp)| {
            let mut e = vec![0.0; ffn];
            for (gate_up, dp) in gate_up.chunks_exact_mut(2 * ffn).zip(dp.chunks_exact(ffn)) {
                let (gate, up) = gate_up.split_at_mut(ffn);
                exponentials(isa, gate, &mut e);
                vectorised(
                    isa,
                    #[inline(always)]
                    || {
                        for (((g, u), dp), e) in gate.iter_mut().zip(up.iter_mut()).zip(dp).zip(&e) {
                            let s = 1.0 / (1.0 + e);
                            let silu = *g * s;
                            // The slope of silu: s + g s (1 - s).
                            *g = dp * *u * (s + silu * (1.0 - s));
                            *u = dp * silu;
                        }
                    },
                );
            }
        });
    });
}

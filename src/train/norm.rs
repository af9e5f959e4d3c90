//! Root-mean-square norm: `n = g * x / sqrt(mean(x²) + eps)` of each row (arXiv 1910.07467), and its gradient.
//!
//! With `r = 1 / sqrt(mean(x²) + eps)` of a row of `H` elements and `t = dn * g`:
//! `dx = r * t - x * r³ / H * sum(t * x)` and `dg = sum over rows of dn * x * r`.

use super::PIECE_ROWS;
use crate::device::Cpu;
use crate::device::simd::loops::{dot, vectorised};
use rayon::prelude::*;

/// Writes the normed rows to `n` and `r` of each row to `inverse`.
pub(super) fn forward(cpu: &Cpu, x: &[f32], gain: &[f32], eps: f32, inverse: &mut [f32], n: &mut [f32]) {
    let (width, isa) = (gain.len(), cpu.isa());
    cpu.install(|| {
        n.par_chunks_mut(PIECE_ROWS * width)
            .zip(x.par_chunks(PIECE_ROWS * width))
            .zip(inverse.par_chunks_mut(PIECE_ROWS))
            .for_each(|((n, x), inverse)| {
                for ((n, x), inverse) in n.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(inverse) {
                    let r = 1.0 / (dot(isa, x, x) / width as f32 + eps).sqrt();
                    *inverse = r;
                    vectorised(
                        isa,
                        #[inline(always)]
                        || n.iter_mut().zip(x).zip(gain).for_each(|((n, x), g)| *n = x * r * g),
                    );
                }
            });
    });
}

/// f32 elements of scratch that [`backward`] needs: a sum of gain gradients for each piece.
pub(super) fn scratch(rows: usize, width: usize) -> usize {
    rows.div_ceil(PIECE_ROWS) * width
}

/// What a norm read and wrote in the forward pass.
pub(super) struct Saved<'a> {
    pub x: &'a [f32],
    pub gain: &'a [f32],
    pub inverse: &'a [f32],
}

/// Adds the gradient by `x` to `dx` and that by the gain to `dgain`; `dn` is overwritten.
pub(super) fn backward(
    cpu: &Cpu,
    saved: &Saved<'_>,
    dn: &mut [f32],
    dx: &mut [f32],
    dgain: &mut [f32],
    scratch: &mut [f32],
) {
    let (width, isa, gain) = (saved.gain.len(), cpu.isa(), saved.gain);
    cpu.install(|| {
        dx.par_chunks_mut(PIECE_ROWS * width)
            .zip(dn.par_chunks_mut(PIECE_ROWS * width))
            .zip(saved.x.par_chunks(PIECE_ROWS * width))
            .zip(saved.inverse.par_chunks(PIECE_ROWS))
            .zip(scratch.par_chunks_mut(width))
            .for_each(|((((dx, dn), x), inverse), sum)| {
                sum.fill(0.0);
                let rows = dx.chunks_exact_mut(width).zip(dn.chunks_exact_mut(width)).zip(x.chunks_exact(width));
                for (((dx, dn), x), &r) in rows.zip(inverse) {
                    vectorised(
                        isa,
                        #[inline(always)]
                        || {
                            for (((sum, dn), x), g) in sum.iter_mut().zip(&mut *dn).zip(x).zip(gain) {
                                *sum += *dn * x * r;
                                *dn *= g;
                            }
                        },
                    );
                    let slope = dot(isa, dn, x) * r * r * r / width as f32;
                    vectorised(
                        isa,
                        #[inline(always)]
                        || dx.iter_mut().zip(&*dn).zip(x).for_each(|((dx, t), x)| *dx += t * r - x * slope),
                    );
                }
            });
    });
    for sum in scratch.chunks_exact(width) {
        dgain.iter_mut().zip(sum).for_each(|(dgain, sum)| *dgain += sum);
    }
}

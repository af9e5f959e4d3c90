//! The gradient of a root-mean-square norm `n = g * x / sqrt(mean(x²) + eps)` of each row (arXiv 1910.07467).
//!
//! With `r = 1 / sqrt(mean(x²) + eps)` of a row of `H` elements and `t = dn * g`:
//! `dx = r * t - x * r³ / H * sum(t * x)` and `dg = sum over rows of dn * x * r`. `r` is computed again: it takes a look at
//! `x`, which is there already.

use super::PIECE_ROWS;
use super::holder::UnitGradients;
use super::parameters::Group;
use crate::device::Cpu;
use crate::device::simd::Isa;
use crate::device::simd::loops::{add_scaled, dot, vectorised};
use crate::model::norm::Norm;
use rayon::prelude::*;
use std::ops::Range;

/// f32 elements of scratch that [`backward`] needs: a sum of gain gradients for each piece.
pub(super) fn scratch(rows: usize, width: usize) -> usize {
    rows.div_ceil(PIECE_ROWS) * width
}

/// What of each row is normalised: some columns, in parts as long as the norm's weight.
pub(super) struct Columns {
    pub range: Range<usize>,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// Turns `dn` in place from the gradient by a norm's output to that by its input `x`, and adds that by the weight, if it
/// is trained, to `gradients`.
pub(super) fn backward(
    cpu: &Cpu,
    norm: Norm<'_>,
    x: &[f32],
    dn: &mut [f32],
    columns: &Columns,
    (gain, gradients): (&Group, &mut UnitGradients<'_>),
    scratch: &mut [f32],
) {
    let (width, isa, piece) = (norm.weight.len(), cpu.isa(), PIECE_ROWS * columns.stride);
    let pieces = dn.len().div_ceil(piece);
    let scratch = &mut scratch[..pieces * width];
    cpu.install(|| {
        dn.par_chunks_mut(piece).zip(x.par_chunks(piece)).zip(scratch.par_chunks_mut(width)).for_each(
            |((dn, x), sum)| {
                sum.fill(0.0);
                for (dn, x) in dn.chunks_exact_mut(columns.stride).zip(x.chunks_exact(columns.stride)) {
                    let (dn, x) = (&mut dn[columns.range.clone()], &x[columns.range.clone()]);
                    for (dn, x) in dn.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                        row(isa, norm, x, dn, sum);
                    }
                }
            },
        );
    });
    for (_, range) in &gain.trained {
        let dgain = gradients.of(range);
        for sum in scratch.chunks_exact(width) {
            dgain.iter_mut().zip(sum).for_each(|(dgain, sum)| *dgain += sum);
        }
    }
}

fn row(isa: Isa, norm: Norm<'_>, x: &[f32], dn: &mut [f32], sum: &mut [f32]) {
    let r = norm.inverse(isa, x);
    vectorised(
        isa,
        #[inline(always)]
        || {
            for (((sum, dn), x), g) in sum.iter_mut().zip(&mut *dn).zip(x).zip(norm.weight) {
                *sum += *dn * x * r;
                *dn *= g + norm.shift;
            }
        },
    );
    let slope = dot(isa, dn, x) * r * r * r / x.len() as f32;
    vectorised(
        isa,
        #[inline(always)]
        || dn.iter_mut().zip(x).for_each(|(t, x)| *t = *t * r - x * slope),
    );
}

/// `to += from`, by pieces.
pub(super) fn add(cpu: &Cpu, to: &mut [f32], from: &[f32]) {
    const PIECE: usize = 1 << 15;
    cpu.install(|| {
        let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
        pieces.for_each(|(to, from)| add_scaled(cpu.isa(), to, 1.0, from));
    });
}

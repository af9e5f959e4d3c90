//! Root-mean-square norms: `x / sqrt(mean(x²) + eps)` times a weight, or times one more than it (Gemma).

use super::Config;
use super::config::Norms;
use crate::device::Cpu;
use crate::device::simd::Isa;
use crate::device::simd::loops::{dot, vectorised};
use rayon::prelude::*;

/// Elements below which the work is not worth more than one thread.
pub(super) const SERIAL: usize = 1 << 14;

/// A norm of rows as long as its weight.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
    /// Added to every weight: 0 or 1.
    pub shift: f32,
}

impl Config {
    /// A norm of the model's flavour.
    pub(crate) fn norm<'w>(&self, weight: &'w [f32]) -> Norm<'w> {
        Norm { weight, eps: self.norm_eps, shift: self.norm_shift() }
    }

    /// What is added to the weights of norms.
    pub(crate) fn norm_shift(&self) -> f32 {
        if self.norms == Norms::BeforeAndAfter { 1.0 } else { 0.0 }
    }
}

impl Norm<'_> {
    /// What a row is multiplied by before the weights.
    pub fn inverse(&self, isa: Isa, row: &[f32]) -> f32 {
        1.0 / (dot(isa, row, row) / row.len() as f32 + self.eps).sqrt()
    }

    /// Normalises one row, in place.
    pub fn row(&self, isa: Isa, row: &mut [f32]) {
        let inverse = self.inverse(isa, row);
        vectorised(
            isa,
            #[inline(always)]
            || row.iter_mut().zip(self.weight).for_each(|(x, weight)| *x = *x * inverse * (weight + self.shift)),
        );
    }

    /// Normalises rows that lie side by side, in place.
    pub fn in_place(&self, cpu: &Cpu, rows: &mut [f32]) {
        let work = |row: &mut [f32]| self.row(cpu.isa(), row);
        match rows.len() < SERIAL {
            true => rows.chunks_exact_mut(self.weight.len()).for_each(work),
            false => cpu.install(|| rows.par_chunks_exact_mut(self.weight.len()).for_each(work)),
        }
    }

    /// Normalises rows of `from` that lie side by side into rows of `to` that lie `stride` apart.
    pub fn rows(&self, cpu: &Cpu, from: &[f32], to: &mut [f32], stride: usize) {
        let width = self.weight.len();
        let work = |(from, to): (&[f32], &mut [f32])| {
            let row = &mut to[..width];
            row.copy_from_slice(from);
            self.row(cpu.isa(), row);
        };
        match from.len() < SERIAL {
            true => from.chunks_exact(width).zip(to.chunks_mut(stride)).for_each(work),
            false => cpu.install(|| from.par_chunks_exact(width).zip(to.par_chunks_mut(stride)).for_each(work)),
        }
    }
}

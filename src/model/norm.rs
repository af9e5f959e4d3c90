//! Root-mean-square norms: `x / sqrt(mean(x²) + eps)` times a weight, or times one more than it (Gemma).

use crate::device::Cpu;
use crate::device::simd::{Native, Task};
use rayon::prelude::*;

/// Elements below which the work is not worth more than one thread.
pub(super) const SERIAL: usize = 1 << 14;

/// A norm of rows as long as its weight.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
    /// Added to every weight: 0 or 1.
    pub shift: f32,
}

/// One row, in place.
struct Row<'a> {
    norm: Norm<'a>,
    row: &'a mut [f32],
}

impl Task for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, _: S) {
        const LANES: usize = 16;
        let Row { norm: Norm { weight, eps, shift }, row } = self;
        let mut lanes = [0.0f32; LANES];
        let chunks = row.chunks_exact(LANES);
        let tail: f32 = chunks.remainder().iter().map(|x| x * x).sum();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += x * x;
            }
        }
        let square = lanes.iter().sum::<f32>() + tail;
        let factor = 1.0 / (square / row.len() as f32 + eps).sqrt();
        for (x, weight) in row.iter_mut().zip(weight) {
            *x *= factor * (weight + shift);
        }
    }
}

impl Norm<'_> {
    /// Normalises rows that lie side by side, in place.
    pub fn in_place(&self, cpu: &Cpu, rows: &mut [f32]) {
        let work = |row: &mut [f32]| cpu.isa().run(Row { norm: *self, row });
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
            cpu.isa().run(Row { norm: *self, row });
        };
        match from.len() < SERIAL {
            true => from.chunks_exact(width).zip(to.chunks_mut(stride)).for_each(work),
            false => cpu.install(|| from.par_chunks_exact(width).zip(to.par_chunks_mut(stride)).for_each(work)),
        }
    }
}

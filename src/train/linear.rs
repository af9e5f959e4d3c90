//! Linear layers `y = x Wᵀ + b` with `W` `[out, in]` as Hugging Face stores it, and their gradients.
//!
//! The rows of a batch are cut into pieces of [`PIECE_ROWS`], the rows of a weight's gradient into blocks; each is one
//! product on one thread, so that its sums have one order.

use super::PIECE_ROWS;
use super::parameters::Group;
use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::loops::add_scaled;
use rayon::prelude::*;

/// Rows of a weight's gradient, or elements of a bias's, that one thread computes.
const WEIGHT_ROWS: usize = 64;

/// Where the parameters of a layer lie, and its extents.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Group,
    /// `[outputs]`.
    pub bias: Option<Group>,
    pub inputs: usize,
    pub outputs: usize,
}

impl Linear {
    /// `y = x Wᵀ + b`, or `y += x Wᵀ + b` with `add`: `x` is `[rows, inputs]`, `y` `[rows, outputs]`.
    pub fn forward(&self, cpu: &Cpu, weights: &[f32], x: &[f32], y: &mut [f32], add: bool) {
        let Linear { inputs, outputs, .. } = *self;
        let w = Matrix::new(self.weight.of(weights), outputs, inputs).transposed();
        let bias = self.bias.as_ref().map(|bias| bias.of(weights));
        cpu.install(|| {
            y.par_chunks_mut(PIECE_ROWS * outputs).zip(x.par_chunks(PIECE_ROWS * inputs)).for_each(|(y, x)| {
                product(y, outputs, Matrix::new(x, x.len() / inputs, inputs), w, add, 1);
                if let Some(bias) = bias {
                    y.chunks_exact_mut(outputs).for_each(|row| add_scaled(cpu.isa(), row, 1.0, bias));
                }
            });
        });
    }

    /// Writes the gradient by `x` to `dx`, and adds those by the trained parameters to `gradients`.
    pub fn backward(&self, cpu: &Cpu, weights: &[f32], dy: &[f32], x: &[f32], gradients: &mut [f32], dx: &mut [f32]) {
        let Linear { inputs, outputs, .. } = *self;
        for (first, range) in &self.weight.trained {
            weight_gradient(cpu, &dy[first / inputs..], x, &mut gradients[range.clone()], [inputs, outputs]);
        }
        for (first, range) in self.bias.iter().flat_map(|bias| &bias.trained) {
            bias_gradient(cpu, &dy[*first..], &mut gradients[range.clone()], outputs);
        }
        cpu.install(|| {
            dx.par_chunks_mut(PIECE_ROWS * inputs).zip(dy.par_chunks(PIECE_ROWS * outputs)).for_each(|(dx, dy)| {
                let dy = Matrix::new(dy, dy.len() / outputs, outputs);
                product(dx, inputs, dy, Matrix::new(self.weight.of(weights), outputs, inputs), false, 1);
            });
        });
    }
}

/// `dW += dyᵀ x` for as many columns of `dy` as `dw` has rows.
pub(super) fn weight_gradient(cpu: &Cpu, dy: &[f32], x: &[f32], dw: &mut [f32], [inputs, outputs]: [usize; 2]) {
    let rows = x.len() / inputs;
    cpu.install(|| {
        dw.par_chunks_mut(WEIGHT_ROWS * inputs).enumerate().for_each(|(block, dw)| {
            let first = block * WEIGHT_ROWS;
            let dy = Matrix::new(&dy[first..], rows, dw.len() / inputs).with_row_stride(outputs);
            product(dw, inputs, dy.transposed(), Matrix::new(x, rows, inputs), true, 1);
        });
    });
}

/// `db += ` the sum of the rows of `dy`, for as many columns as `db` has elements.
fn bias_gradient(cpu: &Cpu, dy: &[f32], db: &mut [f32], outputs: usize) {
    cpu.install(|| {
        db.par_chunks_mut(WEIGHT_ROWS).enumerate().for_each(|(block, db)| {
            let rows = dy[block * WEIGHT_ROWS..].chunks(outputs);
            rows.for_each(|row| db.iter_mut().zip(row).for_each(|(db, dy)| *db += dy));
        });
    });
}

//! Linear layers `y = x Wᵀ` with `W` `[out, in]` as Hugging Face stores it, and their gradients.
//!
//! The rows of a batch are cut into pieces of [`PIECE_ROWS`], the rows of a weight's gradient into blocks; each is one
//! product on one thread, so that its sums have one order.

use super::PIECE_ROWS;
use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use rayon::prelude::*;

/// Rows of a weight's gradient that one thread computes.
const WEIGHT_ROWS: usize = 64;

/// `y = x Wᵀ`, or `y += x Wᵀ` with `add`: `x` is `[rows, inputs]`, `w` `[outputs, inputs]`, `y` `[rows, outputs]`.
pub(super) fn forward(cpu: &Cpu, x: &[f32], w: &[f32], y: &mut [f32], [inputs, outputs]: [usize; 2], add: bool) {
    cpu.install(|| {
        y.par_chunks_mut(PIECE_ROWS * outputs).zip(x.par_chunks(PIECE_ROWS * inputs)).for_each(|(y, x)| {
            let x = Matrix::new(x, x.len() / inputs, inputs);
            product(y, outputs, x, Matrix::new(w, outputs, inputs).transposed(), add, 1);
        });
    });
}

/// `dx = dy W`.
pub(super) fn input_gradient(cpu: &Cpu, dy: &[f32], w: &[f32], dx: &mut [f32], [inputs, outputs]: [usize; 2]) {
    cpu.install(|| {
        dx.par_chunks_mut(PIECE_ROWS * inputs).zip(dy.par_chunks(PIECE_ROWS * outputs)).for_each(|(dx, dy)| {
            let dy = Matrix::new(dy, dy.len() / outputs, outputs);
            product(dx, inputs, dy, Matrix::new(w, outputs, inputs), false, 1);
        });
    });
}

/// `dW += dyᵀ x`.
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

//! Linear layers `y = x Wᵀ + b` with `W` `[out, in]` as Hugging Face stores it, and their gradients.
//!
//! A product is cut into parts of [`crate::device::simd::dense`], the rows of a weight's gradient into blocks; each is computed by
//! one thread, so that its sums have one order.

use super::holder::UnitGradients;
use super::parameters::Group;
use super::weights::Weights;
use crate::device::Cpu;
use crate::device::cpu::Slots;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::dense::{PANEL, Part, SCRATCH};
use crate::device::simd::linear::Stripes;
use crate::tensor::Rows;
use rayon::prelude::*;

/// Rows of a weight's gradient, or elements of a bias's, that one thread computes.
const WEIGHT_ROWS: usize = 64;

/// Fewest rows of a part of a product, where there are more.
const LEAST_ROWS: usize = 96;

/// f32 elements of scratch that products take.
pub(super) fn scratch(threads: usize) -> usize {
    threads * SCRATCH
}

/// `y = x wᵀ + b`, or with `transposed` `y = x w`.
pub(super) struct Product<'a> {
    /// Rows behind each other.
    pub x: &'a [f32],
    pub w: Rows<'a>,
    pub transposed: bool,
    /// Of a layer that several matrices make up, the first of this one's outputs in a row of the layer's, and how many that has: rows of
    /// `y` are as long, or with `transposed` those of `x`.
    pub outputs: [usize; 2],
    /// Whether coded weights are rounded to bf16, and `x` with them.
    pub rounds: bool,
    pub bias: Option<&'a [f32]>,
    /// Whether `y` is added to.
    pub add: bool,
}

impl Product<'_> {
    /// Computes it; `scratch` holds [`scratch`] elements.
    pub fn write(self, cpu: &Cpu, y: &mut [f32], scratch: &mut [f32]) {
        let Product { x, w, transposed, outputs: [at, all], rounds, bias, add } = self;
        let (columns, depth) = if transposed { (w.width(), w.count()) } else { (w.count(), w.width()) };
        let [(x_stride, x_at), (y_stride, y_at)] =
            if transposed { [(all, at), (columns, 0)] } else { [(depth, 0), (all, at)] };
        let rows = x.len() / x_stride;
        assert_eq!(y.len(), rows * y_stride, "the extents of a product");
        // Some parts for each thread, but none of less rows than are worth packing the weights for.
        let panels = columns.div_ceil(PANEL);
        let parts = (4 * cpu.threads()).div_ceil(panels).min(rows / LEAST_ROWS).max(1);
        let share = rows.div_ceil(parts);
        // Rounded up, the shares of fewer parts may be all rows.
        let parts = rows.div_ceil(share.max(1));
        let (y, slots) = (Stripes::new(y, y_stride, rows, y_stride), Slots::new(scratch, cpu.threads()));
        let part = |index: usize| {
            let (row, column) = (index / panels * share, index % panels * PANEL);
            let width = PANEL.min(columns - column);
            let w = if transposed { w.columns(column..column + width) } else { w.skip(column).first(width) };
            slots.with(|scratch| {
                cpu.isa().run_bf16(Part {
                    x: &x[row * x_stride + x_at..(row + share).min(rows) * x_stride],
                    depth,
                    stride: x_stride,
                    w,
                    transposed,
                    rounds,
                    bias: bias.map(|bias| &bias[column..column + width]),
                    add,
                    y: &y,
                    first: [row, y_at + column],
                    scratch,
                });
            });
        };
        cpu.install(|| (0..parts * panels).into_par_iter().with_max_len(1).for_each(part));
    }
}

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
    pub fn forward(&self, cpu: &Cpu, weights: Weights<'_>, x: &[f32], y: &mut [f32], add: bool, scratch: &mut [f32]) {
        self.forward_of(cpu, weights, x, y, (add, true), scratch);
    }

    /// The same, without the bias where another rank adds it.
    pub fn forward_of(
        &self,
        cpu: &Cpu,
        weights: Weights<'_>,
        x: &[f32],
        y: &mut [f32],
        (add, biased): (bool, bool),
        scratch: &mut [f32],
    ) {
        let bias = self.bias.as_ref().filter(|_| biased).map(|bias| weights.vector(bias));
        let rounds = weights.rounds();
        for (first, w) in weights.matrices(&self.weight, self.inputs) {
            let bias = bias.map(|bias| &bias[first..][..w.count()]);
            let outputs = [first, self.outputs];
            Product { x, w, transposed: false, outputs, rounds, bias, add }.write(cpu, y, scratch);
        }
    }

    /// Adds the gradients by the trained parameters to `gradients`.
    pub fn gradients(&self, cpu: &Cpu, dy: &[f32], x: &[f32], gradients: &mut UnitGradients<'_>) {
        let Linear { inputs, outputs, .. } = *self;
        for (first, range) in &self.weight.trained {
            weight_gradient(cpu, &dy[first / inputs..], x, gradients.of(range), [inputs, outputs]);
        }
        for (first, range) in self.bias.iter().flat_map(|bias| &bias.trained) {
            bias_gradient(cpu, &dy[*first..], gradients.of(range), outputs);
        }
    }

    /// Writes the gradient by `x` to `dx`, or adds it with `add`.
    pub fn backward(
        &self,
        cpu: &Cpu,
        weights: Weights<'_>,
        dy: &[f32],
        dx: &mut [f32],
        add: bool,
        scratch: &mut [f32],
    ) {
        let rounds = weights.rounds();
        for (first, w) in weights.matrices(&self.weight, self.inputs) {
            let (outputs, add) = ([first, self.outputs], add || first > 0);
            Product { x: dy, w, transposed: true, outputs, rounds, bias: None, add }.write(cpu, dx, scratch);
        }
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

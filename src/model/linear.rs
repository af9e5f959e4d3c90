//! Linear layers: `y[T, N] = x[T, K] w[N, K]ᵀ (+ b)`, with activations in f32 and weights in their own format
//! ([`crate::device::simd::linear`] says where activations are rounded).
//!
//! Threads take rows of `w`, so every element of `y` has one owner and the bits do not depend on their number.

use super::Config;
use super::padded::PaddedRows;
use super::weights::Matrix;
use crate::device::Cpu;
use crate::device::cpu::Slots;
use crate::device::simd::integers::{Integers, Quad};
use crate::device::simd::linear::{Columns, FEW, Few, PANEL, Panel, Stripes, Widen, padded_rows, panel_scratch};
use crate::format::with_codec;
use crate::memory::Buffer;
use rayon::prelude::*;
use std::ops::Range;

/// Fewest rows of `w` that a thread takes at a time when it does not pack them.
const FEW_ROWS: usize = 16;

/// A weight matrix `[N, K]` and perhaps a bias `[N]`.
pub(super) struct Linear {
    weight: Matrix,
    bias: Option<Buffer<f32>>,
}

impl Linear {
    pub fn new(weight: Matrix, bias: Option<Buffer<f32>>) -> Self {
        Linear { weight, bias }
    }

    /// The weights.
    pub fn weight(&self) -> &Matrix {
        &self.weight
    }

    /// What is added to each row.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// `y = x wᵀ + b` for the first `rows` rows of `x`; rows of `y` lie `stride` apart. `scratch` holds [`scratch`]
    /// elements.
    pub fn apply(&self, cpu: &Cpu, x: &PaddedRows, rows: usize, y: &mut [f32], stride: usize, scratch: &mut [f32]) {
        let (width, w) = (self.weight.rows(), self.weight.all());
        assert_eq!(x.width, self.weight.width(), "inner extents of a linear layer differ");
        let y = Stripes::new(y, stride, rows, width);
        let isa = cpu.isa();
        // Rows of `w` that a thread takes at a time, where there are few of `x`.
        let share = width.div_ceil(8 * cpu.threads()).next_multiple_of(FEW_ROWS).min(width);
        let few = |part: &(dyn Fn(usize, usize) + Sync)| {
            let unit = |unit: usize| part(unit * share, share.min(width - unit * share));
            cpu.install(|| (0..width.div_ceil(share)).into_par_iter().with_max_len(1).for_each(unit));
        };
        let bias = |first: usize, count: usize| self.bias.as_deref().map(|bias| &bias[first..][..count]);
        if let (Some(x), Some(codes), None) =
            (x.as_integers(cpu, rows), self.weight.format().codes(), self.weight.order())
        {
            let stride = Quad::count(self.weight.width());
            few(&|first, count| {
                let (w, bias) = (w.skip(first).first(count), bias(first, count));
                Integers { columns: Columns { x, stride, rows, w, bias, first }, codes, y: &y }.run(isa);
            });
            return;
        }
        let (data, scratch) = match self.weight.order() {
            Some(order) => {
                let (sorted, scratch) = scratch.split_at_mut(padded_rows(rows) * x.stride);
                sort(cpu, order, x, rows, sorted);
                (&*sorted, scratch)
            }
            None => (&*x.data, scratch),
        };
        let columns = |first: usize, count: usize| Columns {
            x: data,
            stride: x.stride,
            rows,
            w: w.skip(first).first(count),
            bias: bias(first, count),
            first,
        };
        if rows <= FEW {
            few(&|first, count| {
                let columns = columns(first, count);
                with_codec!(self.weight.format(), reader => isa.run(Few { columns, reader, y: &y }));
            });
            return;
        }
        let slots = Slots::new(scratch, cpu.threads());
        let unit = |unit: usize| {
            let first = unit * PANEL;
            slots.with(|scratch| {
                let columns = columns(first, PANEL.min(width - first));
                let rows = columns.w;
                let widen = |columns: Range<usize>, dtype, to: &mut [u8]| {
                    with_codec!(self.weight.format(), reader => isa.run(Widen { rows, reader, columns, dtype, to }));
                };
                isa.run_bf16(Panel { columns, widen: &widen, rounds: x.rounds, scratch, y: &y });
            });
        };
        cpu.install(|| (0..width.div_ceil(PANEL)).into_par_iter().with_max_len(1).for_each(unit));
    }
}

/// Rows of `x` with their columns in the order in which rows of weights have them.
fn sort(cpu: &Cpu, order: &[u32], x: &PaddedRows, rows: usize, to: &mut [f32]) {
    // Rows of blocks are whole vectors, so that nothing follows them.
    assert_eq!(x.stride, order.len(), "an order of every column");
    let sorted = |(to, from): (&mut [f32], &[f32])| {
        to.iter_mut().zip(order).for_each(|(to, &input)| *to = from[input as usize]);
    };
    let stride = x.stride;
    match rows <= FEW {
        true => to.chunks_exact_mut(stride).zip(x.data.chunks_exact(stride)).take(rows).for_each(sorted),
        false => cpu.install(|| {
            let all = to.par_chunks_exact_mut(stride).zip(x.data.par_chunks_exact(stride));
            all.take(rows).for_each(sorted);
        }),
    }
}

/// Scratch elements of the linear layers of a model for at most `rows` rows.
pub(super) fn scratch(config: &Config, rows: usize, threads: usize) -> usize {
    let widest = config.hidden.max(config.q_width()).max(config.ffn);
    let sorted = if config.is_ordered() { padded_rows(rows) * widest } else { 0 };
    sorted + if rows <= FEW { 0 } else { threads * panel_scratch(rows) }
}

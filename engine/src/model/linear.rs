//! Linear layers: `y[T, N] = x[T, K] w[N, K]ᵀ (+ b)`, with activations in f32 and weights in their own format
//! ([`crate::device::simd::panel`] says where activations are rounded).
//!
//! Threads take rows of `w`, so every element of `y` has one owner and the bits do not depend on their number. Layers that read the same
//! rows of `x` are one parallel loop, because for a single token the time in which threads wait for each other counts.

use super::config::Activation;
use super::norm::SERIAL;
use super::padded::PaddedRows;
use super::weights::Matrix;
use super::{Config, Setup, mlp};
use crate::device::Cpu;
use crate::device::cpu::Slots;
use crate::device::simd::Isa;
use crate::device::simd::integers::{Codes, Integers, Quad};
use crate::device::simd::linear::{Columns, FEW, Stripes};
use crate::device::simd::loops::{add_scaled, encode};
use crate::device::simd::panel::{
    Finish, PANEL, Panel, Rounded, is_one_span, padded_rows, panel_scratch, rounded_scratch, rounded_stride,
};
use crate::memory::Buffer;
use crate::tensor::{DType, Rows};
use rayon::prelude::*;
use std::ops::Range;

/// Fewest rows of `w` that a thread takes at a time when it does not pack them.
const FEW_ROWS: usize = 16;
/// What rows of `w` that are packed together are a multiple of: tiles of registers and of matrix units are whole then.
const PANEL_STEP: usize = 32;
/// Rows of `x` that a thread rounds at a time.
const ROUNDED_ROWS: usize = 48;

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

    /// The scale of what these layers read, of all tokens, where they have one; the largest of theirs.
    pub fn input_scale<const N: usize>(layers: [&Linear; N]) -> Option<f32> {
        layers.into_iter().filter_map(|layer| layer.weight.input_scale()).reduce(f32::max)
    }

    /// What is added to each row.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// `y = x wᵀ + b` for the first `rows` rows of `x`; rows of `y` lie `stride` apart. `scratch` holds [`scratch`]
    /// elements.
    pub fn apply(&self, cpu: &Cpu, x: &PaddedRows, rows: usize, y: &mut [f32], stride: usize, scratch: &mut [f32]) {
        Self::apply_all(cpu, x, rows, [(self, y, stride)], scratch);
    }

    /// As [`Linear::apply`], of layers that read the same rows: threads meet once for all of them. Each comes with its `y` and the
    /// distance of rows in it.
    pub fn apply_all<const N: usize>(
        cpu: &Cpu,
        x: &PaddedRows,
        rows: usize,
        layers: [(&Linear, &mut [f32], usize); N],
        scratch: &mut [f32],
    ) {
        let asked = layers.map(|(layer, y, stride)| Asked { layer, y, stride, then: Then::Write });
        Self::all(cpu, x, rows, asked, scratch);
    }

    /// `y += x wᵀ + b`, of rows that lie side by side. `room` holds `rows` rows for what is added, where that cannot be done as it is
    /// computed.
    pub fn apply_added(
        &self,
        cpu: &Cpu,
        x: &PaddedRows,
        rows: usize,
        (y, room): (&mut [f32], &mut [f32]),
        scratch: &mut [f32],
    ) {
        let stride = self.weight.rows();
        if Self::are_finished_panels(cpu, x, rows, [self]) {
            return Self::all(cpu, x, rows, [Asked { layer: self, y, stride, then: Then::Add }], scratch);
        }
        self.apply(cpu, x, rows, room, stride, scratch);
        add(cpu, &mut y[..rows * stride], &room[..rows * stride]);
    }

    /// `y = activation(x gateᵀ + b) (x upᵀ + b)`. `room` holds `rows` rows for the second factor, where that cannot be taken in as it is
    /// computed. Where a layer is named that `y` is for alone, `y` may lie rounded, as that layer would round it.
    pub fn apply_gated(
        cpu: &Cpu,
        x: &PaddedRows,
        rows: usize,
        ([gate, up], activation): ([&Linear; 2], Activation),
        (y, reader): (&mut PaddedRows, Option<&Linear>),
        (room, scratch): (&mut [f32], &mut [f32]),
    ) {
        let can_lie_rounded = y.can_lie_rounded(cpu, rows);
        let is_rounded =
            reader.is_some_and(|layer| can_lie_rounded && layer.may_round() && layer.weight.order().is_none());
        let (layers, stride) = ([gate, up], y.stride);
        y.lie_rounded = false;
        let are_alike = gate.may_round() == up.may_round() && layers.iter().all(|layer| layer.weight.order().is_none());
        if are_alike && Self::are_finished_panels(cpu, x, rows, layers) {
            y.lie_rounded = is_rounded;
            let (y, then) = (&mut y.data[..], Then::Gate { up, activation, is_rounded });
            return Self::all(cpu, x, rows, [Asked { layer: gate, y, stride, then }], scratch);
        }
        let (y, width) = (&mut y.data[..], up.weight.rows());
        Self::apply_all(cpu, x, rows, [(gate, &mut *y, stride), (up, &mut *room, width)], scratch);
        mlp::activate(cpu, activation, y, stride, &room[..rows * width], width);
    }

    /// Whether layers are computed in panels, and what becomes of their sums can be done as they are computed.
    fn are_finished_panels<const N: usize>(cpu: &Cpu, x: &PaddedRows, rows: usize, layers: [&Linear; N]) -> bool {
        let are_integers = |layer: &Linear| x.as_integers(cpu, rows).is_some() && layer.codes().is_some();
        rows > FEW && is_one_span(x.width) && !layers.into_iter().any(are_integers)
    }

    fn all<const N: usize>(cpu: &Cpu, x: &PaddedRows, rows: usize, layers: [Asked<'_>; N], scratch: &mut [f32]) {
        if N > 1 && layers.iter().any(|asked| asked.layer.weight.order().is_some()) {
            layers.into_iter().for_each(|Asked { layer, y, stride, .. }| layer.apply(cpu, x, rows, y, stride, scratch));
            return;
        }
        let (data, scratch) = match layers[0].layer.weight.order() {
            Some(order) => {
                let (sorted, scratch) = scratch.split_at_mut(padded_rows(rows) * x.stride);
                sort(cpu, order, x, rows, sorted);
                (&*sorted, scratch)
            }
            None => (&*x.data, scratch),
        };
        let integers = x.as_integers(cpu, rows);
        let as_integers = |layer: &Linear| integers.zip(layer.codes());
        let is_rounded = |layer: &Linear| layer.may_round() && as_integers(layer).is_none();
        let any_is = layers.iter().any(|asked| is_rounded(asked.layer));
        let (rounded, scratch) = match any_is && x.are_rounded(cpu, rows) {
            true if x.lie_rounded => (Some(&x.data[..rounded_scratch(rows, x.width)]), scratch),
            true => {
                let (rounded, scratch) = scratch.split_at_mut(rounded_scratch(rows, x.width));
                round(cpu, data, x, rows, rounded);
                (Some(&*rounded), scratch)
            }
            false => (None, scratch),
        };
        assert!(rounded.is_some() || !x.lie_rounded, "rows that lie rounded are read so");
        let products = layers.map(|Asked { layer, y, stride, then }| {
            assert_eq!(x.width, layer.weight.width(), "inner extents of a linear layer differ");
            let width = layer.weight.rows();
            let y = match then {
                Then::Gate { is_rounded: true, .. } => Stripes::of_pairs(y, rounded_stride(width), rows, width),
                _ => Stripes::new(y, stride, rows, width),
            };
            let (integers, rounded) = (as_integers(layer), rounded.filter(|_| is_rounded(layer)));
            Product { layer, then, integers, x, data, rounded, rows, y, isa: cpu.isa() }
        });
        let are_packed = rows > FEW && products.iter().any(|product| product.integers.is_none());
        let width: usize = products.iter().map(|product| product.width()).sum();
        // Rows of `w` that a thread takes at a time.
        let share = |product: &Product<'_>| match are_packed {
            // As many panels for each thread: all would wait for one more.
            true => {
                let panels = product.width().div_ceil(product.then.panel()).next_multiple_of(cpu.threads());
                product.width().div_ceil(panels).next_multiple_of(PANEL_STEP)
            }
            false => width.div_ceil(8 * cpu.threads()).next_multiple_of(FEW_ROWS),
        };
        let shares = products.each_ref().map(share);
        let slots = Slots::new(scratch, cpu.threads());
        let unit = |mut unit: usize| {
            for (product, share) in products.iter().zip(shares) {
                let units = product.width().div_ceil(share);
                if unit < units {
                    return product.part(unit * share..product.width().min((unit + 1) * share), &slots);
                }
                unit -= units;
            }
        };
        let units: usize = products.iter().zip(shares).map(|(product, share)| product.width().div_ceil(share)).sum();
        cpu.install(|| (0..units).into_par_iter().with_max_len(1).for_each(unit));
    }

    /// Whether what it reads may be rounded to bf16 where that is multiplied faster.
    fn may_round(&self) -> bool {
        matches!(self.weight.all(), Rows::Bf16(_) | Rows::Coded(_))
    }

    /// How codes lie, where rows of weights can be multiplied as whole numbers.
    fn codes(&self) -> Option<Codes> {
        self.weight.format().codes().filter(|_| self.weight.order().is_none())
    }
}

/// A layer, and where its outputs go.
struct Asked<'a> {
    layer: &'a Linear,
    y: &'a mut [f32],
    /// The distance of rows in it.
    stride: usize,
    then: Then<'a>,
}

/// What becomes of a layer's outputs.
#[derive(Clone, Copy)]
enum Then<'a> {
    /// They are `y`.
    Write,
    /// They are added to it.
    Add,
    /// Behind an activation they gate those of another layer, and `y` gets what comes of it, perhaps rounded to bf16.
    Gate { up: &'a Linear, activation: Activation, is_rounded: bool },
}

impl Then<'_> {
    /// Most columns of `y` that are packed together.
    fn panel(&self) -> usize {
        if let Then::Gate { .. } = self { PANEL / 2 } else { PANEL }
    }
}

/// A product on its way.
struct Product<'a> {
    layer: &'a Linear,
    then: Then<'a>,
    /// Rows of `x` as whole numbers, where they are multiplied as such, and how those of `w` lie.
    integers: Option<(&'a [Quad], Codes)>,
    x: &'a PaddedRows,
    /// Rows of `x` with columns as the layer's lie.
    data: &'a [f32],
    /// The same, rounded, where they are multiplied so.
    rounded: Option<&'a [f32]>,
    rows: usize,
    y: Stripes<'a>,
    isa: Isa,
}

impl Product<'_> {
    fn width(&self) -> usize {
        self.layer.weight.rows()
    }

    /// Some columns of `x` rows, or of what takes their place, with those of `w`.
    fn columns<'a, X>(&self, layer: &'a Linear, x: &'a [X], stride: usize, columns: Range<usize>) -> Columns<'a, X> {
        let w = layer.weight.all().skip(columns.start).first(columns.len());
        let bias = layer.bias.as_deref().map(|bias| &bias[columns.clone()]);
        Columns { x, stride, rows: self.rows, w, bias, first: columns.start }
    }

    /// Computes some columns of `y`.
    fn part(&self, columns: Range<usize>, slots: &Slots<'_>) {
        let (format, isa, y) = (self.layer.weight.format(), self.isa, &self.y);
        if let Some((x, codes)) = self.integers {
            let columns = self.columns(self.layer, x, Quad::count(self.x.width), columns);
            return Integers { columns, codes, y }.run(isa);
        }
        if self.rows <= FEW {
            let columns = self.columns(self.layer, self.data, self.x.stride, columns);
            return format.multiply_few(isa, columns, y);
        }
        let step = self.then.panel();
        for first in columns.clone().step_by(step) {
            let columns = first..columns.end.min(first + step);
            slots.with(|scratch| match self.then {
                Then::Write => self.panel(columns, None, None, scratch),
                Then::Add => {
                    let finish = |y: &mut [f32], sums: &mut [f32]| add_scaled(isa, y, 1.0, sums);
                    self.panel(columns, None, Some(&finish), scratch);
                }
                Then::Gate { up, activation, is_rounded } => {
                    let dtype = if is_rounded { DType::Bf16 } else { DType::F32 };
                    let finish = |y: &mut [f32], sums: &mut [f32]| {
                        let (gate, up) = sums.split_at_mut(sums.len() / 2);
                        mlp::row(isa, activation, gate, up);
                        encode(isa, dtype, gate, bytemuck::cast_slice_mut(y));
                    };
                    self.panel(columns, Some(up), Some(&finish), scratch);
                }
            });
        }
    }

    /// Computes some columns, packed, beside those of another layer where there is one.
    fn panel(&self, of: Range<usize>, other: Option<&Linear>, finish: Option<&Finish<'_>>, scratch: &mut [f32]) {
        let isa = self.isa;
        let columns = self.columns(self.layer, self.data, self.x.stride, of.clone());
        let beside = other.map(|other| self.columns(other, self.data, self.x.stride, of));
        let sides = [Some((self.layer, columns.w)), other.zip(beside.as_ref().map(|beside| beside.w))];
        let widen = |side: usize, columns: Range<usize>, dtype, to: &mut [u8]| {
            let (layer, rows) = sides[side].expect("a matrix on this side");
            layer.weight.format().widen(isa, rows, columns, dtype, to);
        };
        isa.run_bf16(Panel { columns, beside, rounded: self.rounded, widen: &widen, scratch, y: &self.y, finish });
    }
}

/// Adds what a part of a block makes of the residual stream to it.
pub(super) fn add(cpu: &Cpu, stream: &mut [f32], projected: &[f32]) {
    match stream.len() < SERIAL {
        true => add_scaled(cpu.isa(), stream, 1.0, projected),
        false => {
            let parts = stream.par_chunks_mut(SERIAL).zip(projected.par_chunks(SERIAL));
            cpu.install(|| parts.for_each(|(stream, projected)| add_scaled(cpu.isa(), stream, 1.0, projected)));
        }
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

/// Rounds rows of `x`, whose columns lie as `data` has them, to pairs of bf16.
fn round(cpu: &Cpu, data: &[f32], x: &PaddedRows, rows: usize, to: &mut [f32]) {
    let stride = to.len() / padded_rows(rows);
    let parts = data[..padded_rows(rows) * x.stride].par_chunks(ROUNDED_ROWS * x.stride);
    let parts = parts.zip(to.par_chunks_mut(ROUNDED_ROWS * stride)).with_max_len(1);
    cpu.install(|| parts.for_each(|(x_rows, to)| cpu.isa().run_bf16(Rounded { x: x_rows, stride: x.stride, to })));
}

/// Scratch elements of the linear layers of a model in a pass.
pub(super) fn scratch(config: &Config, setup: &Setup<'_>, threads: usize) -> usize {
    let (rows, widest) = (setup.rows(), config.hidden.max(config.q_width()).max(config.ffn));
    let sorted = if config.is_ordered() { padded_rows(rows) * widest } else { 0 };
    if rows <= FEW {
        return sorted;
    }
    let rounded = if setup.dtype == DType::F32 { 0 } else { rounded_scratch(rows, widest) };
    sorted + rounded + threads * panel_scratch(widest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use crate::model::{BUILTIN, Model, locate};

    /// Few rows, rows of one panel, and of several blocks: to the same bits as one after the other.
    #[test]
    fn gates_and_sums_are_taken_in_as_products_are_computed() {
        let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
        let model = Model::open(&locate(BUILTIN.as_ref()).unwrap(), &arena).unwrap();
        let (config, block) = (&model.config, &model.weights.layers[0]);
        let layers = [&block.gate, &block.up];
        for dtype in [DType::F32, DType::Bf16] {
            for rows in [1, FEW + 1, 101] {
                let setup = Setup::of(rows, dtype);
                let padded = |width| PaddedRows::new(&arena, rows, width, &setup).unwrap();
                let (mut x, mut together) = (padded(config.hidden), padded(config.ffn));
                x.data.iter_mut().enumerate().for_each(|(index, x)| *x = (index * 37 % 101) as f32 / 50.0 - 1.0);
                let (mut gate, mut up) = (vec![0.0; rows * config.ffn], vec![0.0; rows * config.ffn]);
                let mut scratch = vec![f32::NAN; scratch(config, &setup, cpu.threads())];
                let into: [(_, &mut [f32], _); 2] =
                    [(layers[0], &mut gate, config.ffn), (layers[1], &mut up, config.ffn)];
                Linear::apply_all(&cpu, &x, rows, into, &mut scratch);
                mlp::activate(&cpu, config.activation, &mut gate, config.ffn, &up, config.ffn);
                up.fill(f32::NAN);
                let (mlp, room) = ((layers, config.activation), (&mut up[..], &mut scratch[..]));
                Linear::apply_gated(&cpu, &x, rows, mlp, (&mut together, None), room);
                for (row, expected) in gate.chunks_exact(config.ffn).enumerate() {
                    assert_eq!(together.row_mut(row), expected, "{dtype:?}: row {row} of {rows}");
                }
                let taken_in = up.iter().all(|x| x.is_nan());
                assert_eq!(taken_in, rows > FEW, "{rows} rows");

                let (mut rounded, mlp) = (padded(config.ffn), (layers, config.activation));
                let room = (&mut up[..], &mut scratch[..]);
                Linear::apply_gated(&cpu, &x, rows, mlp, (&mut rounded, Some(&block.down)), room);
                assert_eq!(rounded.lie_rounded, rounded.can_lie_rounded(&cpu, rows) && block.down.may_round());
                let (width, mut sums) = (config.hidden, vec![1.0; rows * config.hidden]);
                let [mut of_rounded, mut of_plain] = [vec![0.0; sums.len()], vec![0.0; sums.len()]];
                block.down.apply(&cpu, &rounded, rows, &mut of_rounded, width, &mut scratch);
                block.down.apply(&cpu, &together, rows, &mut of_plain, width, &mut scratch);
                assert_eq!(of_rounded, of_plain, "{dtype:?}: {rows} rows that lie rounded");
                let room = &mut up[..sums.len()];
                room.fill(f32::NAN);
                block.down.apply_added(&cpu, &rounded, rows, (&mut sums, room), &mut scratch);
                assert_eq!(room.iter().all(|x| x.is_nan()), rows > FEW, "{rows} rows");
                of_plain.iter_mut().for_each(|x| *x += 1.0);
                assert_eq!(sums, of_plain, "{dtype:?}: {rows} rows added");
            }
        }
    }
}

//! The functions of gates: for each layer one of the normed input of attention `n`, linear, `W n + b`, or with an inner layer and GELU,
//! `W gelu(U n + c) + b`, as [`crate::policy::network::Network`] computes it at inference. `W`, `b` and `c` begin at 0, so that gates say
//! nothing at first, and `U` as a draw of variance `2 / hidden` (He et al., arXiv 1502.01852). The inner layer's rows are computed again in
//! the backward pass, and not kept.

use super::activations::Extents;
use super::holder::UnitGradients;
use super::linear::Linear;
use super::parameters::{Group, Parameter};
use super::weights::Weights;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::Config;
use crate::model::parameters::Role;
use crate::policy::network::{gelu, gelu_slope};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};
use rayon::prelude::*;
use std::ops::Range;

/// Fewest elements of an inner layer that are worth a task of their own.
const LEAST_ELEMENTS: usize = 4096;

/// Most elements of an inner layer.
const MOST_INNER: usize = 1 << 16;

/// Refuses an inner layer that no one means.
///
/// # Errors
/// Says how many elements it may have.
pub(super) fn check_inner(inner: Option<usize>) -> Result<(), String> {
    match inner {
        Some(inner) if !(1..=MOST_INNER).contains(&inner) => {
            Err(format!("an inner layer of {inner} elements; give 1 to {MOST_INNER}, or none for a linear function"))
        }
        _ => Ok(()),
    }
}

/// Extents of the functions of a model.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    layers: usize,
    hidden: usize,
    outputs: usize,
    inner: Option<usize>,
}

impl Sizes {
    /// Of a number of functions for each KV head.
    pub fn new(config: &Config, functions: usize, inner: Option<usize>) -> Self {
        Sizes { layers: config.layers, hidden: config.hidden, outputs: functions * config.kv_heads, inner }
    }

    /// Columns of `W`.
    pub fn inputs(self) -> usize {
        self.inner.unwrap_or(self.hidden)
    }

    /// Layers of the model.
    pub fn layers(self) -> usize {
        self.layers
    }

    /// Numbers that are trained.
    pub fn count(self) -> usize {
        self.ranges()[3].end
    }

    /// Where `W` `[layers, outputs, inputs]`, `b` `[layers, outputs]`, `U` `[layers, inner, hidden]` and `c` `[layers, inner]` lie.
    pub fn ranges(self) -> [Range<usize>; 4] {
        let Sizes { layers, hidden, outputs, inner } = self;
        let inner = inner.unwrap_or(0);
        let mut end = 0;
        [outputs * self.inputs(), outputs, inner * hidden, inner].map(|each| {
            end += layers * each;
            end - layers * each..end
        })
    }

    /// Bytes of the inner layer's rows in training.
    pub fn row_bytes(self) -> u64 {
        2 * 4 * self.inner.unwrap_or(0) as u64
    }
}

/// A layer's function.
struct Function {
    inner: Option<Linear>,
    outer: Linear,
}

/// The functions of all layers, in turn.
pub(super) struct Functions {
    sizes: Sizes,
    layers: Vec<Function>,
    /// The inner layer before its activation and behind it, `[rows, inner]`.
    between: Option<[Buffer<f32>; 2]>,
}

impl Functions {
    /// The functions and their parameters, for batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, extents: &Extents<'_>, sizes: Sizes) -> Result<(Self, Vec<Parameter>), ArenaError> {
        let Sizes { layers, hidden, outputs, inner } = sizes;
        let mut parameters = Vec::new();
        let mut linear = |[weights, biases]: [Range<usize>; 2], name: &str, inputs: usize, outputs: usize| {
            let mut one = |what: &str, role, shape: Vec<usize>, all: &Range<usize>, layer: usize| {
                let each = all.len() / layers;
                let range = all.start + layer * each..all.start + (layer + 1) * each;
                let name = format!("gates.{layer}.{name}{what}");
                let (gradient, of_kind) = (Some(range.clone()), range.clone());
                let parameter = Parameter { name, shape, role, gradient, of_kind, range };
                let group = Group::new(std::slice::from_ref(&parameter));
                parameters.push(parameter);
                group
            };
            let mut of_layer = |layer| {
                let weight = one("weight", Role::Matrix, vec![outputs, inputs], &weights, layer);
                let bias = Some(one("bias", Role::Bias, vec![outputs], &biases, layer));
                Linear { weight, bias, inputs, outputs }
            };
            (0..layers).map(&mut of_layer).collect::<Vec<Linear>>()
        };
        let [w, b, u, c] = sizes.ranges();
        let outer = linear([w, b], "", sizes.inputs(), outputs);
        let mut inner_layers =
            inner.map(|inner| linear([u, c], "inner.", hidden, inner)).unwrap_or_default().into_iter();
        let layers = outer.into_iter().map(|outer| Function { inner: inner_layers.next(), outer }).collect();
        let floats = |inner: usize| arena.alloc::<f32>(Label::Activations, extents.rows() * inner);
        let between = inner.map(|inner| Ok::<_, ArenaError>([floats(inner)?, floats(inner)?])).transpose()?;
        Ok((Functions { sizes, layers, between }, parameters))
    }

    /// Draws the inner layers.
    pub fn draw(&self, weights: &mut [f32], seed: u64) {
        let (mut rng, hidden) = (ChaCha8Rng::seed_from_u64(seed), self.sizes.hidden as f32);
        let normal = Normal::new(0.0, (2.0 / hidden).sqrt()).expect("a deviation above 0");
        let [_, _, inner, _] = self.sizes.ranges();
        weights[inner].iter_mut().for_each(|weight| *weight = normal.sample(&mut rng));
    }

    /// Extents.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// A layer's outputs `[rows, outputs]` of `n` `[rows, hidden]`.
    pub fn forward(&mut self, layer: usize, cpu: &Cpu, weights: &[f32], n: &[f32], y: &mut [f32], scratch: &mut [f32]) {
        let (Function { inner, outer }, weights) = (&self.layers[layer], Weights::F32(weights));
        let x = match (inner, &mut self.between) {
            (Some(inner), Some([before, behind])) => {
                inner.forward(cpu, weights, n, before, false, scratch);
                each(cpu, behind, before, |behind, z| *behind = gelu(z));
                behind
            }
            _ => n,
        };
        outer.forward(cpu, weights, x, y, false, scratch);
    }

    /// Adds the gradients of a layer to `gradient`, and to `dn` that by the rows of `n` from `first` on; `dy` is that by the outputs.
    pub fn backward(
        &mut self,
        layer: usize,
        cpu: &Cpu,
        (weights, gradient): (&[f32], &mut [f32]),
        (n, dy): (&[f32], &[f32]),
        (dn, first): (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        let (Function { inner, outer }, weights) = (&self.layers[layer], Weights::F32(weights));
        let gradients = &mut UnitGradients { values: gradient, first: 0 };
        let (Some(inner), Some([before, behind])) = (inner, &mut self.between) else {
            outer.gradients(cpu, dy, n, gradients);
            return outer.backward(cpu, weights, &dy[first * outer.outputs..], dn, true, scratch);
        };
        inner.forward(cpu, weights, n, before, false, scratch);
        each(cpu, behind, before, |behind, z| *behind = gelu(z));
        outer.gradients(cpu, dy, behind, gradients);
        outer.backward(cpu, weights, dy, behind, false, scratch);
        each(cpu, behind, before, |slope, z| *slope *= gelu_slope(z));
        inner.gradients(cpu, behind, n, gradients);
        inner.backward(cpu, weights, &behind[first * inner.outputs..], dn, true, scratch);
    }
}

fn each(cpu: &Cpu, to: &mut [f32], from: &[f32], apply: impl Fn(&mut f32, f32) + Sync) {
    let pieces = |(to, from): (&mut [f32], &[f32])| to.iter_mut().zip(from).for_each(|(to, &from)| apply(to, from));
    cpu.install(|| to.par_chunks_mut(LEAST_ELEMENTS).zip(from.par_chunks(LEAST_ELEMENTS)).for_each(pieces));
}

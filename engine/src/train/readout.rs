//! What is read from a memory of facts, as keys and values of every layer: a linear read-out that is trained beside a frozen
//! model (Larimar, arXiv 2403.11901).
//!
//! Each sequence of a batch begins with `P` placeholders. Their keys and values are not computed from tokens: in every layer
//! they are `W v + b` of the sequence's vector `v` `[V]`, the value that a memory gave for the sequence's question, laid out
//! `[layers, key | value, Hkv, P, D]`. Keys are put there as they are, without RoPE: the tokens behind them keep their
//! distances to one another, and what the prefix is to be found by is learned for the place where it stands. Gradients come
//! back from attention by the same rows; what the placeholders' tokens would have been is read by nothing.

use super::activations::Extents;
use super::holder::UnitGradients;
use super::linear::{self, Linear};
use super::parameters::{Group, Parameter};
use super::weights::Weights;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::PrefixShape;
use crate::model::parameters::Role;
use crate::tensor::Tensor;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

/// Standard deviation of the read-out's numbers at first, for a vector of variance 1: that of its outputs, times the root of `V`.
const FIRST: f32 = 0.5;

/// A read-out at work on batches.
pub struct Readout {
    /// `W` `[outputs, V]`, then `b` `[outputs]`.
    pub weights: Buffer<f32>,
    /// Their gradient, laid out alike.
    pub gradient: Buffer<f32>,
    /// Where they lie.
    pub parameters: Vec<Parameter>,
    /// What is read out of, `[B, V]`.
    pub values: Buffer<f32>,
    shape: PrefixShape,
    len: usize,
    linear: Linear,
    /// Keys and values, or the gradient by them, `[B, outputs]`.
    rows: Buffer<f32>,
    scratch: Buffer<f32>,
}

impl Readout {
    /// A read-out of vectors of `width` numbers with small numbers drawn from a seed, for batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(
        arena: &Arena,
        extents: &Extents<'_>,
        (width, tokens): (usize, usize),
        threads: usize,
        seed: u64,
    ) -> Result<Self, ArenaError> {
        let shape = PrefixShape::new(extents.config(), tokens);
        let (batch, outputs) = (extents.batch, shape.numbers());
        let parameter = |name: &str, role, shape: Vec<usize>, start: usize| {
            let range = start..start + shape.iter().product::<usize>();
            Parameter { name: name.into(), shape, role, gradient: Some(range.clone()), of_kind: range.clone(), range }
        };
        let weight = parameter("readout.weight", Role::Matrix, vec![outputs, width], 0);
        let bias = parameter("readout.bias", Role::Bias, vec![outputs], outputs * width);
        let one = |parameter: &Parameter| Group::new(std::slice::from_ref(parameter));
        let linear = Linear { weight: one(&weight), bias: Some(one(&bias)), inputs: width, outputs };
        let count = outputs * (width + 1);
        let mut weights = arena.alloc(Label::Weights, count)?;
        let normal = Normal::new(0.0, FIRST / (width as f32).sqrt()).expect("a positive deviation");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        weights[..outputs * width].iter_mut().for_each(|weight| *weight = normal.sample(&mut rng));
        Ok(Readout {
            weights,
            gradient: arena.alloc(Label::Gradients, count)?,
            parameters: vec![weight, bias],
            values: arena.alloc(Label::Activations, batch * width)?,
            shape,
            len: extents.len,
            linear,
            rows: arena.alloc(Label::Activations, batch * outputs)?,
            scratch: arena.alloc(Label::Workspace, linear::scratch(threads))?,
        })
    }

    /// Bytes that [`Readout::new`] takes.
    pub fn bytes(extents: &Extents<'_>, (width, tokens): (usize, usize), threads: usize) -> LabelBytes {
        let outputs = PrefixShape::new(extents.config(), tokens).numbers();
        let count = 4 * (outputs * (width + 1)) as u64;
        LabelBytes::from([
            (Label::Weights, count),
            (Label::Gradients, count),
            (Label::Activations, 4 * (extents.batch * (width + outputs)) as u64),
            (Label::Workspace, 4 * linear::scratch(threads) as u64),
        ])
    }

    /// Placeholders at the start of each sequence.
    pub fn tokens(&self) -> usize {
        self.shape.tokens
    }

    /// Begins a forward pass: keys and values of every sequence.
    pub(super) fn begin(&mut self, cpu: &Cpu) {
        let weights = Weights::F32(&self.weights);
        self.linear.forward(cpu, weights, &self.values, &mut self.rows, false, &mut self.scratch);
    }

    /// Puts a layer's keys and values into those of the batch, `[B, Hkv, L, D]`.
    pub(super) fn put(&self, layer: usize, heads: [&mut Tensor; 2]) {
        for (part, tensor) in heads.into_iter().enumerate() {
            let (dtype, bytes) = (tensor.dtype(), self.shape.head_dim * tensor.dtype().bytes());
            let lists = tensor.bytes_mut().chunks_exact_mut(self.len * bytes);
            for (list, to) in lists.enumerate() {
                dtype.encode(&self.rows[self.of_list(layer, part, list)], &mut to[..self.shape.tokens * bytes]);
            }
        }
    }

    /// Takes the gradients by a layer's keys and values out of those of the batch, in which zeros stay.
    pub(super) fn take(&mut self, layer: usize, heads: [&mut Tensor; 2]) {
        for (part, tensor) in heads.into_iter().enumerate() {
            let (dtype, bytes) = (tensor.dtype(), self.shape.head_dim * tensor.dtype().bytes());
            for (list, from) in tensor.bytes_mut().chunks_exact_mut(self.len * bytes).enumerate() {
                let range = self.of_list(layer, part, list);
                let from = &mut from[..self.shape.tokens * bytes];
                dtype.decode(from, &mut self.rows[range]);
                from.fill(0);
            }
        }
    }

    /// Ends a backward pass: adds the gradient by the read-out's numbers.
    pub(super) fn finish(&mut self, cpu: &Cpu) {
        let Readout { linear, rows, values, gradient, .. } = self;
        linear.gradients(cpu, rows, values, &mut UnitGradients { values: gradient, first: 0 });
    }

    /// Where the rows of a (sequence, KV head) lie.
    fn of_list(&self, layer: usize, part: usize, list: usize) -> std::ops::Range<usize> {
        let (sequence, head) = (list / self.shape.kv_heads, list % self.shape.kv_heads);
        let start = sequence * self.shape.numbers();
        let of = self.shape.rows(layer, part, head);
        start + of.start..start + of.end
    }
}

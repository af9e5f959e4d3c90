//! Gates that learn which tokens to evict: Dynamic Memory Sparsification (DMS, arXiv 2506.05345) on a frozen model.
//!
//! Each KV head of each layer has a linear function of the normed input `n` of attention, the *eviction logit*
//! `a = SCALE (w . n + b) - OFFSET`. In training the decision is relaxed: with logistic noise `g` (a difference of two
//! Gumbel variables) `z = (a + g) / TAU`, `alpha = sigmoid(z)`, and the token's key gets the bias `log(1 - alpha)` for
//! queries that lie `window` or more behind it ([`crate::attention::KeyBias`]): eviction is delayed. At inference a token
//! is evicted if `a > 0`, once it leaves the window. `n` is the token's own, or that of the token behind it ([`DecidedBy`]), which has none for the
//! last token: that one is not decided on. Scale, offset and temperature are those of NVIDIA's Model-Optimizer;
//! the offset lets no token go at first.
//!
//! Gradients: `d log(1 - alpha) / dz = -alpha`, and `alpha (1 - alpha)` for the term that asks for more eviction, which
//! counts decisions as taken (`z > 0`) and passes gradients straight through them. Only tokens that some query of the
//! sequence has left behind the window are counted: on others nothing but that term would act.
//!
//! A token that goes may also be accumulated into the one behind it, as in Dynamic Memory Compression ([`super::accumulation`]).

use super::accumulation::Accumulation;
use super::activations::Extents;
use super::holder::UnitGradients;
use super::linear::Linear;
use super::parameters::{Group, Parameter};
use super::weights::Weights;
use crate::attention::{KeyBias, Outputs};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::Config;
use crate::model::parameters::Role;
use crate::policy::DecidedBy;
use crate::tensor::Tensor;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Factor of the linear function, so that few steps of a small learning rate move a logit.
pub const SCALE: f32 = 100.0;
/// What is taken from the logit, so that nothing is evicted at first.
pub const OFFSET: f32 = 5.0;
/// Temperature of the relaxed decision.
pub const TAU: f32 = 0.1;
/// Bias of a token that is evicted for good: no probability is left of it in f32.
pub(super) const GONE: f32 = -1e4;

/// How tokens are decided on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    /// No token is evicted: the dense model.
    Dense,
    /// Relaxed, with noise drawn from a seed and a step's number.
    Relaxed {
        /// The seed.
        seed: u64,
        /// The step.
        step: u64,
    },
    /// As at inference.
    Hard,
}

/// The gates of a model, and what they decided on in a batch.
pub struct Gates {
    /// Weights `[layers, Hkv, hidden]`, then biases `[layers, Hkv]`.
    pub weights: Buffer<f32>,
    /// Their gradient, laid out alike.
    pub gradient: Buffer<f32>,
    /// Where they lie.
    pub parameters: Vec<Parameter>,
    linears: Vec<Linear>,
    heads: usize,
    len: usize,
    window: usize,
    decided_by: DecidedBy,
    mode: Mode,
    /// `z`, or `a` where decisions are hard, `[layers, B, Hkv, L]`.
    logits: Buffer<f32>,
    /// Biases of the keys, `[layers, B, Hkv, L]`.
    bias: Buffer<f32>,
    /// What the linear functions give or take, `[rows, Hkv]`.
    outputs: Buffer<f32>,
    /// The dense model's last norm's output, `[rows, hidden]`.
    pub(super) dense: Buffer<f32>,
    /// Gradient of the loss by each decision, from the term that asks for more eviction.
    pressure: f32,
    /// What becomes of tokens that go, unless they are dropped.
    accumulation: Option<Accumulation>,
}

/// Where the parameters of a model's gates lie.
fn layout(config: &Config) -> (Vec<Parameter>, Vec<Linear>) {
    let Config { layers, kv_heads, hidden, .. } = *config;
    let matrix = kv_heads * hidden;
    let parameter = |layer: usize, what: &str, role, shape: Vec<usize>, start: usize| {
        let range = start..start + shape.iter().product::<usize>();
        Parameter {
            name: format!("gates.{layer}.{what}"),
            shape,
            role,
            gradient: Some(range.clone()),
            of_kind: range.clone(),
            range,
        }
    };
    let weight = |layer| parameter(layer, "weight", Role::Matrix, vec![kv_heads, hidden], layer * matrix);
    let bias = |layer| parameter(layer, "bias", Role::Bias, vec![kv_heads], layers * matrix + layer * kv_heads);
    let weights: Vec<Parameter> = (0..layers).map(weight).collect();
    let biases: Vec<Parameter> = (0..layers).map(bias).collect();
    let one = |parameter: &Parameter| Group::new(std::slice::from_ref(parameter));
    let linear =
        |(weight, bias)| Linear { weight: one(weight), bias: Some(one(bias)), inputs: hidden, outputs: kv_heads };
    let linears = weights.iter().zip(&biases).map(linear).collect();
    (weights.into_iter().chain(biases).collect(), linears)
}

/// Which of the linear functions' outputs `[B L, Hkv]` decides on a token, `index` of `[B, Hkv, L]`.
fn decided_at(index: usize, len: usize, heads: usize, by: DecidedBy) -> Option<usize> {
    let (list, at) = (index / len, index % len + by.later());
    (at < len).then_some((list / heads * len + at) * heads + list % heads)
}

impl Gates {
    /// Numbers that are trained.
    pub fn count(config: &Config) -> usize {
        config.layers * config.kv_heads * (config.hidden + 1)
    }

    /// Gates that evict nothing, for batches of these extents; the bias of a key counts `window` tokens behind it.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, extents: &Extents<'_>, window: usize, decided_by: DecidedBy) -> Result<Self, ArenaError> {
        let (config, rows) = (extents.config(), extents.rows());
        let (parameters, linears) = layout(config);
        let floats = |width: usize| arena.alloc::<f32>(Label::Activations, rows * width);
        Ok(Gates {
            weights: arena.alloc(Label::Weights, Self::count(config))?,
            gradient: arena.alloc(Label::Gradients, Self::count(config))?,
            parameters,
            linears,
            heads: config.kv_heads,
            len: extents.len,
            window,
            decided_by,
            mode: Mode::Dense,
            logits: floats(config.layers * config.kv_heads)?,
            bias: floats(config.layers * config.kv_heads)?,
            outputs: floats(config.kv_heads)?,
            dense: floats(config.hidden)?,
            pressure: 0.0,
            accumulation: None,
        })
    }

    /// The same where a token that goes is accumulated into the one behind it, which decides on it.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When another token decides, or later.
    pub fn accumulating(mut self, arena: &Arena, extents: &Extents<'_>) -> Result<Self, ArenaError> {
        assert_eq!((self.window, self.decided_by), (1, DecidedBy::Next), "a slot goes on with the token that decides");
        self.accumulation = Some(Accumulation::new(arena, extents)?);
        Ok(self)
    }

    /// Bytes that [`Gates::new`] takes, and [`super::Network::with_gates`]: the gradient by the bias, and the dense model's outputs
    /// of attention.
    pub fn bytes(extents: &Extents<'_>) -> LabelBytes {
        let (config, rows) = (extents.config(), extents.rows() as u64);
        let (count, heads) = (4 * Self::count(config) as u64, config.kv_heads as u64);
        let of_token = 2 * config.layers as u64 * heads + 2 * heads + config.hidden as u64;
        LabelBytes::from([
            (Label::Weights, count),
            (Label::Gradients, count),
            (Label::Activations, 4 * rows * of_token + Outputs::bytes(&extents.attention(), extents.dtype())),
        ])
    }

    /// Tokens of the window.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Begins a forward pass.
    pub(super) fn begin(&mut self, mode: Mode) {
        (self.mode, self.pressure) = (mode, 0.0);
    }

    /// Elements of a layer in the arrays over all layers.
    fn layer(&self, layer: usize) -> std::ops::Range<usize> {
        let each = self.outputs.len();
        layer * each..(layer + 1) * each
    }

    /// Whether a token is one that some query leaves behind the window.
    fn is_mature(&self, at: usize) -> bool {
        at + self.window < self.len
    }

    /// Decides on the tokens of a layer by the normed inputs of its attention, `n` `[rows, hidden]`.
    pub(super) fn decide(&mut self, layer: usize, cpu: &Cpu, n: &[f32], scratch: &mut [f32]) {
        if self.is_dense() {
            return;
        }
        let weights = Weights::F32(&self.weights);
        self.linears[layer].forward(cpu, weights, n, &mut self.outputs, false, scratch);
        let mut rng = match self.mode {
            Mode::Relaxed { seed, step } => {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(step << 16 | layer as u64);
                Some(rng)
            }
            _ => None,
        };
        let of_layer = self.layer(layer);
        let to = self.logits[of_layer.clone()].iter_mut().zip(&mut self.bias[of_layer]);
        for (index, (logit, bias)) in to.enumerate() {
            let a = match decided_at(index, self.len, self.heads, self.decided_by) {
                Some(at) => SCALE * self.outputs[at] - OFFSET,
                None => -OFFSET,
            };
            match &mut rng {
                Some(rng) => {
                    let u: f32 = rng.random_range(1e-6..1.0 - 1e-6);
                    let z = (a + (u / (1.0 - u)).ln()) / TAU;
                    *logit = z;
                    *bias = -(z.max(0.0) + (-z.abs()).exp().ln_1p());
                }
                None => {
                    *logit = a;
                    *bias = if a > 0.0 { GONE } else { 0.0 };
                }
            }
        }
    }

    /// How much of a token goes, by its logit.
    fn alpha(mode: Mode, logit: f32) -> f32 {
        match mode {
            Mode::Relaxed { .. } => 1.0 / (1.0 + (-logit).exp()),
            _ => f32::from(u8::from(logit > 0.0)),
        }
    }

    /// Accumulates a layer's tokens that were decided on, keys and values `[B, Hkv, L, D]`, where that is what becomes of them.
    pub(super) fn accumulate(&mut self, layer: usize, cpu: &Cpu, heads: [&mut Tensor; 2]) {
        if self.is_dense() {
            return;
        }
        let (layer, mode) = (self.layer(layer), self.mode);
        let Gates { accumulation: Some(accumulation), logits, .. } = self else { return };
        let logits = &logits[layer];
        accumulation.forward(cpu, |index| Self::alpha(mode, logits[index]), heads);
    }

    /// The gradient of [`Gates::accumulate`]: `gradients` by its results become those by what it was given.
    pub(super) fn accumulate_backward(
        &mut self,
        layer: usize,
        cpu: &Cpu,
        heads: [&Tensor; 2],
        gradients: [&mut Tensor; 2],
    ) {
        let (layer, mode) = (self.layer(layer), self.mode);
        let Gates { accumulation: Some(accumulation), logits, .. } = self else { return };
        let logits = &logits[layer];
        accumulation.backward(cpu, |index| Self::alpha(mode, logits[index]), heads, gradients);
    }

    /// Whether the forward pass is that of the dense model.
    fn is_dense(&self) -> bool {
        self.mode == Mode::Dense
    }

    /// The biases of a layer's keys; `None` for the dense model.
    pub(super) fn bias(&self, layer: usize) -> Option<KeyBias<'_>> {
        (!self.is_dense()).then(|| KeyBias { values: &self.bias[self.layer(layer)], window: self.window })
    }

    /// Fraction of the tokens behind a window that the last forward pass evicted, over all layers and heads.
    pub(super) fn evicted(&self) -> f64 {
        let mature = |(index, _): &(usize, &f32)| self.is_mature(index % self.len);
        let gone = self.logits.iter().enumerate().filter(mature).filter(|(_, logit)| **logit > 0.0).count();
        gone as f64 / self.mature() as f64
    }

    /// Mean of `alpha` where [`Gates::evicted`] counts decisions as taken.
    #[cfg(test)]
    pub(super) fn relaxed(&self) -> f64 {
        let mature = |(index, _): &(usize, &f32)| self.is_mature(index % self.len);
        let alphas = self.logits.iter().enumerate().filter(mature).map(|(_, z)| 1.0 / (1.0 + f64::from(-z).exp()));
        alphas.sum::<f64>() / self.mature() as f64
    }

    /// Decisions that count.
    fn mature(&self) -> usize {
        self.logits.len() / self.len * self.len.saturating_sub(self.window)
    }

    /// The one-sided term `weight * max(0, target - evicted)` of the loss, which [`Gates::backward`] looks at.
    pub(super) fn press(&mut self, target: f64, weight: f64) -> f64 {
        let lacking = (target - self.evicted()).max(0.0);
        self.pressure = if lacking > 0.0 { (weight / self.mature() as f64) as f32 } else { 0.0 };
        weight * lacking
    }

    /// Adds a layer's gradients to those of its parameters and to `dn`, the gradient by the rows of `n` from `first` on; `dbias` is the gradient by
    /// the biases of its keys, `[B, Hkv, L]`.
    pub(super) fn backward(
        &mut self,
        layer: usize,
        cpu: &Cpu,
        n: &[f32],
        dbias: &[f32],
        (dn, first): (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        let logits = &self.logits[self.layer(layer)];
        // What decides on nothing, the first token of a sequence whose tokens the next ones decide on, gets no gradient.
        self.outputs.fill(0.0);
        for (index, (&z, &dbias)) in logits.iter().zip(dbias).enumerate() {
            let Some(at) = decided_at(index, self.len, self.heads, self.decided_by) else { continue };
            let alpha = Self::alpha(self.mode, z);
            let accumulated = self.accumulation.as_ref().map_or(0.0, |accumulation| accumulation.gradient[index]);
            let pressure = if self.is_mature(index % self.len) { self.pressure } else { 0.0 };
            let dz = alpha * ((1.0 - alpha) * (accumulated - pressure) - dbias);
            self.outputs[at] = SCALE / TAU * dz;
        }
        let Gates { linears, weights, gradient, outputs, .. } = self;
        linears[layer].gradients(cpu, outputs, n, &mut UnitGradients { values: gradient, first: 0 });
        let outputs = &outputs[first * self.heads..];
        linears[layer].backward(cpu, Weights::F32(weights), outputs, dn, true, scratch);
    }

    /// Weights and biases of the eviction logits as they are used, with scale and offset: what a policy file holds.
    pub fn folded(&self) -> [Vec<f32>; 2] {
        let (weights, biases) = self.weights.split_at(self.weights.len() - self.linears.len() * self.heads);
        [weights.iter().map(|w| SCALE * w).collect(), biases.iter().map(|b| SCALE * b - OFFSET).collect()]
    }
}

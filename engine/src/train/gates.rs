//! Gates that learn which tokens to evict: Dynamic Memory Sparsification (DMS, arXiv 2506.05345) on a frozen model.
//!
//! Each KV head of each layer has a function of the normed input `n` of attention, linear or with an inner layer (`gate_functions.rs`), and
//! of it an *eviction logit*, `a = SCALE (w . n + b) - OFFSET`. In training the decision is relaxed: with logistic noise `g` (a difference of two
//! Gumbel variables) `z = (a + g) / TAU`, `alpha = sigmoid(z)`, and the token's key gets the bias `log(1 - alpha)` for
//! queries that lie more than `window` behind it ([`crate::attention::KeyBias`]): eviction is delayed. At inference a token
//! is evicted if `a > 0`, once it leaves the window: a step of eviction comes behind a token and leaves the `window` newest, which with
//! itself the next one sees. `n` is the token's own, or that of the token behind it ([`DecidedBy`]), which has none for the
//! last token: that one is not decided on. Scale, offset and temperature are those of NVIDIA's Model-Optimizer;
//! the offset lets no token go at first.
//!
//! Gradients: `d log(1 - alpha) / dz = -alpha`, and `alpha (1 - alpha)` for the term that asks for more eviction, which
//! counts decisions as taken (`z > 0`) and passes gradients straight through them. Only tokens that some query of the
//! sequence has left behind the window are counted: on others nothing but that term would act.
//!
//! A token that goes may also be accumulated into the one behind it, as in Dynamic Memory Compression (`accumulation.rs`): then a
//! second function of each head says how much a token weighs, `sigmoid(SCALE (w . n + b))`, which is the same for all at first.

use super::accumulation::Accumulation;
use super::activations::Extents;
use super::gate_functions::{Functions, Sizes};
use super::parameters::Parameter;
use crate::attention::{KeyBias, Outputs};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::Config;
use crate::policy::DecidedBy;
use crate::tensor::Tensor;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Factor of the linear functions, so that few steps of a small learning rate move a logit.
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

/// What becomes of tokens that go.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fate {
    /// They are dropped behind a window of tokens.
    Dropped {
        /// Tokens of the window.
        window: usize,
        /// Whose hidden state decides.
        by: DecidedBy,
    },
    /// They go into the mean of the token behind them, which decides.
    Accumulated,
}

impl Fate {
    /// How far behind a token the first query is that does not see it, if it goes.
    pub fn reach(self) -> usize {
        match self {
            Fate::Dropped { window, .. } => window + 1,
            Fate::Accumulated => 1,
        }
    }

    fn decided_by(self) -> DecidedBy {
        match self {
            Fate::Dropped { by, .. } => by,
            Fate::Accumulated => DecidedBy::Next,
        }
    }

    /// Functions of each KV head.
    fn functions(self) -> usize {
        match self {
            Fate::Dropped { .. } => 1,
            Fate::Accumulated => 2,
        }
    }
}

/// What gates are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Design {
    /// What becomes of tokens that go.
    pub fate: Fate,
    /// Elements of the inner layer of their functions; linear ones have none.
    pub inner: Option<usize>,
}

impl Design {
    fn sizes(self, config: &Config) -> Sizes {
        Sizes::new(config, self.fate.functions(), self.inner)
    }
}

/// Where tokens of batches are, and what is said of each.
#[derive(Clone, Copy)]
struct Places {
    heads: usize,
    len: usize,
    fate: Fate,
}

impl Places {
    /// Where the output of a function is that is of a token, `index` of `[B, Hkv, L]`, or of one `later`; `None` behind the last.
    fn output(self, function: usize, index: usize, later: usize) -> Option<usize> {
        let (list, at) = (index / self.len, index % self.len + later);
        let row = list / self.heads * self.len + at;
        (at < self.len).then_some((row * self.fate.functions() + function) * self.heads + list % self.heads)
    }

    /// Which output decides on a token.
    fn decided_at(self, index: usize) -> Option<usize> {
        self.output(0, index, self.fate.decided_by().later())
    }

    /// Which output weighs a token.
    fn weighed_at(self, index: usize) -> usize {
        self.output(1, index, 0).expect("every token is weighed")
    }

    /// Whether a token is one that some query leaves behind the window.
    fn is_mature(self, index: usize) -> bool {
        index % self.len + self.fate.reach() < self.len
    }
}

/// The gates of a model, and what they decided on in a batch.
pub struct Gates {
    /// Weights `[layers, functions, Hkv, hidden or inner]` and biases `[layers, functions, Hkv]`, then those of the inner layers.
    pub weights: Buffer<f32>,
    /// Their gradient, laid out alike.
    pub gradient: Buffer<f32>,
    /// Where they lie.
    pub parameters: Vec<Parameter>,
    functions: Functions,
    places: Places,
    mode: Mode,
    /// `z`, or `a` where decisions are hard, `[layers, B, Hkv, L]`.
    logits: Buffer<f32>,
    /// Biases of the keys, `[layers, B, Hkv, L]`.
    bias: Buffer<f32>,
    /// What the functions give or take, `[rows, functions, Hkv]`.
    outputs: Buffer<f32>,
    /// The dense model's last norm's output, `[rows, hidden]`.
    pub(super) dense: Buffer<f32>,
    /// Gradient of the loss by each decision, from the term that asks for more eviction.
    pressure: f32,
    /// Means of tokens that go, where they are accumulated.
    accumulation: Option<Accumulation>,
}

impl Gates {
    /// Numbers that are trained.
    pub fn count(config: &Config, design: Design) -> usize {
        design.sizes(config).count()
    }

    /// Gates that let no token go, for batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, extents: &Extents<'_>, design: Design) -> Result<Self, ArenaError> {
        let (config, rows, fate) = (extents.config(), extents.rows(), design.fate);
        let (functions, parameters) = Functions::new(arena, extents, design.sizes(config))?;
        let accumulation = (fate == Fate::Accumulated).then(|| Accumulation::new(arena, extents)).transpose()?;
        let floats = |width: usize| arena.alloc::<f32>(Label::Activations, rows * width);
        Ok(Gates {
            weights: arena.alloc(Label::Weights, Self::count(config, design))?,
            gradient: arena.alloc(Label::Gradients, Self::count(config, design))?,
            parameters,
            functions,
            places: Places { heads: config.kv_heads, len: extents.len, fate },
            mode: Mode::Dense,
            logits: floats(config.layers * config.kv_heads)?,
            bias: floats(config.layers * config.kv_heads)?,
            outputs: floats(fate.functions() * config.kv_heads)?,
            dense: floats(config.hidden)?,
            pressure: 0.0,
            accumulation,
        })
    }

    /// Draws the inner layers, where there are some.
    pub fn draw(&mut self, seed: u64) {
        self.functions.draw(&mut self.weights, seed);
    }

    /// Bytes that [`Gates::new`] takes, and [`super::Network::with_gates`]: the gradient by the bias, and the dense model's outputs
    /// of attention.
    pub fn bytes(extents: &Extents<'_>, design: Design) -> LabelBytes {
        let (config, rows, fate) = (extents.config(), extents.rows() as u64, design.fate);
        let (count, heads) = (4 * Self::count(config, design) as u64, config.kv_heads as u64);
        let of_token = (2 * config.layers + fate.functions() + 1) as u64 * heads + config.hidden as u64;
        let of_slots = if fate == Fate::Accumulated { Accumulation::bytes(extents) } else { 0 };
        let of_attention = Outputs::bytes(&extents.attention(), extents.dtype());
        LabelBytes::from([
            (Label::Weights, count),
            (Label::Gradients, count),
            (Label::Activations, rows * (4 * of_token + design.sizes(config).row_bytes()) + of_attention + of_slots),
        ])
    }

    /// As [`Fate::reach`].
    pub fn reach(&self) -> usize {
        self.places.fate.reach()
    }

    /// Begins a forward pass.
    pub(super) fn begin(&mut self, mode: Mode) {
        (self.mode, self.pressure) = (mode, 0.0);
    }

    /// Elements of a layer in the arrays over all layers.
    fn layer(&self, layer: usize) -> std::ops::Range<usize> {
        let each = self.outputs.len() / self.places.fate.functions();
        layer * each..(layer + 1) * each
    }

    /// Decides on the tokens of a layer by the normed inputs of its attention, `n` `[rows, hidden]`.
    pub(super) fn decide(&mut self, layer: usize, cpu: &Cpu, n: &[f32], scratch: &mut [f32]) {
        if self.is_dense() {
            return;
        }
        self.functions.forward(layer, cpu, &self.weights, n, &mut self.outputs, scratch);
        let mut rng = match self.mode {
            Mode::Relaxed { seed, step } => {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(step << 16 | layer as u64);
                Some(rng)
            }
            _ => None,
        };
        let of_layer = self.layer(layer);
        for index in 0..of_layer.len() {
            let a = match self.places.decided_at(index) {
                Some(at) => SCALE * self.outputs[at] - OFFSET,
                None => -OFFSET,
            };
            let (logit, bias) = match &mut rng {
                Some(rng) => {
                    let u: f32 = rng.random_range(1e-6..1.0 - 1e-6);
                    let z = (a + (u / (1.0 - u)).ln()) / TAU;
                    (z, -(z.max(0.0) + (-z.abs()).exp().ln_1p()))
                }
                None => (a, if a > 0.0 { GONE } else { 0.0 }),
            };
            (self.logits[of_layer.start + index], self.bias[of_layer.start + index]) = (logit, bias);
        }
        let Gates { accumulation: Some(accumulation), outputs, places, .. } = self else { return };
        let weights = accumulation.weights(layer).iter_mut().enumerate();
        weights.for_each(|(index, weight)| {
            *weight = sigmoid(SCALE * outputs[places.weighed_at(index)]).max(f32::MIN_POSITIVE)
        });
    }

    /// How much of a token goes, by its logit.
    fn alpha(mode: Mode, logit: f32) -> f32 {
        match mode {
            Mode::Relaxed { .. } => sigmoid(logit),
            _ => f32::from(u8::from(logit > 0.0)),
        }
    }

    /// Accumulates a layer's tokens that were decided on, keys and values `[B, Hkv, L, D]`, where that is what becomes of them.
    pub(super) fn accumulate(&mut self, layer: usize, cpu: &Cpu, heads: [&mut Tensor; 2]) {
        if self.is_dense() {
            return;
        }
        let (of_layer, mode) = (self.layer(layer), self.mode);
        let Gates { accumulation: Some(accumulation), logits, .. } = self else { return };
        let logits = &logits[of_layer];
        accumulation.forward(layer, cpu, |index| Self::alpha(mode, logits[index]), heads);
    }

    /// The gradient of [`Gates::accumulate`]: `gradients` by its results become those by what it was given.
    pub(super) fn accumulate_backward(
        &mut self,
        layer: usize,
        cpu: &Cpu,
        heads: [&Tensor; 2],
        gradients: [&mut Tensor; 2],
    ) {
        let (of_layer, mode) = (self.layer(layer), self.mode);
        let Gates { accumulation: Some(accumulation), logits, .. } = self else { return };
        let logits = &logits[of_layer];
        accumulation.backward(layer, cpu, |index| Self::alpha(mode, logits[index]), heads, gradients);
    }

    /// Whether the forward pass is that of the dense model.
    fn is_dense(&self) -> bool {
        self.mode == Mode::Dense
    }

    /// The biases of a layer's keys; `None` for the dense model.
    pub(super) fn bias(&self, layer: usize) -> Option<KeyBias<'_>> {
        (!self.is_dense()).then(|| KeyBias { values: &self.bias[self.layer(layer)], window: self.reach() })
    }

    /// Fraction of the tokens behind a window that the last forward pass evicted, over all layers and heads.
    pub(super) fn evicted(&self) -> f64 {
        let mature = |(index, _): &(usize, &f32)| self.places.is_mature(*index);
        let gone = self.logits.iter().enumerate().filter(mature).filter(|(_, logit)| **logit > 0.0).count();
        gone as f64 / self.mature() as f64
    }

    /// Mean of `alpha` where [`Gates::evicted`] counts decisions as taken.
    #[cfg(test)]
    pub(super) fn relaxed(&self) -> f64 {
        let mature = |(index, _): &(usize, &f32)| self.places.is_mature(*index);
        let alphas = self.logits.iter().enumerate().filter(mature).map(|(_, z)| 1.0 / (1.0 + f64::from(-z).exp()));
        alphas.sum::<f64>() / self.mature() as f64
    }

    /// Decisions that count.
    fn mature(&self) -> usize {
        self.logits.len() / self.places.len * self.places.len.saturating_sub(self.reach())
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
        let of_layer = self.layer(layer);
        // What decides on nothing, the first token of a sequence whose tokens the next ones decide on, gets no gradient.
        self.outputs.fill(0.0);
        for (index, dbias) in dbias.iter().enumerate() {
            let weighed = self.accumulation.as_ref().map(|sums| (sums.by_alpha[index], sums.by_importance[index]));
            if let Some((_, by_importance)) = weighed {
                let at = self.places.weighed_at(index);
                self.outputs[at] = SCALE * by_importance;
            }
            let Some(at) = self.places.decided_at(index) else { continue };
            let alpha = Self::alpha(self.mode, self.logits[of_layer.start + index]);
            let pressure = if self.places.is_mature(index) { self.pressure } else { 0.0 };
            let by_alpha = weighed.map_or(0.0, |(by_alpha, _)| by_alpha);
            let dz = alpha * ((1.0 - alpha) * (by_alpha - pressure) - dbias);
            self.outputs[at] = SCALE / TAU * dz;
        }
        let Gates { functions, weights, gradient, outputs, .. } = self;
        functions.backward(layer, cpu, (weights, gradient), (n, outputs), (dn, first), scratch);
    }

    /// Weights `[layers, Hkv, hidden or inner]` and biases `[layers, Hkv]` of each function as they are used, with scale and offset: what
    /// a policy file holds, and the inner layers' beside them.
    pub fn folded(&self) -> Vec<[Vec<f32>; 2]> {
        let (functions, layers) = (self.places.fate.functions(), self.functions.sizes().layers());
        let [weights, biases, ..] = self.functions.sizes().ranges().map(|range| &self.weights[range]);
        let scaled = |function: usize, values: &[f32], offset: f32| -> Vec<f32> {
            let each = values.len() / (layers * functions);
            let of_function = values.chunks_exact(each).skip(function).step_by(functions);
            of_function.flatten().map(|value| SCALE * value - offset).collect()
        };
        let offset = |function| if function == 0 { OFFSET } else { 0.0 };
        let folded = |function| [scaled(function, weights, 0.0), scaled(function, biases, offset(function))];
        (0..functions).map(folded).collect()
    }

    /// Weights `[layers, inner, hidden]` and biases `[layers, inner]` of the inner layers; empty where functions are linear.
    pub fn inner(&self) -> [&[f32]; 2] {
        let [_, _, weights, biases] = self.functions.sizes().ranges().map(|range| &self.weights[range]);
        [weights, biases]
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

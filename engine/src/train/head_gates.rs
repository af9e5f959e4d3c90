//! Gates of heads that learn which of them retrieve from far away: DuoAttention (arXiv 2410.10819) on a frozen model.
//!
//! Each KV head of each layer has one number `alpha` of 0 to 1, at first 1. The output of its query heads is
//! `alpha full + (1 - alpha) streaming`: attention over all tokens, and over the first `sink` and the latest `recent` ones. The
//! loss asks the last norm's output to stay what it is in the dense model, where answers are read out of the context, and
//! `alpha` to be small: a head whose `alpha` falls does without what lies between. Afterwards the heads with the lowest `alpha`
//! keep the near tokens alone (`crate::policy`'s `duo`).
//!
//! `streaming` is attention with a [`KeyBias`] that leaves nothing of tokens behind the window but the first, so that both are
//! one tiled kernel. Gradients: `d loss / d alpha` is the sum of `dO . (full - streaming)` over a KV head's queries, and `dO`
//! goes back through both with its part.

use super::activations::Extents;
use super::gates::GONE;
use super::heads;
use super::parameters::Parameter;
use crate::attention::{KeyBias, Outputs};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::Config;
use crate::model::parameters::Role;
use crate::policy::allocation::Near;
use crate::tensor::Tensor;
use rayon::prelude::*;

/// The gates of a model's heads, and what attention gives with them in a batch.
pub struct HeadGates {
    /// `alpha`, `[layers, Hkv]`.
    pub alpha: Buffer<f32>,
    /// Its gradient.
    pub gradient: Buffer<f32>,
    /// Where it lies, as optimizers ask.
    pub parameters: [Parameter; 1],
    near: Near,
    /// Dims `[Hkv, G, D]` of an output's row.
    dims: [usize; 3],
    /// Whether outputs are mixed; otherwise the model is the dense one.
    mixes: bool,
    /// Biases of the keys of streaming heads, `[B, Hkv, L]`.
    bias: Buffer<f32>,
    /// What streaming attention gave, layer after layer.
    streaming: Vec<Outputs>,
    d_o: Buffer<f32>,
    dqkv: Buffer<f32>,
    /// The dense model's last norm's output, `[rows, hidden]`.
    pub(super) dense: Buffer<f32>,
}

/// A layer's streaming attention at work.
pub(super) struct Streaming<'a> {
    /// Biases of the keys, which leave nothing of those that are far.
    pub bias: KeyBias<'a>,
    /// What it gave.
    pub outputs: &'a mut Outputs,
    /// Its part of the gradient by attention's output, by tokens, `[rows, q_width]`.
    pub d_o: &'a [f32],
    /// What that gives by q, k and v, by tokens, `[rows, qkv_width]`.
    pub dqkv: &'a mut [f32],
}

impl HeadGates {
    /// Numbers that are trained.
    pub fn count(config: &Config) -> usize {
        config.layers * config.kv_heads
    }

    /// Gates with which every head reads everything, for batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, extents: &Extents<'_>, near: Near) -> Result<Self, ArenaError> {
        let (config, rows, count) = (extents.config(), extents.rows(), Self::count(extents.config()));
        let floats = |width: usize| arena.alloc::<f32>(Label::Activations, rows * width);
        let mut gates = HeadGates {
            alpha: arena.alloc(Label::Weights, count)?,
            gradient: arena.alloc(Label::Gradients, count)?,
            parameters: [Parameter {
                name: "duo.alpha".into(),
                shape: vec![config.layers, config.kv_heads],
                role: Role::Bias,
                range: 0..count,
                of_kind: 0..count,
                gradient: Some(0..count),
            }],
            near,
            dims: [config.kv_heads, config.q_heads / config.kv_heads, config.head_dim],
            mixes: false,
            bias: floats(config.kv_heads)?,
            streaming: (0..config.layers)
                .map(|_| Outputs::allocate(arena, &extents.attention(), extents.dtype()))
                .collect::<Result<_, _>>()?,
            d_o: floats(config.q_width())?,
            dqkv: floats(config.qkv_width())?,
            dense: floats(config.hidden)?,
        };
        gates.alpha.fill(1.0);
        for list in gates.bias.chunks_exact_mut(extents.len) {
            list.iter_mut().skip(near.sink).for_each(|bias| *bias = GONE);
        }
        Ok(gates)
    }

    /// Bytes that [`HeadGates::new`] takes.
    pub fn bytes(extents: &Extents<'_>) -> LabelBytes {
        let (config, rows) = (extents.config(), extents.rows() as u64);
        let (count, layers) = (4 * Self::count(config) as u64, config.layers as u64);
        let of_token = config.kv_heads + config.q_width() + config.qkv_width() + config.hidden;
        let outputs = Outputs::bytes(&extents.attention(), extents.dtype());
        LabelBytes::from([
            (Label::Weights, count),
            (Label::Gradients, count),
            (Label::Activations, 4 * rows * of_token as u64 + layers * outputs),
        ])
    }

    /// Begins a forward pass: with gates, or of the dense model.
    pub(super) fn begin(&mut self, mixes: bool) {
        self.mixes = mixes;
    }

    /// Whether outputs are mixed.
    pub(super) fn mixes(&self) -> bool {
        self.mixes
    }

    /// Streaming attention of a layer.
    pub(super) fn streaming(&mut self, layer: usize) -> Streaming<'_> {
        let bias = KeyBias { values: &self.bias, window: self.near.recent };
        Streaming { bias, outputs: &mut self.streaming[layer], d_o: &self.d_o, dqkv: &mut self.dqkv }
    }

    /// `alpha` of a layer, `[Hkv]`.
    fn layer(&self, layer: usize) -> std::ops::Range<usize> {
        let [heads, ..] = self.dims;
        layer * heads..(layer + 1) * heads
    }

    /// Mixes what a layer's streaming attention gave into `rows`, the output of attention over all tokens by tokens,
    /// `[rows, Hq D]`.
    pub(super) fn mix(&self, layer: usize, cpu: &Cpu, len: usize, rows: &mut [f32]) {
        let (alpha, [_, group, _]) = (&self.alpha[self.layer(layer)], self.dims);
        heads::each_row(cpu, &self.streaming[layer].o, len, rows, |head, near, row| {
            let alpha = alpha[head / group];
            row.iter_mut().zip(near).for_each(|(to, near)| *to = alpha * *to + (1.0 - alpha) * near);
        });
    }

    /// Adds a layer's part to the gradient, and divides the gradient by attention's output, `[rows, Hq D]`, into the part of
    /// `full`, which stays where it is, and that of streaming attention, in `d_o`.
    pub(super) fn divide(&mut self, layer: usize, cpu: &Cpu, full: &Tensor, d_o: &mut [f32]) {
        let (of_layer, [kv_heads, group, dim]) = (self.layer(layer), self.dims);
        let [_, _, len, _] = full.dims();
        let (near, width) = (&self.streaming[layer].o, kv_heads * group * dim);
        let slope = |kv_head: usize| -> f64 {
            let [mut wide, mut narrow] = [vec![0.0; dim], vec![0.0; dim]];
            let mut sum = 0.0;
            for (row, d_o) in d_o.chunks_exact(width).enumerate() {
                for head in kv_head * group..(kv_head + 1) * group {
                    heads::row_of(full, (row / len, head, row % len), &mut wide);
                    heads::row_of(near, (row / len, head, row % len), &mut narrow);
                    let apart = wide.iter().zip(&narrow).map(|(wide, narrow)| wide - narrow);
                    sum +=
                        f64::from(d_o[head * dim..][..dim].iter().zip(apart).map(|(d, apart)| d * apart).sum::<f32>());
                }
            }
            sum
        };
        let slopes: Vec<f64> = cpu.install(|| (0..kv_heads).into_par_iter().map(slope).collect());
        self.gradient[of_layer.clone()].iter_mut().zip(slopes).for_each(|(gradient, slope)| *gradient += slope as f32);
        let alpha = &self.alpha[of_layer];
        let both = d_o.chunks_exact_mut(group * dim).zip(self.d_o.chunks_exact_mut(group * dim));
        for (index, (full, near)) in both.enumerate() {
            let alpha = alpha[index % kv_heads];
            for (full, near) in full.iter_mut().zip(near) {
                (*full, *near) = (alpha * *full, (1.0 - alpha) * *full);
            }
        }
    }

    /// Adds the gradient of `weight` times the mean of `alpha`.
    pub(super) fn press(&mut self, weight: f64) {
        let share = (weight / self.alpha.len() as f64) as f32;
        self.gradient.iter_mut().for_each(|gradient| *gradient += share);
    }
}

/// Mean square of what the numbers of `student` are off those of `teacher`, `[rows, hidden]`, over the rows `judged`; writes its gradient
/// to `dn`, if that is wanted.
pub(super) fn distance(
    [teacher, student]: [&[f32]; 2],
    hidden: usize,
    judged: &[usize],
    mut dn: Option<&mut [f32]>,
) -> f64 {
    let count = (judged.len() * hidden) as f64;
    if let Some(dn) = &mut dn {
        dn.fill(0.0);
    }
    let mut sum = 0.0;
    for row in judged.iter().map(|row| row * hidden..(row + 1) * hidden) {
        let apart = |at: usize| student[at] - teacher[at];
        sum += row.clone().map(|at| f64::from(apart(at)).powi(2)).sum::<f64>();
        if let Some(dn) = &mut dn {
            row.for_each(|at| dn[at] = (2.0 / count) as f32 * apart(at));
        }
    }
    sum / count
}

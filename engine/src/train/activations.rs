//! What a forward pass leaves for the backward pass, and what is computed again instead.
//!
//! Of each block there are three groups, kept for every block or held once for the block at work:
//!
//! | group | what | f32 elements of a token |
//! |---|---|---|
//! | input | the block's input `x` | `hidden` |
//! | cheap | attention's `o` and `lse`, `y` after attention | `Hq D + Hq + hidden` |
//! | inner | normed `x` and `y`, q, k, v, `o` by tokens, gate and up, their product | `2 hidden + 2 Hq D + 2 Hkv D + 3 ffn` |
//! |  | with norms of heads: q, k, v by tokens before them | `Hq D + 2 Hkv D` |
//! |  | with norms after attention and MLP: what they read | `2 hidden` |
//!
//! Without recomputation all are kept. `selective` keeps input and cheap: the inputs of attention and the inner part of
//! the MLP are computed again, but attention itself is not. `full` keeps only the input and computes the block again.
//! Where weights are bf16, so are q, k, v, attention's `o`, and what of their gradients attention reads and writes.
//!
//! What is computed again has the same bits, so that gradients do not depend on the mode. (Chen and others,
//! arXiv 1604.06174; Korthikanti and others, arXiv 2205.05198, whose selective mode computes attention's scores again,
//! which a tiled kernel does in any mode.)

use super::holder::Unit;
use super::norm;
use super::parameters::{Parameter, Parameters};
use super::{linear, loss, network};
use crate::attention::{Gradients, Kernel, Outputs, Shape, Tiled, Workspace, WorkspaceSize};
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::config::Norms;
use crate::model::{Config, params};
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

/// What the backward pass computes again (activation checkpointing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// The inputs of attention and the inner part of the MLP.
    Selective,
    /// All of a block.
    Full,
}

impl Recompute {
    /// Every mode, from the most memory to the least.
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

    /// The mode that computes least again of those that take at most so many bytes; if none does, the one that takes fewest.
    pub fn within(limit_bytes: u64, bytes: impl Fn(Recompute) -> u64) -> Recompute {
        Self::ALL.into_iter().find(|mode| bytes(*mode) <= limit_bytes).unwrap_or(Recompute::Full)
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        ["none", "selective", "full"][self as usize]
    }

    /// How many blocks' groups are held, input, cheap and inner, of a model of `layers`.
    fn held(self, layers: usize) -> [usize; 3] {
        match self {
            Recompute::None => [layers; 3],
            Recompute::Selective => [layers, layers, 1],
            Recompute::Full => [layers, 1, 1],
        }
    }
}

/// Extents of a step: model and batch.
#[derive(Debug, Clone, Copy)]
pub struct Extents<'a> {
    /// The model, and what of it is trained.
    pub parameters: &'a Parameters,
    /// Sequences of a batch.
    pub batch: usize,
    /// Tokens of each sequence.
    pub len: usize,
    /// Rows at the start of the batch that are what they are in the dense model: those of the first window of the only
    /// sequence, where gates evict behind it. A pass with gates reads of them only keys, values and the gates' own inputs.
    pub skipped: usize,
}

impl<'a> Extents<'a> {
    /// The model.
    pub fn config(&self) -> &'a Config {
        &self.parameters.config
    }

    /// Tokens of a batch.
    pub fn rows(&self) -> usize {
        self.batch * self.len
    }

    /// Floating-point operations of a step with `targets` target tokens: a product of a row with a matrix takes two for
    /// each element, as many again for the gradient by the row, and as many for that by the matrix where it is trained;
    /// attention's backward pass takes 2.5 times its forward pass. Blocks below all that is trained have no backward pass. What is
    /// computed again is not looked at, nor are adapters and gates.
    pub fn step_flop(&self, targets: usize) -> f64 {
        let (config, parameters) = (self.config(), self.parameters);
        let Config { hidden, layers, ffn, vocab, .. } = *config;
        let is_trained = |parameter: &&Parameter| parameter.gradient.is_some() && parameter.role.decays();
        let is_of_block = |parameter: &&Parameter| matches!(parameters.unit_of(parameter), Unit::Block(_));
        let trained = parameters.all.iter().filter(is_trained).filter(is_of_block);
        let trained: usize = trained.map(|parameter| parameter.range.len()).sum();
        // Where nothing of the model is trained, adapters or gates of every block are.
        let first = if parameters.trained_count() == 0 { 0 } else { parameters.first_trained };
        let block = hidden * (config.qkv_width() + config.q_width() + 3 * ffn);
        let blocks = 2 * self.rows() * ((layers + layers - first) * block + trained);
        let head = if parameters.output.trained.is_empty() { 4 } else { 6 } * targets * hidden * vocab;
        let of_layer = |layer| {
            let backward = if layer >= first { 2.5 } else { 0.0 };
            (1.0 + backward) * self.attention().flops(&params(config, layer)) as f64
        };
        (blocks + head) as f64 + (0..layers).map(of_layer).sum::<f64>()
    }

    /// Type of what attention reads and writes.
    pub(super) fn dtype(&self) -> DType {
        self.parameters.dtype
    }

    /// Elements of attention's output's gradient by tokens, where it is rounded for attention.
    pub(super) fn rounded(&self) -> usize {
        if self.dtype() == DType::F32 { 0 } else { self.rows() * self.config().q_width() }
    }

    /// The attention problem of a block.
    pub(super) fn attention(&self) -> Shape {
        let Config { q_heads, kv_heads, head_dim, .. } = *self.config();
        Shape { batch: self.batch, q_heads, kv_heads, q_len: self.len, kv_len: self.len, head_dim }
    }

    /// The same with gates: queries of the rows that are not skipped.
    pub(super) fn gated(&self) -> Shape {
        Shape { q_len: self.len - self.skipped, ..self.attention() }
    }

    fn workspaces(&self, threads: usize) -> [WorkspaceSize; 2] {
        // A window or a soft-cap changes nothing in what the kernel needs.
        let params = params(self.config(), 0);
        // Fewer queries may be cut into larger tiles.
        let [whole, gated] =
            [self.attention(), self.gated()].map(|shape| Tiled::AUTO.workspace(&shape, &params, self.dtype(), threads));
        let forward =
            WorkspaceSize { scores: whole.scores.max(gated.scores), scratch: whole.scratch.max(gated.scratch) };
        let backward = Tiled::AUTO.backward_workspace(&self.gated(), &params, self.dtype(), threads);
        [forward, backward.expect("the tiled kernel has a backward pass")]
    }

    /// Bytes that training takes from the arena, for each label: exactly what [`network::Network`] and
    /// [`super::adamw::AdamW`] allocate.
    pub fn training_bytes(&self, recompute: Recompute, threads: usize) -> LabelBytes {
        let trained = 4 * self.parameters.trained_count() as u64;
        let workspaces: u64 = self.workspaces(threads).iter().map(WorkspaceSize::bytes).sum();
        let scratch = self.norm_scratch() + linear::scratch(threads) + loss::scratch(self);
        LabelBytes::from([
            (Label::Weights, self.parameters.bytes()),
            (Label::Gradients, trained),
            (Label::Optimizer, 2 * trained),
            (Label::Activations, self.activation_bytes(recompute)),
            (Label::Workspace, workspaces + 4 * scratch as u64),
        ])
    }

    /// Bytes of what is kept and computed between the input of a step and its gradients.
    fn activation_bytes(&self, recompute: Recompute) -> u64 {
        let (config, rows, shape, dtype) = (self.config(), self.rows(), self.attention(), self.dtype());
        let [inputs, cheap, inner] = recompute.held(config.layers);
        let cheap_bytes = 4 * (rows * config.hidden) as u64 + Outputs::bytes(&self.gated(), dtype);
        let inner_bytes = 4 * (rows * inner_widths(config).iter().sum::<usize>()) as u64
            + Tensor::bytes_of(dtype, shape.q_dims())
            + 2 * Tensor::bytes_of(dtype, shape.kv_dims());
        inputs as u64 * 4 * (rows * config.hidden) as u64
            + cheap as u64 * cheap_bytes
            + inner as u64 * inner_bytes
            + 4 * (rows * network::shared_width(config)) as u64
            + Gradients::bytes(&self.gated(), dtype)
            + (dtype.bytes() * self.rounded()) as u64
    }

    /// f32 elements of scratch of the sums over norms: those of heads fit where those of the stream do.
    pub(super) fn norm_scratch(&self) -> usize {
        norm::scratch(self.rows(), self.config().hidden.max(self.config().head_dim))
    }
}

/// f32 elements of a token in each buffer of the inner group, in the order of [`Inner`], without q, k and v.
fn inner_widths(config: &Config) -> [usize; 8] {
    let Config { hidden, ffn, .. } = *config;
    let unnormed = if config.qk_norm { config.qkv_width() } else { 0 };
    let after = if config.norms == Norms::BeforeAndAfter { hidden } else { 0 };
    [hidden, unnormed, config.q_width(), after, hidden, 2 * ffn, ffn, after]
}

/// A block's group of what is cheap to keep for what it saves.
pub(super) struct Cheap {
    pub attention: Outputs,
    /// The residual stream after attention, `[rows, hidden]`.
    pub y: Buffer<f32>,
}

/// A block's group of what is large and soon computed again.
pub(super) struct Inner {
    /// q, k, v after RoPE, `[B, H, L, D]`.
    pub qkv: [Tensor; 3],
    /// Normed `x`, `[rows, hidden]`.
    pub n1: Buffer<f32>,
    /// q, k, v by tokens before the norms of heads, `[rows, qkv_width]`; empty without these.
    pub unnormed: Buffer<f32>,
    /// Attention's output by tokens, `[rows, q_width]`.
    pub o: Buffer<f32>,
    /// The input of the norm after attention, `[rows, hidden]`; empty without one.
    pub attended: Buffer<f32>,
    /// Normed `y`, `[rows, hidden]`.
    pub n2: Buffer<f32>,
    /// Gate and up, `[rows, 2 * ffn]`; in the backward pass their gradients.
    pub gate_up: Buffer<f32>,
    /// `activation(gate) * up`, `[rows, ffn]`.
    pub p: Buffer<f32>,
    /// The input of the norm after the MLP, `[rows, hidden]`; empty without one.
    pub projected: Buffer<f32>,
}

/// All groups of all blocks.
pub(super) struct Saved {
    inputs: Vec<Buffer<f32>>,
    cheap: Vec<Cheap>,
    inner: Vec<Inner>,
}

impl Saved {
    pub fn allocate(arena: &Arena, extents: &Extents<'_>, recompute: Recompute) -> Result<Self, ArenaError> {
        let (config, rows, shape) = (extents.config(), extents.rows(), extents.attention());
        let floats = |width: usize| arena.alloc::<f32>(Label::Activations, rows * width);
        let tensor = |dims| Tensor::zeros(arena, Label::Activations, extents.dtype(), dims);
        let [inputs, cheap, inner] = recompute.held(config.layers);
        let make_cheap = |_| {
            let attention = Outputs::allocate(arena, &extents.gated(), extents.dtype())?;
            Ok(Cheap { attention, y: floats(config.hidden)? })
        };
        let make_inner = |_| {
            let [n1, unnormed, o, attended, n2, gate_up, p, projected] = inner_widths(config);
            Ok(Inner {
                qkv: [tensor(shape.q_dims())?, tensor(shape.kv_dims())?, tensor(shape.kv_dims())?],
                n1: floats(n1)?,
                unnormed: floats(unnormed)?,
                o: floats(o)?,
                attended: floats(attended)?,
                n2: floats(n2)?,
                gate_up: floats(gate_up)?,
                p: floats(p)?,
                projected: floats(projected)?,
            })
        };
        Ok(Saved {
            inputs: (0..inputs).map(|_| floats(config.hidden)).collect::<Result<_, _>>()?,
            cheap: (0..cheap).map(make_cheap).collect::<Result<_, ArenaError>>()?,
            inner: (0..inner).map(make_inner).collect::<Result<_, ArenaError>>()?,
        })
    }

    /// The groups of a block; those that are held once are whatever block wrote last.
    pub fn block(&mut self, layer: usize) -> (&mut Buffer<f32>, &mut Cheap, &mut Inner) {
        let (cheap, inner) = (layer.min(self.cheap.len() - 1), layer.min(self.inner.len() - 1));
        (&mut self.inputs[layer], &mut self.cheap[cheap], &mut self.inner[inner])
    }
}

/// Scratch memory of attention and of sums, for the block at work.
pub(super) struct Scratch {
    pub forward: Workspace,
    pub backward: Workspace,
    pub norm: Buffer<f32>,
    /// For products with weights.
    pub products: Buffer<f32>,
}

impl Scratch {
    pub fn allocate(arena: &Arena, extents: &Extents<'_>, threads: usize) -> Result<Self, ArenaError> {
        let [forward, backward] = extents.workspaces(threads);
        Ok(Scratch {
            forward: forward.allocate(arena)?,
            backward: backward.allocate(arena)?,
            norm: arena.alloc(Label::Workspace, extents.norm_scratch())?,
            products: arena.alloc(Label::Workspace, linear::scratch(threads))?,
        })
    }
}

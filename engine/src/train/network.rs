//! The whole decoder: embedding, blocks, last norm, loss, and the way back.

use super::activations::{Extents, Recompute, Saved, Scratch};
use super::block::{Block, Shared};
use super::gates::{Gates, Mode};
use super::head_gates::{self, HeadGates};
use super::heads::Turns;
use super::holder::{Holder, Unit, Whole};
use super::lora::Adapters;
use super::loss::{Head, Loss, Target};
use super::norm::{self, Columns};
use super::readout::Readout;
use super::tensor_parallel;
use super::weights::Weights;
use crate::attention::{AttentionError, Gradients, Outputs};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::Config;
use crate::ranks::{Comm, RankError};
use rayon::prelude::*;

/// Tokens of the vocabulary whose gradients one thread adds up.
const TOKENS_OF_A_PIECE: usize = 64;

/// f32 elements of a token in the buffers that blocks share, without the gradients by q, k and v: the residual stream
/// and its gradient, the last norm's output, and those of [`Shared`].
pub(super) fn shared_width(config: &Config) -> usize {
    3 * config.hidden + config.qkv_width() + config.ffn + config.hidden + config.q_width()
}

/// What a step reads: `B` sequences of `L` tokens, and which of the next tokens are judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// `[B, L]`.
    pub tokens: Vec<u32>,
    /// In the order of their rows.
    pub targets: Vec<Target>,
}

impl Batch {
    /// Of sequences of `len` tokens those that one of `parts` equal parts has.
    pub fn part(&self, part: usize, parts: usize, len: usize) -> Batch {
        let rows = self.tokens.len() / len / parts * len;
        let within = part * rows..(part + 1) * rows;
        let targets = self.targets.iter().filter(|target| within.contains(&target.row));
        let targets = targets.map(|target| Target { row: target.row - within.start, ..*target }).collect();
        Batch { tokens: self.tokens[within].to_vec(), targets }
    }
}

/// How a model with gates compares with the dense one.
#[derive(Debug, Clone, Copy)]
pub struct Distilled {
    /// Kullback-Leibler divergence of the dense model's next tokens from those of the model with gates, nats; mean over
    /// the queries behind the first window and its own token.
    pub kl: f64,
    /// Fraction of the tokens behind a window that were evicted.
    pub evicted: f64,
    /// What the term that asks for eviction adds to the loss.
    pub pressure: f64,
}

/// Buffers for steps of one shape.
pub struct Network<'a> {
    extents: Extents<'a>,
    recompute: Recompute,
    cpu: &'a Cpu,
    turns: Turns,
    /// The ranks that share each block.
    tensor: Option<&'a Comm>,
    saved: Saved,
    shared: Shared,
    loss: Loss,
    /// The residual stream after the last block, the last norm's output, and the stream's gradient.
    x: Buffer<f32>,
    n: Buffer<f32>,
    dx: Buffer<f32>,
}

impl<'a> Network<'a> {
    /// Takes everything but weights and gradients from the arena: [`Extents::training_bytes`].
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(
        arena: &Arena,
        cpu: &'a Cpu,
        extents: Extents<'a>,
        recompute: Recompute,
    ) -> Result<Self, AttentionError> {
        let (config, rows, shape) = (extents.config(), extents.rows(), extents.attention());
        shape.check()?;
        let floats = |width: usize| arena.alloc::<f32>(Label::Activations, rows * width);
        let shared = Shared {
            qkv: floats(config.qkv_width())?,
            dp: floats(config.ffn)?,
            dn: floats(config.hidden)?,
            d_o: floats(config.q_width())?,
            rounded: arena.alloc(Label::Activations, extents.rounded())?,
            dqkv: Gradients::allocate(arena, &extents.gated(), extents.dtype())?,
            scratch: Scratch::allocate(arena, &extents, cpu.threads())?,
            sums: arena.alloc(Label::Workspace, 0)?,
            dense: None,
            gates: None,
            head_gates: None,
            adapters: None,
            readout: None,
            sensed: None,
        };
        Ok(Network {
            recompute,
            cpu,
            turns: Turns::new(config, extents.len),
            tensor: None,
            saved: Saved::allocate(arena, &extents, recompute)?,
            shared,
            loss: Loss::allocate(arena, &extents)?,
            x: floats(config.hidden)?,
            n: floats(config.hidden)?,
            dx: floats(config.hidden)?,
            extents,
        })
    }

    /// The same where blocks are shared by the ranks of `tensor`, whose parts these parameters are; takes scratch for sums over them
    /// besides.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn shared_by(mut self, arena: &Arena, tensor: &'a Comm) -> Result<Self, ArenaError> {
        self.shared.sums = arena.alloc(Label::Workspace, tensor_parallel::sums(&self.extents, tensor.size()))?;
        self.tensor = Some(tensor);
        Ok(self)
    }

    /// The extents of a step.
    pub fn extents(&self) -> &Extents<'a> {
        &self.extents
    }

    /// The loss of a batch, and its gradient, which is added to `gradients`.
    ///
    /// # Errors
    /// When attention cannot be computed.
    ///
    /// # Panics
    /// When the batch does not have the extents of this network, or holds a token outside the vocabulary.
    pub fn step(&mut self, weights: &[f32], batch: &Batch, gradients: &mut [f32]) -> Result<f64, RankError> {
        self.step_of(&mut Whole { weights: Weights::F32(weights), gradients }, batch)
    }

    /// The same of parameters that `holder` holds.
    ///
    /// # Errors
    /// When attention cannot be computed, or another rank ended.
    ///
    /// # Panics
    /// As [`Network::step`].
    pub fn step_of(&mut self, holder: &mut dyn Holder, batch: &Batch) -> Result<f64, RankError> {
        self.forward(holder, &batch.tokens, 0)?;
        let (config, parameters) = (self.extents.config(), self.extents.parameters);
        let unit = parameters.output_unit();
        let (weights, mut unit_gradients) = holder.both(unit)?;
        let gradient = parameters.output.gradient().map(|range| unit_gradients.of(&range));
        let output = weights.matrix(&parameters.output, config.hidden);
        let head = Head { weights: output, rounds: weights.rounds(), gradient, softcap: config.final_softcap };
        let Shared { dn, scratch, .. } = &mut self.shared;
        let (n, scratch) = (&*self.n, &mut *scratch.products);
        let loss = self.loss.run(self.cpu, (n, Some(dn)), &batch.targets, head, scratch, |_, _, _| ());
        if unit == Unit::Output {
            holder.complete(unit)?;
        }
        let beside = self.shared.adapters.is_some() || self.shared.readout.is_some();
        let first = if beside { 0 } else { parameters.first_trained };
        self.backward(holder, &batch.tokens, first)?;
        Ok(loss)
    }

    /// The same with gates that decide on evicted tokens, for [`Network::distil`].
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn with_gates(mut self, arena: &Arena, gates: Gates) -> Result<Self, ArenaError> {
        let (shape, dtype) = (self.extents.attention(), self.extents.dtype());
        self.shared.dqkv = self.shared.dqkv.with_bias(arena, &shape)?;
        self.shared.dense = Some(Outputs::allocate(arena, &shape, dtype)?);
        self.shared.gates = Some(gates);
        Ok(self)
    }

    /// The gates.
    ///
    /// # Panics
    /// When there are none.
    pub fn gates(&mut self) -> &mut Gates {
        self.shared.gates.as_mut().expect("a network that distils has gates")
    }

    /// What is trained beside a model that is distilled: gates, and adapters where there are some.
    ///
    /// # Panics
    /// When there are no gates.
    pub(super) fn gates_and_adapters(&mut self) -> (&mut Gates, Option<&mut Adapters>) {
        let Shared { gates, adapters, .. } = &mut self.shared;
        (gates.as_mut().expect("a network that distils has gates"), adapters.as_mut())
    }

    /// Begins a pass that decides on tokens in a `mode`; the dense model has no adapters.
    fn begin(&mut self, mode: Mode) {
        let (gates, adapters) = self.gates_and_adapters();
        gates.begin(mode);
        if let Some(adapters) = adapters {
            adapters.at_work = mode != Mode::Dense;
        }
    }

    /// The same with gates of heads, for [`Network::identify`].
    pub fn with_head_gates(mut self, gates: HeadGates) -> Self {
        self.shared.head_gates = Some(gates);
        self
    }

    /// The gates of heads.
    ///
    /// # Panics
    /// When there are none.
    pub fn head_gates(&mut self) -> &mut HeadGates {
        self.shared.head_gates.as_mut().expect("a network that identifies heads has gates of them")
    }

    /// The same with adapters beside matrices that are frozen.
    pub fn with_adapters(mut self, adapters: Adapters) -> Self {
        self.shared.adapters = Some(adapters);
        self
    }

    /// The adapters.
    ///
    /// # Panics
    /// When there are none.
    pub fn adapters(&mut self) -> &mut Adapters {
        self.shared.adapters.as_mut().expect("a network that trains adapters has them")
    }

    /// The same with a prefix that is read out of a vector of each sequence.
    pub fn with_readout(mut self, readout: Readout) -> Self {
        self.shared.readout = Some(readout);
        self
    }

    /// The read-out.
    ///
    /// # Panics
    /// When there is none.
    pub fn readout(&mut self) -> &mut Readout {
        self.shared.readout.as_mut().expect("a network that trains a read-out has one")
    }

    /// The same with room for norms of gradients, for [`Network::sensitivity`].
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn sensing(mut self, arena: &Arena) -> Result<Self, ArenaError> {
        let elements = self.extents.config().layers * self.extents.rows();
        self.shared.sensed = Some(arena.alloc(Label::Activations, elements)?);
        self.shared.dense = Some(Outputs::allocate(arena, &self.extents.attention(), self.extents.dtype())?);
        Ok(self)
    }

    /// Norms of the gradient by what attention adds to the residual stream, `[layers, rows]`, of the sum of squares of the last block's
    /// output over the `judged` rows behind those that are skipped; of these nothing is asked, and no gradient flows into them. The first
    /// `known` rows, none or those, are what the last pass left.
    ///
    /// # Errors
    /// When attention cannot be computed.
    ///
    /// # Panics
    /// When the network is not [`Network::sensing`], and as [`Network::step`].
    pub fn sensitivity(
        &mut self,
        weights: Weights<'_>,
        tokens: &[u32],
        judged: usize,
        known: usize,
    ) -> Result<&[f32], RankError> {
        let holder = &mut Whole { weights, gradients: &mut [] };
        self.forward(holder, tokens, known)?;
        let hidden = self.extents.config().hidden;
        let rows = self.extents.skipped * hidden..(self.extents.skipped + judged) * hidden;
        self.dx.fill(0.0);
        self.dx[rows.clone()].iter_mut().zip(&self.x[rows]).for_each(|(dx, x)| *dx = 2.0 * x);
        self.blocks_backward(holder, 0)?;
        Ok(self.shared.sensed.as_ref().expect("a network that senses has room for it"))
    }

    /// Compares the model whose gates decide in a `mode` with the dense model on `tokens` `[B, L]`. With a `target`, the
    /// fraction of tokens to be evicted, and the weight of the term that asks for it, adds to the gates' gradient. Adapters are
    /// those of the model with gates, and get their gradient too.
    ///
    /// # Errors
    /// When attention cannot be computed.
    ///
    /// # Panics
    /// When there are no gates, or there are adapters, which change every row, and rows are skipped; and as [`Network::step`].
    pub fn distil(
        &mut self,
        weights: Weights<'_>,
        tokens: &[u32],
        mode: Mode,
        target: Option<(f64, f64)>,
    ) -> Result<Distilled, RankError> {
        let holder = &mut Whole { weights, gradients: &mut [] };
        assert!(self.shared.adapters.is_none() || self.extents.skipped == 0, "adapters change every row");
        self.begin(Mode::Dense);
        self.forward(holder, tokens, 0)?;
        let Network { shared, n, .. } = self;
        shared.gates.as_mut().expect("begin() found them").dense.copy_from_slice(n);
        self.begin(mode);
        self.forward(holder, tokens, self.extents.skipped)?;
        let (config, parameters) = (self.extents.config(), self.extents.parameters);
        let output = weights.matrix(&parameters.output, config.hidden);
        let head = Head { weights: output, rounds: weights.rounds(), gradient: None, softcap: config.final_softcap };
        let Shared { gates, dn, scratch, .. } = &mut self.shared;
        let gates = gates.as_mut().expect("begin() found them");
        let judged = [self.extents.len, gates.reach()];
        let (models, dn) = ([&*gates.dense, &*self.n], target.is_some().then_some(&mut **dn));
        let kl = self.loss.distil(self.cpu, models, judged, head, dn, &mut scratch.products);
        let evicted = gates.evicted();
        let pressure = target.map_or(0.0, |(target, weight)| gates.press(target, weight));
        if target.is_some() {
            self.backward(holder, tokens, 0)?;
        }
        Ok(Distilled { kl, evicted, pressure })
    }

    /// Mean square of what the last norm's output with gates of heads is off the dense model's, over the rows of the batch's targets.
    /// With a `pressure` on the mean of the gates, adds the gradient of both to the gates'.
    ///
    /// # Errors
    /// When attention cannot be computed.
    ///
    /// # Panics
    /// When there are no gates of heads, and as [`Network::step`].
    pub fn identify(&mut self, weights: Weights<'_>, batch: &Batch, pressure: Option<f64>) -> Result<f64, RankError> {
        let holder = &mut Whole { weights, gradients: &mut [] };
        self.head_gates().begin(false);
        self.forward(holder, &batch.tokens, 0)?;
        let Network { shared, n, .. } = self;
        shared.head_gates.as_mut().expect("head_gates() found them").dense.copy_from_slice(n);
        self.head_gates().begin(true);
        self.forward(holder, &batch.tokens, 0)?;
        let Shared { head_gates, dn, .. } = &mut self.shared;
        let gates = head_gates.as_mut().expect("head_gates() found them");
        let judged: Vec<usize> = batch.targets.iter().map(|target| target.row).collect();
        let dn = pressure.is_some().then_some(&mut **dn);
        let hidden = self.extents.config().hidden;
        let distance = head_gates::distance([&gates.dense, &self.n], hidden, &judged, dn);
        if let Some(pressure) = pressure {
            gates.press(pressure);
            self.backward(holder, &batch.tokens, 0)?;
        }
        Ok(distance)
    }

    /// From the gradient by the last norm's output, in the shared `dn`, to that of every parameter, down to block `first`.
    fn backward(&mut self, holder: &mut dyn Holder, tokens: &[u32], first: usize) -> Result<(), RankError> {
        let (config, parameters) = (self.extents.config(), self.extents.parameters);
        let dn = &mut self.shared.dn;
        let (weights, mut unit_gradients) = holder.both(Unit::Norm)?;
        let (norm, gain) = (config.norm(weights.vector(&parameters.norm)), &parameters.norm);
        let columns = Columns { range: 0..config.hidden, stride: config.hidden };
        let scratch = &mut self.shared.scratch.norm;
        let live = self.extents.skipped * config.hidden..;
        norm::backward(
            self.cpu,
            norm,
            &self.x[live.clone()],
            &mut dn[live],
            &columns,
            (gain, &mut unit_gradients),
            scratch,
        );
        holder.complete(Unit::Norm)?;
        self.dx.copy_from_slice(dn);
        self.blocks_backward(holder, first)?;
        if let Some(range) = parameters.embedding.gradient() {
            self.embedding_gradient(tokens, holder.unit_gradients(Unit::Embedding).of(&range));
            holder.complete(Unit::Embedding)?;
        }
        if let Some(readout) = &mut self.shared.readout {
            readout.finish(self.cpu);
        }
        Ok(())
    }

    /// Takes the residual stream's gradient down to the input of block `first`.
    fn blocks_backward(&mut self, holder: &mut dyn Holder, first: usize) -> Result<(), RankError> {
        let skipped = self.extents.skipped;
        for layer in (first..self.extents.config().layers).rev() {
            let Network { extents, recompute, cpu, turns, tensor, saved, shared, dx, .. } = self;
            let unit = Unit::Block(layer);
            let (weights, mut unit_gradients) = holder.both(unit)?;
            let recompute = *recompute;
            let block = Block { extents, layer, cpu, turns, weights, recompute, first: skipped, tensor: *tensor };
            let (x, cheap, inner) = saved.block(layer);
            block.restore(x, cheap, inner, shared)?;
            block.backward(x, cheap, inner, shared, &mut unit_gradients, dx)?;
            holder.complete(unit)?;
        }
        Ok(())
    }

    /// The loss of a batch; tells `judge` the likeliest token at each target and the target's own negative log-likelihood
    /// in nats, in their order.
    ///
    /// # Errors
    /// When attention cannot be computed.
    ///
    /// # Panics
    /// As [`Network::step`].
    pub fn judge(
        &mut self,
        weights: &[f32],
        batch: &Batch,
        judge: impl FnMut(&Target, u32, f32),
    ) -> Result<f64, RankError> {
        self.judge_of(&mut Whole { weights: Weights::F32(weights), gradients: &mut [] }, batch, judge)
    }

    /// The same of parameters that `holder` holds.
    ///
    /// # Errors
    /// As [`Network::step_of`].
    ///
    /// # Panics
    /// As [`Network::step`].
    pub fn judge_of(
        &mut self,
        holder: &mut dyn Holder,
        batch: &Batch,
        judge: impl FnMut(&Target, u32, f32),
    ) -> Result<f64, RankError> {
        self.forward(holder, &batch.tokens, 0)?;
        let (config, parameters) = (self.extents.config(), self.extents.parameters);
        let weights = holder.weights(parameters.output_unit())?;
        let output = weights.matrix(&parameters.output, config.hidden);
        let head = Head { weights: output, rounds: weights.rounds(), gradient: None, softcap: config.final_softcap };
        let scratch = &mut *self.shared.scratch.products;
        Ok(self.loss.run(self.cpu, (&self.n, None), &batch.targets, head, scratch, judge))
    }

    /// Rows before the `first` are those that the last forward pass left, which was of the same tokens.
    fn forward(&mut self, holder: &mut dyn Holder, tokens: &[u32], first: usize) -> Result<(), RankError> {
        let (config, parameters) = (self.extents.config(), self.extents.parameters);
        assert_eq!(tokens.len(), self.extents.rows(), "a batch has the extents of its network");
        if let Some(readout) = &mut self.shared.readout {
            readout.begin(self.cpu);
        }
        let hidden = config.hidden;
        let embedding = holder.weights(Unit::Embedding)?.matrix(&parameters.embedding, hidden);
        for (&token, x) in tokens.iter().zip(self.x.chunks_exact_mut(hidden)) {
            embedding.skip(token as usize).first(1).widen(x);
            x.iter_mut().for_each(|x| *x *= config.embedding_scale);
        }
        for layer in 0..config.layers {
            let Network { extents, recompute, cpu, turns, tensor, saved, shared, x: stream, .. } = self;
            let weights = holder.weights(Unit::Block(layer))?;
            let recompute = *recompute;
            let block = Block { extents, layer, cpu, turns, weights, recompute, first, tensor: *tensor };
            let (x, cheap, inner) = saved.block(layer);
            x[first * hidden..].copy_from_slice(&stream[first * hidden..]);
            block.forward(x, cheap, inner, shared, stream)?;
        }
        let live = first * hidden..;
        let weights = holder.weights(Unit::Norm)?;
        config.norm(weights.vector(&parameters.norm)).rows(self.cpu, &self.x[live.clone()], &mut self.n[live], hidden);
        Ok(())
    }

    /// Adds each row's gradient to that of its token, in the order of the rows.
    fn embedding_gradient(&self, tokens: &[u32], gradient: &mut [f32]) {
        let Config { hidden, embedding_scale, .. } = *self.extents.config();
        let dx = &*self.dx;
        self.cpu.install(|| {
            gradient.par_chunks_mut(TOKENS_OF_A_PIECE * hidden).enumerate().for_each(|(piece, gradient)| {
                let first = piece * TOKENS_OF_A_PIECE;
                for (&token, dx) in tokens.iter().zip(dx.chunks_exact(hidden)) {
                    let at = (token as usize).wrapping_sub(first);
                    if let Some(to) = gradient.get_mut(at.wrapping_mul(hidden)..).filter(|_| at < TOKENS_OF_A_PIECE) {
                        to[..hidden].iter_mut().zip(dx).for_each(|(to, dx)| *to += embedding_scale * dx);
                    }
                }
            });
        });
    }
}

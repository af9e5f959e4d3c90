//! The whole decoder: embedding, blocks, last norm, loss, and the way back.

use super::activations::{Extents, Recompute, Saved, Scratch};
use super::block::{Block, Shared};
use super::heads::Turns;
use super::loss::{Head, Loss, Target};
use super::norm;
use super::parameters::{ModelSpec, Parameters};
use crate::attention::{AttentionError, Gradients};
use crate::device::Cpu;
use crate::memory::{Arena, Buffer, Label};
use crate::tensor::DType;
use rayon::prelude::*;

/// Tokens of the vocabulary whose gradients one thread adds up.
const TOKENS_OF_A_PIECE: usize = 64;

/// f32 elements of a token in the buffers that blocks share, without the gradients by q, k and v: the residual stream
/// and its gradient, the last norm's output, and those of [`Shared`]. One more is its inverse norm.
pub(super) fn shared_width(spec: &ModelSpec) -> usize {
    3 * spec.hidden + spec.qkv_width() + spec.ffn + spec.hidden + spec.q_width()
}

/// What a step reads: `B` sequences of `L` tokens, and which of the next tokens are judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// `[B, L]`.
    pub tokens: Vec<u32>,
    /// In the order of their rows.
    pub targets: Vec<Target>,
}

/// Buffers for steps of one shape.
pub struct Network<'a> {
    extents: Extents,
    recompute: Recompute,
    cpu: &'a Cpu,
    parameters: &'a Parameters,
    turns: Turns,
    saved: Saved,
    shared: Shared,
    loss: Loss,
    /// The residual stream after the last block, the last norm's inverse and output, and the stream's gradient.
    x: Buffer<f32>,
    inverse: Buffer<f32>,
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
        extents: Extents,
        parameters: &'a Parameters,
        recompute: Recompute,
    ) -> Result<Self, AttentionError> {
        let (spec, rows, shape) = (&extents.spec, extents.rows(), extents.attention());
        shape.check()?;
        let floats = |width: usize| arena.alloc::<f32>(Label::Activations, rows * width);
        let shared = Shared {
            qkv: floats(spec.qkv_width())?,
            dp: floats(spec.ffn)?,
            dn: floats(spec.hidden)?,
            d_o: floats(spec.q_width())?,
            dqkv: Gradients::allocate(arena, &shape, DType::F32)?,
            scratch: Scratch::allocate(arena, &extents, cpu.threads())?,
        };
        Ok(Network {
            recompute,
            cpu,
            parameters,
            turns: Turns::new(spec, extents.len),
            saved: Saved::allocate(arena, &extents, recompute)?,
            shared,
            loss: Loss::allocate(arena, &extents)?,
            x: floats(spec.hidden)?,
            inverse: floats(1)?,
            n: floats(spec.hidden)?,
            dx: floats(spec.hidden)?,
            extents,
        })
    }

    /// The extents of a step.
    pub fn extents(&self) -> &Extents {
        &self.extents
    }

    /// The loss of a batch, and its gradient, which is added to `gradients`.
    ///
    /// # Errors
    /// When attention cannot be computed.
    ///
    /// # Panics
    /// When the batch does not have the extents of this network, or holds a token outside the vocabulary.
    pub fn step(&mut self, weights: &[f32], batch: &Batch, gradients: &mut [f32]) -> Result<f64, AttentionError> {
        self.forward(weights, batch)?;
        let embedding = self.parameters.embedding.clone();
        let head = Head { weights: &weights[embedding.clone()], gradient: Some(&mut gradients[embedding.clone()]) };
        let loss = self.loss.run(self.cpu, &self.n, &batch.targets, head, &mut self.shared.dn, |_, _| ());
        self.dx.fill(0.0);
        let norm_range = self.parameters.norm.clone();
        let saved = norm::Saved { x: &self.x, gain: &weights[norm_range.clone()], inverse: &self.inverse };
        let scratch = &mut self.shared.scratch.norm;
        norm::backward(self.cpu, &saved, &mut self.shared.dn, &mut self.dx, &mut gradients[norm_range], scratch);
        for (layer, ranges) in self.parameters.blocks.iter().enumerate().rev() {
            let block = Block { extents: &self.extents, cpu: self.cpu, turns: &self.turns, weights, ranges };
            let (x, cheap, inner) = self.saved.block(layer);
            block.restore(self.recompute, x, cheap, inner, &mut self.shared)?;
            block.backward(x, cheap, inner, &mut self.shared, gradients, &mut self.dx)?;
        }
        self.embedding_gradient(&batch.tokens, &mut gradients[embedding]);
        Ok(loss)
    }

    /// The loss of a batch; tells `judge` the likeliest token at each target, in their order.
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
        judge: impl FnMut(&Target, u32),
    ) -> Result<f64, AttentionError> {
        self.forward(weights, batch)?;
        let head = Head { weights: &weights[self.parameters.embedding.clone()], gradient: None };
        Ok(self.loss.run(self.cpu, &self.n, &batch.targets, head, &mut [], judge))
    }

    fn forward(&mut self, weights: &[f32], batch: &Batch) -> Result<(), AttentionError> {
        let (hidden, parameters) = (self.extents.spec.hidden, self.parameters);
        assert_eq!(batch.tokens.len(), self.extents.rows(), "a batch has the extents of its network");
        let embedding = &weights[parameters.embedding.clone()];
        for (&token, x) in batch.tokens.iter().zip(self.x.chunks_exact_mut(hidden)) {
            x.copy_from_slice(&embedding[token as usize * hidden..][..hidden]);
        }
        for (layer, ranges) in parameters.blocks.iter().enumerate() {
            let block = Block { extents: &self.extents, cpu: self.cpu, turns: &self.turns, weights, ranges };
            let (x, cheap, inner) = self.saved.block(layer);
            x.copy_from_slice(&self.x);
            block.forward(x, cheap, inner, &mut self.shared, &mut self.x)?;
        }
        let gain = &weights[parameters.norm.clone()];
        norm::forward(self.cpu, &self.x, gain, self.extents.spec.norm_eps, &mut self.inverse, &mut self.n);
        Ok(())
    }

    /// Adds each row's gradient to that of its token, in the order of the rows.
    fn embedding_gradient(&self, tokens: &[u32], gradient: &mut [f32]) {
        let hidden = self.extents.spec.hidden;
        self.cpu.install(|| {
            gradient.par_chunks_mut(TOKENS_OF_A_PIECE * hidden).enumerate().for_each(|(piece, gradient)| {
                let first = piece * TOKENS_OF_A_PIECE;
                for (&token, dx) in tokens.iter().zip(self.dx.chunks_exact(hidden)) {
                    let at = (token as usize).wrapping_sub(first);
                    if let Some(to) = gradient.get_mut(at.wrapping_mul(hidden)..).filter(|_| at < TOKENS_OF_A_PIECE) {
                        to[..hidden].iter_mut().zip(dx).for_each(|(to, dx)| *to += dx);
                    }
                }
            });
        });
    }
}

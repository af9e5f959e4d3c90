//! One block, and the logits at the end, begun on the GPU; the activations between them.

use super::gates::Place;
use super::{DeviceDecoder, DeviceModel};
use crate::device::cuda::{CudaError, Device, DeviceBuffer, HeadsOperands};
use crate::memory::{Arena, Label};
use crate::model::Setup;
use std::ops::Range;

/// Where activations lie: rows of f32, but for the heads that attention reads and writes.
pub(super) struct Buffers {
    /// Of each row the cosines and sines of its position, and behind them the tokens.
    pub asked: DeviceBuffer,
    pub hidden: DeviceBuffer,
    projected: DeviceBuffer,
    normed: DeviceBuffer,
    /// Queries, and later what attention gives.
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    gate: DeviceBuffer,
    up: DeviceBuffer,
    pub logits: DeviceBuffer,
    /// Rows in 16 bits for cuBLAS; empty without it, and where all weights are f32.
    narrowed: DeviceBuffer,
    /// q, k, v and o as `[heads, tokens, D]` in the cache's type.
    heads: [DeviceBuffer; 4],
}

impl Buffers {
    /// Takes the memory.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn allocate(
        of: &DeviceModel<'_>,
        setup: &Setup<'_>,
        device: &Device,
        arena: &Arena,
    ) -> Result<Self, CudaError> {
        let (config, rows, kv_bytes) = (&of.model.config, setup.rows(), setup.dtype.bytes());
        let room = |elements: usize, bytes: usize| device.alloc(arena, Label::Activations, (elements * bytes) as u64);
        let plain = |width: usize| room(rows * width, 4);
        let widest = config.hidden.max(config.q_width()).max(config.ffn);
        let narrows = of.runtime.cublas().is_some() && of.weights.dtypes.iter().any(|dtype| dtype.bytes() == 2);
        Ok(Buffers {
            asked: plain(config.head_dim + 1)?,
            hidden: plain(config.hidden)?,
            projected: plain(config.hidden)?,
            normed: plain(config.hidden)?,
            q: plain(config.q_width())?,
            k: plain(config.kv_width())?,
            v: plain(config.kv_width())?,
            gate: plain(config.ffn)?,
            up: plain(config.ffn)?,
            logits: room(setup.logit_rows() * config.vocab, 4)?,
            narrowed: room(if narrows { rows * widest } else { 0 }, 2)?,
            heads: [
                room(rows * config.q_width(), kv_bytes)?,
                room(rows * config.kv_width(), kv_bytes)?,
                room(rows * config.kv_width(), kv_bytes)?,
                room(rows * config.q_width(), kv_bytes)?,
            ],
        })
    }
}

impl DeviceDecoder<'_> {
    /// What is added to a mean square under the root, and to the weights of norms.
    fn flavour(&self) -> [f32; 2] {
        [self.of.model.config.norm_eps, self.of.model.norm_shift()]
    }

    /// Begins one block: attention and MLP, each behind its norm and added to the residual stream.
    pub(super) fn block(&mut self, layer: usize, count: usize) -> Result<(), CudaError> {
        let (config, flavour) = (&self.of.model.config, self.flavour());
        let (weights, layers, dtype) = (&self.of.weights.layers[layer], &self.layers, self.setup.dtype);
        let (stream, head_dim) = ([count, config.hidden], config.head_dim);
        let Buffers { hidden, projected, normed, q, k, v, gate, up, asked, narrowed, heads, .. } = &mut self.buffers;
        let [q_heads, k_heads, v_heads, o_heads] = heads;
        layers.norm((hidden, 0), &weights.before_attention, normed, stream, flavour)?;
        layers.linear(
            normed,
            [(&weights.q, &mut *q), (&weights.k, &mut *k), (&weights.v, &mut *v)],
            count,
            narrowed,
        )?;
        if let Some([q_norm, k_norm]) = &weights.qk_norm {
            layers.norm_in_place(q, q_norm, [count * config.q_heads, head_dim], flavour)?;
            layers.norm_in_place(k, k_norm, [count * config.kv_heads, head_dim], flavour)?;
        }
        let (angles, pairs) = (Some(&*asked), config.rope.pairs(head_dim));
        for (rows, angles, split, heads) in [
            (&mut *q, angles, &mut *q_heads, config.q_heads),
            (k, angles, &mut *k_heads, config.kv_heads),
            (v, None, &mut *v_heads, config.kv_heads),
        ] {
            layers.split_heads(&HeadsOperands { rows, angles, split, dtype, tokens: count, heads, head_dim, pairs })?;
        }
        let lists = layer * config.kv_heads..(layer + 1) * config.kv_heads;
        self.cache.place(self.of.runtime, lists.clone(), [k_heads, v_heads], count, self.seen)?;
        if let Some(evictor) = &mut self.evictor {
            let place = Place { runtime: self.of.runtime, layers, cache: &self.cache, layer, count };
            evictor.gate(&place, normed, narrowed)?;
        }
        if self.evictor.as_ref().is_some_and(|evictor| evictor.rotates()) {
            self.cache.turn_newest(self.of.runtime, lists.clone(), count)?;
            let (extents, seen) = ([config.q_heads, count], self.seen + count);
            self.cache.rotate_queries(self.of.runtime, lists, q_heads, extents, seen)?;
        }
        self.attend.begin(self.of.runtime, &self.cache, layer, count, [&mut *q_heads, &mut *o_heads])?;
        if let Some(evictor) = &mut self.evictor {
            let there = (self.of.runtime, &self.cache);
            evictor.see(config, there, layer, count, [&*q_heads, self.attend.lse()])?;
        }
        let heads = config.q_heads;
        let tokens = count;
        let joined = HeadsOperands { rows: q, angles: None, split: o_heads, dtype, tokens, heads, head_dim, pairs };
        layers.merge_heads(&joined)?;

        layers.linear(q, [(&weights.o, &mut *projected)], count, narrowed)?;
        if let Some(weight) = &weights.after_attention {
            layers.norm_in_place(projected, weight, stream, flavour)?;
        }
        layers.add(hidden, projected, count * config.hidden)?;
        layers.norm((hidden, 0), &weights.before_mlp, normed, stream, flavour)?;
        layers.linear(normed, [(&weights.gate, &mut *gate), (&weights.up, &mut *up)], count, narrowed)?;
        layers.activate(config.activation, gate, up, count * config.ffn)?;
        layers.linear(gate, [(&weights.down, &mut *projected)], count, narrowed)?;
        if let Some(weight) = &weights.after_mlp {
            layers.norm_in_place(projected, weight, stream, flavour)?;
        }
        layers.add(hidden, projected, count * config.hidden)
    }

    /// Begins the logits of some rows.
    pub(super) fn logits(&mut self, rows: Range<usize>) -> Result<(), CudaError> {
        if rows.is_empty() {
            return Ok(());
        }
        let (config, weights, flavour) = (&self.of.model.config, &self.of.weights, self.flavour());
        let Buffers { hidden, normed, logits, narrowed, .. } = &mut self.buffers;
        let extents = [rows.len(), config.hidden];
        self.layers.norm((hidden, rows.start), &weights.norm, normed, extents, flavour)?;
        self.layers.product(normed, weights.output(), rows.len(), logits, (narrowed, &mut None))?;
        match config.final_softcap {
            Some(cap) => self.layers.soft_cap(logits, rows.len() * config.vocab, cap),
            None => Ok(()),
        }
    }
}

//! One block: attention and MLP, each behind its norm and added to the residual stream.

use super::{Buffers, Chunk, Decoder};
use crate::device::Cpu;
use crate::model::hook::Activation;
use crate::model::linear::Linear;
use crate::model::norm::{Norm, SERIAL};
use crate::model::padded::PaddedRows;
use crate::model::{ModelError, linear, rope};
use crate::tensor::{DType, TensorView};
use rayon::prelude::*;

/// Rows `[batch * tokens, heads * D]` as `[batch, heads, tokens, D]`.
pub(super) fn heads(rows: &[f32], batch: usize, tokens: usize, heads: usize) -> TensorView<'_> {
    heads_of(DType::F32, bytemuck::cast_slice(rows), batch, tokens, heads)
}

/// As [`heads`], of raw elements of a type.
pub(super) fn heads_of(dtype: DType, rows: &[u8], batch: usize, tokens: usize, heads: usize) -> TensorView<'_> {
    let head_dim = rows.len() / (dtype.bytes() * batch * tokens * heads);
    TensorView::contiguous(dtype, [batch, tokens, heads, head_dim], rows).permuted([0, 2, 1, 3])
}

/// Adds what a layer makes of rows of `x` to the residual stream, perhaps behind a norm. `room` holds as many rows.
fn add(
    (layer, after): (&Linear, Option<Norm<'_>>),
    cpu: &Cpu,
    x: &PaddedRows,
    rows: usize,
    (stream, room): (&mut [f32], &mut [f32]),
    scratch: &mut [f32],
) {
    match after {
        None => layer.apply_added(cpu, x, rows, (stream, room), scratch),
        Some(norm) => {
            let room = &mut room[..stream.len()];
            layer.apply(cpu, x, rows, room, norm.weight.len(), scratch);
            norm.in_place(cpu, room);
            linear::add(cpu, stream, room);
        }
    }
}

impl Decoder<'_> {
    pub(super) fn block(&mut self, layer: usize, chunks: &[Chunk], rows: usize) -> Result<(), ModelError> {
        let (config, weights, cpu) = (&self.model.config, &self.model.weights.layers[layer], self.cpu);
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        let (q_width, kv_width) = (config.q_width(), config.kv_width());
        let norm = self.norm(&weights.before_attention);
        let qk_norm = weights.qk_norm.as_ref().map(|[q, k]| [self.norm(q), self.norm(k)]);
        let Buffers { hidden: stream, normed, q, k, v, angles, scratch, .. } = &mut self.buffers;
        norm.rows(cpu, &stream[..rows * hidden], &mut normed.data, normed.stride);
        if let Some(hook) = self.hook {
            (0..rows).for_each(|row| hook.rows(layer, Activation::Hidden, normed.row_mut(row)));
        }
        normed.round(cpu, rows, Linear::input_scale([&weights.q, &weights.k, &weights.v]));
        let projections: [(_, &mut [f32], _); 3] =
            [(&weights.q, q, q_width), (&weights.k, k, kv_width), (&weights.v, v, kv_width)];
        Linear::apply_all(cpu, normed, rows, projections, scratch);
        if let Some([q_norm, k_norm]) = qk_norm {
            q_norm.in_place(cpu, &mut q[..rows * q_width]);
            k_norm.in_place(cpu, &mut k[..rows * kv_width]);
        }
        if let Some(hook) = self.hook {
            hook.rows(layer, Activation::QBeforeRope, &q[..rows * q_width]);
            hook.rows(layer, Activation::KBeforeRope, &k[..rows * kv_width]);
        }
        // A memory rotates keys itself.
        let (rotates_keys, pairs) = (self.memory.is_none(), config.rope.pairs(head_dim));
        let rotate = |((q, k), angles): ((&mut [f32], &mut [f32]), &[f32])| {
            rope::rotate(q, angles, pairs);
            if rotates_keys {
                rope::rotate(k, angles, pairs);
            }
        };
        match rows * q_width < SERIAL {
            true => {
                let heads_of = q.chunks_exact_mut(q_width).zip(k.chunks_exact_mut(kv_width));
                heads_of.zip(angles.chunks_exact(head_dim)).take(rows).for_each(rotate);
            }
            false => {
                let heads_of = q.par_chunks_exact_mut(q_width).zip(k.par_chunks_exact_mut(kv_width));
                heads_of.zip(angles.par_chunks_exact(head_dim)).take(rows).for_each(rotate);
            }
        }
        if let Some(hook) = self.hook {
            hook.rows(layer, Activation::Q, &q[..rows * q_width]);
            if self.memory.is_none() {
                hook.rows(layer, Activation::K, &k[..rows * kv_width]);
            }
            hook.rows(layer, Activation::V, &v[..rows * kv_width]);
        }
        match self.memory.is_some() {
            true => self.remember(layer, chunks)?,
            false => self.cached_attention(layer, chunks)?,
        }
        if let Some(hook) = self.hook {
            let attended = &mut self.buffers.attended;
            (0..rows).for_each(|row| hook.rows(layer, Activation::O, attended.row_mut(row)));
        }

        let after_attention = weights.after_attention.as_ref().map(|weight| self.norm(weight));
        let (before_mlp, after_mlp) =
            (self.norm(&weights.before_mlp), weights.after_mlp.as_ref().map(|weight| self.norm(weight)));
        let Buffers { hidden: stream, projected, normed, attended, gate, up, scratch, .. } = &mut self.buffers;
        let stream = &mut stream[..rows * hidden];
        attended.round(cpu, rows, Linear::input_scale([&weights.o]));
        add((&weights.o, after_attention), cpu, attended, rows, (stream, projected), scratch);

        before_mlp.rows(cpu, stream, &mut normed.data, normed.stride);
        if let Some(hook) = self.hook {
            (0..rows).for_each(|row| hook.rows(layer, Activation::MlpInput, normed.row_mut(row)));
        }
        normed.round(cpu, rows, Linear::input_scale([&weights.gate, &weights.up]));
        let (layers, reader) = ([&weights.gate, &weights.up], self.hook.is_none().then_some(&weights.down));
        Linear::apply_gated(cpu, normed, rows, (layers, config.activation), (gate, reader), (up, scratch));
        if let Some(hook) = self.hook {
            (0..rows).for_each(|row| hook.rows(layer, Activation::MlpInner, gate.row_mut(row)));
        }
        gate.round(cpu, rows, Linear::input_scale([&weights.down]));
        add((&weights.down, after_mlp), cpu, gate, rows, (stream, projected), scratch);
        Ok(())
    }

    /// Puts the keys and values of `chunks` into the cache, and lets their queries attend to it.
    fn cached_attention(&mut self, layer: usize, chunks: &[Chunk]) -> Result<(), ModelError> {
        let (config, hidden) = (&self.model.config, self.model.config.hidden);
        let (kv_width, Buffers { normed, k, v, .. }) = (config.kv_width(), &self.buffers);
        for chunk in chunks {
            let own = chunk.row * kv_width..(chunk.row + chunk.tokens) * kv_width;
            let of = |rows| heads(rows, 1, chunk.tokens, config.kv_heads);
            let (k, v) = (of(&k[own.clone()]), of(&v[own]));
            let sequence = layer * self.setup.batch + chunk.sequence;
            self.cache.append_at(sequence, k, v, 0, 0..chunk.tokens, chunk.first)?;
            if let Some(policy) = self.evictor.as_ref().and_then(|evictor| evictor.gating(chunk.sequence)) {
                let rows = chunk.row..chunk.row + chunk.tokens;
                let states: Vec<&[f32]> = rows.map(|row| &normed.data[row * normed.stride..][..hidden]).collect();
                policy.carry_gates(self.cpu, &mut self.cache, (layer, sequence), &states)?;
            }
            if let Some(rope) = self.evictor.as_ref().and_then(|evictor| evictor.rotates(chunk.sequence)) {
                for head in 0..config.kv_heads {
                    let list = self.cache.list(sequence, head);
                    self.cache.rerotate_from(list, self.cache.lens()[list] - chunk.tokens, rope)?;
                }
            }
        }
        self.attention(layer, chunks)
    }
}

//! A model on a GPU: weights copied there once, keys and values in pages there, attention by this project's kernels.
//!
//! [`DeviceDecoder`] runs one sequence, chunk by chunk and then token by token. Only tokens and angles go to the GPU, and
//! only logits come back. All kernels of a pass are begun one behind another and waited for once. What is computed is
//! what [`super::Decoder`] computes.

mod attend;
mod evict;
mod held;
mod layers;
mod weights;

use super::{Eviction, Model, ModelError, OneSequence, Setup, rope};
use crate::cache::cuda::DeviceCache;
use crate::cache::{CacheShape, PAGE_TOKENS};
use crate::device::Cpu;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, HeadsOperands, Runtime};
use crate::memory::{Arena, Label};
use crate::policy::Decoding;
use attend::Attend;
use evict::DeviceEvictor;
use layers::Layers;
use weights::DeviceWeights;

/// A model whose weights lie in a GPU's memory.
pub struct DeviceModel<'a> {
    model: &'a Model,
    runtime: &'a Runtime,
    weights: DeviceWeights,
}

impl<'a> DeviceModel<'a> {
    /// Copies the weights of a model.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn new(model: &'a Model, runtime: &'a Runtime, arena: &Arena) -> Result<Self, ModelError> {
        Ok(DeviceModel { model, runtime, weights: DeviceWeights::upload(model, runtime.device(), arena)? })
    }

    /// Bytes of all parameters, as the arena counts them.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes
    }
}

/// Where activations lie: rows of f32, but for the heads that attention reads and writes.
struct Buffers {
    tokens: DeviceBuffer,
    /// Cosines and sines of each row's position.
    angles: DeviceBuffer,
    hidden: DeviceBuffer,
    projected: DeviceBuffer,
    normed: DeviceBuffer,
    /// Queries, and later what attention gives.
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    gate: DeviceBuffer,
    up: DeviceBuffer,
    logits: DeviceBuffer,
    /// Rows in 16 bits for cuBLAS; empty without it, and where all weights are f32.
    narrowed: DeviceBuffer,
    /// q, k, v and o as `[heads, tokens, D]` in the cache's type.
    heads: [DeviceBuffer; 4],
}

impl Buffers {
    fn allocate(of: &DeviceModel<'_>, setup: &Setup, device: &Device, arena: &Arena) -> Result<Self, CudaError> {
        let (config, rows, kv_bytes) = (&of.model.config, setup.rows(), setup.kv_dtype.bytes());
        let room = |elements: usize, bytes: usize| device.alloc(arena, Label::Activations, (elements * bytes) as u64);
        let plain = |width: usize| room(rows * width, 4);
        let widest = config.hidden.max(config.q_width()).max(config.ffn);
        let narrows = of.runtime.cublas().is_some() && of.weights.dtypes.iter().any(|dtype| dtype.bytes() == 2);
        Ok(Buffers {
            tokens: plain(1)?,
            angles: plain(config.head_dim)?,
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

/// A model at work on one sequence on a GPU.
pub struct DeviceDecoder<'a> {
    of: &'a DeviceModel<'a>,
    setup: Setup,
    layers: Layers<'a>,
    cache: DeviceCache,
    seen: usize,
    buffers: Buffers,
    attend: Attend,
    arena: Arena,
    evictor: Option<DeviceEvictor<'a>>,
}

impl<'a> DeviceDecoder<'a> {
    /// A model with an empty cache; its kernels are compiled here.
    ///
    /// # Errors
    /// When a kernel cannot do what the model needs, when the arena or the GPU has no room, and as [`Runtime::module`].
    ///
    /// # Panics
    /// When the setup is for several sequences.
    pub fn new(of: &'a DeviceModel<'a>, setup: Setup, arena: &Arena) -> Result<Self, ModelError> {
        assert_eq!(setup.batch, 1, "sequences of a decoder on a GPU");
        let (config, device) = (&of.model.config, of.runtime.device());
        let shape = CacheShape {
            batch: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            dtype: setup.kv_dtype,
            max_tokens: setup.max_tokens,
            page_tokens: PAGE_TOKENS,
            columns: setup.columns,
        };
        let cache = DeviceCache::new(device, arena, shape)?;
        of.runtime.module(&cache.program())?;
        Ok(DeviceDecoder {
            of,
            setup,
            layers: Layers::new(of.runtime, of.weights.dtypes.iter().copied().chain([setup.kv_dtype]))?,
            cache,
            seen: 0,
            buffers: Buffers::allocate(of, &setup, device, arena)?,
            attend: Attend::new(config, &setup, of.runtime, arena)?,
            arena: arena.clone(),
            evictor: None,
        })
    }

    /// The keys and values so far.
    pub fn cache(&self) -> &DeviceCache {
        &self.cache
    }

    /// Forgets the sequence and the policy.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the GPU cannot be told.
    pub fn clear(&mut self) -> Result<(), ModelError> {
        (self.seen, self.evictor) = (0, None);
        Ok(self.cache.clear()?)
    }

    /// Puts a policy to work, before the first token; `cpu` divides its budget, which counts a prompt of `context`
    /// tokens.
    ///
    /// # Errors
    /// When the policy has no form on a GPU or the model cannot do what it does, the budget leaves nothing, or there is
    /// no room.
    ///
    /// # Panics
    /// When the setup lacks a column of the policy.
    pub fn evict(&mut self, eviction: Eviction<'a>, cpu: &'a Cpu, context: usize) -> Result<(), ModelError> {
        let columns = eviction.policy.columns();
        assert!(columns.iter().all(|column| self.setup.columns.contains(column)), "a cache with the policy's columns");
        let place = (self.of.runtime, cpu, &self.arena);
        self.evictor = Some(DeviceEvictor::new(eviction, &self.of.model.config, &self.cache, context, place)?);
        Ok(())
    }

    /// Tokens that were evicted, counted in every list.
    pub fn evicted_tokens(&self) -> u64 {
        self.evictor.as_ref().map_or(0, DeviceEvictor::evicted_tokens)
    }

    /// Runs a prompt and lets the policy judge after it, or after each chunk that its schedule names.
    /// `visit(place, logits)` gets the logits `[vocab]` of every token, or of the last, as the setup says; `place` counts
    /// from the first token of this call. `sequence` is what the sequence is called where a token is refused.
    ///
    /// # Errors
    /// When a token is not one of the model's, when the arena or the GPU has no room, or a kernel fails.
    pub fn prefill(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.of.model.check_tokens(sequence, self.seen, tokens)?;
        let horizon = self.seen + tokens.len();
        let policy = self.evictor.as_ref().and_then(DeviceEvictor::judging);
        let piece = policy.and_then(|policy| policy.schedule.chunk_tokens).unwrap_or(tokens.len()).max(1);
        for (index, tokens) in tokens.chunks(piece).enumerate() {
            self.feed(tokens, horizon, |place, logits| visit(index * piece + place, logits))?;
            if let Some(evictor) = &mut self.evictor {
                let (config, last) = (&self.of.model.config, self.seen == horizon);
                evictor.judge_prefill(config, self.of.runtime, &mut self.cache, self.seen, last)?;
            }
        }
        Ok(())
    }

    /// Runs tokens that follow, and lets the policy judge after each where its schedule asks for that; else they go
    /// through together. `visit` and `sequence` as in [`DeviceDecoder::prefill`].
    ///
    /// # Errors
    /// As [`DeviceDecoder::prefill`].
    pub fn follow(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.of.model.check_tokens(sequence, self.seen, tokens)?;
        let policy = self.evictor.as_ref().and_then(DeviceEvictor::judging);
        let together = policy.is_none_or(|policy| policy.schedule.decoding == Decoding::Never);
        let piece = if together { tokens.len().max(1) } else { 1 };
        for (index, tokens) in tokens.chunks(piece).enumerate() {
            let horizon = self.seen + tokens.len();
            self.feed(tokens, horizon, |place, logits| visit(index * piece + place, logits))?;
            if let Some(evictor) = self.evictor.as_mut().filter(|_| !together) {
                evictor.judge_step(&self.of.model.config, self.of.runtime, &mut self.cache, self.seen)?;
            }
        }
        Ok(())
    }

    /// Runs tokens, a chunk at a time, of a sequence that will have `horizon` tokens.
    fn feed(
        &mut self,
        tokens: &[u32],
        horizon: usize,
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        let vocab = self.of.model.config.vocab;
        for (index, chunk) in tokens.chunks(self.setup.chunk_tokens).enumerate() {
            let start = index * self.setup.chunk_tokens;
            let last = self.seen + chunk.len() == horizon;
            let wanted = match (self.setup.all_logits, last) {
                (true, _) => 0..chunk.len(),
                (false, true) => chunk.len() - 1..chunk.len(),
                (false, false) => 0..0,
            };
            self.pass(chunk, horizon, wanted.clone())?;
            let mut logits = vec![0f32; wanted.len() * vocab];
            self.buffers.logits.read(bytemuck::cast_slice_mut(&mut logits))?;
            for (place, logits) in wanted.zip(logits.chunks_exact(vocab)) {
                visit(start + place, logits);
            }
        }
        Ok(())
    }

    /// One chunk through all blocks, and the logits of the rows that are `wanted`.
    fn pass(&mut self, tokens: &[u32], horizon: usize, wanted: std::ops::Range<usize>) -> Result<(), ModelError> {
        let (config, runtime, count) = (&self.of.model.config, self.of.runtime, tokens.len());
        self.cache.grow(runtime.device(), count)?;
        let ragged = self.evicted_tokens() > 0;
        self.attend.prepare(config, (runtime, &self.arena), &self.cache, count, ragged)?;
        self.buffers.tokens.write(bytemuck::cast_slice(tokens))?;
        self.turn_angles(count, horizon)?;
        runtime.device().timed(|| {
            let Buffers { tokens, hidden, .. } = &mut self.buffers;
            self.layers.embed(tokens, &self.of.weights.embedding, hidden, count, config.embedding_scale)?;
            (0..config.layers).try_for_each(|layer| self.block(layer, count))?;
            self.logits(wanted)
        })?;
        self.seen += count;
        if let Some(evictor) = &mut self.evictor {
            evictor.advance(count);
        }
        Ok(())
    }

    /// Cosines and sines of the positions of the next `count` tokens.
    fn turn_angles(&mut self, count: usize, horizon: usize) -> Result<(), CudaError> {
        let config = &self.of.model.config;
        let frequencies = config.rope.frequencies(config.head_dim, config.max_positions, horizon);
        let factor = config.rope.attention_factor();
        let mut angles = vec![0f32; count * config.head_dim];
        for (position, row) in (self.seen..).zip(angles.chunks_exact_mut(config.head_dim)) {
            rope::angles(&frequencies, position, factor, row);
        }
        self.buffers.angles.write(bytemuck::cast_slice(&angles))
    }

    /// What is added to a mean square under the root, and to the weights of norms.
    fn flavour(&self) -> [f32; 2] {
        [self.of.model.config.norm_eps, self.of.model.norm_shift()]
    }

    /// Begins one block: attention and MLP, each behind its norm and added to the residual stream.
    fn block(&mut self, layer: usize, count: usize) -> Result<(), CudaError> {
        let (config, flavour) = (&self.of.model.config, self.flavour());
        let (weights, layers, dtype) = (&self.of.weights.layers[layer], &self.layers, self.setup.kv_dtype);
        let (stream, head_dim) = ([count, config.hidden], config.head_dim);
        let Buffers { hidden, projected, normed, q, k, v, gate, up, angles, narrowed, heads, .. } = &mut self.buffers;
        let [q_heads, k_heads, v_heads, o_heads] = heads;
        layers.norm((hidden, 0), &weights.before_attention, normed, stream, flavour)?;
        layers.linear(normed, &weights.q, count, q, narrowed)?;
        layers.linear(normed, &weights.k, count, k, narrowed)?;
        layers.linear(normed, &weights.v, count, v, narrowed)?;
        if let Some([q_norm, k_norm]) = &weights.qk_norm {
            layers.norm_in_place(q, q_norm, [count * config.q_heads, head_dim], flavour)?;
            layers.norm_in_place(k, k_norm, [count * config.kv_heads, head_dim], flavour)?;
        }
        let angles = Some(&*angles);
        for (rows, angles, split, heads) in [
            (&mut *q, angles, &mut *q_heads, config.q_heads),
            (k, angles, &mut *k_heads, config.kv_heads),
            (v, None, &mut *v_heads, config.kv_heads),
        ] {
            layers.cut(&HeadsOperands { rows, angles, split, dtype, tokens: count, heads, head_dim })?;
        }
        let lists = layer * config.kv_heads..(layer + 1) * config.kv_heads;
        self.cache.place(self.of.runtime, lists, [k_heads, v_heads], count, self.seen)?;
        self.attend.begin(self.of.runtime, &self.cache, layer, count, [&mut *q_heads, &mut *o_heads])?;
        if let Some(evictor) = &mut self.evictor {
            let there = (self.of.runtime, &self.cache);
            evictor.see(config, there, layer, count, [&*q_heads, self.attend.lse()])?;
        }
        let heads = config.q_heads;
        let joined = HeadsOperands { rows: q, angles: None, split: o_heads, dtype, tokens: count, heads, head_dim };
        layers.join(&joined)?;

        layers.linear(q, &weights.o, count, projected, narrowed)?;
        if let Some(weight) = &weights.after_attention {
            layers.norm_in_place(projected, weight, stream, flavour)?;
        }
        layers.add(hidden, projected, count * config.hidden)?;
        layers.norm((hidden, 0), &weights.before_mlp, normed, stream, flavour)?;
        layers.linear(normed, &weights.gate, count, gate, narrowed)?;
        layers.linear(normed, &weights.up, count, up, narrowed)?;
        layers.activate(config.activation, gate, up, count * config.ffn)?;
        layers.linear(gate, &weights.down, count, projected, narrowed)?;
        if let Some(weight) = &weights.after_mlp {
            layers.norm_in_place(projected, weight, stream, flavour)?;
        }
        layers.add(hidden, projected, count * config.hidden)
    }

    /// Begins the logits of some rows.
    fn logits(&mut self, rows: std::ops::Range<usize>) -> Result<(), CudaError> {
        if rows.is_empty() {
            return Ok(());
        }
        let (config, weights, flavour) = (&self.of.model.config, &self.of.weights, self.flavour());
        let Buffers { hidden, normed, logits, narrowed, .. } = &mut self.buffers;
        let extents = [rows.len(), config.hidden];
        self.layers.norm((hidden, rows.start), &weights.norm, normed, extents, flavour)?;
        self.layers.product(normed, weights.output(), rows.len(), logits, narrowed)?;
        match config.final_softcap {
            Some(cap) => self.layers.soft_cap(logits, rows.len() * config.vocab, cap),
            None => Ok(()),
        }
    }
}

impl OneSequence for DeviceDecoder<'_> {
    fn prompt(&mut self, tokens: &[u32], last: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.prefill(0, tokens, |place, logits| {
            if place + 1 == tokens.len() {
                last(logits);
            }
        })
    }

    fn step(&mut self, token: u32, logits: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.follow(0, &[token], |_, row| logits(row))
    }

    fn kv_bytes(&self) -> u64 {
        self.cache.pages() as u64 * self.cache.shape().page_bytes()
    }
}

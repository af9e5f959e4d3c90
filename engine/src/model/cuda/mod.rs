//! A model on a GPU: weights copied there once, keys and values in pages there, attention by this project's kernels.
//!
//! [`DeviceDecoder`] runs one sequence, chunk by chunk and then token by token. Tokens, angles and changes of the page
//! table go to the GPU, logits and what an eviction step has found come back. Kernels and copies of a pass are begun one behind
//! another; the landing of its logits is all that is waited for. Memory is taken before: a token takes none, but for slabs
//! of pages when lists have grown through theirs. `tests/cuda/models.rs` counts the driver's calls. What is computed is what
//! [`super::Decoder`] computes.

mod attend;
mod block;
mod evict;
mod gates;
mod layers;
mod weights;

use super::{Eviction, Model, ModelError, OneSequence, Setup, rope};
use crate::cache::cuda::DeviceCache;
use crate::cache::{self, CacheShape, PAGE_TOKENS};
use crate::device::Cpu;
use crate::device::cuda::{CudaError, Landing, Runtime};
use crate::eviction::cuda::landing_bytes;
use crate::memory::Arena;
use crate::policy::{Decoding, PolicyError};
use attend::Attend;
use block::Buffers;
use evict::DeviceEvictor;
use layers::Layers;
pub use layers::program;
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

    /// Refuses a policy that has no form on a GPU, or does what the model cannot do.
    ///
    /// # Errors
    /// What it is, and why.
    pub fn check(&self, eviction: &Eviction<'_>) -> Result<(), PolicyError> {
        evict::check(eviction, &self.model.config)
    }

    /// Bytes of all parameters, as the arena counts them.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes
    }
}

/// A model at work on one sequence on a GPU.
pub struct DeviceDecoder<'a> {
    of: &'a DeviceModel<'a>,
    setup: Setup<'a>,
    layers: Layers<'a>,
    cache: DeviceCache,
    seen: usize,
    buffers: Buffers,
    attend: Attend,
    /// A row of logits, and behind it what an eviction step has found.
    landing: Landing,
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
    pub fn new(of: &'a DeviceModel<'a>, setup: Setup<'a>, arena: &Arena) -> Result<Self, ModelError> {
        assert_eq!(setup.batch, 1, "sequences of a decoder on a GPU");
        let (config, device) = (&of.model.config, of.runtime.device());
        let shape = CacheShape {
            batch: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            format: setup.kv_format,
            max_tokens: setup.max_tokens,
            page_tokens: PAGE_TOKENS,
            columns: setup.columns,
        };
        let cache = DeviceCache::new(device, arena, shape, setup.dtype)?;
        of.runtime.module(&cache.program())?;
        // What copies rows of elements, the queries of an observation window.
        of.runtime.module(&cache::cuda::program(setup.dtype.into(), config.head_dim))?;
        Ok(DeviceDecoder {
            of,
            setup,
            layers: Layers::new(of.runtime, of.weights.dtypes.iter().copied().chain([setup.dtype]))?,
            cache,
            seen: 0,
            buffers: Buffers::allocate(of, &setup, device, arena)?,
            attend: Attend::new(config, &setup, of.runtime, arena)?,
            landing: Landing::new(device, 4 * config.vocab + landing_bytes(shape.lists()))?,
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
        Ok(self.cache.clear(self.of.runtime)?)
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
        self.evictor = Some(DeviceEvictor::new(
            eviction,
            &self.of.model.config,
            &self.cache,
            [context, self.setup.rows()],
            place,
        )?);
        Ok(())
    }

    /// Tokens that were evicted, counted in every list.
    pub fn evicted_tokens(&self) -> u64 {
        self.evictor.as_ref().map_or(0, DeviceEvictor::evicted_tokens)
    }

    /// Runs a prompt and lets the policy evict behind it, or behind each chunk that its schedule names.
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
        let policy = self.evictor.as_ref().and_then(DeviceEvictor::evicting);
        let piece = policy.and_then(|policy| policy.schedule.chunk_tokens).unwrap_or(tokens.len()).max(1);
        for (index, tokens) in tokens.chunks(piece).enumerate() {
            self.feed(tokens, horizon, false, |place, logits| visit(index * piece + place, logits))?;
            if let Some(evictor) = &mut self.evictor {
                let config = &self.of.model.config;
                evictor.evict_chunk(config, self.of.runtime, &mut self.cache, self.seen, horizon)?;
            }
        }
        Ok(())
    }

    /// Runs tokens that follow, and lets the policy evict behind each where its schedule asks for that; else they go
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
        let policy = self.evictor.as_ref().and_then(DeviceEvictor::evicting);
        let together = policy.is_none_or(|policy| policy.schedule.decoding == Decoding::Never);
        let piece = if together { tokens.len().max(1) } else { 1 };
        for (index, tokens) in tokens.chunks(piece).enumerate() {
            let horizon = self.seen + tokens.len();
            self.feed(tokens, horizon, !together, |place, logits| visit(index * piece + place, logits))?;
        }
        Ok(())
    }

    /// Runs tokens, a chunk at a time, of a sequence that will have `horizon` tokens; the policy evicts behind each that is
    /// `stepwise`, which comes alone.
    fn feed(
        &mut self,
        tokens: &[u32],
        horizon: usize,
        stepwise: bool,
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        let (config, runtime) = (&self.of.model.config, self.of.runtime);
        for (index, chunk) in tokens.chunks(self.setup.chunk_tokens).enumerate() {
            let start = index * self.setup.chunk_tokens;
            let last = self.seen + chunk.len() == horizon;
            let wanted = match (self.setup.all_logits, last) {
                (true, _) => 0..chunk.len(),
                (false, true) => chunk.len() - 1..chunk.len(),
                (false, false) => 0..0,
            };
            self.pass(chunk, horizon, wanted.clone())?;
            if wanted.len() > 1 {
                let mut logits = vec![0f32; wanted.len() * config.vocab];
                self.buffers.logits.read(bytemuck::cast_slice_mut(&mut logits))?;
                wanted.zip(logits.chunks_exact(config.vocab)).for_each(|(place, row)| visit(start + place, row));
                continue;
            }
            let Some(place) = wanted.last() else { continue };
            let row_bytes = 4 * config.vocab;
            self.landing.begin(0, &self.buffers.logits, row_bytes)?;
            let mut evictor = self.evictor.as_mut().filter(|_| stepwise);
            if let Some(evictor) = &mut evictor {
                evictor.begin_step(config, runtime, &self.cache, self.seen, (&mut self.landing, row_bytes))?;
            }
            let (logits, found) = self.landing.wait()?.split_at(row_bytes);
            visit(start + place, bytemuck::cast_slice(logits));
            if let Some(evictor) = evictor {
                evictor.end_step(config, runtime, &mut self.cache, self.seen, bytemuck::cast_slice(found))?;
            }
        }
        Ok(())
    }

    /// Begins one chunk through all blocks, and the logits of the rows that are `wanted`.
    fn pass(&mut self, tokens: &[u32], horizon: usize, wanted: std::ops::Range<usize>) -> Result<(), ModelError> {
        let (config, runtime, count) = (&self.of.model.config, self.of.runtime, tokens.len());
        self.cache.grow(runtime, count)?;
        let ragged = self.evicted_tokens() > 0;
        self.attend.prepare(config, (runtime, &self.arena), &self.cache, count, ragged)?;
        self.ask(tokens, horizon)?;
        let Buffers { asked, hidden, .. } = &mut self.buffers;
        let (embedding, first) = (&self.of.weights.embedding, count * config.head_dim);
        self.layers.embed((asked, first), embedding, hidden, count, config.embedding_scale)?;
        (0..config.layers).try_for_each(|layer| self.block(layer, count))?;
        self.logits(wanted)?;
        self.seen += count;
        if let Some(evictor) = &mut self.evictor {
            evictor.advance(count);
        }
        Ok(())
    }

    /// Begins to tell the GPU the next tokens and the cosines and sines of their positions.
    fn ask(&mut self, tokens: &[u32], horizon: usize) -> Result<(), CudaError> {
        let config = &self.of.model.config;
        // Behind a prompt whose keys went to positions inside the cache, as long as the longest list; it has room for these tokens.
        let turned = self.evictor.as_mut().filter(|_| config.rope.is_dynamic()).and_then(DeviceEvictor::turned_tokens);
        let frequencies = |tokens| config.rope.frequencies(config.head_dim, config.max_positions, tokens);
        let frequencies = match turned {
            None => frequencies(horizon),
            Some(turned) => {
                let gone = self.seen + tokens.len() - self.cache.max_len();
                *turned = config.rope.turned_tokens(config.max_positions, *turned, horizon - gone);
                let frequencies = frequencies(*turned);
                self.cache.set_rope(&frequencies)?;
                frequencies
            }
        };
        let factor = config.rope.attention_factor();
        let mut angles = vec![0f32; tokens.len() * config.head_dim];
        for (position, row) in (self.seen..).zip(angles.chunks_exact_mut(config.head_dim)) {
            rope::angles(&frequencies, position, factor, row);
        }
        let asked: Vec<u32> = angles.into_iter().map(f32::to_bits).chain(tokens.iter().copied()).collect();
        self.buffers.asked.begin_write(self.of.runtime.device(), 0, bytemuck::cast_slice(&asked))
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

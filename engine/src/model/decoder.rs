//! Tokens through a model: embedding, blocks, norm, logits; keys and values go into a paged cache.
//!
//! Several sequences run together. Their tokens lie behind one another as rows of activations, so a sequence may bring
//! fewer tokens than its neighbours, or none. Sequence `b` of layer `l` is sequence `l * B + b` of the cache.

mod attend;
mod block;
mod fork;
mod narrow;
mod phases;
mod prefix;
mod remember;
mod repeat;
mod through;

use super::padded::PaddedRows;
use super::weights::embed;
use super::{Config, Model, ModelError, linear, rope};
use crate::cache::{CacheShape, Column, PAGE_TOKENS, PagedCache};
use crate::device::Cpu;
use crate::format::{KvFormat, RowFormat};
use crate::memories::Memory;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::evictor::{Eviction, Evictor, QueryRecorder};
use crate::model::hook::Hook;
use crate::model::norm::Norm;
use crate::named::NamedError;
use crate::policy::{PolicyError, Statistic};
use crate::tensor::DType;
use attend::Attend;
pub(crate) use attend::params;
use half::bf16;
pub use prefix::PrefixShape;
use remember::Remembered;
pub use remember::bytes_with_memory;
use repeat::Repeating;
use std::ops::Range;

/// How a model is to be run.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'k> {
    /// Kernel of attention where several tokens of a sequence go through together, perhaps with parameters. A token by
    /// itself is for the kernel `decode`.
    pub kernel: &'k str,
    /// Sequences that run together.
    pub batch: usize,
    /// Most tokens that a sequence will hold.
    pub max_tokens: usize,
    /// Tokens of each sequence that go through the model together.
    pub chunk_tokens: usize,
    /// Whether logits of all tokens are wanted, or only of the last of each call.
    pub all_logits: bool,
    /// Element type of the pass: where it is f32, no activations are rounded.
    pub dtype: DType,
    /// What the rows that linear layers read are rounded to, if to anything (W8A8 is `int8` beside weights in `int8`).
    pub activations: Option<RowFormat>,
    /// How keys and values are kept.
    pub kv_format: KvFormat,
    /// What each cached token carries.
    pub columns: &'static [Column],
}

impl Setup<'_> {
    /// One sequence of `max_tokens` that go through together and are kept as they are computed, attended to tile by tile.
    pub fn of(max_tokens: usize, dtype: DType) -> Self {
        Setup {
            kernel: "tiled",
            batch: 1,
            max_tokens,
            chunk_tokens: max_tokens,
            all_logits: false,
            dtype,
            activations: None,
            kv_format: KvFormat::plain(dtype),
            columns: &[],
        }
    }

    /// Rows of activations.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.chunk_tokens.min(self.max_tokens)
    }

    /// Rows of logits.
    pub(super) fn logit_rows(&self) -> usize {
        if self.all_logits { self.rows() } else { self.batch }
    }
}

/// Tokens of one sequence in a pass.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    sequence: usize,
    /// First of its rows.
    row: usize,
    tokens: usize,
    /// Position of the first token.
    first: usize,
    /// Tokens that the sequence will have when the call is done.
    horizon: usize,
}

/// Where activations lie.
struct Buffers {
    /// The residual stream, `[rows, hidden]`.
    hidden: Buffer<f32>,
    /// What a block's parts add to it.
    projected: Buffer<f32>,
    /// Norms of it.
    normed: PaddedRows,
    q: Buffer<f32>,
    /// Queries of several tokens in a pass over keys in bf16, rounded so that bf16 is all that is multiplied.
    rounded_q: Buffer<bf16>,
    k: Buffer<f32>,
    v: Buffer<f32>,
    attended: PaddedRows,
    gate: PaddedRows,
    up: Buffer<f32>,
    /// Cosines and sines of each row's position.
    angles: Buffer<f32>,
    logits: Buffer<f32>,
    /// Scratch of linear layers.
    scratch: Buffer<f32>,
}

impl Buffers {
    fn allocate(model: &Model, setup: &Setup<'_>, arena: &Arena, threads: usize) -> Result<Self, ArenaError> {
        let (config, rows) = (&model.config, setup.rows());
        let plain = |len: usize| arena.alloc::<f32>(Label::Activations, len);
        Ok(Buffers {
            hidden: plain(rows * config.hidden)?,
            projected: plain(rows * config.hidden)?,
            normed: PaddedRows::new(arena, rows, config.hidden, setup)?,
            q: plain(rows * config.q_width())?,
            rounded_q: arena.alloc(Label::Activations, rounded_queries(config, setup))?,
            k: plain(rows * config.kv_width())?,
            v: plain(rows * config.kv_width())?,
            attended: PaddedRows::new(arena, rows, config.q_width(), setup)?,
            gate: PaddedRows::new(arena, rows, config.ffn, setup)?,
            up: plain(rows * config.ffn)?,
            angles: plain(rows * config.head_dim)?,
            logits: plain(setup.logit_rows() * config.vocab)?,
            scratch: arena.alloc(Label::Workspace, linear::scratch(config, setup, threads))?,
        })
    }

    fn bytes(config: &Config, setup: &Setup<'_>, threads: usize) -> [(Label, u64); 2] {
        let rows = setup.rows();
        let plain = rows
            * (2 * config.hidden + config.q_width() + 2 * config.kv_width() + config.ffn + config.head_dim)
            + setup.logit_rows() * config.vocab;
        let sheets = [config.hidden, config.q_width(), config.ffn];
        let sheets: u64 = sheets.map(|width| PaddedRows::bytes(rows, width, setup)).iter().sum();
        let rounded = 2 * rounded_queries(config, setup) as u64;
        let scratch = linear::scratch(config, setup, threads);
        [(Label::Activations, 4 * plain as u64 + sheets + rounded), (Label::Workspace, 4 * scratch as u64)]
    }
}

/// Elements of [`Buffers::rounded_q`]: none where attention does not multiply what it reads as bf16.
fn rounded_queries(config: &Config, setup: &Setup<'_>) -> usize {
    let is_bf16 = setup.dtype == DType::Bf16 && setup.kv_format.in_pass(setup.dtype).is_read_as_bf16();
    if is_bf16 { setup.rows() * config.q_width() } else { 0 }
}

/// A model at work on some sequences.
pub struct Decoder<'a> {
    model: &'a Model,
    setup: Setup<'a>,
    cpu: &'a Cpu,
    arena: &'a Arena,
    cache: PagedCache,
    /// What attention reads in place of the cache, which is empty then.
    memory: Option<Remembered<'a>>,
    /// Tokens that each sequence has seen, and which.
    seen: Vec<usize>,
    fed: Vec<Vec<u32>>,
    buffers: Buffers,
    /// Whether logits of every token of a call are wanted.
    all_logits: bool,
    attend: Attend,
    evictor: Option<Evictor<'a>>,
    recorder: Option<QueryRecorder>,
    /// While a context is repeated.
    repeating: Option<Repeating>,
    hook: Option<&'a dyn Hook>,
    /// Whether tokens of a sequence were evicted, so that slots of its lists are no positions.
    gaps: Vec<bool>,
}

impl<'a> Decoder<'a> {
    /// A model with an empty cache.
    ///
    /// # Errors
    /// When there is no such kernel, or the arena has no room.
    pub fn new(model: &'a Model, setup: Setup<'a>, cpu: &'a Cpu, arena: &'a Arena) -> Result<Self, ModelError> {
        Self::build(model, setup, None, cpu, arena)
    }

    /// A model with an empty memory in place of the cache. The memory says in what its keys and values are kept, and no
    /// policy can be put to work.
    ///
    /// # Errors
    /// As [`Decoder::new`].
    pub fn with_memory(
        model: &'a Model,
        setup: Setup<'a>,
        memory: &'a dyn Memory,
        cpu: &'a Cpu,
        arena: &'a Arena,
    ) -> Result<Self, ModelError> {
        let memory = Remembered::open(memory, model, &setup, arena)?;
        Self::build(model, setup, Some(memory), cpu, arena)
    }

    fn build(
        model: &'a Model,
        setup: Setup<'a>,
        memory: Option<Remembered<'a>>,
        cpu: &'a Cpu,
        arena: &'a Arena,
    ) -> Result<Self, ModelError> {
        setup.kv_format.check(model.config.head_dim, setup.max_tokens)?;
        setup.activations.map_or(Ok(()), |format| model.config.check_activations(format))?;
        Ok(Decoder {
            model,
            setup,
            cpu,
            arena,
            cache: PagedCache::new(arena, cache_shape(&model.config, &setup, memory.is_some()))?,
            memory,
            seen: vec![0; setup.batch],
            fed: vec![Vec::new(); setup.batch],
            buffers: Buffers::allocate(model, &setup, arena, cpu.threads())?,
            all_logits: setup.all_logits,
            attend: Attend::new(&setup)?,
            evictor: None,
            recorder: None,
            repeating: None,
            hook: None,
            gaps: vec![false; setup.batch],
        })
    }

    /// The keys and values so far.
    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// KV bytes of pages in use, or of the memory.
    pub fn kv_bytes(&self) -> u64 {
        let pages = || self.cache.kv_bytes();
        self.memory.as_ref().map_or_else(pages, Remembered::kv_bytes)
    }

    /// Most KV bytes of pages in use at one moment, or of the memory.
    pub fn most_kv_bytes(&self) -> u64 {
        let pages = || self.cache.most_kv_bytes();
        self.memory.as_ref().map_or_else(pages, Remembered::kv_bytes)
    }

    /// Tokens that each sequence has seen.
    pub fn seen(&self) -> &[usize] {
        &self.seen
    }

    /// Puts a policy to work, before the first token. The prompts of the sequences will be `contexts` tokens long: that
    /// is what a budget counts.
    ///
    /// # Errors
    /// When the model cannot do what the policy does, or the budget leaves nothing.
    ///
    /// # Panics
    /// When the setup lacks a column of the policy, or there is a memory in place of the cache.
    pub fn evict(&mut self, eviction: Eviction<'a>, contexts: &[usize]) -> Result<(), ModelError> {
        assert!(self.memory.is_none(), "a policy is at work in a cache");
        let columns = eviction.policy.columns();
        assert!(columns.iter().all(|column| self.setup.columns.contains(column)), "a cache with the policy's columns");
        eviction.policy.check_base(&self.model.fingerprint, self.model.weights_of.as_deref())?;
        if eviction.policy.reconstruction.is_some() && eviction.repeat.is_none() {
            let reason =
                "it has the model repeat its context, for which `eval`, `generate` and `inspect` have the words".into();
            return Err(PolicyError::Combination { policy: eviction.name.into(), reason }.into());
        }
        let knows_gradients = eviction.repeat.is_some_and(|repeat| repeat.gradients.is_some());
        if eviction.policy.looks_at(Statistic::Gradients) && !knows_gradients {
            let reason =
                "it looks at gradients, for which `eval`, `generate` and `inspect` have a backward pass".into();
            return Err(PolicyError::Combination { policy: eviction.name.into(), reason }.into());
        }
        eviction.policy.check_format(eviction.name, eviction.budget.as_ref(), self.setup.kv_format)?;
        let token_bytes = self.cache.shape().token_bytes();
        self.evictor = Some(Evictor::new(eviction, &self.model.config, contexts, token_bytes, self.arena)?);
        Ok(())
    }

    /// Tokens at these positions are never evicted by the policy at work, and stay beside its budget.
    pub fn never_evict(&mut self, positions: Range<usize>) {
        if let Some(evictor) = &mut self.evictor {
            evictor.kept = positions;
        }
    }

    /// Tokens that were evicted, counted in every list.
    pub fn evicted_tokens(&self) -> u64 {
        self.evictor.as_ref().map_or(0, Evictor::evicted_tokens)
    }

    /// Runs more tokens of each sequence, a chunk at a time, until they have `horizons` tokens; `visit` as in
    /// [`Decoder::prefill`], with places counted from `from`.
    fn run(
        &mut self,
        tokens: &[&[u32]],
        horizons: &[usize],
        from: &[usize],
        visit: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), ModelError> {
        let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        for start in (0..longest).step_by(self.setup.chunk_tokens) {
            let mut chunks = Vec::with_capacity(tokens.len());
            let mut row = 0;
            for (sequence, tokens) in tokens.iter().enumerate() {
                let left = &tokens[start.min(tokens.len())..];
                let chunk = &left[..left.len().min(self.setup.chunk_tokens)];
                if chunk.is_empty() {
                    continue;
                }
                let (first, horizon) = (self.seen[sequence], horizons[sequence]);
                self.fed[sequence].extend_from_slice(chunk);
                chunks.push(Chunk { sequence, row, tokens: chunk.len(), first, horizon });
                for token in chunk {
                    let hidden = self.model.config.hidden;
                    let to = &mut self.buffers.hidden[row * hidden..][..hidden];
                    embed(&self.model.weights.embedding, *token as usize, self.model.config.embedding_scale, to);
                    row += 1;
                }
            }
            self.pass(&chunks, row)?;
            for chunk in &chunks {
                self.seen[chunk.sequence] += chunk.tokens;
            }
            if self.layers() == self.model.config.layers {
                self.logits(&chunks, |sequence| from[sequence] + start, visit);
            }
        }
        Ok(())
    }

    /// Blocks that are run: all, unless a hook looks at nothing above one of them.
    fn layers(&self) -> usize {
        let last = self.hook.and_then(Hook::last_layer);
        last.map_or(self.model.config.layers, |last| self.model.config.layers.min(last + 1))
    }

    fn check(&self, tokens: &[&[u32]]) -> Result<(), ModelError> {
        let all = tokens.iter().zip(&self.seen).enumerate();
        all.into_iter().try_for_each(|(sequence, (tokens, seen))| self.model.check_tokens(sequence, *seen, tokens))
    }

    /// The blocks, over `rows` rows of the residual stream: on the threads from the first to the last, because to hand
    /// each small product over to them costs more than a new token's products themselves.
    fn pass(&mut self, chunks: &[Chunk], rows: usize) -> Result<(), ModelError> {
        self.turn_angles(chunks);
        self.make_way(chunks);
        let (cpu, layers) = (self.cpu, 0..self.layers());
        cpu.install(|| layers.into_iter().try_for_each(|layer| self.block(layer, chunks, rows)))
    }

    /// Cosines and sines of every row's position.
    fn turn_angles(&mut self, chunks: &[Chunk]) {
        let config = &self.model.config;
        let frequencies = |tokens| config.rope.frequencies(config.head_dim, config.max_positions, tokens);
        let factor = config.rope.attention_factor();
        let mut same = None;
        for chunk in chunks {
            let horizon = self.horizon(chunk);
            let own = (config.rope.is_dynamic() || same.is_none()).then(|| frequencies(horizon));
            if let (Some(own), Some(evictor)) = (&own, &mut self.evictor) {
                evictor.turn(chunk.sequence, horizon, own);
            }
            let frequencies = match own {
                Some(own) => same.insert(own),
                None => same.as_mut().expect("made for the first chunk"),
            };
            let rows = self.buffers.angles.chunks_exact_mut(config.head_dim).skip(chunk.row).take(chunk.tokens);
            for (position, row) in (chunk.first..).zip(rows) {
                rope::angles(frequencies, position, factor, row);
            }
        }
    }

    /// Tokens of the sequence by which RoPE turns a chunk. Behind a prompt whose keys went to positions inside the cache, those
    /// that its longest list holds.
    fn horizon(&self, chunk: &Chunk) -> usize {
        let before = self.evictor.as_ref().and_then(|evictor| evictor.turned_tokens(chunk.sequence));
        let (Some(before), config) = (before, &self.model.config) else { return chunk.horizon };
        let heads = config.kv_heads;
        let lists = |layer: usize| {
            let first = self.cache.list(layer * self.setup.batch + chunk.sequence, 0);
            &self.cache.lens()[first..first + heads]
        };
        let longest = (0..config.layers).flat_map(lists).copied().max().unwrap_or(0);
        config.rope.turned_tokens(config.max_positions, before, chunk.horizon - (chunk.first - longest))
    }

    /// A norm of the model's flavour.
    fn norm<'w>(&self, weight: &'w [f32]) -> Norm<'w> {
        self.model.config.norm(weight)
    }

    /// Logits of the rows that are wanted, handed to `visit`; `place` gives that of a chunk's first token.
    fn logits(
        &mut self,
        chunks: &[Chunk],
        place: impl Fn(usize) -> usize,
        visit: &mut dyn FnMut(usize, usize, &[f32]),
    ) {
        let (config, weights) = (&self.model.config, &self.model.weights);
        let norm = self.norm(&weights.norm);
        let (hidden, vocab) = (config.hidden, config.vocab);
        // Sequence, place and row of what is wanted.
        let mut wanted = Vec::new();
        for chunk in chunks {
            let first = match self.all_logits {
                true => 0,
                false if chunk.first + chunk.tokens == chunk.horizon => chunk.tokens - 1,
                false => continue,
            };
            let places =
                (first..chunk.tokens).map(|token| (chunk.sequence, place(chunk.sequence) + token, chunk.row + token));
            wanted.extend(places);
        }
        let Buffers { hidden: stream, normed, logits, scratch, .. } = &mut self.buffers;
        for wanted in wanted.chunks(self.setup.logit_rows()) {
            for (to, &(_, _, row)) in wanted.iter().enumerate() {
                let stride = normed.stride;
                norm.rows(self.cpu, &stream[row * hidden..][..hidden], &mut normed.data[to * stride..], stride);
            }
            normed.round(self.cpu, wanted.len(), linear::Linear::input_scale([&weights.output]));
            weights.output.apply(self.cpu, normed, wanted.len(), logits, vocab, scratch);
            for (&(sequence, place, _), logits) in wanted.iter().zip(logits.chunks_exact_mut(vocab)) {
                if let Some(cap) = config.final_softcap {
                    crate::device::simd::loops::soft_cap(self.cpu.isa(), logits, 1.0, cap);
                }
                visit(sequence, place, logits);
            }
        }
    }
}

/// The cache of a model; without a single page where it has a memory in its place.
fn cache_shape(config: &Config, setup: &Setup<'_>, memory: bool) -> CacheShape {
    CacheShape {
        batch: config.layers * setup.batch,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        format: setup.kv_format.in_pass(setup.dtype),
        max_tokens: if memory { 0 } else { setup.max_tokens },
        page_tokens: PAGE_TOKENS,
        columns: setup.columns,
    }
}

/// Most bytes in use at a time while sequences of `lens` tokens are run from the start with nothing evicted, and then
/// `steps` more tokens of each, one by one: what the arena will show, weights included.
///
/// # Errors
/// When there is no such kernel as the setup names.
pub fn bytes(
    model: &Model,
    setup: &Setup<'_>,
    lens: &[usize],
    steps: usize,
    threads: usize,
) -> Result<u64, NamedError> {
    bytes_of_calls(model, setup, &[lens], steps, threads)
}

/// As [`bytes()`], where tokens come in several calls: `calls` holds how many tokens each sequence brings to each.
///
/// # Errors
/// As [`bytes()`].
pub fn bytes_of_calls(
    model: &Model,
    setup: &Setup<'_>,
    calls: &[&[usize]],
    steps: usize,
    threads: usize,
) -> Result<u64, NamedError> {
    let moments = moments(&model.config, model.weights.bytes(), setup, calls, steps, threads)?;
    Ok(moments.iter().map(|moment| moment.values().sum()).max().unwrap_or(0))
}

/// As [`bytes()`] of a model that nobody has opened, by what its weights take; and the most of each label. Their moments
/// differ, so these need not add up to the peak.
///
/// # Errors
/// As [`bytes()`].
pub fn bytes_unopened(
    config: &Config,
    weights_bytes: u64,
    setup: &Setup<'_>,
    lens: &[usize],
    steps: usize,
    threads: usize,
) -> Result<(u64, LabelBytes), NamedError> {
    let (mut peak, mut most) = (0, LabelBytes::new());
    for moment in moments(config, weights_bytes, setup, &[lens], steps, threads)? {
        peak = moment.values().sum::<u64>().max(peak);
        for (label, bytes) in moment {
            let held = most.entry(label).or_default();
            *held = bytes.max(*held);
        }
    }
    Ok((peak, most))
}

/// What is held when the cache is empty, after each chunk of each call, and after the last step.
fn moments(
    config: &Config,
    weights_bytes: u64,
    setup: &Setup<'_>,
    calls: &[&[usize]],
    steps: usize,
    threads: usize,
) -> Result<Vec<LabelBytes>, NamedError> {
    let shape = cache_shape(config, setup, false);
    let always = [(Label::Weights, weights_bytes)].into_iter().chain(Buffers::bytes(config, setup, threads));
    let always: Vec<(Label, u64)> = always.collect();
    let attend = Attend::new(setup)?;
    let moment = |held: &[usize], counts: &[usize]| {
        let lists = held.iter().flat_map(|&len| std::iter::repeat_n(len, config.layers * config.kv_heads));
        let mut bytes = shape.bytes(lists, 0);
        for &(label, more) in always.iter().chain(&attend.most_bytes(config, setup, counts, threads)) {
            *bytes.entry(label).or_default() += more;
        }
        bytes
    };
    let mut held = vec![0; setup.batch];
    let mut moments = vec![moment(&held, &[])];
    for lens in calls {
        let longest = lens.iter().copied().max().unwrap_or(0);
        for start in (0..longest).step_by(setup.chunk_tokens) {
            let counts: Vec<usize> = lens.iter().map(|len| len.saturating_sub(start).min(setup.chunk_tokens)).collect();
            held.iter_mut().zip(&counts).for_each(|(held, count)| *held += count);
            moments.push(moment(&held, &counts));
        }
    }
    if steps > 0 {
        held.iter_mut().for_each(|held| *held += steps);
        moments.push(moment(&held, &vec![1; held.len()]));
    }
    Ok(moments)
}

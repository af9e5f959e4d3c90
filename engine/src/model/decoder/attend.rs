//! Attention of one layer, by this project's kernels over the layer's sequences of the cache.
//!
//! Sequences that bring equally many tokens are one call; others are a call each. What a call needs is kept until one of
//! another shape comes, so that decode steps take no memory.

use super::narrow::Narrow;
use super::{Buffers, Chunk, Decoder, Setup, block};
use crate::attention::rope::Rotation;
use crate::attention::{Forward, Kernel, KvRows, Outputs, Params, Shape, Workspace, WorkspaceSize, kernel};
use crate::cache::Sequences;
use crate::device::simd::loops::encode;
use crate::memory::{Arena, ArenaError, Label};
use crate::model::evictor::QueryRecorder;
use crate::model::norm::SERIAL;
use crate::model::padded::PaddedRows;
use crate::model::{Config, ModelError};
use crate::named::NamedError;
use crate::policy::sparse::Lists;
use crate::tensor::DType;
use rayon::prelude::*;

/// The kernels, and outputs and scratch of the last shape.
pub(super) struct Attend {
    /// For several queries of a sequence.
    many: Box<dyn Kernel>,
    /// For a single one.
    one: Box<dyn Kernel>,
    held: Option<(Shape, Outputs, Workspace)>,
}

/// A call's extents with room for the longest list, of `most_rows`.
pub(super) fn roomy(config: &Config, most_rows: usize, batch: usize, q_len: usize) -> Shape {
    let Config { q_heads, kv_heads, head_dim, .. } = *config;
    Shape { batch, q_heads, kv_heads, q_len, kv_len: most_rows, head_dim }
}

/// Copies outputs `[B, Hq, Lq, D]` to the rows from `first` on that the output projection reads.
pub(super) fn hand_on(outputs: &Outputs, shape: &Shape, attended: &mut PaddedRows, first: usize) {
    let Shape { batch, q_heads, q_len, head_dim, .. } = *shape;
    let o: &[f32] = bytemuck::cast_slice(outputs.o.bytes());
    let stride = attended.stride;
    let hand_on = |(row, to): (usize, &mut [f32])| {
        let (sequence, token) = (row / q_len, row % q_len);
        for (head, to) in to.chunks_exact_mut(head_dim).take(q_heads).enumerate() {
            to.copy_from_slice(&o[((sequence * q_heads + head) * q_len + token) * head_dim..][..head_dim]);
        }
    };
    let rows = &mut attended.data[first * stride..][..batch * q_len * stride];
    match rows.len() < SERIAL {
        true => rows.chunks_exact_mut(stride).enumerate().for_each(hand_on),
        false => rows.par_chunks_exact_mut(stride).enumerate().for_each(hand_on),
    }
}

/// Scale, mask and soft-cap of a layer.
pub(crate) fn params(config: &Config, layer: usize) -> Params {
    Params {
        scale: config.attention_scale,
        softcap: config.attention_softcap,
        causal: true,
        window: config.windows[layer],
    }
}

impl Attend {
    pub fn new(setup: &Setup<'_>) -> Result<Self, NamedError> {
        Ok(Attend { many: kernel(setup.kernel)?, one: kernel("decode")?, held: None })
    }

    fn kernel(&self, q_len: usize) -> &dyn Kernel {
        if q_len == 1 { &*self.one } else { &*self.many }
    }

    fn scratch(&self, config: &Config, shape: &Shape, threads: usize) -> WorkspaceSize {
        self.kernel(shape.q_len).workspace(shape, &params(config, 0), DType::F32, threads)
    }

    pub fn bytes(&self, config: &Config, shape: &Shape, threads: usize) -> [(Label, u64); 3] {
        let WorkspaceSize { scores, scratch } = self.scratch(config, shape, threads);
        let outputs = Outputs::bytes(shape, DType::F32);
        [(Label::Scores, 4 * scores as u64), (Label::Workspace, 4 * scratch as u64), (Label::Activations, outputs)]
    }

    pub fn room(
        &mut self,
        config: &Config,
        shape: &Shape,
        threads: usize,
        arena: &Arena,
    ) -> Result<(&dyn Kernel, &mut Outputs, &mut Workspace), ArenaError> {
        if self.held.as_ref().is_none_or(|(held, ..)| held != shape) {
            self.held = None;
            let workspace = self.scratch(config, shape, threads).allocate(arena)?;
            self.held = Some((*shape, Outputs::allocate(arena, shape, DType::F32)?, workspace));
        }
        let Attend { many, one, held } = self;
        let (_, outputs, workspace) = held.as_mut().expect("made above");
        Ok((if shape.q_len == 1 { &**one } else { &**many }, outputs, workspace))
    }

    /// Bytes of the largest call for sequences that bring so many tokens; none without sequences.
    pub fn most_bytes(
        &self,
        config: &Config,
        setup: &Setup<'_>,
        counts: &[usize],
        threads: usize,
    ) -> Vec<(Label, u64)> {
        let bytes = |(batch, q_len)| self.bytes(config, &roomy(config, setup.max_tokens, batch, q_len), threads);
        let calls = calls(counts).into_iter().map(bytes);
        calls.max_by_key(|call| call.iter().map(|(_, bytes)| bytes).sum::<u64>()).map(Vec::from).unwrap_or_default()
    }
}

/// Batch and queries of each call for sequences that bring so many tokens.
fn calls(counts: &[usize]) -> Vec<(usize, usize)> {
    match counts {
        [] => Vec::new(),
        [first, others @ ..] if others.iter().all(|count| count == first) => vec![(counts.len(), *first)],
        _ => counts.iter().filter(|&&count| count > 0).map(|&count| (1, count)).collect(),
    }
}

impl Decoder<'_> {
    /// Gives back what calls of another shape needed, before the cache grows for `chunks`: the two are not held
    /// together. A memory does not grow.
    pub(super) fn make_way(&mut self, chunks: &[Chunk]) {
        if self.memory.is_some() {
            return;
        }
        let batch = if self.is_one_call(chunks) { chunks.len() } else { 1 };
        let comes = roomy(&self.model.config, self.setup.max_tokens, batch, chunks[0].tokens);
        self.attend.held.take_if(|(shape, ..)| *shape != comes);
    }

    /// Whether all sequences bring equally many tokens.
    fn is_one_call(&self, chunks: &[Chunk]) -> bool {
        chunks.len() == self.setup.batch && chunks.iter().all(|chunk| chunk.tokens == chunks[0].tokens)
    }

    /// Attention of `chunks` in a layer: from the queries to the rows that the output projection reads.
    pub(super) fn attention(&mut self, layer: usize, chunks: &[Chunk]) -> Result<(), ModelError> {
        let windowed = self.model.config.windows[layer].is_some();
        let narrow = |chunk: &Chunk| windowed && self.gaps[chunk.sequence];
        let selects = self.evictor.as_ref().is_some_and(|evictor| evictor.selects());
        if self.is_one_call(chunks) && !selects && !chunks.iter().any(narrow) {
            return self.call(layer, chunks, None);
        }
        for chunk in chunks {
            match windowed && self.gaps[chunk.sequence] {
                false => self.call(layer, std::slice::from_ref(chunk), None)?,
                true => (0..chunk.tokens)
                    .try_for_each(|token| self.call(layer, std::slice::from_ref(chunk), Some(token)))?,
            }
        }
        Ok(())
    }

    /// One call for neighbouring sequences that bring equally many tokens, or for token `only` of one sequence in a
    /// windowed layer.
    fn call(&mut self, layer: usize, chunks: &[Chunk], only: Option<usize>) -> Result<(), ModelError> {
        let (config, batch, chunk) = (&self.model.config, chunks.len(), chunks[0]);
        let q_len = if only.is_some() { 1 } else { chunk.tokens };
        let (row, width) = (chunk.row + only.unwrap_or(0), config.q_width());
        self.rotate_queries(layer, chunks);
        let kv = Sequences { cache: &self.cache, first: layer * self.setup.batch + chunk.sequence, step: 1 };
        let narrow = only
            .zip(config.windows[layer])
            .map(|(token, window)| Narrow { kv, slots: self.seen_slots(&kv, &chunk, token, window) });
        let (kv_len, kv, window): (usize, &dyn KvRows, _) = match &narrow {
            Some(narrow) => (narrow.slots.iter().map(|slots| slots.len()).max().unwrap_or(0), narrow, None),
            None => (kv.max_len(batch), &kv, config.windows[layer]),
        };
        let roomy = roomy(config, self.setup.max_tokens, batch, q_len);
        let (kernel, outputs, workspace) = self.attend.room(config, &roomy, self.cpu.threads(), self.arena)?;
        let Buffers { q, rounded_q, attended, normed, .. } = &mut self.buffers;
        let own = row * width..(row + batch * q_len) * width;
        let q = match rounded_q.get_mut(own.clone()) {
            // A single token is no work for the unit that multiplies bf16.
            Some(rounded) if q_len > 1 => {
                let (isa, rows) = (self.cpu.isa(), q[own].par_chunks(width).zip(rounded.par_chunks_mut(width)));
                rows.for_each(|(row, rounded)| encode(isa, DType::Bf16, row, bytemuck::cast_slice_mut(rounded)));
                block::heads_of(DType::Bf16, bytemuck::cast_slice(rounded), batch, q_len, config.q_heads)
            }
            _ => block::heads(&q[own], batch, q_len, config.q_heads),
        };
        let (shape, params) = (Shape { kv_len, ..roomy }, Params { window, ..params(config, layer) });
        let call = Forward { shape, params, q, kv, cpu: self.cpu };
        let selector = self.evictor.as_mut().and_then(|evictor| evictor.selector(layer, chunk.sequence));
        // Several tokens at once are a context, which is read whole.
        match selector.filter(|_| q_len == 1) {
            None => kernel.forward(&call, outputs, workspace)?,
            Some(selector) => {
                let lists = Lists::of_sequence(&self.cache, layer * self.setup.batch + chunk.sequence);
                selector.step(q, lists, self.cpu);
                let selected = selector.rows(lists);
                let kv: &dyn KvRows = match &selected {
                    Some(selected) => selected,
                    None => kv,
                };
                let kv_len = selected.as_ref().map_or(kv_len, |selected| selected.max_len().min(kv_len));
                let shape = Shape { kv_len, ..shape };
                kernel.forward(&Forward { shape, kv, ..call }, outputs, workspace)?;
            }
        }
        hand_on(outputs, &roomy, attended, row);
        if let Some(repeating) = &mut self.repeating {
            return repeating.see((layer, &call), kernel, (normed, row), self.arena);
        }
        let received = match (&mut self.evictor, &mut self.recorder) {
            (Some(evictor), _) => evictor.see(layer, config.layers, chunk.sequence, &call, &outputs.lse)?,
            (None, Some(recorder)) if chunk.sequence == QueryRecorder::SEQUENCE => {
                recorder.see(layer, config.layers, &call, &outputs.lse)?
            }
            _ => None,
        };
        if let Some(received) = received {
            let skipped = narrow.map_or(Vec::new(), |narrow| narrow.slots.iter().map(|slots| slots.start).collect());
            let first = (layer * self.setup.batch + chunk.sequence) * config.kv_heads;
            received.add(&mut self.cache, first, &skipped)?;
        }
        Ok(())
    }

    /// Where keys are rotated to positions inside the cache, rotates the queries of a layer as far as each list is short of
    /// the tokens that its sequence has seen.
    fn rotate_queries(&mut self, layer: usize, chunks: &[Chunk]) {
        let config = &self.model.config;
        let (width, head_dim, group) = (config.q_width(), config.head_dim, config.q_heads / config.kv_heads);
        for chunk in chunks {
            let Some(rope) = self.evictor.as_ref().and_then(|evictor| evictor.rotates(chunk.sequence)) else {
                continue;
            };
            let rows = &mut self.buffers.q[chunk.row * width..][..chunk.tokens * width];
            for head in 0..config.q_heads {
                let list = self.cache.list(layer * self.setup.batch + chunk.sequence, head / group);
                let by = self.cache.lens()[list] as i64 - (chunk.first + chunk.tokens) as i64;
                if by == 0 {
                    continue;
                }
                let rotation = Rotation::new(rope, by);
                rows.chunks_exact_mut(width).for_each(|row| rotation.rotate(&mut row[head * head_dim..][..head_dim]));
            }
        }
    }
}

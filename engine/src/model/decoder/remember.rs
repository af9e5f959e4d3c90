//! A memory in place of the cache: keys before RoPE go to it, and attention reads what it says.
//!
//! The cache stays as it is, and empty. In each layer the tokens of a sequence go to the memory piece by piece, as many as
//! it takes together: append, attend, write. A layer's memory looks at nothing but the keys and values of that layer, so
//! pieces need not be those in which tokens go through the model, and the result does not depend on these.

use super::{Attend, Chunk, Decoder, Setup, attend, block};
use crate::attention::rope::ModelRope;
use crate::attention::{Forward, KvRows, Params, Shape};
use crate::memories::{At, Memory, MemoryShape, MemoryState, Modes};
use crate::memory::{Arena, ArenaError, Label};
use crate::model::{Config, Model, ModelError};
use crate::named::NamedError;

/// A memory at work.
pub(super) struct Remembered<'a> {
    memory: &'a dyn Memory,
    shape: MemoryShape,
    state: Box<dyn MemoryState>,
    /// KV bytes that the tokens of each sequence that came last read, by sequence of the state.
    read_bytes: Vec<u64>,
}

fn shape(config: &Config, setup: &Setup<'_>) -> MemoryShape {
    MemoryShape {
        sequences: config.layers * setup.batch,
        q_heads: config.q_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        max_tokens: setup.max_tokens,
        windowed: config.windows.iter().any(Option::is_some),
    }
}

impl<'a> Remembered<'a> {
    pub fn open(memory: &'a dyn Memory, model: &Model, setup: &Setup<'_>, arena: &Arena) -> Result<Self, ArenaError> {
        let shape = shape(&model.config, setup);
        Ok(Remembered { memory, shape, state: memory.open(&shape, arena)?, read_bytes: vec![0; shape.sequences] })
    }

    /// Bytes of keys and values.
    pub fn kv_bytes(&self) -> u64 {
        self.memory.bytes(&self.shape).get(&Label::Kv).copied().unwrap_or(0)
    }

    /// As [`Decoder::held_tokens`].
    pub fn held_rows(&self, layers: usize, batch: usize, sequence: usize) -> usize {
        (0..layers).map(|layer| self.state.held_rows(layer * batch + sequence)).sum()
    }

    /// As [`Decoder::step_kv_bytes`].
    pub fn read_bytes(&self, layers: usize, batch: usize, sequence: usize) -> u64 {
        (0..layers).map(|layer| self.read_bytes[layer * batch + sequence]).sum()
    }

    /// As [`Decoder::modes`].
    pub fn modes(&self, layers: usize, batch: usize, sequence: usize) -> Vec<Modes> {
        (0..layers).filter_map(|layer| self.state.modes(layer * batch + sequence)).collect()
    }

    pub fn fork(&mut self, layers: usize, batch: usize, from: usize, to: usize) {
        for (from, to) in (0..layers).map(|layer| (layer * batch + from, layer * batch + to)) {
            self.state.fork(from, to);
            self.read_bytes[to] = self.read_bytes[from];
        }
    }

    pub fn free(&mut self, layers: usize, batch: usize, sequence: usize) {
        for sequence in (0..layers).map(|layer| layer * batch + sequence) {
            self.state.free(sequence);
            self.read_bytes[sequence] = 0;
        }
    }
}

/// Extents of the call for a piece of `count` tokens.
fn extents(memory: &dyn Memory, shape: &MemoryShape, config: &Config, count: usize) -> Shape {
    Shape { kv_heads: memory.lists(shape), ..attend::roomy(config, memory.most_rows(shape), 1, count) }
}

/// Tokens of each piece of `tokens` tokens behind `seen` others.
fn pieces(memory: &dyn Memory, window: Option<usize>, mut seen: usize, tokens: usize) -> impl Iterator<Item = usize> {
    let end = seen + tokens;
    std::iter::from_fn(move || {
        let count = (seen < end).then(|| memory.together(seen, end - seen, window))?;
        seen += count;
        Some(count)
    })
}

/// Most bytes in use at a time while sequences bring tokens in several calls, `calls` as in [`super::bytes_of_calls`], to a
/// memory in place of the cache: what the arena will show, weights included.
///
/// # Errors
/// When there is no such kernel as the setup names.
pub fn bytes_with_memory(
    model: &Model,
    setup: &Setup<'_>,
    memory: &dyn Memory,
    calls: &[&[usize]],
    threads: usize,
) -> Result<u64, NamedError> {
    let (config, shape) = (&model.config, shape(&model.config, setup));
    let kernels = Attend::new(setup)?;
    let mut windows = config.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    let (mut seen, mut most) = (vec![0; setup.batch], 0u64);
    for tokens in calls {
        for (seen, &tokens) in seen.iter_mut().zip(*tokens) {
            for start in (0..tokens).step_by(setup.chunk_tokens) {
                let chunk = (tokens - start).min(setup.chunk_tokens);
                for count in windows.iter().flat_map(|&window| pieces(memory, window, *seen, chunk)) {
                    let call = kernels.bytes(config, &extents(memory, &shape, config, count), threads);
                    most = most.max(call.iter().map(|(_, bytes)| bytes).sum());
                }
                *seen += chunk;
            }
        }
    }
    let cache = super::cache_shape(config, setup, true).bytes([], 0);
    let held = memory.bytes(&shape).values().chain(cache.values()).sum::<u64>();
    let buffers: u64 = super::Buffers::bytes(config, setup, threads).iter().map(|(_, bytes)| bytes).sum();
    Ok(model.weights.bytes() + buffers + held + most)
}

impl Decoder<'_> {
    /// Attention of `chunks` in a layer over the memory, as [`Decoder::attention`] over the cache; keys are not turned.
    ///
    /// # Panics
    /// When there is no memory.
    pub(super) fn remember(&mut self, layer: usize, chunks: &[Chunk]) -> Result<(), ModelError> {
        let (config, batch) = (&self.model.config, self.setup.batch);
        let Remembered { memory, shape, state, read_bytes } =
            self.memory.as_mut().expect("a memory in place of the cache");
        let (q_width, kv_width, window) = (config.q_width(), config.kv_width(), config.windows[layer]);
        let params = Params { window: None, ..attend::params(config, layer) };
        for chunk in chunks {
            let frequencies = config.rope.frequencies(config.head_dim, config.max_positions, chunk.horizon);
            let rope = ModelRope::new(frequencies, config.rope.attention_factor());
            let at = At { sequence: layer * batch + chunk.sequence, window, rope: &rope, cpu: self.cpu };
            let mut row = chunk.row;
            for count in pieces(*memory, window, chunk.first, chunk.tokens) {
                let of = |rows, heads| block::heads(rows, 1, count, heads);
                let own = row * kv_width..(row + count) * kv_width;
                let (k, v) = (&self.buffers.k[own.clone()], &self.buffers.v[own]);
                state.append(&at, of(k, config.kv_heads), of(v, config.kv_heads));
                let q = of(&self.buffers.q[row * q_width..(row + count) * q_width], config.q_heads);
                let runs = state.read(&at, q);
                read_bytes[at.sequence] = runs.bytes();
                let roomy = extents(*memory, shape, config, count);
                let (kernel, outputs, workspace) = self.attend.room(config, &roomy, self.cpu.threads(), self.arena)?;
                let call = Forward {
                    shape: Shape { kv_len: runs.max_len(), ..roomy },
                    params,
                    q,
                    kv: &runs as &dyn KvRows,
                    cpu: self.cpu,
                };
                kernel.forward(&call, outputs, workspace)?;
                attend::hand_on(outputs, &roomy, &mut self.buffers.attended, row);
                state.write(&at);
                row += count;
            }
        }
        Ok(())
    }
}

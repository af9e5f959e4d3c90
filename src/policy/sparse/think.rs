//! ThinK: channels of the keys that queries hardly use are not read.
//!
//! arXiv 2407.21018, with the channels that kvpress chooses. After prefill each KV head scores its channels by `mean(q^2) mean(k^2)`: the mean
//! over the last `window` queries and the heads of the group, times the mean over the tokens; the lowest channels go, of
//! all keys of the head, for all later queries. kvpress takes them from the keys of the context alone, and leaves those of the
//! question and the answer whole; here they are left out of these too, which costs more accuracy than there. Values are whole, so of `D` channels a step that reads `c` of the keys reads
//! `(c + D) / 2D` of the bytes: never less than a half.
//!
//! What is measured, honestly: the cache keeps whole keys, and the query's dropped channels are set to zero, which gives
//! the same logits as keys without these channels. Bytes read are counted as a cache without these channels would read
//! them; times and bytes held are those of the whole cache.
//!
//! `ratio` is the fraction of channels that goes. Where it is 0, the budget says what fraction of the channels stays.

use super::{KvSelection, KvSelector, Lists, Start};
use crate::attention::Shape;
use crate::cache::CacheShape;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::named::Parameter;
use crate::policy::select::keep_best;
use crate::policy::{Policy, PolicyEntry, PolicyError, Statistic};
use crate::tensor::{DType, Tensor, TensorView};
use rayon::prelude::*;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "think",
    about: "keeps every token; each decode step reads the key channels that late queries use most",
    paper: "2407.21018",
    parameters: &[
        Parameter {
            name: "ratio",
            default: "0",
            about: "fraction of key channels dropped, with the budget 1.0; 0 leaves it to the budget",
        },
        Parameter { name: "window", default: "32", about: "last queries of the context that are looked at" },
    ],
    build: |named, _| {
        let ratio = named.number("ratio", 0.0, 0.0..=1.0)?;
        if ratio == 1.0 {
            return Err(named.wrong("ratio", "a number from 0 on and less than 1".into()).into());
        }
        let ratio = (ratio > 0.0).then_some(ratio);
        Ok(Policy::selecting(Think { ratio, window: named.count("window", 32, 1)? }))
    },
};

struct Think {
    ratio: Option<f64>,
    window: usize,
}

impl Think {
    /// Channels of `width` that stay.
    fn channels(&self, width: usize, budget_tokens: usize, context_tokens: usize) -> usize {
        match self.ratio {
            Some(ratio) => width - (width as f64 * ratio) as usize,
            None => (width * budget_tokens / context_tokens).clamp(1, width),
        }
    }
}

/// KV bytes that lists of `tokens` tokens in all have without the dropped channels.
fn pruned_bytes(cache: &CacheShape, channels: usize, tokens: usize) -> u64 {
    (tokens * (cache.format.k.row_bytes(channels) + cache.format.v.row_bytes(cache.head_dim))) as u64
}

impl KvSelection for Think {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Queries]
    }

    fn recent_queries(&self) -> usize {
        self.window
    }

    fn check(&self, budget_tokens: usize, context_tokens: usize) -> Result<(), String> {
        if self.ratio.is_some() && budget_tokens < context_tokens {
            return Err("has its ratio from the parameter; give the budget 1.0, or leave ratio out".into());
        }
        Ok(())
    }

    fn reads_all(&self, budget_tokens: usize, context_tokens: usize) -> bool {
        self.ratio.is_none() && budget_tokens >= context_tokens
    }

    fn step_bytes(&self, cache: &CacheShape, budget_tokens: usize, context_tokens: usize, tokens: usize) -> u64 {
        let channels = self.channels(cache.head_dim, budget_tokens, context_tokens);
        pruned_bytes(cache, channels, cache.lists() * tokens)
    }

    fn bytes(&self, cache: &CacheShape, (step, dtype): (&Shape, DType), _: usize) -> u64 {
        let row = (cache.lists() * cache.head_dim) as u64;
        4 * row + (8 * row).max(Tensor::bytes_of(dtype, step.q_dims()))
    }

    fn open(&self, start: &Start<'_>) -> Result<Box<dyn KvSelector>, PolicyError> {
        let (shape, arena) = (start.cache.shape(), start.arena);
        let width = shape.head_dim;
        let kept = self.channels(width, start.budget_tokens, start.cache.max_len());
        let mut channels: Buffer<u32> = arena.alloc(Label::Policy, shape.lists() * width)?;
        let mut scratch: Buffer<f32> = arena.alloc(Label::Workspace, shape.lists() * 2 * width)?;
        start.cpu.install(|| {
            let lists = channels.par_chunks_mut(width).zip(scratch.par_chunks_mut(2 * width));
            lists.enumerate().for_each(|(list, (channels, scratch))| {
                let (scores, ranks) = scratch.split_at_mut(width);
                energies(start, list, scores);
                keep_best(scores, kept, ranks, channels);
            });
        });
        drop(scratch);
        let [batch, heads, _, _] = start.q.dims();
        let q = Tensor::zeros(arena, Label::Activations, start.q.dtype(), [batch, heads, 1, width])?;
        Ok(Box::new(Channels { kept, width, group: heads / shape.kv_heads, channels, q }))
    }
}

/// `mean(q^2) mean(k^2)` of each channel of a list.
fn energies(start: &Start<'_>, list: usize, scores: &mut [f32]) {
    let shape = start.cache.shape();
    let [_, heads, queries, _] = start.q.dims();
    let (batch, group) = (list / shape.kv_heads, heads / shape.kv_heads);
    let first = list % shape.kv_heads * group;
    let mut rows = [[0.0; Shape::MAX_HEAD_DIM]; 2];
    let [row, keys] = rows.each_mut().map(|row| &mut row[..shape.head_dim]);
    let add = |sums: &mut [f32], row: &[f32]| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
    scores.fill(0.0);
    for (head, query) in (first..first + group).flat_map(|head| (0..queries).map(move |query| (head, query))) {
        start.q.read_rows(batch, head, query, row);
        add(scores, row);
    }
    let len = start.cache.lens()[list];
    (0..len).for_each(|slot| {
        start.cache.read_key(list, slot, row);
        add(keys, row);
    });
    let per = 1.0 / (group * queries) as f32 / len as f32;
    scores.iter_mut().zip(&*keys).for_each(|(score, key)| *score *= key * per);
}

/// The channels of a cache that stay, and the query of a step without the others.
struct Channels {
    kept: usize,
    width: usize,
    group: usize,
    /// `[lists, D]`: channels that stay, ascending, at the front of each list's part.
    channels: Buffer<u32>,
    /// `[B, Hq, 1, D]`.
    q: Tensor,
}

impl Channels {
    fn of(&self, list: usize) -> &[u32] {
        &self.channels[list * self.width..][..self.kept]
    }
}

impl KvSelector for Channels {
    fn copy(&self, arena: &Arena) -> Result<Box<dyn KvSelector>, ArenaError> {
        let mut channels = arena.alloc(Label::Policy, self.channels.len())?;
        channels.copy_from_slice(&self.channels);
        let q = Tensor::zeros(arena, Label::Activations, self.q.dtype(), self.q.dims())?;
        Ok(Box::new(Channels { kept: self.kept, width: self.width, group: self.group, channels, q }))
    }

    fn step(&mut self, q: TensorView<'_>, _: Lists<'_>, _: &Cpu) {
        let [batch, heads, _, width] = q.dims();
        let (dtype, mut rows) = (q.dtype(), [[0.0; Shape::MAX_HEAD_DIM]; 2]);
        let [row, read] = rows.each_mut().map(|row| &mut row[..width]);
        for index in 0..batch * heads {
            q.read_rows(index / heads, index % heads, 0, row);
            read.fill(0.0);
            self.of(index / self.group).iter().for_each(|&channel| read[channel as usize] = row[channel as usize]);
            let bytes = width * dtype.bytes();
            dtype.encode(read, &mut self.q.bytes_mut()[index * bytes..][..bytes]);
        }
    }

    fn query<'a>(&'a self, _: TensorView<'a>) -> TensorView<'a> {
        self.q.view()
    }

    fn read_bytes(&self, cache: Lists<'_>) -> u64 {
        pruned_bytes(&cache.shape(), self.kept, cache.lens().iter().sum())
    }

    fn choice(&self) -> (&'static str, Vec<Vec<i64>>) {
        let lists = self.channels.chunks(self.width);
        ("channels", lists.map(|all| all[..self.kept].iter().map(|&channel| i64::from(channel)).collect()).collect())
    }
}

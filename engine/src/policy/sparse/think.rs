//! ThinK: channels of the keys that queries hardly use are not read.
//!
//! arXiv 2407.21018, with the channels that kvpress chooses. After prefill each KV head scores its channels by `mean(q^2) mean(k^2)`: the mean
//! over the last `window` queries and the heads of the group, times the mean over the tokens; the lowest channels
//! of the head go, from all keys of the context, for all later queries. Keys that come behind the context, of the question and the answer, are
//! whole, as kvpress has it; so are values, so that of `D` channels a step that reads `c` of the context's keys reads
//! `(c + D) / 2D` of its bytes: never less than a half.
//!
//! What is measured, honestly: the cache keeps rows of `D` channels, and those that go are set to zero in the context's
//! keys, which gives the same logits as keys without them (coded keys are rounded anew). Bytes read are counted as a cache without these channels would read
//! them; times and bytes held are those of the whole cache.
//!
//! `ratio` is the fraction of channels that goes. Where it is 0, the budget says what fraction of the channels stays.

use super::{KvSelection, KvSelector, Lists, Start};
use crate::attention::Shape;
use crate::cache::{CacheShape, PagedCache};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::named::Parameter;
use crate::policy::select::keep_best;
use crate::policy::{Policy, PolicyEntry, PolicyError, Statistic};
use crate::tensor::TensorView;
use rayon::prelude::*;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "think",
    about: "keeps every token, and of the context's keys the channels that its last queries use most",
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
            // The budget is whole tokens already: to the nearest, that its fraction of the context is not rounded down again.
            None => ((width * budget_tokens + context_tokens / 2) / context_tokens).clamp(1, width),
        }
    }
}

/// KV bytes that a list of `tokens` tokens has without the dropped channels of its first `context_tokens`.
fn pruned_bytes(cache: &CacheShape, channels: usize, context_tokens: usize, tokens: usize) -> u64 {
    let key_bytes = |channels: usize| cache.format.k.row_bytes(channels);
    let keys = context_tokens * key_bytes(channels) + (tokens - context_tokens) * key_bytes(cache.head_dim);
    (keys + tokens * cache.format.v.row_bytes(cache.head_dim)) as u64
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
        cache.lists() as u64 * pruned_bytes(cache, channels, context_tokens.min(tokens), tokens)
    }

    fn bytes(&self, cache: &CacheShape, _: &Shape, _: usize) -> u64 {
        4 * (cache.lists() * cache.head_dim) as u64
    }

    fn open(&self, start: &Start<'_>) -> Result<Box<dyn KvSelector>, PolicyError> {
        let (shape, arena) = (start.cache.shape(), start.arena);
        let width = shape.head_dim;
        let kept = self.channels(width, start.budget_tokens, start.cache.max_len());
        let mut channels: Buffer<u32> = arena.alloc(Label::Policy, shape.lists() * width)?;
        start.cpu.install(|| {
            channels.par_chunks_mut(width).enumerate().for_each(|(list, channels)| {
                let mut rows = [[0.0; Shape::MAX_HEAD_DIM]; 2];
                let [scores, ranks] = rows.each_mut().map(|row| &mut row[..width]);
                energies(start, list, scores);
                keep_best(scores, kept, ranks, channels);
            });
        });
        Ok(Box::new(Channels { kept, width, context_tokens: start.cache.max_len(), channels }))
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

/// The channels of a context that stay.
struct Channels {
    kept: usize,
    width: usize,
    context_tokens: usize,
    /// `[lists, D]`: channels that stay, ascending, at the front of each list's part.
    channels: Buffer<u32>,
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
        Ok(Box::new(Channels { channels, ..*self }))
    }

    fn prune(&self, cache: &mut PagedCache, first: usize) -> Result<(), ArenaError> {
        if self.kept == self.width {
            // Coded keys would be rounded anew for nothing.
            return Ok(());
        }
        let first = cache.list(first, 0);
        let (mut key, mut pruned) = (vec![0.0; self.width], vec![0.0; self.width]);
        for list in 0..self.channels.len() / self.width {
            for slot in 0..self.context_tokens {
                cache.read_key(first + list, slot, &mut key);
                pruned.fill(0.0);
                self.of(list).iter().for_each(|&channel| pruned[channel as usize] = key[channel as usize]);
                cache.write_key(first + list, slot, &pruned)?;
            }
        }
        Ok(())
    }

    fn step(&mut self, _: TensorView<'_>, _: Lists<'_>, _: &Cpu) {}

    fn read_bytes(&self, cache: Lists<'_>) -> u64 {
        let list_bytes = |&tokens: &usize| pruned_bytes(&cache.shape(), self.kept, self.context_tokens, tokens);
        cache.lens().iter().map(list_bytes).sum()
    }

    fn choice(&self) -> (&'static str, Vec<Vec<i64>>) {
        let lists = self.channels.chunks(self.width);
        ("channels", lists.map(|all| all[..self.kept].iter().map(|&channel| i64::from(channel)).collect()).collect())
    }
}

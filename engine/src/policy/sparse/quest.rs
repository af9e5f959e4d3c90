//! Quest: each decode step reads the pages that may matter to its query.
//!
//! arXiv 2406.10774. For each page of each KV head the index holds the elementwise least `m` and greatest `M` of its
//! keys, in the cache's type where that is a plain one, as many bytes as one token; of coded keys in f32, so that in a format of few
//! bits the index may be more than what it saves. `sum_d max(q_d m_d, q_d M_d)` bounds the logit of every key of
//! the page from above; it equals `min(q, 0) . m + max(q, 0) . M`, one inner product of rows of twice the width. The
//! query heads of a group read the same pages: a page counts as much as for the head that wants it most (the maximum over
//! the group). A list reads its last page, which holds the query's own token, and the best others, as many whole pages as
//! the budget has room for. The paper reads the first two layers densely; here every layer is read by pages.

use super::{KvSelection, KvSelector, Lists, Selected, Start};
use crate::attention::Shape;
use crate::cache::{CacheShape, PAGE_TOKENS};
use crate::device::Cpu;
use crate::device::cpu::Slots;
use crate::device::simd::Isa;
use crate::device::simd::rows::{Addresses, BLOCK, RowList};
use crate::format::RowFormat;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::policy::select::keep_best;
use crate::policy::{Policy, PolicyEntry, PolicyError, Statistic};
use crate::tensor::{DType, Rows, TensorView};
use rayon::prelude::*;
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "quest",
    about: "keeps every token; each decode step reads the pages whose keys may match its query best",
    paper: "2406.10774",
    parameters: &[],
    build: |_, _| Ok(Policy::selecting(Quest)),
};

/// Query elements are padded to whole vectors.
const LANES: usize = 16;

struct Quest;

/// Bytes of a page's line in the index.
fn line_bytes(cache: &CacheShape) -> usize {
    2 * cache.head_dim * cache.dtype().bytes()
}

/// Pages that a step reads of a list of `pages` pages.
fn pages_read(budget_tokens: usize, page_tokens: usize, pages: usize) -> usize {
    (budget_tokens / page_tokens).clamp(1, pages.max(1))
}

/// Elements of a thread's scratch: the group's queries, and a block of their scores.
fn slot(group: usize, head_dim: usize) -> usize {
    group * ((2 * head_dim).next_multiple_of(LANES) + BLOCK)
}

impl KvSelection for Quest {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Queries]
    }

    fn check(&self, budget_tokens: usize, context_tokens: usize) -> Result<(), String> {
        if budget_tokens < PAGE_TOKENS.min(context_tokens) {
            return Err(format!("reads whole pages of {PAGE_TOKENS} tokens and needs at least one"));
        }
        Ok(())
    }

    fn reads_all(&self, budget_tokens: usize, context_tokens: usize) -> bool {
        budget_tokens >= context_tokens
    }

    fn step_bytes(&self, cache: &CacheShape, budget_tokens: usize, _: usize, tokens: usize) -> u64 {
        let pages = cache.pages(tokens);
        let read = pages_read(budget_tokens, cache.page_tokens, pages);
        // The last page is always among them, and may not be full.
        let read = read * cache.page_tokens - (pages * cache.page_tokens - tokens);
        cache.lists() as u64 * (read as u64 * cache.token_bytes() + (pages * line_bytes(cache)) as u64)
    }

    fn bytes(&self, cache: &CacheShape, step: &Shape, threads: usize) -> u64 {
        let pages = cache.lists() * cache.pages(cache.max_tokens);
        (pages * (line_bytes(cache) + 3 * 4) + 4 * threads * slot(step.group(), cache.head_dim)) as u64
    }

    fn open(&self, start: &Start<'_>) -> Result<Box<dyn KvSelector>, PolicyError> {
        let (shape, arena) = (start.cache.shape(), start.arena);
        let most = shape.pages(shape.max_tokens);
        let group = start.q.dims()[1] / shape.kv_heads;
        let threads = start.cpu.threads();
        let mut selector = Pages {
            budget_tokens: start.budget_tokens,
            most,
            indexed: 0,
            read: 0,
            group,
            index: arena.alloc(Label::Policy, shape.lists() * most * line_bytes(&shape))?,
            scores: arena.alloc(Label::Policy, shape.lists() * most)?,
            ranks: arena.alloc(Label::Policy, shape.lists() * most)?,
            pages: arena.alloc(Label::Policy, shape.lists() * most)?,
            scratch: arena.alloc(Label::Workspace, threads * slot(group, shape.head_dim))?,
        };
        selector.index(start.cache, start.cpu);
        Ok(Box::new(selector))
    }
}

/// The index of a cache, and the pages that were chosen last.
struct Pages {
    budget_tokens: usize,
    /// Pages of a list at most.
    most: usize,
    /// Tokens of each list that are in the index.
    indexed: usize,
    /// Pages of each list that the step reads.
    read: usize,
    group: usize,
    /// `[lists, most, 2 (least, greatest), D]` in the cache's type.
    index: Buffer<u8>,
    /// `[lists, most]` each.
    scores: Buffer<f32>,
    ranks: Buffer<f32>,
    pages: Buffer<u32>,
    scratch: Buffer<f32>,
}

impl Pages {
    /// Brings the index up to the tokens that are there.
    fn index(&mut self, cache: Lists<'_>, cpu: &Cpu) {
        let shape = cache.shape();
        let (first, tokens) = (self.indexed / shape.page_tokens, cache.max_len());
        let line = line_bytes(&shape);
        let lists = self.index.par_chunks_mut(self.most * line).enumerate();
        cpu.install(|| {
            lists.for_each(|(list, lines)| {
                for (page, line) in lines.chunks_exact_mut(line).enumerate().take(shape.pages(tokens)).skip(first) {
                    let start = page * shape.page_tokens;
                    bounds(cache, list, start..tokens.min(start + shape.page_tokens), line);
                }
            });
        });
        self.indexed = tokens;
    }
}

/// Writes the least and the greatest of some keys of a list, element by element.
fn bounds(cache: Lists<'_>, list: usize, slots: Range<usize>, line: &mut [u8]) {
    let (width, dtype) = (cache.shape().head_dim, cache.shape().dtype());
    let mut rows = [[0.0; Shape::MAX_HEAD_DIM]; 3];
    let [least, greatest, key] = rows.each_mut().map(|row| &mut row[..width]);
    least.fill(f32::INFINITY);
    greatest.fill(f32::NEG_INFINITY);
    for slot in slots {
        cache.read_key(list, slot, key);
        least.iter_mut().zip(&*key).for_each(|(least, &x)| *least = least.min(x));
        greatest.iter_mut().zip(&*key).for_each(|(greatest, &x)| *greatest = greatest.max(x));
    }
    let (to_least, to_greatest) = line.split_at_mut(width * dtype.bytes());
    dtype.encode(least, to_least);
    dtype.encode(greatest, to_greatest);
}

impl KvSelector for Pages {
    fn copy(&self, arena: &Arena) -> Result<Box<dyn KvSelector>, ArenaError> {
        let Pages { budget_tokens, most, indexed, read, group, .. } = *self;
        let lists = self.pages.len();
        let mut copy = Pages {
            budget_tokens,
            most,
            indexed,
            read,
            group,
            index: arena.alloc(Label::Policy, self.index.len())?,
            scores: arena.alloc(Label::Policy, lists)?,
            ranks: arena.alloc(Label::Policy, lists)?,
            pages: arena.alloc(Label::Policy, lists)?,
            scratch: arena.alloc(Label::Workspace, self.scratch.len())?,
        };
        copy.index.copy_from_slice(&self.index);
        copy.pages.copy_from_slice(&self.pages);
        Ok(Box::new(copy))
    }

    fn step(&mut self, q: TensorView<'_>, cache: Lists<'_>, cpu: &Cpu) {
        self.index(cache, cpu);
        let (shape, group, most) = (cache.shape(), self.group, self.most);
        let pages = shape.pages(cache.max_len());
        let read = pages_read(self.budget_tokens, shape.page_tokens, pages);
        self.read = read;
        let slots = Slots::new(&mut self.scratch, cpu.threads());
        let line = line_bytes(&shape);
        let chosen = self.pages.par_chunks_mut(most).zip(self.scores.par_chunks_mut(most));
        let lists = chosen.zip(self.ranks.par_chunks_mut(most)).zip(self.index.par_chunks(most * line));
        cpu.install(|| {
            lists.enumerate().with_max_len(1).for_each(|(list, (((chosen, scores), ranks), index))| {
                let scores = &mut scores[..pages];
                slots.with(|slot| {
                    let (batch, first) = (list / shape.kv_heads, list % shape.kv_heads * group);
                    let heads = first..first + group;
                    let (dtype, width) = (shape.dtype(), shape.head_dim);
                    Bounds { q, batch, heads, index, dtype, width, scores, slot }.score(cpu.isa());
                });
                // The last page is the query's own.
                keep_best(&scores[..pages - 1], read - 1, ranks, chosen);
                chosen[read - 1] = pages as u32 - 1;
            });
        });
    }

    fn rows<'a>(&'a self, cache: Lists<'a>) -> Option<Selected<'a>> {
        Some(Selected::new(cache, &self.pages, self.most, self.read))
    }

    fn read_bytes(&self, cache: Lists<'_>) -> u64 {
        let shape = cache.shape();
        let rows = Selected::new(cache, &self.pages, self.most, self.read);
        let lines = shape.lists() * shape.pages(cache.max_len());
        rows.tokens() as u64 * shape.token_bytes() + (lines * line_bytes(&shape)) as u64
    }

    fn choice(&self) -> (&'static str, Vec<Vec<i64>>) {
        let lists = self.pages.chunks(self.most);
        ("pages", lists.map(|pages| pages[..self.read].iter().map(|&page| i64::from(page)).collect()).collect())
    }
}

/// Scores the pages of a list.
struct Bounds<'a> {
    q: TensorView<'a>,
    batch: usize,
    /// Query heads of the list's group.
    heads: Range<usize>,
    index: &'a [u8],
    dtype: DType,
    width: usize,
    /// `[pages]`.
    scores: &'a mut [f32],
    slot: &'a mut [f32],
}

impl Bounds<'_> {
    fn score(self, isa: Isa) {
        let Bounds { q, batch, heads, index, dtype, width, scores, slot } = self;
        let stride = (2 * width).next_multiple_of(LANES);
        let (queries, blocks) = slot.split_at_mut(heads.len() * stride);
        for (head, row) in heads.zip(queries.chunks_exact_mut(stride)) {
            let (below, rest) = row.split_at_mut(width);
            let (above, padding) = rest.split_at_mut(width);
            q.read_rows(batch, head, 0, below);
            above.iter_mut().zip(&*below).for_each(|(above, x)| *above = x.max(0.0));
            below.iter_mut().for_each(|x| *x = x.min(0.0));
            padding.fill(0.0);
        }
        let line = 2 * width * dtype.bytes();
        let pages = scores.len();
        let lines = |page: usize| Rows::contiguous(dtype, &index[page * line..pages * line], [pages - page, 2 * width]);
        let mut addresses = Addresses::default();
        for (block, scores) in scores.chunks_mut(BLOCK).enumerate() {
            let first = block * BLOCK;
            let end = first + scores.len();
            let list =
                RowList::collect(&mut addresses, [2 * width, line], &lines, first..end, &lines, end..pages, &mut []);
            RowFormat::plain(dtype).dots(isa, &list, 0..scores.len(), (queries, stride), blocks);
            scores.fill(f32::NEG_INFINITY);
            for of_head in blocks.chunks_exact(BLOCK) {
                scores.iter_mut().zip(of_head).for_each(|(score, &bound)| *score = score.max(bound));
            }
        }
    }
}

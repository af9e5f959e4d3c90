//! The memory of Memorizing Transformers (arXiv 2203.08913): every past token, of which each query reads the nearest.
//!
//! A text is read in segments of `window` tokens. A query attends to its segment up to itself and to the `top` tokens before
//! the segment whose keys have the largest inner products with it, those that full attention would weigh most. Each query
//! head chooses for itself, so its list is its own. Nothing is ever given up, so the bytes grow with the text: it is what a
//! memory of few rows could do at best if it knew what will be asked for. `docs/memories.md` says where it departs from the
//! paper.

use super::{At, Memory, MemoryEntry, MemoryShape, MemoryState, Run, Runs, in_segment, largest};
use crate::device::simd::loops;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::TensorView;
use rayon::prelude::*;
use std::ops::Range;

pub(super) const ENTRY: MemoryEntry = MemoryEntry {
    name: "memorizing-transformer",
    about: "every token, of which each query reads the nearest, behind a window",
    paper: "2203.08913",
    parameters: &[
        Parameter { name: "top", default: "32", about: "tokens before the segment that a query reads" },
        Parameter { name: "window", default: "128", about: "tokens of a segment" },
    ],
    exact: "memorizing-transformer:top=1000000",
    build,
};

fn build(named: &Named) -> Result<Box<dyn Memory>, NamedError> {
    Ok(Box::new(Nearest { top: named.count("top", 32, 1)?, window: named.count("window", 128, 1)? }))
}

#[derive(Clone, Copy)]
struct Nearest {
    top: usize,
    window: usize,
}

impl Nearest {
    /// Tokens that a query chooses among and that are copied together for it; 0 of both where all fit.
    fn choices(&self, shape: &MemoryShape) -> (usize, usize) {
        if self.top < shape.max_tokens { (shape.max_tokens, self.top) } else { (0, 0) }
    }

    /// Elements of all keys, and of all values.
    fn elements(shape: &MemoryShape) -> usize {
        shape.sequences * shape.kv_heads * shape.max_tokens * shape.head_dim
    }
}

impl Memory for Nearest {
    fn segment_tokens(&self) -> Option<usize> {
        Some(self.window)
    }

    fn together(&self, seen: usize, tokens: usize, window: Option<usize>) -> usize {
        let segment = in_segment(seen, tokens, self.window);
        // Where there are more tokens before the segment than are read, every query has its own.
        match seen - seen % self.window > self.top {
            true => 1,
            false => segment.min(window.map_or(segment, |window| window.saturating_sub(seen))).max(1),
        }
    }

    fn lists(&self, shape: &MemoryShape) -> usize {
        shape.q_heads
    }

    fn most_rows(&self, shape: &MemoryShape) -> usize {
        self.top.saturating_add(self.window).min(shape.max_tokens)
    }

    fn bytes(&self, shape: &MemoryShape) -> LabelBytes {
        let (tokens, picks) = self.choices(shape);
        LabelBytes::from([
            (Label::Kv, 2 * 4 * Self::elements(shape) as u64),
            (Label::Workspace, (shape.q_heads * (2 * 4 * picks * shape.head_dim + 8 * tokens)) as u64),
        ])
    }

    fn open(&self, shape: &MemoryShape, arena: &Arena) -> Result<Box<dyn MemoryState>, ArenaError> {
        let (tokens, picks) = self.choices(shape);
        let rows = || arena.alloc(Label::Kv, Self::elements(shape));
        let picked = || arena.alloc(Label::Workspace, shape.q_heads * picks * shape.head_dim);
        Ok(Box::new(State {
            asked: *self,
            shape: *shape,
            k: rows()?,
            v: rows()?,
            seen: vec![0; shape.sequences],
            picked: [picked()?, picked()?],
            scores: arena.alloc(Label::Workspace, shape.q_heads * tokens)?,
            order: arena.alloc(Label::Workspace, shape.q_heads * tokens)?,
        }))
    }
}

/// Elements of tokens `from .. to` of the KV head of a query head.
fn rows(shape: &MemoryShape, sequence: usize, q_head: usize, from: usize, to: usize) -> Range<usize> {
    let MemoryShape { q_heads, kv_heads, max_tokens, head_dim, .. } = *shape;
    let list = (sequence * kv_heads + q_head / (q_heads / kv_heads)) * max_tokens;
    (list + from) * head_dim..(list + to) * head_dim
}

struct State {
    asked: Nearest,
    shape: MemoryShape,
    /// `[sequences, Hkv, max_tokens, D]`, keys after RoPE.
    k: Buffer<f32>,
    v: Buffer<f32>,
    seen: Vec<usize>,
    /// Keys and values of chosen tokens, `[Hq, top, D]`.
    picked: [Buffer<f32>; 2],
    /// Inner products with a query, and tokens, `[Hq, max_tokens]`.
    scores: Buffer<f32>,
    order: Buffer<u32>,
}

impl State {
    /// Copies together what each head of the query `q` reads of tokens `first .. end`.
    fn choose(&mut self, at: &At<'_>, q: TensorView<'_>, first: usize, end: usize) {
        let (shape, head_dim) = (self.shape, self.shape.head_dim);
        let ((tokens, picks), count) = (self.asked.choices(&shape), end - first);
        let [picked_k, picked_v] = &mut self.picked;
        let heads = picked_k.par_chunks_mut(picks * head_dim).zip(picked_v.par_chunks_mut(picks * head_dim));
        let heads = heads.zip(self.scores.par_chunks_mut(tokens)).zip(self.order.par_chunks_mut(tokens));
        heads.enumerate().for_each(|(head, (((keys, values), scores), order))| {
            let own = rows(&shape, at.sequence, head, first, end);
            let (k, v) = (&self.k[own.clone()], &self.v[own]);
            // The query lies in the row that its key goes to.
            let (query, _) = keys.split_at_mut(head_dim);
            q.read_rows(0, head, 0, query);
            let (scores, order) = (&mut scores[..count], &mut order[..count]);
            loops::row_dots(at.cpu.isa(), query, k, scores);
            order.iter_mut().zip(0..).for_each(|(token, index)| *token = index);
            for (pick, &token) in largest(order, picks, scores).iter().enumerate() {
                let from = token as usize * head_dim..(token as usize + 1) * head_dim;
                let to = pick * head_dim..(pick + 1) * head_dim;
                keys[to.clone()].copy_from_slice(&k[from.clone()]);
                values[to].copy_from_slice(&v[from]);
            }
        });
    }
}

impl MemoryState for State {
    fn append(&mut self, at: &At<'_>, k: TensorView<'_>, v: TensorView<'_>) {
        let (MemoryShape { kv_heads, max_tokens, head_dim, .. }, seen) = (self.shape, self.seen[at.sequence]);
        let tokens = k.dims()[2];
        for head in 0..kv_heads {
            for token in 0..tokens {
                let place = ((at.sequence * kv_heads + head) * max_tokens + seen + token) * head_dim;
                let key = &mut self.k[place..place + head_dim];
                k.read_rows(0, head, token, key);
                at.rope.rotate(key, (seen + token) as f64);
                v.read_rows(0, head, token, &mut self.v[place..place + head_dim]);
            }
        }
        self.seen[at.sequence] += tokens;
    }

    fn read(&mut self, at: &At<'_>, q: TensorView<'_>) -> Runs<'_> {
        let (end, head_dim) = (self.seen[at.sequence], self.shape.head_dim);
        let hidden = at.window.map_or(0, |window| end.saturating_sub(window));
        let segment = end - 1 - (end - 1) % self.asked.window;
        let chooses = segment.saturating_sub(hidden) > self.asked.top;
        if chooses {
            self.choose(at, q, hidden, segment);
        }
        let own = if chooses { segment } else { hidden };
        let runs = |head| {
            let rows = rows(&self.shape, at.sequence, head, own, end);
            let picked = if chooses { self.asked.top * head_dim } else { 0 };
            let picked = head * picked..(head + 1) * picked;
            let [k, v] = &self.picked;
            [Run { k: &k[picked.clone()], v: &v[picked] }, Run { k: &self.k[rows.clone()], v: &self.v[rows] }]
        };
        let looked_at = if chooses { self.shape.kv_heads * (segment - hidden) } else { 0 };
        Runs::new(head_dim, (0..self.shape.q_heads).map(runs)).chosen_by(looked_at)
    }

    fn held_rows(&self, sequence: usize) -> usize {
        self.seen[sequence] * self.shape.kv_heads
    }

    fn fork(&mut self, from: usize, to: usize) {
        let len = self.k.len() / self.shape.sequences;
        for rows in [&mut self.k, &mut self.v] {
            rows.copy_within(from * len..(from + 1) * len, to * len);
        }
        self.seen[to] = self.seen[from];
    }

    fn free(&mut self, sequence: usize) {
        self.seen[sequence] = 0;
    }
}

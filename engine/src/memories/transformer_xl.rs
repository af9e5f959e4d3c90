//! The cache of Transformer-XL (arXiv 1901.02860): the latest tokens before the segment, and the segment.
//!
//! A text is read in segments of `window` tokens. A token of a segment attends to the `slots` tokens before the segment, as
//! they were computed, and to those of the segment up to itself. Keys keep their positions. It is what a memory that
//! consolidates nothing comes to, so the memories with slots are held against it. A ring of `slots + window` tokens holds all
//! of it: what a new token overwrites is older than what its segment may see.

use super::{At, Memory, MemoryEntry, MemoryShape, MemoryState, Run, Runs, in_segment};
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::TensorView;

pub(super) const ENTRY: MemoryEntry = MemoryEntry {
    name: "transformer-xl",
    about: "the tokens of a segment and the latest before it, in a ring",
    paper: "1901.02860",
    parameters: &[
        Parameter { name: "slots", default: "1024", about: "tokens before the segment that are kept" },
        Parameter { name: "window", default: "128", about: "tokens of a segment" },
    ],
    exact: "transformer-xl:slots=1000000",
    build,
};

fn build(named: &Named) -> Result<Box<dyn Memory>, NamedError> {
    let (slots, window) = (named.count("slots", 1024, 1)?, named.count("window", 128, 1)?);
    Ok(Box::new(Recent { slots, window }))
}

#[derive(Clone, Copy)]
struct Recent {
    slots: usize,
    window: usize,
}

impl Recent {
    /// Positions that are seen from a segment which goes on at `position`, through a sliding window that ends there.
    fn oldest(&self, position: usize, window: Option<usize>) -> usize {
        let segment = position - position % self.window;
        segment.saturating_sub(self.slots).max(window.map_or(0, |window| (position + 1).saturating_sub(window)))
    }

    fn ring(&self, shape: &MemoryShape) -> usize {
        self.slots.saturating_add(self.window).min(shape.max_tokens)
    }

    /// Elements of all keys, and of all values.
    fn elements(&self, shape: &MemoryShape) -> usize {
        shape.sequences * shape.kv_heads * self.ring(shape) * shape.head_dim
    }
}

impl Memory for Recent {
    fn segment_tokens(&self) -> Option<usize> {
        Some(self.window)
    }

    fn together(&self, seen: usize, tokens: usize, window: Option<usize>) -> usize {
        let segment = in_segment(seen, tokens, self.window);
        // The last of them must still see what the first sees.
        let all = window.map_or(segment, |window| (self.oldest(seen, None) + window).saturating_sub(seen));
        segment.min(all).max(1)
    }

    fn most_rows(&self, shape: &MemoryShape) -> usize {
        self.ring(shape)
    }

    fn bytes(&self, shape: &MemoryShape) -> LabelBytes {
        LabelBytes::from([(Label::Kv, 2 * 4 * self.elements(shape) as u64)])
    }

    fn open(&self, shape: &MemoryShape, arena: &Arena) -> Result<Box<dyn MemoryState>, ArenaError> {
        let alloc = || arena.alloc(Label::Kv, self.elements(shape));
        Ok(Box::new(Ring { asked: *self, shape: *shape, k: alloc()?, v: alloc()?, seen: vec![0; shape.sequences] }))
    }
}

struct Ring {
    asked: Recent,
    shape: MemoryShape,
    /// `[sequences, Hkv, ring, D]`, keys after RoPE.
    k: Buffer<f32>,
    v: Buffer<f32>,
    seen: Vec<usize>,
}

impl MemoryState for Ring {
    fn append(&mut self, at: &At<'_>, k: TensorView<'_>, v: TensorView<'_>) {
        let (MemoryShape { kv_heads, head_dim, .. }, ring) = (self.shape, self.asked.ring(&self.shape));
        let tokens = k.dims()[2];
        for head in 0..kv_heads {
            for (token, position) in (self.seen[at.sequence]..).take(tokens).enumerate() {
                let place = ((at.sequence * kv_heads + head) * ring + position % ring) * head_dim;
                let key = &mut self.k[place..place + head_dim];
                k.read_rows(0, head, token, key);
                at.rope.rotate(key, position as f64);
                v.read_rows(0, head, token, &mut self.v[place..place + head_dim]);
            }
        }
        self.seen[at.sequence] += tokens;
    }

    fn read(&mut self, at: &At<'_>, _q: TensorView<'_>) -> Runs<'_> {
        let (MemoryShape { kv_heads, head_dim, .. }, ring) = (self.shape, self.asked.ring(&self.shape));
        let end = self.seen[at.sequence];
        let oldest = self.asked.oldest(end - 1, at.window);
        // Up to the end of the ring, and on from its beginning.
        let (first, count) = (oldest % ring, end - oldest);
        let (ahead, behind) = (count.min(ring - first), count.saturating_sub(ring - first));
        let list = |head| (at.sequence * kv_heads + head) * ring;
        let run = |from: usize, rows: usize| {
            let elements = from * head_dim..(from + rows) * head_dim;
            Run { k: &self.k[elements.clone()], v: &self.v[elements] }
        };
        Runs::new(head_dim, (0..kv_heads).map(|head| [run(list(head) + first, ahead), run(list(head), behind)]))
    }

    fn held_rows(&self, sequence: usize) -> usize {
        self.seen[sequence].min(self.asked.ring(&self.shape)) * self.shape.kv_heads
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

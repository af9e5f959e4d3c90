//! A slab: the memory of some pages that are taken from the arena together.
//!
//! Keys of pages that follow one another are neighbours, and so are their values, so that a list whose pages follow
//! one another is read, and moved, as one stream. Places in a slab are counted in tokens.

use super::pool::PageId;
use super::shapes::StoreShape;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::DType;
use std::ops::Range;

pub(super) struct Slab {
    /// `[slab_pages, page_tokens, D]` keys and as many values, behind one another.
    kv: Buffer<u8>,
    /// `[slab_pages, page_tokens]`.
    pub positions: Buffer<u32>,
    /// One for each column of the shape, `[slab_pages, page_tokens]`.
    pub columns: Vec<Buffer<f32>>,
    /// Where each token finds what its group shares, `[slab_pages, page_tokens]`; empty where tokens share nothing.
    pub groups: Buffer<PageId>,
    /// Lists that hold each page.
    pub refs: Buffer<u32>,
    /// Where keys and values begin, and the bytes of a row of each.
    parts: [(usize, usize); 2],
}

impl Slab {
    pub fn allocate(arena: &Arena, shape: &StoreShape) -> Result<Self, ArenaError> {
        let tokens = shape.slab_pages * shape.page_tokens;
        let [key_bytes, value_bytes] = [shape.format.k, shape.format.v].map(|format| format.row_bytes(shape.head_dim));
        // Plain elements must be aligned; formats with scales are read byte by byte. Values stand behind keys where that can be, because
        // keys by channel are read beyond their end.
        let element_bytes = shape.format.v.dtype().map_or(1, DType::bytes);
        let starts = match (tokens * key_bytes).is_multiple_of(element_bytes) {
            true => [0, tokens * key_bytes],
            false => [tokens * value_bytes, 0],
        };
        Ok(Slab {
            kv: arena.alloc(Label::KvSlack, tokens * shape.token_bytes() as usize)?,
            positions: arena.alloc(Label::Metadata, tokens)?,
            columns: shape.columns.iter().map(|_| arena.alloc(Label::Policy, tokens)).collect::<Result<_, _>>()?,
            groups: arena.alloc(Label::Metadata, tokens * usize::from(shape.group_tokens.is_some()))?,
            refs: arena.alloc(Label::PageTable, shape.slab_pages)?,
            parts: [(starts[0], key_bytes), (starts[1], value_bytes)],
        })
    }

    /// Raw keys (`part` 0) or values (`part` 1) of `count` tokens.
    #[inline]
    pub fn rows(&self, part: usize, token: usize, count: usize) -> &[u8] {
        &self.kv[self.row_range(part, token, count)]
    }

    /// As [`Slab::rows`], to be written.
    pub fn rows_mut(&mut self, part: usize, token: usize, count: usize) -> &mut [u8] {
        let range = self.row_range(part, token, count);
        &mut self.kv[range]
    }

    /// Moves `count` tokens with all that belongs to them; the places may overlap.
    pub fn move_within(&mut self, from: usize, to: usize, count: usize) {
        for part in 0..2 {
            let (from, to) = (self.row_range(part, from, count), self.row_range(part, to, 0).start);
            self.kv.copy_within(from, to);
        }
        self.positions.copy_within(from..from + count, to);
        self.columns.iter_mut().for_each(|column| column.copy_within(from..from + count, to));
        if !self.groups.is_empty() {
            self.groups.copy_within(from..from + count, to);
        }
    }

    /// Copies `count` tokens of another slab with all that belongs to them.
    pub fn copy_from(&mut self, source: &Slab, from: usize, to: usize, count: usize) {
        for part in 0..2 {
            self.rows_mut(part, to, count).copy_from_slice(source.rows(part, from, count));
        }
        self.positions[to..to + count].copy_from_slice(&source.positions[from..from + count]);
        for (column, source) in self.columns.iter_mut().zip(&source.columns) {
            column[to..to + count].copy_from_slice(&source[from..from + count]);
        }
        if !self.groups.is_empty() {
            self.groups[to..to + count].copy_from_slice(&source.groups[from..from + count]);
        }
    }

    #[inline]
    fn row_range(&self, part: usize, token: usize, count: usize) -> Range<usize> {
        let (first, row_bytes) = self.parts[part];
        let start = first + token * row_bytes;
        start..start + count * row_bytes
    }
}

//! Tokens that come: into full, or coded, and those that leave the newest ones meanwhile.
//!
//! What becomes of a token does not depend on how many come at once: one that is coded as it comes is rounded to the type of the pass
//! first, as one that was kept in it, and groups of tokens that share scales are the same.

use super::pool::PageId;
use super::slab::Slab;
use super::store::Store;
use super::{CacheShape, PagedCache};
use crate::format::{KvFormat, RowFormat};
use crate::tensor::{ChannelScales, RowCode, TensorView};
use half::f16;
use std::ops::Range;

/// Rows that are converted at a time, unless more share scales.
const APPEND_TOKENS: usize = 16;

/// Some tokens on their way: what is written of them.
pub(super) struct Staging {
    /// Tokens that go together.
    tokens: usize,
    /// Keys and values, `[tokens, D]` each.
    rows: [Vec<f32>; 2],
    positions: Vec<u32>,
    /// `[tokens, columns]`.
    columns: Vec<f32>,
    /// Scales and minimums of a group, `[D]` each.
    channels: [Vec<f16>; 2],
    /// Bytes of a row in full.
    bytes: Vec<u32>,
}

impl Staging {
    /// Room for tokens of a cache.
    pub fn new(shape: &CacheShape) -> Self {
        let tokens = shape.format.k.group_tokens().unwrap_or(APPEND_TOKENS);
        let row = || vec![0.0; tokens * shape.head_dim];
        let channels = || vec![f16::ZERO; shape.format.k.group_tokens().map_or(0, |_| shape.head_dim)];
        Staging {
            tokens,
            rows: [row(), row()],
            positions: vec![0; tokens],
            columns: vec![0.0; tokens * shape.columns.len()],
            channels: [channels(), channels()],
            bytes: vec![0; shape.head_dim],
        }
    }

    /// Takes tokens of the sources, `count` from `token` on, whose first has the position `position`, to the place `at`.
    fn take_new(&mut self, new: &New<'_>, at: usize, token: usize, count: usize, shape: &CacheShape) {
        let width = shape.head_dim;
        for (rows, source) in self.rows.iter_mut().zip(new.sources) {
            let rows = &mut rows[at * width..][..count * width];
            source.read_rows(new.at[0], new.at[1], new.start + token, rows);
            if shape.format.keeps_full() {
                let full = RowFormat::plain(shape.format.full.dtype);
                let bytes = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut self.bytes)[..full.row_bytes(width)];
                for row in rows.chunks_exact_mut(width) {
                    full.encode(row, width, bytes);
                    full.decode(bytes, 0, row);
                }
            }
        }
        for (index, at) in (at..at + count).enumerate() {
            let position = new.first + token + index;
            self.positions[at] = position as u32;
            let columns = self.columns[at * shape.columns.len()..].iter_mut();
            columns.zip(shape.columns).for_each(|(value, column)| *value = column.initial(position));
        }
    }

    /// Takes the token in a slot of a store.
    fn take_kept(&mut self, store: &Store, list: usize, slot: usize, at: usize) {
        let width = store.shape.head_dim;
        for (part, rows) in self.rows.iter_mut().enumerate() {
            store.rows(list, part, slot).first(1).widen(&mut rows[at * width..]);
        }
        let (slab, place) = store.at(list, slot);
        self.positions[at] = slab.positions[place];
        let columns = self.columns[at * slab.columns.len()..].iter_mut();
        columns.zip(&slab.columns).for_each(|(value, column)| *value = column[place]);
    }

    /// Puts new tokens behind a list of a store; returns the first that is not among them.
    fn put_new(
        &mut self,
        store: &mut Store,
        list: usize,
        new: &New<'_>,
        range: Range<usize>,
        shape: &CacheShape,
    ) -> usize {
        for token in range.clone().step_by(self.tokens) {
            let count = (range.end - token).min(self.tokens);
            self.take_new(new, 0, token, count, shape);
            self.put(store, list, count);
        }
        range.end
    }

    /// Puts the first `count` tokens behind a list of a store.
    fn put(&mut self, store: &mut Store, list: usize, count: usize) {
        let (format, width) = (store.shape.format, store.shape.head_dim);
        let group = store.shape.group_tokens.map(|_| {
            let [scales, minimums] = &mut self.channels;
            format.k.normalise(&mut self.rows[0][..count * width], scales, minimums);
            store.add_group(ChannelScales { scales: &*scales, minimums: &*minimums }, count)
        });
        store.grow(list, count, |slab, place, tokens| self.write(slab, place, tokens, (format, width), group));
    }

    fn write(
        &self,
        slab: &mut Slab,
        place: usize,
        tokens: Range<usize>,
        (format, width): (KvFormat, usize),
        group: Option<PageId>,
    ) {
        for (part, rows) in self.rows.iter().enumerate() {
            let rows = &rows[tokens.start * width..tokens.end * width];
            format.of(part).encode(rows, width, slab.rows_mut(part, place, tokens.len()));
        }
        slab.positions[place..place + tokens.len()].copy_from_slice(&self.positions[tokens.clone()]);
        let count = slab.columns.len();
        for (index, column) in slab.columns.iter_mut().enumerate() {
            let values = self.columns[tokens.start * count..tokens.end * count].iter().skip(index).step_by(count);
            column[place..place + tokens.len()].iter_mut().zip(values).for_each(|(to, value)| *to = *value);
        }
        if let Some(group) = group {
            slab.groups[place..place + tokens.len()].fill(group);
        }
    }
}

/// Tokens of head `at` of two tensors, from `start` on, whose first has the position `first`.
struct New<'a> {
    sources: [TensorView<'a>; 2],
    at: [usize; 2],
    start: usize,
    first: usize,
}

impl PagedCache {
    /// Appends rows of head `at` of `sources` to a list, from position `first` on; the pages are reserved.
    pub(super) fn extend(
        &mut self,
        list: usize,
        staging: &mut Staging,
        sources: [TensorView<'_>; 2],
        at: [usize; 2],
        range: Range<usize>,
        first: usize,
    ) {
        let (shape, arrival) = (self.shape, self.arrival(list, range.len(), first));
        let new = New { sources, at, start: range.start, first };
        let mut came = 0;
        if let Some([front, _]) = &mut self.full {
            came = staging.put_new(front, list, &new, 0..arrival.first, &shape);
        }
        let (leaving, coded) = (arrival.leaving, arrival.leaving + arrival.coded);
        for from in (0..coded).step_by(staging.tokens) {
            let end = coded.min(from + staging.tokens);
            let kept = leaving.clamp(from, end) - from;
            if let Some([_, window]) = &self.full {
                (0..kept).for_each(|index| staging.take_kept(window, list, from + index, index));
            }
            let count = end - from - kept;
            staging.take_new(&new, kept, came, count, &shape);
            staging.put(&mut self.coded, list, end - from);
            came += count;
        }
        if let Some([_, window]) = &mut self.full {
            window.pop(list, leaving);
            window.pass(list, arrival.coded);
            staging.put_new(window, list, &new, came..range.len(), &shape);
        }
        self.lens[list] += range.len();
    }
}

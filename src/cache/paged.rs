//! Page lists over the pool: append, share, give back, and the rows that kernels read.

use super::CacheShape;
use super::pool::{PageId, PagePool};
use crate::attention::KvRows;
use crate::format::KvFormat;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{Rows, TensorView};
use std::collections::HashMap;
use std::ops::Range;

/// Rows for which pages are looked up to find those that are uniformly strided: as many as `decode` reads at a time.
const RUN_TOKENS: usize = 256;
/// Rows that are converted at a time.
const APPEND_TOKENS: usize = 16;

/// A cache of keys and values in pages, one list of pages per (sequence, KV head).
pub struct PagedCache {
    pub(super) shape: CacheShape,
    pub(super) pool: PagePool,
    /// `[B * Hkv, pages of max_tokens]` page numbers.
    table: Buffer<PageId>,
    table_len: usize,
    pub(super) lens: Vec<usize>,
}

impl PagedCache {
    /// An empty cache.
    ///
    /// # Errors
    /// When the arena has no room for the page tables.
    ///
    /// # Panics
    /// When `page_tokens` is not in `1 ..= MOST_PAGE_TOKENS`, or a column is named twice.
    pub fn new(arena: &Arena, shape: CacheShape) -> Result<Self, ArenaError> {
        let most = super::MOST_PAGE_TOKENS;
        assert!((1..=most).contains(&shape.page_tokens), "pages of 1 to {most} tokens, not {}", shape.page_tokens);
        let named_twice = |(index, column)| shape.columns[..index].contains(column);
        assert!(!shape.columns.iter().enumerate().any(named_twice), "a column of {:?} is named twice", shape.columns);
        let table_len = shape.pages(shape.max_tokens);
        let table = arena.alloc(Label::PageTable, shape.lists() * table_len)?;
        Ok(PagedCache { shape, pool: PagePool::new(shape, arena), table, table_len, lens: vec![0; shape.lists()] })
    }

    /// What the cache holds.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Number of the list of `(sequence, KV head)`.
    pub fn list(&self, sequence: usize, head: usize) -> usize {
        sequence * self.shape.kv_heads + head
    }

    /// Numbers of the pages of all lists, one behind another, and how many each has room for.
    pub(super) fn table(&self) -> (&[PageId], usize) {
        (&self.table, self.table_len)
    }

    /// Tokens in each list, `[B * Hkv]`.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Tokens of the longest list.
    pub fn max_len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Pages in use; one that several lists share counts once.
    pub fn pages(&self) -> usize {
        self.pool.pages()
    }

    /// Most pages that were in use at any moment so far.
    pub fn most_pages(&self) -> usize {
        self.pool.most_pages()
    }

    /// Appends the tokens `range` of `k` and `v` `[B, Hkv, L, D]` to every list; a token's position is its index.
    ///
    /// # Errors
    /// When the arena has no room; the cache then holds what it held before.
    ///
    /// # Panics
    /// When a list would grow past `max_tokens`.
    pub fn append<'a>(&mut self, k: TensorView<'a>, v: TensorView<'a>, range: Range<usize>) -> Result<(), ArenaError> {
        let pages = (0..self.shape.lists()).map(|list| self.pages_to_append(list, range.len())).sum();
        self.pool.reserve(pages)?;
        (0..self.shape.batch)
            .try_for_each(|sequence| self.append_at(sequence, k, v, sequence, range.clone(), range.start))
    }

    /// Appends the tokens `range` of sequence `source_batch` of `k` and `v` `[_, Hkv, L, D]` to the lists of one
    /// sequence; a token's position is its index.
    ///
    /// # Errors
    /// When the arena has no room; the cache then holds what it held before.
    ///
    /// # Panics
    /// When a list would grow past `max_tokens`.
    pub fn append_sequence<'a>(
        &mut self,
        sequence: usize,
        k: TensorView<'a>,
        v: TensorView<'a>,
        source_batch: usize,
        range: Range<usize>,
    ) -> Result<(), ArenaError> {
        let first = range.start;
        self.append_at(sequence, k, v, source_batch, range, first)
    }

    /// As [`PagedCache::append_sequence`], where the first token's position is `first`.
    ///
    /// # Errors
    /// As [`PagedCache::append_sequence`].
    ///
    /// # Panics
    /// As [`PagedCache::append_sequence`].
    pub fn append_at<'a>(
        &mut self,
        sequence: usize,
        k: TensorView<'a>,
        v: TensorView<'a>,
        source_batch: usize,
        range: Range<usize>,
        first: usize,
    ) -> Result<(), ArenaError> {
        let lists = self.lists_of(sequence);
        let pages = lists.clone().map(|list| self.pages_to_append(list, range.len())).sum();
        self.pool.reserve(pages)?;
        for (head, list) in lists.enumerate() {
            self.extend(list, [k, v], [source_batch, head], range.clone(), first);
        }
        self.pool.tell();
        Ok(())
    }

    /// Gives the empty sequence `to` the tokens of `from`. Both share the pages, until one of them changes a page: then
    /// that one gets its own copy.
    ///
    /// # Panics
    /// When `to` is not empty.
    pub fn fork(&mut self, from: usize, to: usize) {
        for (source, target) in self.lists_of(from).zip(self.lists_of(to)) {
            assert_eq!(self.lens[target], 0, "a fork's target must be empty; free sequence {to} first");
            for index in 0..self.shape.pages(self.lens[source]) {
                let page = self.page(source, index);
                self.pool.share(page);
                self.set_page(target, index, page);
            }
            self.lens[target] = self.lens[source];
        }
    }

    /// Takes all tokens from a sequence; pages that no other sequence shares go back to the pool.
    pub fn free(&mut self, sequence: usize) {
        for list in self.lists_of(sequence) {
            self.truncate_pages(list, 0);
            self.lens[list] = 0;
        }
        self.pool.tell();
    }

    /// Gives memory that no page needs back to the arena, moving pages together where that empties a slab.
    pub fn release(&mut self) {
        let Some(spare) = self.pool.close_spare_slabs() else { return };
        // Where pages went that other lists hold too.
        let mut shared = HashMap::new();
        for list in 0..self.shape.lists() {
            let pages = self.shape.pages(self.lens[list]);
            for index in 0..pages {
                let page = self.page(list, index);
                if !spare[self.pool.slab_of(page)] {
                    continue;
                }
                let moved = shared.get(&page).copied().unwrap_or_else(|| {
                    let follow = (index..pages).take(self.shape.slab_pages());
                    let wanted = follow.take_while(|&index| spare[self.pool.slab_of(self.page(list, index))]).count();
                    let moved = self.pool.move_out(page, self.page_before(list, index), wanted);
                    if self.pool.is_shared(moved) {
                        shared.insert(page, moved);
                    }
                    moved
                });
                self.set_page(list, index, moved);
            }
        }
        self.pool.drop_slabs(&spare);
    }

    /// Position of the key in a slot: its index where it was appended from, or what [`PagedCache::rerotate`] made of
    /// it.
    ///
    /// # Panics
    /// When the slot is empty.
    pub fn position(&self, list: usize, slot: usize) -> usize {
        let (slab, place) = self.at(list, slot);
        slab.positions[place] as usize
    }

    /// The lists of a sequence.
    fn lists_of(&self, sequence: usize) -> Range<usize> {
        assert!(sequence < self.shape.batch, "sequence {sequence} of {}", self.shape.batch);
        self.list(sequence, 0)..self.list(sequence + 1, 0)
    }

    /// Pages that `count` more tokens need: new ones, and a copy of the last one if it is shared.
    fn pages_to_append(&self, list: usize, count: usize) -> usize {
        let len = self.lens[list];
        let (last, begun) = (len / self.shape.page_tokens, !len.is_multiple_of(self.shape.page_tokens));
        let copied = count > 0 && begun && self.pool.is_shared(self.page(list, last));
        self.shape.pages(len + count) - self.shape.pages(len) + usize::from(copied)
    }

    /// Appends rows of head `at` of `sources` to a list, from position `first` on; the pages are reserved.
    fn extend(&mut self, list: usize, sources: [TensorView<'_>; 2], at: [usize; 2], range: Range<usize>, first: usize) {
        let (page_tokens, width) = (self.shape.page_tokens, self.shape.head_dim);
        let end = self.lens[list] + range.len();
        assert!(end <= self.shape.max_tokens, "a list of {end} tokens, but max_tokens is {}", self.shape.max_tokens);
        let mut rows = vec![0.0; APPEND_TOKENS * width];
        let mut next = range.start;
        while next < range.end {
            let (index, token) = (self.lens[list] / page_tokens, self.lens[list] % page_tokens);
            let page = if token == 0 {
                let page = self.pool.take(self.page_before(list, index), (range.end - next).div_ceil(page_tokens));
                self.set_page(list, index, page);
                page
            } else {
                self.own(list, index)
            };
            let count = (page_tokens - token).min(range.end - next).min(APPEND_TOKENS);
            let (slab, place) = self.pool.at_mut(page, token);
            for (part, source) in sources.into_iter().enumerate() {
                source.read_rows(at[0], at[1], next, &mut rows[..count * width]);
                let format = self.shape.format.of(part);
                format.encode(&rows[..count * width], width, slab.rows_mut(part, place, count));
            }
            let from = first + (next - range.start);
            let positions = slab.positions[place..place + count].iter_mut();
            positions.zip(from..).for_each(|(position, next)| *position = next as u32);
            for (column, values) in self.shape.columns.iter().zip(&mut slab.columns) {
                let values = values[place..place + count].iter_mut();
                values.zip(from..).for_each(|(value, position)| *value = column.initial(position));
            }
            self.pool.count(count, 0);
            self.lens[list] += count;
            next += count;
        }
    }

    /// Makes a page of a list its own, so that it may be written: the page itself, or a copy of a shared one. The page
    /// for the copy is reserved.
    pub(super) fn own(&mut self, list: usize, index: usize) -> PageId {
        let page = self.page(list, index);
        if !self.pool.is_shared(page) {
            return page;
        }
        let tokens = self.page_len(list, index);
        let copy = self.pool.take(self.page_before(list, index), 1);
        self.pool.copy((page, 0), (copy, 0), tokens);
        self.pool.count(tokens, 0);
        self.pool.give(page, tokens);
        self.set_page(list, index, copy);
        copy
    }

    /// Makes pages of a list its own.
    ///
    /// # Errors
    /// When the arena has no room for copies; nothing is changed then.
    pub(super) fn own_pages(&mut self, list: usize, pages: Range<usize>) -> Result<(), ArenaError> {
        let shared = pages.clone().filter(|&index| self.pool.is_shared(self.page(list, index))).count();
        if shared > 0 {
            self.pool.reserve(shared)?;
            pages.for_each(|index| _ = self.own(list, index));
        }
        Ok(())
    }

    /// Gives the pages of a list from `first` on back.
    pub(super) fn truncate_pages(&mut self, list: usize, first: usize) {
        for index in first..self.shape.pages(self.lens[list]) {
            self.pool.give(self.page(list, index), self.page_len(list, index));
        }
    }

    /// Tokens in a page of a list.
    fn page_len(&self, list: usize, index: usize) -> usize {
        (self.lens[list] - index * self.shape.page_tokens).min(self.shape.page_tokens)
    }

    pub(super) fn page(&self, list: usize, index: usize) -> PageId {
        self.table[list * self.table_len + index]
    }

    fn page_before(&self, list: usize, index: usize) -> Option<PageId> {
        index.checked_sub(1).map(|before| self.page(list, before))
    }

    fn set_page(&mut self, list: usize, index: usize, page: PageId) {
        self.table[list * self.table_len + index] = page;
    }

    /// Where the slots from `start` on lie: page, place in it, and how many slots, at most `most`, lie behind one
    /// another.
    #[inline]
    pub(super) fn run(&self, list: usize, start: usize, most: usize) -> (PageId, usize, usize) {
        let page_tokens = self.shape.page_tokens;
        let token = start % page_tokens;
        let from = list * self.table_len + start / page_tokens;
        let pages = &self.table[from..][..(token + most).div_ceil(page_tokens)];
        let followers = pages.windows(2).take_while(|pair| self.pool.follows(pair[0], pair[1])).count();
        (pages[0], token, ((1 + followers) * page_tokens - token).min(most))
    }

    /// The rows of a list from `start` on, as many as lie behind one another.
    #[inline]
    fn rows(&self, list: usize, part: usize, start: usize) -> Rows<'_> {
        let (page, token, count) = self.run(list, start, (self.lens[list] - start).min(RUN_TOKENS));
        let (slab, place) = self.pool.at(page, token);
        let (bytes, format, width) = (slab.rows(part, place, count), self.shape.format.of(part), self.shape.head_dim);
        format.rows(bytes, [count, width])
    }
}

impl KvRows for PagedCache {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.lens[self.list(batch, head)]
    }

    fn format(&self) -> KvFormat {
        self.shape.format
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(self.list(batch, head), 0, start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(self.list(batch, head), 1, start)
    }
}

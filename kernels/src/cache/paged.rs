//! The cache: lists of tokens in up to three stores, one behind another.
//!
//! The slots of a list are those of its first tokens in full, of its coded tokens, and of its newest tokens in full. Without tokens in
//! full there is one store. A token goes from one store to the next once, when it leaves the newest; eviction takes tokens out of each
//! where they are, and brings none back.

use super::arrival::Staging;
use super::shapes::Shapes;
use super::store::Store;
use super::{CacheShape, Column};
use crate::attention::KvRows;
use crate::format::{Full, KvFormat};
use crate::memory::{Arena, ArenaError};
use crate::tensor::{Rows, TensorView};
use std::ops::Range;

/// A cache of keys and values in pages, one list of pages per (sequence, KV head).
pub struct PagedCache {
    pub(super) shape: CacheShape,
    /// Tokens in the cache's format.
    pub(super) coded: Store,
    /// The first and the newest tokens, where they are kept in full.
    pub(super) full: Option<[Store; 2]>,
    /// Tokens of each list in all stores.
    pub(super) lens: Vec<usize>,
}

/// Where tokens that come to a list go: what is not named here, to the newest.
pub(super) struct Arrival {
    /// To the first tokens.
    pub first: usize,
    /// Of the newest tokens so far, how many leave these.
    pub leaving: usize,
    /// Coded as they come: so many come at once that these are not among the newest any more.
    pub coded: usize,
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
        let Shapes { coded, full } = Shapes::new(&shape);
        let full = match full {
            Some([first, recent]) => Some([Store::new(arena, first)?, Store::new(arena, recent)?]),
            None => None,
        };
        Ok(PagedCache { shape, coded: Store::new(arena, coded)?, full, lens: vec![0; shape.lists()] })
    }

    /// What the cache holds.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Number of the list of `(sequence, KV head)`.
    pub fn list(&self, sequence: usize, head: usize) -> usize {
        sequence * self.shape.kv_heads + head
    }

    /// Tokens in each list, `[B * Hkv]`.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Tokens of the longest list.
    pub fn max_len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Pages of coded tokens in use; one that several lists share counts once.
    pub fn pages(&self) -> usize {
        self.coded.pool.pages()
    }

    /// Most pages of coded tokens that were in use at any moment so far.
    pub fn most_pages(&self) -> usize {
        self.coded.pool.most_pages()
    }

    /// KV bytes of pages in use, with tokens in full and what groups share.
    pub fn kv_bytes(&self) -> u64 {
        self.stores().map(Store::bytes).sum()
    }

    /// Most KV bytes of pages that were in use at any moment so far, of each store.
    pub fn most_kv_bytes(&self) -> u64 {
        self.stores().map(Store::most_bytes).sum()
    }

    /// KV bytes of the pages of a list, as if it shared none.
    pub fn list_kv_bytes(&self, list: usize) -> u64 {
        self.stores().map(|store| store.list_bytes(list)).sum()
    }

    /// Bytes of the tokens of a list, without what is empty of its pages: what a step reads.
    pub fn held_bytes(&self, list: usize) -> u64 {
        self.stores().map(|store| store.held_bytes(list)).sum()
    }

    /// Appends the tokens `range` of `k` and `v` `[B, Hkv, L, D]` to every list; a token's position is its index.
    ///
    /// # Errors
    /// When the arena has no room; the cache then holds what it held before.
    ///
    /// # Panics
    /// When a list would grow past `max_tokens`.
    pub fn append<'a>(&mut self, k: TensorView<'a>, v: TensorView<'a>, range: Range<usize>) -> Result<(), ArenaError> {
        self.reserve(0..self.shape.lists(), range.len(), range.start)?;
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
        self.reserve(lists.clone(), range.len(), first)?;
        let mut staging = Staging::new(&self.shape);
        for (head, list) in lists.enumerate() {
            let end = self.lens[list] + range.len();
            assert!(
                end <= self.shape.max_tokens,
                "a list of {end} tokens, but max_tokens is {}",
                self.shape.max_tokens
            );
            self.extend(list, &mut staging, [k, v], [source_batch, head], range.clone(), first);
        }
        self.stores_mut().for_each(Store::tell);
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
            self.stores_mut().for_each(|store| store.fork(source, target));
            self.lens[target] = self.lens[source];
        }
    }

    /// Takes all tokens from a sequence; pages that no other sequence shares go back to the pool.
    pub fn free(&mut self, sequence: usize) {
        for list in self.lists_of(sequence) {
            self.stores_mut().for_each(|store| store.free(list));
            self.lens[list] = 0;
        }
        self.stores_mut().for_each(Store::tell);
    }

    /// Gives memory that no page needs back to the arena, moving pages together where that empties a slab.
    pub fn release(&mut self) {
        self.coded.release(0);
        for part in 0..2 {
            let lists = self.holders(part, |_| false);
            self.full.iter_mut().for_each(|full| full[part].release(lists));
        }
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

    /// The stores in the order of slots.
    fn stores(&self) -> impl Iterator<Item = &Store> {
        let [first, recent] = self.full.as_ref().map_or([None, None], |full| full.each_ref().map(Some));
        first.into_iter().chain([&self.coded]).chain(recent)
    }

    /// As `stores`, to be changed.
    pub(super) fn stores_mut(&mut self) -> impl Iterator<Item = &mut Store> {
        let [first, recent] = self.full.as_mut().map_or([None, None], |full| full.each_mut().map(Some));
        first.into_iter().chain([&mut self.coded]).chain(recent)
    }

    /// The store of a slot, and the slot in it.
    #[inline]
    pub(super) fn store(&self, list: usize, slot: usize) -> (&Store, usize) {
        let Some([first, recent]) = &self.full else { return (&self.coded, slot) };
        let coded = first.lens[list];
        let newest = coded + self.coded.lens[list];
        match slot {
            _ if slot < coded => (first, slot),
            _ if slot < newest => (&self.coded, slot - coded),
            _ => (recent, slot - newest),
        }
    }

    /// As `store`, to be changed.
    pub(super) fn store_mut(&mut self, list: usize, slot: usize) -> (&mut Store, usize) {
        let Some([first, recent]) = &mut self.full else { return (&mut self.coded, slot) };
        let coded = first.lens[list];
        let newest = coded + self.coded.lens[list];
        match slot {
            _ if slot < coded => (first, slot),
            _ if slot < newest => (&mut self.coded, slot - coded),
            _ => (recent, slot - newest),
        }
    }

    /// Where `count` tokens from position `position` on go.
    pub(super) fn arrival(&self, list: usize, count: usize, position: usize) -> Arrival {
        let Some([front, window]) = &self.full else {
            return Arrival { first: 0, leaving: 0, coded: count };
        };
        let (KvFormat { full: Full { first, recent, .. }, .. }, held) = (self.shape.format, window.lens[list]);
        let begins = self.coded.lens[list] + held == 0;
        let room = first.saturating_sub(position).min(first - front.lens[list]);
        let to_first = if begins { count.min(room) } else { 0 };
        let rest = count - to_first;
        let group = self.shape.format.group_tokens();
        let coded = (held + rest).saturating_sub(recent) / group * group;
        let leaving = coded.min(held);
        Arrival { first: to_first, leaving, coded: coded - leaving }
    }

    /// Makes sure that there is room for `count` more tokens from `position` on of each of the lists.
    fn reserve(&mut self, lists: Range<usize>, count: usize, position: usize) -> Result<(), ArenaError> {
        let arrivals: Vec<Arrival> = lists.clone().map(|list| self.arrival(list, count, position)).collect();
        let coded = arrivals.iter().map(|arrival| arrival.leaving + arrival.coded);
        self.coded.reserve(lists.clone().zip(coded))?;
        for part in 0..2 {
            let held = self.holders(part, |list| {
                let arrival = lists.contains(&list).then(|| &arrivals[list - lists.start]);
                arrival.is_some_and(|arrival| if part == 0 { arrival.first > 0 } else { count > arrival.first })
            });
            self.full.as_mut().map_or(Ok(()), |full| full[part].hold(held))?;
        }
        Ok(())
    }

    /// Lists that have room for first tokens (`part` 0) or newest ones, and those that `comes` says will. Newest tokens have room as long as
    /// a list goes on behind the first, so that how much is held does not depend on how tokens come.
    fn holders(&self, part: usize, comes: impl Fn(usize) -> bool) -> usize {
        let Some([first, recent]) = &self.full else { return 0 };
        let holds = |list: usize| match part {
            0 => first.lens[list] > 0,
            _ => self.coded.lens[list] + recent.lens[list] > 0,
        };
        (0..self.lens.len()).filter(|&list| holds(list) || comes(list)).count()
    }

    /// The rows of a list from `start` on, as many as lie behind one another.
    #[inline]
    fn rows(&self, list: usize, part: usize, start: usize) -> Rows<'_> {
        let (store, slot) = self.store(list, start);
        store.rows(list, part, slot)
    }
}

impl KvRows for PagedCache {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.lens[self.list(batch, head)]
    }

    fn before(&self, batch: usize, head: usize, behind: usize) -> usize {
        let (list, len) = (self.list(batch, head), self.len(batch, head));
        let Some(last) = len.checked_sub(1).map(|last| self.origin(list, last)) else { return 0 };
        // Most often no token is missing, or none of the latest.
        match len.checked_sub(behind + 1) {
            _ if behind > last => 0,
            Some(slot) if self.origin(list, slot) == last - behind => slot + 1,
            _ => self.first_slot(list, last - behind + 1),
        }
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

    fn token_bias(&self, batch: usize, head: usize, start: usize) -> Option<&[f32]> {
        let column = self.shape.columns.iter().position(|&kept| kept == Column::Bias)?;
        let list = self.list(batch, head);
        let (store, slot) = self.store(list, start);
        Some(store.column(list, slot, column))
    }
}

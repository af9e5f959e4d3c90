//! A store: page lists over one pool, one for each (sequence, KV head), all of tokens that are kept in one way.
//!
//! A list begins somewhere in its first page: tokens leave a window at the front without those behind them being moved. Tokens whose
//! keys share scales each know their group ([`Slab::groups`]); a group is a page of one token in a pool of its own, whose key is the
//! scales and whose value is the minimums, and lives as long as a place in a page names it.

use super::pool::{PageId, PagePool};
use super::shapes::StoreShape;
use super::slab::Slab;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{ChannelScales, Rows};
use std::collections::HashMap;
use std::ops::Range;

/// Rows for which pages are looked up to find those that are uniformly strided: as many as `decode` reads at a time.
const RUN_TOKENS: usize = 256;

/// Page lists over a pool.
pub(super) struct Store {
    pub shape: StoreShape,
    pub pool: PagePool,
    /// What groups of tokens share.
    groups: Option<PagePool>,
    /// `[lists, table_len]` page numbers.
    table: Buffer<PageId>,
    /// Tokens of each list.
    pub lens: Vec<usize>,
    /// Places of each list's first page in front of its first token.
    skips: Vec<usize>,
}

impl Store {
    pub fn new(arena: &Arena, shape: StoreShape) -> Result<Self, ArenaError> {
        let table = arena.alloc(Label::PageTable, shape.lists * shape.table_len)?;
        let groups = shape.groups().map(|groups| PagePool::new(groups, arena));
        let (lens, skips) = (vec![0; shape.lists], vec![0; shape.lists]);
        Ok(Store { shape, pool: PagePool::new(shape, arena), groups, table, lens, skips })
    }

    /// Bytes of pages in use and of groups.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(PagePool::pages)
    }

    /// The most that [`Store::bytes`] was.
    pub fn most_bytes(&self) -> u64 {
        self.bytes_of(PagePool::most_pages)
    }

    fn bytes_of(&self, pages: impl Fn(&PagePool) -> usize) -> u64 {
        let groups = self.groups.as_ref().zip(self.shape.groups());
        pages(&self.pool) as u64 * self.shape.page_bytes()
            + groups.map_or(0, |(pool, shape)| pages(pool) as u64 * shape.page_bytes())
    }

    /// Bytes of the pages of a list, and of the groups of its tokens.
    pub fn list_bytes(&self, list: usize) -> u64 {
        self.pages(list) as u64 * self.shape.page_bytes() + self.group_bytes(list)
    }

    /// Bytes of the tokens of a list and of their groups.
    pub fn held_bytes(&self, list: usize) -> u64 {
        self.lens[list] as u64 * self.shape.token_bytes() + self.group_bytes(list)
    }

    /// Bytes of the groups of a list's tokens.
    fn group_bytes(&self, list: usize) -> u64 {
        let Some(shape) = self.shape.groups() else { return 0 };
        let mut groups: Vec<PageId> = (0..self.lens[list]).map(|slot| self.group(list, slot)).collect();
        groups.dedup();
        groups.len() as u64 * shape.page_bytes()
    }

    /// Makes sure that pages and groups of so many more tokens of each list are free.
    pub fn reserve(&mut self, lists: impl Iterator<Item = (usize, usize)>) -> Result<(), ArenaError> {
        let (mut pages, mut groups) = (0, 0);
        for (list, count) in lists {
            pages += self.pages_to_append(list, count);
            groups += self.shape.group_tokens.map_or(0, |group| count / group);
        }
        self.pool.reserve(pages)?;
        self.groups.as_mut().map_or(Ok(()), |pool| pool.reserve(groups))
    }

    /// Makes sure that so many lists have room for all that they may ever hold.
    pub fn hold(&mut self, lists: usize) -> Result<(), ArenaError> {
        self.pool.reserve((lists * self.shape.table_len).saturating_sub(self.pool.pages()))
    }

    /// Pages that `count` more tokens need: new ones, and a copy of the last one if it is shared.
    fn pages_to_append(&self, list: usize, count: usize) -> usize {
        let end = self.skips[list] + self.lens[list];
        let (last, begun) =
            (end / self.shape.page_tokens, self.lens[list] > 0 && !end.is_multiple_of(self.shape.page_tokens));
        let copied = count > 0 && begun && self.pool.is_shared(self.page(list, last));
        let pages = if count == 0 { self.pages(list) } else { self.shape.pages(end + count) };
        pages - self.pages(list) + usize::from(copied)
    }

    /// Puts `count` tokens behind a list, whose pages are reserved: `write` is given where they go, and which of them.
    pub fn grow(&mut self, list: usize, count: usize, mut write: impl FnMut(&mut Slab, usize, Range<usize>)) {
        let page_tokens = self.shape.page_tokens;
        let mut written = 0;
        while written < count {
            let end = self.skips[list] + self.lens[list];
            let (index, token) = (end / page_tokens, end % page_tokens);
            let page = if token == 0 || self.lens[list] == 0 {
                let page =
                    self.pool.take(self.page_before(list, index), (token + count - written).div_ceil(page_tokens));
                self.set_page(list, index, page);
                page
            } else {
                self.own(list, index)
            };
            let some = (page_tokens - token).min(count - written);
            let (slab, place) = self.pool.at_mut(page, token);
            write(slab, place, written..written + some);
            self.pool.count(some, 0);
            self.lens[list] += some;
            written += some;
        }
    }

    /// A group for tokens to come, `count` of them, with its scales and minimums. It is reserved.
    pub fn add_group(&mut self, channels: ChannelScales<'_>, count: usize) -> PageId {
        let pool = self.groups.as_mut().expect(GROUPED);
        let group = pool.take(None, 1);
        pool.share(group, count - 1);
        let (slab, place) = pool.at_mut(group, 0);
        for (part, numbers) in [channels.scales, channels.minimums].into_iter().enumerate() {
            slab.rows_mut(part, place, 1).copy_from_slice(bytemuck::cast_slice(numbers));
        }
        pool.count(1, 0);
        group
    }

    /// Tells the arena what became of the memory.
    pub fn tell(&mut self) {
        self.pool.tell();
        self.groups.iter_mut().for_each(PagePool::tell);
    }

    /// Takes the first `count` tokens from a list. A page of its own for what stays of a shared one is reserved.
    pub fn pop(&mut self, list: usize, count: usize) {
        let (page_tokens, skip, len) = (self.shape.page_tokens, self.skips[list], self.lens[list]);
        let (pages, next) = (self.pages(list), skip + count);
        let whole = if count == len { pages } else { next / page_tokens };
        if whole < pages && count > 0 && !next.is_multiple_of(page_tokens) {
            self.own(list, whole);
            self.pool.count(0, next - skip.max(whole * page_tokens));
        }
        (0..whole).for_each(|index| self.give(list, index));
        let row = list * self.shape.table_len;
        self.table.copy_within(row + whole..row + pages, row);
        (self.skips[list], self.lens[list]) = (next % page_tokens, len - count);
    }

    /// Tokens that were never here would have been the first of an empty list, which begins so much later.
    pub fn pass(&mut self, list: usize, count: usize) {
        debug_assert!(count == 0 || self.lens[list] == 0);
        self.skips[list] = (self.skips[list] + count) % self.shape.page_tokens;
    }

    /// Gives an empty list the tokens of another; both share the pages.
    pub fn fork(&mut self, from: usize, to: usize) {
        for index in 0..self.pages(from) {
            let page = self.page(from, index);
            self.pool.share(page, 1);
            self.set_page(to, index, page);
        }
        (self.lens[to], self.skips[to]) = (self.lens[from], self.skips[from]);
    }

    /// Takes all tokens from a list.
    pub fn free(&mut self, list: usize) {
        self.truncate_pages(list, 0);
        (self.lens[list], self.skips[list]) = (0, 0);
    }

    /// Makes sure that pages of which [`Store::retain`] needs a copy are free.
    pub fn reserve_to_retain(
        &mut self,
        list: usize,
        keep: impl Iterator<Item = Range<usize>>,
    ) -> Result<(), ArenaError> {
        let (kept, still) = kept(keep);
        if kept == self.lens[list] {
            return Ok(());
        }
        let pages = self.written(list, kept, still);
        let shared = pages.filter(|&index| self.pool.is_shared(self.page(list, index))).count();
        self.pool.reserve(shared)
    }

    /// Keeps the tokens in these slots, ascending ranges of those there are; room for copies is reserved.
    pub fn retain(&mut self, list: usize, keep: impl Iterator<Item = Range<usize>> + Clone) {
        let (page_tokens, len, skip) = (self.shape.page_tokens, self.lens[list], self.skips[list]);
        let (kept, still) = kept(keep.clone());
        if kept == len {
            return;
        }
        let written = self.written(list, kept, still);
        let pages = written.end;
        written.for_each(|index| _ = self.own(list, index));
        let moving = keep.filter(|range| range.start > still);
        let of_group = |slot: usize| self.groups.as_ref().map(|_| self.group(list, slot));
        let named: Vec<PageId> = moving.clone().flatten().filter_map(of_group).collect();
        let emptied: Vec<PageId> =
            (still..len.min((pages * page_tokens).saturating_sub(skip))).filter_map(of_group).collect();
        if let Some(groups) = &mut self.groups {
            // Places that are written, or empty now, name their groups no more; those of the tokens that move are named twice first.
            named.into_iter().for_each(|group| groups.share(group, 1));
            emptied.into_iter().for_each(|group| groups.give(group, 1));
        }
        let mut to = still;
        for range in moving {
            let mut from = range.start;
            while from < range.end {
                let (source, source_token, count) = self.run(list, from, range.end - from);
                let (target, target_token, count) = self.run(list, to, count);
                self.pool.copy((source, source_token), (target, target_token), count);
                (from, to) = (from + count, to + count);
            }
        }
        self.truncate_pages(list, pages);
        // Of the pages that stay, only the last one may hold fewer tokens than before.
        self.pool.count(0, (skip + len).min(pages * page_tokens).saturating_sub(skip + kept));
        self.lens[list] = kept;
        if kept == 0 {
            self.skips[list] = 0;
        }
    }

    /// Pages of a list that change when `kept` tokens stay, of which the first `still` stay where they are.
    fn written(&self, list: usize, kept: usize, still: usize) -> Range<usize> {
        let skip = self.skips[list];
        let pages = if kept == 0 { 0 } else { self.shape.pages(skip + kept) };
        ((skip + still) / self.shape.page_tokens).min(pages)..pages
    }

    /// Gives memory that nothing needs back to the arena, moving pages together where that empties a slab; room for `lists` full
    /// lists stays.
    pub fn release(&mut self, lists: usize) {
        if let Some(spare) = self.pool.close_spare_slabs(lists * self.shape.table_len) {
            self.leave(&spare);
            self.pool.drop_slabs(&spare);
        }
        let Some(spare) = self.groups.as_mut().and_then(|pool| pool.close_spare_slabs(0)) else { return };
        let pool = self.groups.as_mut().expect(GROUPED);
        let mut moved = HashMap::new();
        for (list, &len) in self.lens.iter().enumerate() {
            for at in self.skips[list]..self.skips[list] + len {
                let page = self.table[list * self.shape.table_len + at / self.shape.page_tokens];
                let (slab, place) = self.pool.at_mut(page, at % self.shape.page_tokens);
                let group = &mut slab.groups[place];
                // The places of a shared page are met more than once.
                if spare[pool.slab_of(*group)] {
                    *group = *moved.entry(*group).or_insert_with(|| pool.move_out(*group, None, 1));
                }
            }
        }
        pool.drop_slabs(&spare);
    }

    /// Moves pages out of closed slabs.
    fn leave(&mut self, spare: &[bool]) {
        // Where pages went that other lists hold too.
        let mut shared = HashMap::new();
        for list in 0..self.shape.lists {
            let pages = self.pages(list);
            for index in 0..pages {
                let page = self.page(list, index);
                if !spare[self.pool.slab_of(page)] {
                    continue;
                }
                let moved = shared.get(&page).copied().unwrap_or_else(|| {
                    let follow = (index..pages).take(self.shape.slab_pages);
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
    }

    /// Makes a page of a list its own, so that it may be written: the page itself, or a copy of a shared one. The page
    /// for the copy is reserved.
    fn own(&mut self, list: usize, index: usize) -> PageId {
        let page = self.page(list, index);
        if !self.pool.is_shared(page) {
            return page;
        }
        let tokens = self.page_tokens(list, index);
        let copy = self.pool.take(self.page_before(list, index), 1);
        self.pool.copy((page, 0), (copy, 0), tokens.end);
        self.pool.count(tokens.len(), 0);
        if let Some(groups) = &mut self.groups {
            let (slab, place) = self.pool.at(copy, 0);
            slab.groups[place..][tokens.clone()].iter().for_each(|&group| groups.share(group, 1));
        }
        self.pool.give(page, tokens.len());
        self.set_page(list, index, copy);
        copy
    }

    /// Makes the pages of slots `first .. end` the list's own.
    ///
    /// # Errors
    /// When the arena has no room for copies; nothing is changed then.
    pub fn own_slots(&mut self, list: usize, slots: Range<usize>) -> Result<(), ArenaError> {
        let skip = self.skips[list];
        let pages = (skip + slots.start) / self.shape.page_tokens..self.shape.pages(skip + slots.end);
        let shared = pages.clone().filter(|&index| self.pool.is_shared(self.page(list, index))).count();
        if shared > 0 {
            self.pool.reserve(shared)?;
            pages.for_each(|index| _ = self.own(list, index));
            self.tell();
        }
        Ok(())
    }

    /// A list holds its page of this index no more.
    fn give(&mut self, list: usize, index: usize) {
        let (page, tokens) = (self.page(list, index), self.page_tokens(list, index));
        if let (Some(groups), false) = (&mut self.groups, self.pool.is_shared(page)) {
            let (slab, place) = self.pool.at(page, 0);
            slab.groups[place..][tokens.clone()].iter().for_each(|&group| groups.give(group, 1));
        }
        self.pool.give(page, tokens.len());
    }

    /// Gives the pages of a list from `first` on back.
    fn truncate_pages(&mut self, list: usize, first: usize) {
        (first..self.pages(list)).for_each(|index| self.give(list, index));
    }

    /// Pages of a list.
    pub fn pages(&self, list: usize) -> usize {
        if self.lens[list] == 0 { 0 } else { self.shape.pages(self.skips[list] + self.lens[list]) }
    }

    /// The tokens that a page of a list holds of it.
    fn page_tokens(&self, list: usize, index: usize) -> Range<usize> {
        let (first, skip) = (index * self.shape.page_tokens, self.skips[list]);
        skip.saturating_sub(first)..(skip + self.lens[list] - first).min(self.shape.page_tokens)
    }

    pub fn page(&self, list: usize, index: usize) -> PageId {
        self.table[list * self.shape.table_len + index]
    }

    fn page_before(&self, list: usize, index: usize) -> Option<PageId> {
        index.checked_sub(1).map(|before| self.page(list, before))
    }

    fn set_page(&mut self, list: usize, index: usize, page: PageId) {
        self.table[list * self.shape.table_len + index] = page;
    }

    /// Where the slots from `start` on lie: page, place in it, and how many slots, at most `most`, lie behind one
    /// another.
    #[inline]
    pub fn run(&self, list: usize, start: usize, most: usize) -> (PageId, usize, usize) {
        let (page_tokens, start) = (self.shape.page_tokens, self.skips[list] + start);
        let token = start % page_tokens;
        let from = list * self.shape.table_len + start / page_tokens;
        let pages = &self.table[from..][..(token + most).div_ceil(page_tokens)];
        let followers = pages.windows(2).take_while(|pair| self.pool.follows(pair[0], pair[1])).count();
        (pages[0], token, ((1 + followers) * page_tokens - token).min(most))
    }

    /// The rows of a list from `start` on, as many as lie behind one another and share what they share.
    #[inline]
    pub fn rows(&self, list: usize, part: usize, start: usize) -> Rows<'_> {
        let (page, token, count) = self.run(list, start, (self.lens[list] - start).min(RUN_TOKENS));
        let (slab, place) = self.pool.at(page, token);
        let (format, width) = (self.shape.format.of(part), self.shape.head_dim);
        let rows = |count| format.rows(slab.rows(part, place, count), [count, width]);
        let Some(groups) = self.groups.as_ref().filter(|_| part == 0) else { return rows(count) };
        let group = slab.groups[place];
        let count = slab.groups[place..place + count].iter().take_while(|&&other| other == group).count();
        let (slab, place) = groups.at(group, 0);
        let shared = |part| bytemuck::cast_slice(slab.rows(part, place, 1));
        rows(count).with_channels(ChannelScales { scales: shared(0), minimums: shared(1) })
    }

    /// What the tokens of a list from `start` on carry in a column, as many as lie behind one another.
    pub fn column(&self, list: usize, start: usize, column: usize) -> &[f32] {
        let (page, token, count) = self.run(list, start, (self.lens[list] - start).min(RUN_TOKENS));
        let (slab, place) = self.pool.at(page, token);
        &slab.columns[column][place..place + count]
    }

    /// The slab and the place in it of a slot.
    pub fn at(&self, list: usize, slot: usize) -> (&Slab, usize) {
        let (page, token, _) = self.run(list, slot, 1);
        self.pool.at(page, token)
    }

    /// As [`Store::at`], in a page of the list's own.
    pub fn at_mut(&mut self, list: usize, slot: usize) -> Result<(&mut Slab, usize), ArenaError> {
        self.own_slots(list, slot..slot + 1)?;
        let (page, token, _) = self.run(list, slot, 1);
        Ok(self.pool.at_mut(page, token))
    }

    /// What the token in a slot shares.
    fn group(&self, list: usize, slot: usize) -> PageId {
        let (slab, place) = self.at(list, slot);
        slab.groups[place]
    }
}

/// Tokens in ranges of slots, and how many of the first slots are among them without a gap.
fn kept(keep: impl Iterator<Item = Range<usize>>) -> (usize, usize) {
    keep.fold((0, 0), |(kept, still), range| (kept + range.len(), if range.start == still { range.end } else { still }))
}

const GROUPED: &str = "a store whose tokens share scales";

//! The pool of pages behind a cache: slabs from the arena, who holds each page, and the way back.
//!
//! Reading is quickest where pages of a list follow one another in memory. So a list is given the page behind its last
//! one if that is free, and begins elsewhere in the middle of the longest run of free pages, as far from other lists'
//! ends as can be: lists that grow in turn do not meet soon.

use super::shapes::StoreShape;
use super::slab::Slab;
use crate::memory::{Arena, ArenaError, Label};
use std::cmp::Reverse;

/// Number of a page: its slab above `shift` bits, its index in the slab in these.
pub(super) type PageId = u32;

const WORD_BITS: usize = u64::BITS as usize;

/// Slabs of pages.
pub(super) struct PagePool {
    shape: StoreShape,
    arena: Arena,
    /// `None` where the memory was given back; such a number is used again first.
    slabs: Vec<Option<Slab>>,
    /// Bits of a page's index in its slab: enough for the pages of a slab and for a word of the mask.
    shift: u32,
    /// A bit for each free page, by number; no bits where there is no page.
    free: Vec<u64>,
    pages: usize,
    most_pages: usize,
    tokens: usize,
    /// Bytes under `kv` and `kv_fragmentation` that the arena was told of.
    told: [u64; 2],
}

impl PagePool {
    pub fn new(shape: StoreShape, arena: &Arena) -> Self {
        let arena = arena.clone();
        let shift = shape.slab_pages.next_power_of_two().max(WORD_BITS).ilog2();
        let (slabs, free) = (Vec::new(), Vec::new());
        PagePool { shape, arena, slabs, shift, free, pages: 0, most_pages: 0, tokens: 0, told: [0; 2] }
    }

    /// Pages in use.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Most pages that were in use at a time.
    pub fn most_pages(&self) -> usize {
        self.most_pages
    }

    /// Makes sure that `pages` pages are free.
    pub fn reserve(&mut self, pages: usize) -> Result<(), ArenaError> {
        let mut free: usize = self.held_slabs() * self.shape.slab_pages - self.pages;
        while free < pages {
            let slab = Slab::allocate(&self.arena, &self.shape)?;
            let index = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
            if index == self.slabs.len() {
                self.slabs.push(None);
                self.free.resize(self.slabs.len() * self.words(), 0);
            }
            self.slabs[index] = Some(slab);
            let mut left = self.shape.slab_pages;
            for word in self.mask_mut(index) {
                let bits = left.min(WORD_BITS);
                *word = u64::MAX.checked_shr((WORD_BITS - bits) as u32).unwrap_or(0);
                left -= bits;
            }
            free += self.shape.slab_pages;
        }
        Ok(())
    }

    /// Takes a page that was reserved for a list whose last page is `after` and that will take `wanted` pages at once.
    pub fn take(&mut self, after: Option<PageId>, wanted: usize) -> PageId {
        let page = self.choose(after, wanted);
        *self.refs_mut(page) = 1;
        self.pages += 1;
        self.most_pages = self.most_pages.max(self.pages);
        page
    }

    /// `count` more hold the page.
    pub fn share(&mut self, page: PageId, count: usize) {
        *self.refs_mut(page) += count as u32;
    }

    /// Whether several lists hold the page.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.refs(page) > 1
    }

    /// A list with `tokens` tokens in the page holds it no more.
    pub fn give(&mut self, page: PageId, tokens: usize) {
        let refs = self.refs_mut(page);
        *refs -= 1;
        if *refs == 0 {
            self.free[page as usize / WORD_BITS] |= 1 << (page as usize % WORD_BITS);
            self.pages -= 1;
            self.tokens -= tokens;
        }
    }

    /// Counts tokens that were written to a page, or that left one which is still in use.
    pub fn count(&mut self, added: usize, gone: usize) {
        self.tokens = self.tokens + added - gone;
    }

    /// Tells the arena how many bytes are tokens and how many are empty places of pages.
    pub fn tell(&mut self) {
        let kv = self.tokens as u64 * self.shape.token_bytes();
        let now = [kv, self.pages as u64 * self.shape.page_bytes() - kv];
        let labels = [Label::Kv, Label::KvFragmentation];
        for (label, (told, now)) in labels.into_iter().zip(self.told.into_iter().zip(now)) {
            self.arena.relabel(label, Label::KvSlack, told.saturating_sub(now));
        }
        for (label, (told, now)) in labels.into_iter().zip(self.told.into_iter().zip(now)) {
            self.arena.relabel(Label::KvSlack, label, now.saturating_sub(told));
        }
        self.told = now;
    }

    /// The emptiest slabs, if the others have room for all pages in use and for at least `pages`; no page is taken from them any
    /// more.
    pub fn close_spare_slabs(&mut self, pages: usize) -> Option<Vec<bool>> {
        let needed = self.pages.max(pages).div_ceil(self.shape.slab_pages);
        if self.held_slabs() <= needed {
            return None;
        }
        let mut live: Vec<usize> = (0..self.slabs.len()).filter(|&slab| self.slabs[slab].is_some()).collect();
        live.sort_by_key(|&slab| self.mask(slab).iter().map(|word| word.count_ones()).sum::<u32>());
        let mut spare = vec![false; self.slabs.len()];
        for slab in live.drain(needed..) {
            spare[slab] = true;
            self.mask_mut(slab).fill(0);
        }
        Some(spare)
    }

    /// Moves a page out of a closed slab; the arguments after it as of [`PagePool::take`]. Returns its new number.
    pub fn move_out(&mut self, page: PageId, after: Option<PageId>, wanted: usize) -> PageId {
        let target = self.choose(after, wanted);
        self.copy((page, 0), (target, 0), self.shape.page_tokens);
        *self.refs_mut(target) = self.refs(page);
        target
    }

    /// Gives the memory of slabs back to the arena.
    pub fn drop_slabs(&mut self, spare: &[bool]) {
        self.slabs.iter_mut().zip(spare).filter(|(_, spare)| **spare).for_each(|(slab, _)| *slab = None);
    }

    /// Whether the keys, and the values, of the second page lie just behind those of the first.
    #[inline]
    pub fn follows(&self, first: PageId, second: PageId) -> bool {
        second == first + 1 && self.slab_of(first) == self.slab_of(second)
    }

    /// The slab of a page.
    #[inline]
    pub fn slab_of(&self, page: PageId) -> usize {
        (page >> self.shift) as usize
    }

    /// Lists that hold a page.
    pub fn refs(&self, page: PageId) -> u32 {
        self.slab(page).refs[self.index(page)]
    }

    /// The slab of a page and the place in it of a token of the page.
    #[inline]
    pub fn at(&self, page: PageId, token: usize) -> (&Slab, usize) {
        (self.slab(page), self.place(page, token))
    }

    /// As [`PagePool::at`], to be written.
    pub fn at_mut(&mut self, page: PageId, token: usize) -> (&mut Slab, usize) {
        let place = self.place(page, token);
        (self.slab_mut(page), place)
    }

    /// Copies `count` tokens, from pages that follow one another to pages that do; the places may overlap.
    pub fn copy(&mut self, from: (PageId, usize), to: (PageId, usize), count: usize) {
        let (source, target) = (self.slab_of(from.0), self.slab_of(to.0));
        let (from, to) = (self.place(from.0, from.1), self.place(to.0, to.1));
        if source == target {
            self.slabs[target].as_mut().expect(HELD).move_within(from, to, count);
        } else {
            let [source, target] = self.slabs.get_disjoint_mut([source, target]).expect("two slabs that are there");
            target.as_mut().expect(HELD).copy_from(source.as_ref().expect(HELD), from, to, count);
        }
    }

    /// A free page, which is free no more.
    fn choose(&mut self, after: Option<PageId>, wanted: usize) -> PageId {
        let is_free = |page: PageId| self.free[page as usize / WORD_BITS] >> (page as usize % WORD_BITS) & 1 == 1;
        let page = match after {
            Some(after) if self.follows(after, after + 1) && is_free(after + 1) => after + 1,
            _ => self.start(wanted),
        };
        self.free[page as usize / WORD_BITS] &= !(1 << (page as usize % WORD_BITS));
        page
    }

    /// Where a list that finds no room behind its last page goes on.
    fn start(&self, wanted: usize) -> PageId {
        let runs = (0..self.slabs.len()).map(|slab| (longest_run(self.mask(slab)), slab));
        let ((first, len), slab) = runs.max_by_key(|&((_, len), slab)| (len, Reverse(slab))).unwrap_or_default();
        assert!(len > 0, "pages are reserved before they are taken");
        // In front of a run that begins with its slab there is no list that grows.
        let skipped = if first == 0 { 0 } else { (len / 2).min(len.saturating_sub(wanted)) };
        ((slab << self.shift) + first + skipped) as PageId
    }

    fn held_slabs(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    #[inline]
    fn place(&self, page: PageId, token: usize) -> usize {
        self.index(page) * self.shape.page_tokens + token
    }

    #[inline]
    fn slab(&self, page: PageId) -> &Slab {
        self.slabs[self.slab_of(page)].as_ref().expect(HELD)
    }

    fn slab_mut(&mut self, page: PageId) -> &mut Slab {
        let slab = self.slab_of(page);
        self.slabs[slab].as_mut().expect(HELD)
    }

    fn refs_mut(&mut self, page: PageId) -> &mut u32 {
        let index = self.index(page);
        &mut self.slab_mut(page).refs[index]
    }

    /// Index of a page in its slab.
    #[inline]
    fn index(&self, page: PageId) -> usize {
        page as usize & ((1 << self.shift) - 1)
    }

    /// Words of the mask of a slab.
    fn words(&self) -> usize {
        (1 << self.shift) / WORD_BITS
    }

    fn mask(&self, slab: usize) -> &[u64] {
        &self.free[slab * self.words()..][..self.words()]
    }

    fn mask_mut(&mut self, slab: usize) -> &mut [u64] {
        let words = self.words();
        &mut self.free[slab * words..][..words]
    }
}

const HELD: &str = "a page in use lies in a slab that is there";

/// First bit and length of the longest run of set bits, the first of several.
fn longest_run(words: &[u64]) -> (usize, usize) {
    let bits = words.len() * WORD_BITS;
    // The next bit from `from` on in words that are turned over by `flip`.
    let next = |from: usize, flip: u64| {
        let (mut word, mut mask) = (from / WORD_BITS, u64::MAX << (from % WORD_BITS));
        while word < words.len() && (words[word] ^ flip) & mask == 0 {
            (word, mask) = (word + 1, u64::MAX);
        }
        words.get(word).map_or(bits, |found| word * WORD_BITS + ((found ^ flip) & mask).trailing_zeros() as usize)
    };
    let (mut best, mut end) = ((0, 0), 0);
    while end < bits {
        let first = next(end, 0);
        end = next(first, u64::MAX);
        if end - first > best.1 {
            best = (first, end - first);
        }
    }
    best
}

impl Drop for PagePool {
    fn drop(&mut self) {
        // Buffers give their bytes back under the label they were taken with.
        (self.pages, self.tokens) = (0, 0);
        self.tell();
    }
}

#[cfg(test)]
mod tests {
    use super::{WORD_BITS, longest_run};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_longest_run_is_the_first_of_its_length(
            words in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), (0u32..64).prop_map(|at| u64::MAX << at)], 1..4),
        ) {
            let bits = words.len() * WORD_BITS;
            let run = |first: usize| (first..bits).take_while(|bit| words[bit / 64] >> (bit % 64) & 1 == 1).count();
            let longest = (0..bits).map(run).max().unwrap();
            let first = (0..bits).find(|&first| run(first) == longest).unwrap();
            prop_assert_eq!(longest_run(&words), (first, longest));
        }
    }
}

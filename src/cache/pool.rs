//! The pool of pages behind a cache: slabs from the arena, who holds each page, and the way back.
//!
//! Reading is quickest where pages of a list follow one another in memory. So a list is given the page behind its last
//! one if that is free, and begins elsewhere in the middle of the longest run of free pages, as far from other lists'
//! ends as can be: lists that grow in turn do not meet soon.

use super::slab::Slab;
use super::{CacheShape, SLAB_PAGES};
use crate::memory::{Arena, ArenaError, Label};
use std::cmp::Reverse;

/// Number of a page: `slab * SLAB_PAGES + place`, also where slabs have fewer pages.
pub(super) type PageId = u32;

/// The slab of a page.
#[inline]
pub(super) fn slab_of(page: PageId) -> usize {
    page as usize / SLAB_PAGES
}

/// Slabs of pages.
pub(super) struct PagePool {
    shape: CacheShape,
    arena: Arena,
    /// `None` where the memory was given back; such a number is used again first.
    slabs: Vec<Option<Slab>>,
    /// For each slab a bit for each free page; no bits where there is no slab.
    free: Vec<u64>,
    pages: usize,
    most_pages: usize,
    tokens: usize,
    /// Bytes under `kv` and `kv_fragmentation` that the arena was told of.
    told: [u64; 2],
}

impl PagePool {
    pub fn new(shape: CacheShape, arena: &Arena) -> Self {
        let arena = arena.clone();
        PagePool { shape, arena, slabs: Vec::new(), free: Vec::new(), pages: 0, most_pages: 0, tokens: 0, told: [0; 2] }
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
        let mut free: usize = self.held_slabs() * self.shape.slab_pages() - self.pages;
        while free < pages {
            let slab = Slab::allocate(&self.arena, &self.shape)?;
            let index = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
            if index == self.slabs.len() {
                self.slabs.push(None);
                self.free.push(0);
            }
            self.slabs[index] = Some(slab);
            self.free[index] = u64::MAX >> (SLAB_PAGES - self.shape.slab_pages());
            free += self.shape.slab_pages();
        }
        Ok(())
    }

    /// Takes a page that was reserved for a list whose last page is `after` and that will take `wanted` pages at once.
    pub fn take(&mut self, after: Option<PageId>, wanted: usize) -> PageId {
        let page = self.choose(after, wanted);
        self.slab_mut(page).refs[page as usize % SLAB_PAGES] = 1;
        self.pages += 1;
        self.most_pages = self.most_pages.max(self.pages);
        page
    }

    /// One more list holds the page.
    pub fn share(&mut self, page: PageId) {
        self.slab_mut(page).refs[page as usize % SLAB_PAGES] += 1;
    }

    /// Whether several lists hold the page.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.slab(page).refs[page as usize % SLAB_PAGES] > 1
    }

    /// A list with `tokens` tokens in the page holds it no more.
    pub fn give(&mut self, page: PageId, tokens: usize) {
        let refs = &mut self.slab_mut(page).refs[page as usize % SLAB_PAGES];
        *refs -= 1;
        if *refs == 0 {
            self.free[slab_of(page)] |= 1 << (page as usize % SLAB_PAGES);
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

    /// The emptiest slabs, if the others have room for all pages in use; no page is taken from them any more.
    pub fn close_spare_slabs(&mut self) -> Option<Vec<bool>> {
        let needed = self.pages.div_ceil(self.shape.slab_pages());
        if self.held_slabs() == needed {
            return None;
        }
        let mut live: Vec<usize> = (0..self.slabs.len()).filter(|&slab| self.slabs[slab].is_some()).collect();
        live.sort_by_key(|&slab| self.free[slab].count_ones());
        let mut spare = vec![false; self.slabs.len()];
        for slab in live.drain(needed..) {
            spare[slab] = true;
            self.free[slab] = 0;
        }
        Some(spare)
    }

    /// Moves a page out of a closed slab; the arguments after it as of [`PagePool::take`]. Returns its new number.
    pub fn move_out(&mut self, page: PageId, after: Option<PageId>, wanted: usize) -> PageId {
        let target = self.choose(after, wanted);
        self.copy((page, 0), (target, 0), self.shape.page_tokens);
        let refs = self.slab(page).refs[page as usize % SLAB_PAGES];
        self.slab_mut(target).refs[target as usize % SLAB_PAGES] = refs;
        target
    }

    /// Gives the memory of slabs back to the arena.
    pub fn drop_slabs(&mut self, spare: &[bool]) {
        self.slabs.iter_mut().zip(spare).filter(|(_, spare)| **spare).for_each(|(slab, _)| *slab = None);
    }

    /// Whether the keys, and the values, of the second page lie just behind those of the first.
    #[inline]
    pub fn follows(first: PageId, second: PageId) -> bool {
        second == first + 1 && slab_of(first) == slab_of(second)
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
        let (source, target) = (slab_of(from.0), slab_of(to.0));
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
        let is_free = |page: PageId| self.free[slab_of(page)] >> (page as usize % SLAB_PAGES) & 1 == 1;
        let next = after.map(|after| (after, after + 1)).filter(|&(after, next)| Self::follows(after, next));
        let page = match next {
            Some((_, next)) if is_free(next) => next,
            _ => self.start(wanted),
        };
        self.free[slab_of(page)] &= !(1 << (page as usize % SLAB_PAGES));
        page
    }

    /// Where a list that finds no room behind its last page goes on.
    fn start(&self, wanted: usize) -> PageId {
        let runs = self.free.iter().enumerate().filter(|(_, mask)| **mask != 0);
        let runs = runs.map(|(slab, &mask)| (longest_run(mask), slab));
        let ((first, len), slab) = runs
            .max_by_key(|&((_, len), slab)| (len, Reverse(slab)))
            .expect("pages are reserved before they are taken");
        // In front of a run that begins with its slab there is no list that grows.
        let skipped = if first == 0 { 0 } else { (len / 2).min(len.saturating_sub(wanted)) };
        (slab * SLAB_PAGES + first + skipped) as PageId
    }

    fn held_slabs(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    #[inline]
    fn place(&self, page: PageId, token: usize) -> usize {
        page as usize % SLAB_PAGES * self.shape.page_tokens + token
    }

    #[inline]
    fn slab(&self, page: PageId) -> &Slab {
        self.slabs[slab_of(page)].as_ref().expect(HELD)
    }

    fn slab_mut(&mut self, page: PageId) -> &mut Slab {
        self.slabs[slab_of(page)].as_mut().expect(HELD)
    }
}

const HELD: &str = "a page in use lies in a slab that is there";

/// First page and length of the longest run of set bits.
fn longest_run(mut mask: u64) -> (usize, usize) {
    let mut best = (0, 0);
    while mask != 0 {
        let first = mask.trailing_zeros();
        let len = (mask >> first).trailing_ones();
        if len as usize > best.1 {
            best = (first as usize, len as usize);
        }
        mask &= !(u64::MAX >> (u64::BITS - len) << first);
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
    use super::longest_run;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_longest_run_is_the_first_of_its_length(mask: u64, sparse: u64) {
            for mask in [mask, mask & sparse, mask | sparse, u64::MAX << (mask % 64), u64::MAX >> (mask % 64)] {
                let run = |first: usize| (first..64).take_while(|bit| mask >> bit & 1 == 1).count();
                let longest = (0..64).map(run).max().unwrap();
                let first = (0..64).find(|&first| run(first) == longest).unwrap();
                prop_assert_eq!(longest_run(mask), if longest == 0 { (0, 0) } else { (first, longest) });
            }
        }
    }
}

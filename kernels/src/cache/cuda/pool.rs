//! Pages of a cache in a GPU's memory: who has which, in slabs that come and go.
//!
//! As the pool of the CPU's cache: slabs are taken as they are needed, and given back when other slabs have room for all
//! pages in use. Pages are numbered alike, but a GPU does not care whether a list's pages follow one another, so the
//! lowest free page is taken.

use crate::cache::CacheShape;
use crate::device::cuda::{CudaError, Device, Slabs};
use crate::memory::{Arena, Label};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// Number of a page: its slab above [`Pool::shift`] bits, its index in the slab in these.
pub(super) type PageId = u32;

/// Slabs of pages.
pub(super) struct Pool {
    shape: CacheShape,
    arena: Arena,
    slabs: Slabs,
    free: BTreeSet<PageId>,
    pages: usize,
    most_pages: usize,
    /// Bytes under `kv` and `kv_fragmentation` that the arena was told of.
    told: [u64; 2],
}

/// Slabs that all lists need when they are full.
pub(super) fn most_slabs(shape: &CacheShape) -> usize {
    (shape.lists() * shape.pages(shape.max_tokens)).div_ceil(shape.slab_pages())
}

impl Pool {
    /// A pool without slabs.
    ///
    /// # Errors
    /// When there is no room for the table of slabs.
    pub fn new(device: &Device, arena: &Arena, shape: CacheShape) -> Result<Self, CudaError> {
        let slab_bytes = shape.slab_pages() as u64 * shape.page_bytes();
        let slabs = Slabs::new(device, arena, most_slabs(&shape), slab_bytes)?;
        Ok(Pool { shape, arena: arena.clone(), slabs, free: BTreeSet::new(), pages: 0, most_pages: 0, told: [0; 2] })
    }

    /// Where the pages lie.
    pub fn slabs(&self) -> &Slabs {
        &self.slabs
    }

    /// Bits of a page's index in its slab.
    pub fn shift(&self) -> u32 {
        self.shape.slab_pages().next_power_of_two().ilog2()
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
    ///
    /// # Errors
    /// When the arena or the GPU has no room; what was taken by then stays taken.
    pub fn reserve(&mut self, device: &Device, pages: usize) -> Result<(), CudaError> {
        while self.free.len() < pages {
            let slab = self.slabs.add(device, &self.arena, Label::KvSlack)?;
            self.free.extend(self.pages_of(slab));
        }
        Ok(())
    }

    /// Takes a page that was reserved.
    pub fn take(&mut self) -> PageId {
        self.pages += 1;
        self.most_pages = self.most_pages.max(self.pages);
        self.free.pop_first().expect("pages are reserved before they are taken")
    }

    /// A page is used no more.
    pub fn give(&mut self, page: PageId) {
        self.pages -= 1;
        self.free.insert(page);
    }

    /// Tells the arena what the bytes are now, of `tokens` tokens.
    pub fn tell(&mut self, tokens: usize) {
        let kv = tokens as u64 * self.shape.token_bytes();
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

    /// Slabs that are there.
    pub fn slabs_held(&self) -> usize {
        (0..self.slabs.count()).filter(|&slab| self.slabs.get(slab).is_some()).count()
    }

    /// Closes the slabs with fewest pages in use but for `needed` others, which have room for all: no page is taken from
    /// them any more, and those `in_use` get places elsewhere. [`Pool::drop_slabs`] gives them back when the pages have moved.
    pub fn spare(&mut self, needed: usize, in_use: impl IntoIterator<Item = PageId>) -> Spare {
        let mut held: Vec<usize> = (0..self.slabs.count()).filter(|&slab| self.slabs.get(slab).is_some()).collect();
        held.sort_by_key(|&slab| (self.free.range(self.pages_of(slab)).count(), slab));
        let slabs = held.split_off(needed.min(held.len()));
        for &slab in &slabs {
            let pages = self.pages_of(slab);
            self.free.retain(|page| !pages.contains(page));
        }
        let shift = self.shift();
        let moving: Vec<PageId> =
            in_use.into_iter().filter(|page| slabs.contains(&((page >> shift) as usize))).collect();
        let moves = moving.into_iter().map(|page| (page, self.free.pop_first().expect("the others have room")));
        Spare { moves: moves.collect(), slabs }
    }

    /// Gives slabs back.
    ///
    /// # Errors
    /// As [`Slabs::remove`].
    pub fn drop_slabs(&mut self, spare: &Spare) -> Result<(), CudaError> {
        spare.slabs.iter().try_for_each(|&slab| self.slabs.remove(slab))
    }

    /// Copies keys (`part` 0) or values (`part` 1) of the first tokens of a page to the host.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the copy fails.
    ///
    /// # Panics
    /// When there is no such page.
    pub fn read(&self, page: PageId, part: usize, target: &mut [u8]) -> Result<(), CudaError> {
        let slab = self.slabs.get((page >> self.shift()) as usize).expect("a page in use lies in a slab that is there");
        let CacheShape { page_tokens, head_dim, format, .. } = self.shape;
        let [key_page, value_page] = [format.k, format.v].map(|format| page_tokens * format.row_bytes(head_dim));
        let index = (page & ((1 << self.shift()) - 1)) as usize;
        let from = [index * key_page, self.shape.slab_pages() * key_page + index * value_page][part];
        slab.read_from(from, target)
    }

    /// Numbers of a slab's pages.
    fn pages_of(&self, slab: usize) -> Range<PageId> {
        let first = (slab as PageId) << self.shift();
        first..first + self.shape.slab_pages() as PageId
    }
}

/// Slabs to give back, and where the pages that are still in use in them go.
pub(super) struct Spare {
    slabs: Vec<usize>,
    pub moves: HashMap<PageId, PageId>,
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Slabs give their bytes back under the label they were taken with.
        self.pages = 0;
        self.tell(0);
    }
}

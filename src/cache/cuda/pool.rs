//! Pages of a cache in a GPU's memory: slabs from plain allocations, and which pages are free.
//!
//! As [`crate::cache`]'s own pool, slabs are taken as they are needed and given back when other slabs have room for all
//! pages in use. Kernels know one place where page 0 begins, so a page's number is its distance from there in pages: each
//! slab begins at a whole number of pages from the first one, for which it is one page of keys longer than its pages.
//! In a slab the keys of all its pages come first, then their values. A GPU does not care whether a list's pages follow
//! one another, so the lowest free page is taken.

use crate::cache::CacheShape;
use crate::device::cuda::{CudaError, Device, DeviceBuffer};
use crate::memory::{Arena, Label};
use std::collections::{BTreeSet, HashMap};

/// Number of a page: its distance from page 0.
pub(super) type PageId = i32;

struct Slab {
    first: PageId,
    memory: DeviceBuffer,
}

/// Slabs of pages.
pub(super) struct Pool {
    shape: CacheShape,
    arena: Arena,
    /// Where the keys of page 0 begin: of the first slab that was ever taken.
    origin: u64,
    slabs: Vec<Slab>,
    free: BTreeSet<PageId>,
    pages: usize,
    most_pages: usize,
    tokens: usize,
    /// Bytes under `kv` and `kv_fragmentation` that the arena was told of.
    told: [u64; 2],
}

impl Pool {
    pub fn new(shape: CacheShape, arena: &Arena) -> Self {
        let (arena, slabs, free) = (arena.clone(), Vec::new(), BTreeSet::new());
        Pool { shape, arena, origin: 0, slabs, free, pages: 0, most_pages: 0, tokens: 0, told: [0; 2] }
    }

    /// Pages in use.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Most pages that were in use at a time.
    pub fn most_pages(&self) -> usize {
        self.most_pages
    }

    /// Where the keys and the values of page 0 begin.
    pub fn rows(&self) -> [u64; 2] {
        [self.origin, self.origin + self.shape.slab_pages() as u64 * key_bytes(&self.shape)]
    }

    /// Makes sure that `pages` pages are free.
    ///
    /// # Errors
    /// When the arena or the GPU has no room; what was taken by then stays taken.
    pub fn reserve(&mut self, device: &Device, pages: usize) -> Result<(), CudaError> {
        while self.free.len() < pages {
            let memory = device.alloc(&self.arena, Label::KvSlack, slab_bytes(&self.shape))?;
            let (address, page) = (memory.address(), key_bytes(&self.shape));
            if self.slabs.is_empty() && self.pages == 0 {
                self.origin = address;
            }
            // Rounded up to a whole number of pages from the origin, which may lie behind it.
            let distance = i128::from(address) - i128::from(self.origin);
            let first = (distance + i128::from(page) - 1).div_euclid(i128::from(page));
            let last = first + self.shape.slab_pages() as i128;
            let far =
                |_| CudaError::Operand(format!("a slab of the KV cache lies {distance} bytes from the first one"));
            PageId::try_from(last).map_err(far)?;
            let first = PageId::try_from(first).map_err(far)?;
            self.free.extend(first..first + self.shape.slab_pages() as PageId);
            self.slabs.push(Slab { first, memory });
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
        self.tokens = tokens;
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

    /// The slabs with fewest pages in use, if the others have room for all: their numbers' first pages. No page is taken
    /// from them any more.
    fn close_spare_slabs(&mut self) -> Vec<PageId> {
        let pages = self.shape.slab_pages();
        let needed = self.pages.div_ceil(pages);
        let mut firsts: Vec<PageId> = self.slabs.iter().map(|slab| slab.first).collect();
        firsts.sort_by_key(|&first| (self.free.range(first..first + pages as PageId).count(), first));
        let spare = firsts.split_off(needed.min(firsts.len()));
        for &first in &spare {
            self.free.retain(|page| !(first..first + pages as PageId).contains(page));
        }
        spare
    }

    /// Empties slabs that are not needed: where pages in use must go. [`Pool::drop_slabs`] gives them back when that is
    /// done.
    pub fn spare(&mut self, in_use: impl IntoIterator<Item = PageId>) -> Spare {
        let firsts = self.close_spare_slabs();
        let pages = self.shape.slab_pages() as PageId;
        let is_spare = |page: PageId| firsts.iter().any(|&first| (first..first + pages).contains(&page));
        let moving: Vec<PageId> = in_use.into_iter().filter(|&page| is_spare(page)).collect();
        let moves = moving.into_iter().map(|page| (page, self.free.pop_first().expect("the others have room")));
        let moves = moves.collect();
        Spare { firsts, moves }
    }

    /// Copies keys (`part` 0) or values (`part` 1) of the first tokens of a page to the host.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the copy fails.
    ///
    /// # Panics
    /// When there is no such page.
    pub fn read(&self, page: PageId, part: usize, target: &mut [u8]) -> Result<(), CudaError> {
        let pages = self.shape.slab_pages() as PageId;
        let slab = self.slabs.iter().find(|slab| (slab.first..slab.first + pages).contains(&page));
        let slab = slab.expect("a page in use lies in a slab that is there");
        let bytes = key_bytes(&self.shape) as i64;
        let address = self.rows()[part] as i64 + i64::from(page) * bytes;
        slab.memory.read_from((address - slab.memory.address() as i64) as usize, target)
    }

    /// Gives slabs back.
    pub fn drop_slabs(&mut self, spare: &Spare) {
        self.slabs.retain(|slab| !spare.firsts.contains(&slab.first));
    }
}

/// Slabs to give back, and where the pages that are still in use in them go.
pub(super) struct Spare {
    firsts: Vec<PageId>,
    pub moves: HashMap<PageId, PageId>,
}

impl Spare {
    /// Whether there is nothing to give back.
    pub fn is_empty(&self) -> bool {
        self.firsts.is_empty()
    }
}

/// Bytes of the keys of a page.
fn key_bytes(shape: &CacheShape) -> u64 {
    shape.page_bytes() / 2
}

/// Bytes of a slab.
pub(super) fn slab_bytes(shape: &CacheShape) -> u64 {
    shape.slab_pages() as u64 * shape.page_bytes() + key_bytes(shape)
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Buffers give their bytes back under the label they were taken with.
        self.pages = 0;
        self.tell(0);
    }
}

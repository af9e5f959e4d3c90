//! The pool of pages behind a cache: slabs from the arena, a free list, and the way back.

use super::{CacheShape, PAGE_TOKENS, SLAB_PAGES};
use crate::memory::{Arena, ArenaError, Buffer, Label};

/// Number of a page: slab and place in it.
pub(super) type PageId = u32;

struct Slab {
    /// `[2 (keys, values), SLAB_PAGES, PAGE_TOKENS, D]`: keys of pages that were taken one after the other are
    /// neighbours, so that reading them is one stream.
    kv: Buffer<u8>,
    positions: Buffer<u32>,
    attention: Option<Buffer<f32>>,
    used: usize,
}

/// Slabs of pages. A slot of `slabs` whose memory was given back is `None` and is filled again first.
pub(super) struct PagePool {
    shape: CacheShape,
    arena: Arena,
    slabs: Vec<Option<Slab>>,
    free: Vec<PageId>,
}

/// The slab and the first token of a page.
fn place(page: PageId) -> (usize, usize) {
    (page as usize / SLAB_PAGES, page as usize % SLAB_PAGES * PAGE_TOKENS)
}

impl PagePool {
    pub fn new(shape: CacheShape, arena: &Arena) -> Self {
        PagePool { shape, arena: arena.clone(), slabs: Vec::new(), free: Vec::new() }
    }

    /// Takes a page, from a new slab if none is free.
    pub fn take(&mut self) -> Result<PageId, ArenaError> {
        if self.free.is_empty() {
            self.grow()?;
        }
        let page = self.free.pop().expect("a grown pool has free pages");
        self.slab_mut(page).used += 1;
        self.arena.relabel(Label::KvSlack, Label::Kv, self.shape.page_bytes());
        Ok(page)
    }

    /// Gives a page back to the pool.
    pub fn give(&mut self, page: PageId) {
        self.slab_mut(page).used -= 1;
        self.free.push(page);
        self.arena.relabel(Label::Kv, Label::KvSlack, self.shape.page_bytes());
    }

    /// Pages in use.
    pub fn used(&self) -> usize {
        self.slabs.iter().flatten().map(|slab| slab.used).sum()
    }

    /// Which slabs to empty so that the rest just holds the pages in use: the emptiest ones.
    pub fn spare_slabs(&self) -> Vec<bool> {
        let mut live: Vec<usize> = (0..self.slabs.len()).filter(|&slab| self.slabs[slab].is_some()).collect();
        live.sort_by_key(|&slab| std::cmp::Reverse(self.slabs[slab].as_ref().map_or(0, |slab| slab.used)));
        let mut spare = vec![false; self.slabs.len()];
        live.into_iter().skip(self.used().div_ceil(SLAB_PAGES)).for_each(|slab| spare[slab] = true);
        spare
    }

    /// Whether a page lies in one of these slabs.
    pub fn lies_in(page: PageId, slabs: &[bool]) -> bool {
        slabs[place(page).0]
    }

    /// Moves a page out of the spare slabs; returns its new number.
    pub fn move_out(&mut self, page: PageId, spare: &[bool]) -> PageId {
        let at = self.free.iter().rposition(|&free| !Self::lies_in(free, spare));
        let target = self.free.swap_remove(at.expect("the slabs that stay have room for every page in use"));
        self.slab_mut(target).used += 1;
        for token in 0..PAGE_TOKENS {
            self.copy_token((page, token), (target, token));
        }
        self.slab_mut(page).used -= 1;
        self.free.push(page);
        target
    }

    /// Gives the memory of empty slabs back to the arena.
    pub fn drop_slabs(&mut self, spare: &[bool]) {
        self.free.retain(|&page| !Self::lies_in(page, spare));
        for (slab, _) in self.slabs.iter_mut().zip(spare).filter(|(_, spare)| **spare) {
            *slab = None;
        }
    }

    /// Whether the keys, and the values, of the second page lie just behind those of the first.
    #[inline]
    pub fn follows(first: PageId, second: PageId) -> bool {
        second == first + 1 && !second.is_multiple_of(SLAB_PAGES as PageId)
    }

    /// Keys (`part` 0) or values (`part` 1) of the tokens `first .. first + count` of a page and of those that follow
    /// it, raw.
    #[inline]
    pub fn rows(&self, page: PageId, part: usize, first: usize, count: usize) -> &[u8] {
        &self.slab(page).kv[self.row_range(page, part, first, count)]
    }

    /// As [`PagePool::rows`], to be written.
    pub fn rows_mut(&mut self, page: PageId, part: usize, first: usize, count: usize) -> &mut [u8] {
        let range = self.row_range(page, part, first, count);
        &mut self.slab_mut(page).kv[range]
    }

    /// Position of a token in its sequence.
    pub fn position(&self, page: PageId, token: usize) -> u32 {
        self.slab(page).positions[place(page).1 + token]
    }

    pub fn set_position(&mut self, page: PageId, token: usize, position: u32) {
        self.slab_mut(page).positions[place(page).1 + token] = position;
    }

    /// Attention that a token has received; 0 where it is not kept.
    pub fn attention(&self, page: PageId, token: usize) -> f32 {
        self.slab(page).attention.as_ref().map_or(0.0, |attention| attention[place(page).1 + token])
    }

    pub fn set_attention(&mut self, page: PageId, token: usize, value: f32) {
        if let Some(attention) = &mut self.slab_mut(page).attention {
            attention[place(page).1 + token] = value;
        }
    }

    /// Copies a token with all that belongs to it.
    pub fn copy_token(&mut self, from: (PageId, usize), to: (PageId, usize)) {
        let row_bytes = self.shape.head_dim * self.shape.dtype.bytes();
        let mut row = [0; 4 * crate::attention::Shape::MAX_HEAD_DIM];
        for part in 0..2 {
            row[..row_bytes].copy_from_slice(self.rows(from.0, part, from.1, 1));
            self.rows_mut(to.0, part, to.1, 1).copy_from_slice(&row[..row_bytes]);
        }
        let position = self.position(from.0, from.1);
        self.set_position(to.0, to.1, position);
        let attention = self.attention(from.0, from.1);
        self.set_attention(to.0, to.1, attention);
    }

    #[inline]
    fn row_range(&self, page: PageId, part: usize, first: usize, count: usize) -> std::ops::Range<usize> {
        let row_bytes = self.shape.head_dim * self.shape.dtype.bytes();
        let start = (part * SLAB_PAGES * PAGE_TOKENS + place(page).1 + first) * row_bytes;
        start..start + count * row_bytes
    }

    #[inline]
    fn slab(&self, page: PageId) -> &Slab {
        self.slabs[place(page).0].as_ref().expect("a page in use lies in a slab that is there")
    }

    fn slab_mut(&mut self, page: PageId) -> &mut Slab {
        self.slabs[place(page).0].as_mut().expect("a page in use lies in a slab that is there")
    }

    fn grow(&mut self) -> Result<(), ArenaError> {
        let tokens = SLAB_PAGES * PAGE_TOKENS;
        let slab = Slab {
            kv: self.arena.alloc(Label::KvSlack, tokens * self.shape.token_bytes() as usize)?,
            positions: self.arena.alloc(Label::Metadata, tokens)?,
            attention: match self.shape.with_attention {
                true => Some(self.arena.alloc(Label::Policy, tokens)?),
                false => None,
            },
            used: 0,
        };
        let index = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
        if index == self.slabs.len() {
            self.slabs.push(None);
        }
        self.slabs[index] = Some(slab);
        let first = (index * SLAB_PAGES) as PageId;
        self.free.extend((first..first + SLAB_PAGES as PageId).rev());
        Ok(())
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        // Buffers give their bytes back under the label they were taken with.
        let used = self.used() as u64 * self.shape.page_bytes();
        self.arena.relabel(Label::Kv, Label::KvSlack, used);
    }
}

//! The memory of a cache as it lies there: what a copy of it in a GPU's memory is made of.

use super::PagedCache;
use super::pool::PageId;

/// Slabs, page lists, and how numbers of pages are read.
pub struct Layout<'a> {
    /// Each slab's keys and values, `[2, slab_pages, page_tokens, D]`; `None` where the memory was given back.
    pub slabs: Vec<Option<&'a [u8]>>,
    /// `[B * Hkv, table_width]` numbers of pages: the slab above `shift` bits, the page's index in the slab in these.
    pub table: &'a [PageId],
    /// Pages that a list has room for.
    pub table_width: usize,
    /// Bits of a page's index in its slab.
    pub shift: u32,
}

impl PagedCache {
    /// How the cache lies in memory.
    pub fn layout(&self) -> Layout<'_> {
        let (table, table_width) = self.table();
        Layout { slabs: self.coded.pool.slabs(), table, table_width, shift: self.coded.pool.shift() }
    }
}

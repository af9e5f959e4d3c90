//! Keys and values in pages in a GPU's memory: the slabs that hold the pages, and what a kernel is told of them.
//!
//! The layout is that of [`crate::cache`]: a slab is `[slab_pages, page_tokens]` rows of keys, and behind them as many of
//! values, and the number of a page is that of its slab above some bits and its index in the slab in these. So slabs come and go one
//! by one. Their addresses lie in a table in the GPU's memory, which follows them.

use super::problem::short;
use super::{CudaError, Device, DeviceBuffer};
use crate::memory::{Arena, Label};
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// Slabs of pages, and the table of their addresses on the GPU.
pub struct Slabs {
    slabs: Vec<Option<DeviceBuffer>>,
    table: DeviceBuffer,
    slab_bytes: u64,
}

impl Slabs {
    /// Room for `most` slabs of `slab_bytes`; takes 8 bytes for each, labelled `page_table`.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn new(device: &Device, arena: &Arena, most: usize, slab_bytes: u64) -> Result<Self, CudaError> {
        let table = device.alloc(arena, Label::PageTable, Self::table_bytes(most))?;
        Ok(Slabs { slabs: Vec::new(), table, slab_bytes })
    }

    /// Bytes of the table for `most` slabs.
    pub fn table_bytes(most: usize) -> u64 {
        8 * most as u64
    }

    /// Takes a zeroed slab; its number, the lowest that is free.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when there are `most` slabs already; else as [`Device::alloc`].
    pub fn add(&mut self, device: &Device, arena: &Arena, label: Label) -> Result<usize, CudaError> {
        let index = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
        if Self::table_bytes(index + 1) > self.table.bytes() {
            return Err(CudaError::Operand(format!("the table has room for {index} slabs of pages, not for one more")));
        }
        let slab = device.alloc(arena, label, self.slab_bytes)?;
        self.table.write_at(8 * index as u64, &slab.address().to_le_bytes())?;
        if index == self.slabs.len() {
            self.slabs.push(None);
        }
        self.slabs[index] = Some(slab);
        Ok(index)
    }

    /// Gives a slab's memory back; its number may be used again. A kernel that reads a page of it fails.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the table cannot be written; the slab is kept then.
    pub fn remove(&mut self, index: usize) -> Result<(), CudaError> {
        self.table.write_at(8 * index as u64, &[0; 8])?;
        self.slabs[index] = None;
        Ok(())
    }

    /// A slab.
    pub fn get(&self, index: usize) -> Option<&DeviceBuffer> {
        self.slabs.get(index)?.as_ref()
    }

    /// A slab, to be written.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut DeviceBuffer> {
        self.slabs.get_mut(index)?.as_mut()
    }

    /// One more than the highest number in use so far.
    pub fn count(&self) -> usize {
        self.slabs.len()
    }
}

/// Keys and values in pages, one list of pages for each (sequence, KV head): what paged decode reads.
#[derive(Clone, Copy)]
pub struct PagedKv<'a> {
    /// The pages' memory.
    pub slabs: &'a Slabs,
    /// Lists of the table and the lengths before the first one that is meant.
    pub first_list: usize,
    /// `[lists, table_width]` page numbers in u32: the pages of each list in order.
    pub table: &'a DeviceBuffer,
    /// `[lists]` tokens of each list in i32.
    pub lens: &'a DeviceBuffer,
    /// `[lists, stride]` in i32: where each token stood in its sequence.
    pub origins: &'a DeviceBuffer,
    /// Tokens that one list can hold.
    pub stride: usize,
    /// Pages of a slab.
    pub slab_pages: usize,
    /// Bits of a page's index in its slab: at least `log2(slab_pages)`.
    pub shift: u32,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Places for pages of one list in the table.
    pub table_width: usize,
}

/// What a kernel is told: the same fields as `Pages` in `kernels/pages.cuh`. It borrows the buffers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Pages<'a> {
    slabs: u64,
    table: u64,
    lens: u64,
    origins: u64,
    slab_count: i32,
    slab_pages: i32,
    shift: i32,
    page_tokens: i32,
    table_width: i32,
    stride: i32,
    buffers: PhantomData<PagedKv<'a>>,
}

// SAFETY: the struct is `repr(C)`, has no padding, and holds numbers only; its fields are those of `Pages` in
// kernels/pages.cuh (a test compares them). `new` compares the buffers with the extents.
unsafe impl DeviceRepr for Pages<'_> {}

impl<'a> Pages<'a> {
    /// The pages of `lists` lists of at most `max_len` tokens with keys and values of `row_bytes`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is smaller than that, or there is no slab.
    pub fn new(kv: &PagedKv<'a>, lists: usize, max_len: usize, row_bytes: [usize; 2]) -> Result<Self, CudaError> {
        let token_bytes: usize = row_bytes.iter().sum();
        let needs = |what: &str, has: u64, needed: usize| match has >= needed as u64 {
            true => Ok(()),
            false => Err(CudaError::Operand(format!("{what}: {has}; {needed} are needed"))),
        };
        needs("slabs of pages", kv.slabs.count() as u64, 1)?;
        needs("tokens of a page", kv.page_tokens as u64, 1)?;
        needs("bytes of a slab", kv.slabs.slab_bytes, kv.slab_pages * kv.page_tokens * token_bytes)?;
        needs("pages that the numbers in a slab tell apart", 1 << kv.shift.min(31), kv.slab_pages)?;
        needs("tokens in the pages of a list", (kv.table_width * kv.page_tokens) as u64, max_len)?;
        let end = kv.first_list + lists;
        needs("bytes of the page table", kv.table.bytes(), 4 * end * kv.table_width)?;
        needs("bytes of the lists' lengths", kv.lens.bytes(), 4 * end)?;
        needs("tokens that a list can hold", kv.stride as u64, max_len)?;
        needs("bytes of the tokens' positions", kv.origins.bytes(), 4 * end * kv.stride)?;
        Ok(Pages {
            slabs: kv.slabs.table.address(),
            table: kv.table.address() + 4 * (kv.first_list * kv.table_width) as u64,
            lens: kv.lens.address() + 4 * kv.first_list as u64,
            origins: kv.origins.address() + 4 * (kv.first_list * kv.stride) as u64,
            slab_count: short("slabs", kv.slabs.count())?,
            slab_pages: short("pages of a slab", kv.slab_pages)?,
            shift: kv.shift.min(31) as i32,
            page_tokens: short("tokens of a page", kv.page_tokens)?,
            table_width: short("pages of a list", kv.table_width)?,
            stride: short("tokens of a list", kv.stride)?,
            buffers: PhantomData,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_has_the_size_that_cuda_gives_it() {
        assert_eq!(size_of::<Pages>(), 4 * 8 + 6 * 4);
    }
}

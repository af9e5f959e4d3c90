//! A paged cache in a GPU's memory: the same pages in the same places as a cache of the host.
//!
//! Positions and counts of references stay on the host, where nothing of the measured arena holds them; a GPU only reads
//! pages. Everything else has the labels that it has on the CPU.

use crate::cache::{CacheShape, PagedCache};
use crate::device::cuda::{CudaError, Device, DeviceBuffer, PagedKv, Slabs};
use crate::memory::{Arena, Label};

/// A copy of a cache.
pub(super) struct Pages {
    shape: CacheShape,
    slabs: Slabs,
    table: DeviceBuffer,
    lens: DeviceBuffer,
    table_width: usize,
    shift: u32,
    arena: Arena,
    /// Bytes under `kv` and `kv_fragmentation` that the arena was told of.
    told: [u64; 2],
}

/// The bytes of tokens, of the empty places of their pages, and of all slabs, of lists of `tokens` tokens.
fn kv_bytes(shape: &CacheShape, tokens: usize) -> [u64; 3] {
    let (tokens, pages) = ((shape.lists() * tokens) as u64, shape.lists() * shape.pages(tokens));
    let slabs = pages.div_ceil(shape.slab_pages());
    let kv = tokens * shape.token_bytes();
    [kv, pages as u64 * shape.page_bytes() - kv, (slabs * shape.slab_pages()) as u64 * shape.page_bytes()]
}

impl Pages {
    /// Bytes of the copy of a cache that was made for lists of `tokens` tokens and holds as many.
    pub(super) fn bytes(shape: &CacheShape, tokens: usize) -> u64 {
        let [.., slab_bytes] = kv_bytes(shape, tokens);
        let slabs = (shape.lists() * shape.pages(tokens)).div_ceil(shape.slab_pages());
        let tables = 4 * shape.lists() * (shape.pages(tokens) + 1);
        slab_bytes + Slabs::table_bytes(slabs) + tables as u64
    }

    /// Copies a cache in which every list holds as many tokens as there is room for.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub(super) fn upload(device: &Device, arena: &Arena, host: &PagedCache) -> Result<Self, CudaError> {
        let (shape, layout) = (*host.shape(), host.layout());
        let mut slabs = Slabs::new(device, arena, layout.slabs.len(), layout_bytes(&shape))?;
        for bytes in layout.slabs.iter().flatten() {
            let index = slabs.add(device, arena, Label::KvSlack)?;
            slabs.get_mut(index).expect("added just now").write(bytes)?;
        }
        let lens: Vec<i32> = host.lens().iter().map(|&len| len as i32).collect();
        let numbers = |count: usize| device.alloc(arena, Label::PageTable, 4 * count as u64);
        let (mut table, mut lens_there) = (numbers(layout.table.len())?, numbers(lens.len())?);
        table.write(bytemuck::cast_slice(layout.table))?;
        lens_there.write(bytemuck::cast_slice(&lens))?;
        let [kv, fragmentation, _] = kv_bytes(&shape, host.max_len());
        arena.relabel(Label::KvSlack, Label::Kv, kv);
        arena.relabel(Label::KvSlack, Label::KvFragmentation, fragmentation);
        Ok(Pages {
            shape,
            slabs,
            table,
            lens: lens_there,
            table_width: layout.table_width,
            shift: layout.shift,
            arena: arena.clone(),
            told: [kv, fragmentation],
        })
    }

    /// What kernels read.
    pub(super) fn kv(&self) -> PagedKv<'_> {
        PagedKv {
            first_list: 0,
            slabs: &self.slabs,
            table: &self.table,
            lens: &self.lens,
            slab_pages: self.shape.slab_pages(),
            shift: self.shift,
            page_tokens: self.shape.page_tokens,
            table_width: self.table_width,
        }
    }
}

/// Bytes of a slab.
fn layout_bytes(shape: &CacheShape) -> u64 {
    shape.slab_pages() as u64 * shape.page_bytes()
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Slabs give their bytes back under the label they were taken with.
        let [kv, fragmentation] = self.told;
        self.arena.relabel(Label::Kv, Label::KvSlack, kv);
        self.arena.relabel(Label::KvFragmentation, Label::KvSlack, fragmentation);
    }
}

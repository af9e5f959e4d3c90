//! A cache in a GPU's memory that a model fills: room for a pass's tokens in all lists at once, and their rows layer by
//! layer, in copies and launches that are begun one behind another and not waited for.

use super::{DeviceCache, ROWS};
use crate::cache::Column;
use crate::device::cuda::{
    Argument, Arrival, Changes, CudaError, DeviceBuffer, Gathering, Gating, Launch, Received, Runtime,
};
use std::ops::Range;

impl DeviceCache {
    /// Makes every list `count` tokens longer; nothing is in their rows until [`DeviceCache::place`] has put it there.
    ///
    /// Nothing is waited for but what new slabs and long changes of the page table take: lengths, and a page for each list
    /// at most, go in one copy.
    ///
    /// # Errors
    /// When there is no room, and [`CudaError::Operand`] when a list would grow past `max_tokens`.
    pub fn grow(&mut self, runtime: &Runtime, count: usize) -> Result<(), CudaError> {
        let longest = self.max_len() + count;
        if longest > self.shape.max_tokens {
            let most = self.shape.max_tokens;
            return Err(CudaError::Operand(format!("a list of {longest} tokens; the cache was made for {most}")));
        }
        self.pool.reserve(runtime.device(), self.pages_after(count) - self.pages())?;
        let (width, mut places) = (self.table_width(), Vec::new());
        for list in 0..self.lens.len() {
            for index in self.shape.pages(self.lens[list])..self.shape.pages(self.lens[list] + count) {
                self.table[list * width + index] = self.pool.take();
                places.push((list * width + index) as u32);
            }
        }
        self.lens.iter_mut().for_each(|len| *len += count);
        if places.len() > self.lens.len() {
            self.pages_there.write(bytemuck::cast_slice(&self.table))?;
            places.clear();
        }
        self.tell(runtime, &places)
    }

    /// Pages in use when every list is `count` tokens longer.
    pub(super) fn pages_after(&self, count: usize) -> usize {
        self.lens.iter().map(|&len| self.shape.pages(len + count)).sum()
    }

    /// Begins to tell the GPU the lists' lengths and what stands in some places of the page table; tells the arena what its
    /// bytes are for.
    pub(super) fn tell(&mut self, runtime: &Runtime, places: &[u32]) -> Result<(), CudaError> {
        self.pool.tell(self.lens.iter().sum());
        let lens = self.lens.iter().map(|&len| len as u32);
        let pages = places.iter().map(|&place| self.table[place as usize]);
        let news: Vec<u32> = lens.chain(places.iter().copied()).chain(pages).collect();
        self.news.begin_write(runtime.device(), 0, bytemuck::cast_slice(&news))?;
        if places.is_empty() {
            return Ok(());
        }
        let (lists, count) = (self.lens.len(), places.len());
        let changes = Changes::new(&self.news, lists, count)?;
        self.begin(runtime, 0..lists, ("change_table", 256), [count.div_ceil(256), 1, 1], &changes)
    }

    /// Begins to put `k` and `v` `[lists, count, D]`, whose first token stands at `position`, into the newest rows of
    /// some lists: inside `Device::timed`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the tensors are too small or the lists too short, and as [`Runtime::module`].
    pub fn place(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        [k, v]: [&DeviceBuffer; 2],
        count: usize,
        position: usize,
    ) -> Result<(), CudaError> {
        if let Some(len) = self.lens[lists.clone()].iter().find(|&&len| len < count) {
            return Err(CudaError::Operand(format!("{count} tokens at the end of a list of {len}")));
        }
        let arrival = Arrival::new([k, v], lists.len(), count, self.element_bytes(), 0..count, position)?;
        self.begin(runtime, lists.clone(), ("append_tokens", 128), [count.div_ceil(ROWS), lists.len(), 1], &arrival)
    }

    /// Begins to copy the first `length` tokens of some lists to `k` and `v`, rows as they lie in lists of
    /// [`crate::format::GpuRows::lists_bytes`]: inside `Device::timed`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the tensors are too small or a list too short, and as [`Runtime::module`].
    pub fn gather(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        to: [&mut DeviceBuffer; 2],
        length: usize,
    ) -> Result<(), CudaError> {
        if let Some(len) = self.lens[lists.clone()].iter().find(|&&len| len < length) {
            return Err(CudaError::Operand(format!("{length} tokens of a list of {len}")));
        }
        let gathering = Gathering::new(to, length, self.rows.lists_bytes(lists.len(), length, self.shape.head_dim))?;
        self.begin(runtime, lists.clone(), ("gather_tokens", 128), [length.div_ceil(ROWS), lists.len(), 2], &gathering)
    }

    /// Takes all tokens from every list; slabs are kept for those that come.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the lengths cannot be written.
    pub fn clear(&mut self, runtime: &Runtime) -> Result<(), CudaError> {
        let width = self.table_width();
        for (list, len) in self.lens.iter_mut().enumerate() {
            let pages = self.shape.pages(*len);
            self.table[list * width..][..pages].iter().for_each(|&page| self.pool.give(page));
            *len = 0;
        }
        self.tell(runtime, &[])
    }

    /// Begins to add attention `[lists, width]` to what the tokens of some lists received: inside `Device::timed`.
    ///
    /// # Errors
    /// As [`DeviceCache::add_attention`].
    pub fn receive(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        columns: &DeviceBuffer,
        width: usize,
    ) -> Result<(), CudaError> {
        let longest = self.lens[lists.clone()].iter().copied().max().unwrap_or(0);
        if !self.shape.columns.contains(&Column::Attention) || width < longest {
            return Err(CudaError::Operand(
                "a cache that keeps no attention, or columns shorter than its lists".into(),
            ));
        }
        let (received, grid) = (Received::new(columns, [lists.len(), width])?, [width.div_ceil(256), lists.len(), 1]);
        self.begin(runtime, lists, ("add_columns", 256), grid, &received)
    }

    /// Begins to give the newest tokens of some lists, or those `later` before each of them, the gates `[count, lists]` that they decided on.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the cache keeps no gates, and as [`Runtime::module`].
    pub fn place_gates(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        gates: &DeviceBuffer,
        count: usize,
        later: usize,
    ) -> Result<(), CudaError> {
        if !self.shape.columns.contains(&Column::Gate) {
            return Err(CudaError::Operand("gates for a cache that keeps none".into()));
        }
        let (gating, grid) = (Gating::new(gates, [count, lists.len()], later)?, [count.div_ceil(256), lists.len(), 1]);
        self.begin(runtime, lists, ("place_gates", 256), grid, &gating)
    }

    /// Begins a function of `compact.cu` with so many threads over some lists.
    pub(super) fn begin(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        (function, threads): (&'static str, u32),
        grid: [usize; 3],
        argument: &dyn Argument,
    ) -> Result<(), CudaError> {
        let launch = Launch { function, grid, threads, shared_bytes: 0 };
        let (device, lists) = (runtime.device(), self.some_lists(lists)?);
        device.begin(&device.ready(&*runtime.module(&self.program())?, &[launch])?, &[&lists, argument])
    }
}

//! A cache in a GPU's memory that a model fills: room for a pass's tokens in all lists at once, and their rows layer by
//! layer, in launches that are waited for once per pass.

use super::{DeviceCache, ROWS};
use crate::device::cuda::{Argument, Arrival, CudaError, Device, DeviceBuffer, Gathering, Launch, Received, Runtime};
use std::ops::Range;

impl DeviceCache {
    /// Makes every list `count` tokens longer; nothing is in their rows until [`DeviceCache::place`] has put it there.
    ///
    /// # Errors
    /// When there is no room, and [`CudaError::Operand`] when a list would grow past `max_tokens`.
    pub(crate) fn grow(&mut self, device: &Device, count: usize) -> Result<(), CudaError> {
        let longest = self.max_len() + count;
        if longest > self.shape.max_tokens {
            let most = self.shape.max_tokens;
            return Err(CudaError::Operand(format!("a list of {longest} tokens; the cache was made for {most}")));
        }
        let wanted = |len: usize| self.shape.pages(len + count) - self.shape.pages(len);
        let pages: usize = self.lens.iter().map(|&len| wanted(len)).sum();
        self.pool.reserve(device, pages)?;
        let width = self.table_width();
        for list in 0..self.lens.len() {
            for index in self.shape.pages(self.lens[list])..self.shape.pages(self.lens[list] + count) {
                self.table[list * width + index] = self.pool.take();
            }
        }
        if pages > 0 {
            self.pages_there.write(bytemuck::cast_slice(&self.table))?;
        }
        self.lens.iter_mut().for_each(|len| *len += count);
        self.tell()
    }

    /// Begins to put `k` and `v` `[lists, count, D]`, whose first token stands at `position`, into the newest rows of
    /// some lists: inside [`Device::timed`].
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the tensors are too small or the lists too short, and as [`Runtime::module`].
    pub(crate) fn place(
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
        let arrival = Arrival::new([k, v], lists.len(), count, self.row_bytes(), 0..count, position)?;
        self.begin(runtime, lists.clone(), ("append_tokens", 128), [count.div_ceil(ROWS), lists.len(), 1], &arrival)
    }

    /// Begins to copy the first `length` tokens of some lists to `k` and `v` `[lists, length, D]`: inside
    /// [`Device::timed`].
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the tensors are too small or a list too short, and as [`Runtime::module`].
    pub(crate) fn gather(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        to: [&mut DeviceBuffer; 2],
        length: usize,
    ) -> Result<(), CudaError> {
        if let Some(len) = self.lens[lists.clone()].iter().find(|&&len| len < length) {
            return Err(CudaError::Operand(format!("{length} tokens of a list of {len}")));
        }
        let gathering = Gathering::new(to, lists.len(), length, self.row_bytes())?;
        self.begin(runtime, lists.clone(), ("gather_tokens", 128), [length.div_ceil(ROWS), lists.len(), 2], &gathering)
    }

    /// Takes all tokens from every list; slabs are kept for those that come.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the lengths cannot be written.
    pub(crate) fn clear(&mut self) -> Result<(), CudaError> {
        let width = self.table_width();
        for (list, len) in self.lens.iter_mut().enumerate() {
            let pages = self.shape.pages(*len);
            self.table[list * width..][..pages].iter().for_each(|&page| self.pool.give(page));
            *len = 0;
        }
        self.tell()
    }

    /// Begins to add attention `[lists, width]` to what the tokens of some lists received: inside [`Device::timed`].
    ///
    /// # Errors
    /// As [`DeviceCache::add_attention`].
    pub(crate) fn receive(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        columns: &DeviceBuffer,
        width: usize,
    ) -> Result<(), CudaError> {
        let longest = self.lens[lists.clone()].iter().copied().max().unwrap_or(0);
        if self.attention.is_none() || width < longest {
            return Err(CudaError::Operand(
                "a cache that keeps no attention, or columns shorter than its lists".into(),
            ));
        }
        let (received, grid) = (Received::new(columns, [lists.len(), width])?, [width.div_ceil(256), lists.len(), 1]);
        self.begin(runtime, lists, ("add_columns", 256), grid, &received)
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

//! The paged KV cache in a GPU's memory: the GPU holds pages, tables and positions, the host decides which page is whose.
//!
//! It is [`crate::cache`]'s cache, with the same [`CacheShape`] and the same labels in the arena, and eviction gives
//! whole slabs back to the GPU. Kernels (`kernels/compact.cu`) append, compact and rotate keys; of tokens nothing comes to
//! the host. Lists share no pages here, and tokens carry their position and, where asked for, attention or a gate, and the position
//! that they came with: [`Column::Weight`] and [`Column::Bias`] are refused. Positions and columns are plain arrays as long as the lists may grow,
//! which eviction does not shorten: 4 bytes for each place.

mod growing;
mod observed;
mod pool;
mod rerotate;
mod tokens;

pub use observed::ObservedRows;
use tokens::begin_copy;
pub use tokens::take_tokens;

use super::{CacheShape, Column};
use crate::device::cuda::{
    Arrival, CudaError, Device, DeviceBuffer, Keeping, Launch, Lists, ListsOperands, Moves, PagedKv, Program, Received,
    Runtime, Slabs, Source,
};
use crate::format::{GPU_PAGE_TOKENS, GpuRows};
use crate::memory::{Arena, Label, LabelBytes};
use crate::tensor::DType;
use pool::{PageId, Pool};
use std::ops::Range;

const SOURCE: Source = Source { name: "compact.cu", text: include_str!("../../../compact.cu") };
/// Pages that one launch moves out of slabs.
const MOST_MOVES: usize = 1024;
/// Rows of a block that appends or rotates.
const ROWS: usize = 32;

/// A cache of keys and values in a GPU's memory, one list of pages per (sequence, KV head).
pub struct DeviceCache {
    shape: CacheShape,
    rows: GpuRows,
    pool: Pool,
    /// `[lists, table_width]`, as the GPU has them.
    table: Vec<PageId>,
    lens: Vec<usize>,
    pages_there: DeviceBuffer,
    /// Lengths of the lists, and behind them room for changes of the page table: a place and a page for each list.
    news: DeviceBuffer,
    positions: DeviceBuffer,
    /// Attention that tokens received, or their gates.
    carried: Option<DeviceBuffer>,
    origins: Option<DeviceBuffer>,
    moves: DeviceBuffer,
    /// Turns per token of each pair of channels, where tokens carry what their keys stood at before.
    turns: Option<DeviceBuffer>,
    /// The same on the host, once they are there.
    turns_told: Vec<f64>,
}

impl DeviceCache {
    /// An empty cache for a pass in `dtype`.
    ///
    /// # Errors
    /// When the arena or the GPU has no room, tokens are to carry a column that is not kept on a GPU, or keys and values a
    /// format that no kernel there reads.
    pub fn new(device: &Device, arena: &Arena, shape: CacheShape, dtype: DType) -> Result<Self, CudaError> {
        let rows = GpuRows::new(dtype, shape.format).map_err(CudaError::Operand)?;
        let fits = shape.format.check(shape.head_dim, shape.max_tokens);
        fits.map_err(|error| CudaError::Operand(error.to_string()))?;
        if rows.is_coded() && !shape.page_tokens.is_multiple_of(GPU_PAGE_TOKENS) {
            let wanted = format!("pages of codes hold a multiple of {GPU_PAGE_TOKENS} tokens on a GPU");
            return Err(CudaError::Operand(format!("pages of {} tokens; {wanted}", shape.page_tokens)));
        }
        let has = |column: Column| shape.columns.contains(&column);
        if has(Column::Weight) || has(Column::Bias) || has(Column::Gate) && has(Column::Attention) {
            let kept = "attention or gates, and origins, not both nor weights or biases";
            return Err(CudaError::Operand(format!("a cache in a GPU's memory keeps {kept} of tokens")));
        }
        let (lists, width) = (shape.lists(), shape.pages(shape.max_tokens));
        let numbers = |label, count: usize| device.alloc(arena, label, 4 * count as u64);
        let places = lists * shape.max_tokens;
        let column = |is_kept: bool| is_kept.then(|| numbers(Label::Policy, places)).transpose();
        let turns = has(Column::Origin).then(|| numbers(Label::Policy, 2 * (shape.head_dim / 2)));
        Ok(DeviceCache {
            shape,
            rows,
            pool: Pool::new(device, arena, shape)?,
            table: vec![0; lists * width],
            lens: vec![0; lists],
            pages_there: numbers(Label::PageTable, lists * width)?,
            news: numbers(Label::PageTable, 3 * lists)?,
            positions: numbers(Label::Metadata, places)?,
            carried: column(has(Column::Attention) || has(Column::Gate))?,
            origins: column(has(Column::Origin))?,
            moves: numbers(Label::PageTable, 2 * MOST_MOVES)?,
            turns: turns.transpose()?,
            turns_told: Vec::new(),
        })
    }

    /// Bytes by label of a cache whose lists hold `lens` tokens and that had at most `most_pages` pages in use at any
    /// moment since the last release: what the arena will show.
    pub fn bytes(shape: &CacheShape, lens: impl IntoIterator<Item = usize>, most_pages: usize) -> LabelBytes {
        let (tokens, pages) =
            lens.into_iter().fold((0, 0), |(tokens, pages), len| (tokens + len, pages + shape.pages(len)));
        let slabs = most_pages.max(pages).div_ceil(shape.slab_pages()) as u64;
        let (kv, used) = (tokens as u64 * shape.token_bytes(), pages as u64 * shape.page_bytes());
        let tables = shape.lists() * (shape.pages(shape.max_tokens) + 3) + 2 * MOST_MOVES;
        let table_bytes = Slabs::table_bytes(pool::most_slabs(shape)) + 4 * tables as u64;
        let places = (shape.lists() * shape.max_tokens) as u64;
        let turns = if shape.columns.contains(&Column::Origin) { 8 * (shape.head_dim / 2) as u64 } else { 0 };
        LabelBytes::from([
            (Label::Kv, kv),
            (Label::KvFragmentation, used - kv),
            (Label::KvSlack, slabs * shape.slab_pages() as u64 * shape.page_bytes() - used),
            (Label::PageTable, table_bytes),
            (Label::Metadata, 4 * places),
            (Label::Policy, 4 * places * shape.columns.len() as u64 + turns),
        ])
    }

    /// What the cache holds.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// How its keys and values lie.
    pub fn rows(&self) -> GpuRows {
        self.rows
    }

    /// Tokens in each list, `[B * Hkv]`.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Tokens of the longest list.
    pub fn max_len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Pages in use.
    pub fn pages(&self) -> usize {
        self.pool.pages()
    }

    /// Most pages that were in use at any moment so far.
    pub fn most_pages(&self) -> usize {
        self.pool.most_pages()
    }

    /// Appends the tokens `range` of `k` and `v` `[B, Hkv, length, D]`, elements of the pass's type, to every list; a token's
    /// position is its index. Returns the GPU's time in nanoseconds.
    ///
    /// # Errors
    /// When there is no room, [`CudaError::Operand`] when a list would grow past `max_tokens`, and as
    /// [`Runtime::module`].
    pub fn append(
        &mut self,
        runtime: &Runtime,
        [k, v]: [&DeviceBuffer; 2],
        length: usize,
        range: Range<usize>,
    ) -> Result<u64, CudaError> {
        let (lists, count, position) = (self.shape.lists(), range.len(), range.start);
        let arrival = Arrival::new([k, v], lists, length, self.element_bytes(), range, position)?;
        self.grow(runtime, count)?;
        self.run(runtime, "append_tokens", [count.div_ceil(ROWS), lists, 1], 128, &arrival)
    }

    /// Keeps `counts[list]` tokens of each list: those whose slots stand, ascending, at the front of its part of `slots`
    /// `[lists, width]`; `counts_there` are the same numbers on the GPU. Pages behind them are free then. Returns the
    /// GPU's time in nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a list has fewer tokens than are to stay, and as [`Runtime::module`].
    pub fn keep(
        &mut self,
        runtime: &Runtime,
        slots: &DeviceBuffer,
        width: usize,
        counts: &[usize],
        counts_there: &DeviceBuffer,
    ) -> Result<u64, CudaError> {
        let keeping = self.keeping(slots, width, counts, counts_there)?;
        runtime.load([self.program()])?;
        // Not the host's work on lists and pages, which the GPU would be timed waiting for.
        let ns = runtime.device().timed(|| self.launch_keep(runtime, &keeping))?;
        self.shorten(runtime, counts)?;
        Ok(ns)
    }

    /// Begins to do so; the lists have their new lengths when it returns.
    ///
    /// # Errors
    /// As [`DeviceCache::keep`].
    pub fn begin_keep(
        &mut self,
        runtime: &Runtime,
        slots: &DeviceBuffer,
        width: usize,
        counts: &[usize],
        counts_there: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let keeping = self.keeping(slots, width, counts, counts_there)?;
        self.launch_keep(runtime, &keeping)?;
        self.shorten(runtime, counts)
    }

    fn keeping<'k>(
        &self,
        slots: &'k DeviceBuffer,
        width: usize,
        counts: &[usize],
        counts_there: &'k DeviceBuffer,
    ) -> Result<Keeping<'k>, CudaError> {
        let lists = self.shape.lists();
        if counts.len() != lists || counts.iter().zip(&self.lens).any(|(count, len)| count > len) {
            return Err(CudaError::Operand(format!("{counts:?} tokens to keep of {:?}", self.lens)));
        }
        Keeping::new(slots, counts_there, lists, width)
    }

    fn launch_keep(&self, runtime: &Runtime, keeping: &Keeping<'_>) -> Result<(), CudaError> {
        let lists = self.shape.lists();
        let parts = if self.origins.is_some() { 5 } else { 3 + usize::from(self.carried.is_some()) };
        self.begin(runtime, 0..lists, ("keep_slots", 256), [lists, parts, 1], keeping)
    }

    /// Gives lists their new lengths, and pages that are empty by them back.
    fn shorten(&mut self, runtime: &Runtime, counts: &[usize]) -> Result<(), CudaError> {
        for (table, (&count, &len)) in self.table.chunks(self.table_width()).zip(counts.iter().zip(&self.lens)) {
            let emptied = &table[self.shape.pages(count)..self.shape.pages(len)];
            emptied.iter().for_each(|&page| self.pool.give(page));
        }
        self.lens.copy_from_slice(counts);
        self.tell(runtime, &[])
    }

    /// Gives slabs that no page needs back to the GPU, moving pages together where that empties one; it keeps those that
    /// the lists need when they are `ahead` tokens longer. Returns the GPU's time in nanoseconds.
    ///
    /// # Errors
    /// As [`Runtime::module`].
    pub fn release(&mut self, runtime: &Runtime, ahead: usize) -> Result<u64, CudaError> {
        let needed = self.pages_after(ahead).div_ceil(self.shape.slab_pages());
        if self.pool.slabs_held() <= needed {
            return Ok(0);
        }
        let width = self.table_width();
        let in_use: Vec<usize> = (0..self.shape.lists())
            .flat_map(|list| (0..self.shape.pages(self.lens[list])).map(move |index| list * width + index))
            .collect();
        let spare = self.pool.spare(needed, in_use.iter().map(|&at| self.table[at]));
        let mut ns = 0;
        let moves: Vec<(PageId, PageId)> = spare.moves.iter().map(|(&from, &to)| (from, to)).collect();
        for moves in moves.chunks(MOST_MOVES) {
            let mut numbers = vec![0; 2 * MOST_MOVES];
            for (index, &(from, to)) in moves.iter().enumerate() {
                (numbers[index], numbers[MOST_MOVES + index]) = (from, to);
            }
            self.moves.write(bytemuck::cast_slice(&numbers))?;
            let moving = Moves::new(&self.moves, MOST_MOVES)?;
            ns += self.run(runtime, "move_pages", [moves.len(), 2, 1], 128, &moving)?;
        }
        for at in in_use {
            self.table[at] = spare.moves.get(&self.table[at]).copied().unwrap_or(self.table[at]);
        }
        self.pages_there.write(bytemuck::cast_slice(&self.table))?;
        self.pool.drop_slabs(&spare)?;
        Ok(ns)
    }

    /// Adds attention `[lists, width]` to what the tokens received. Returns the GPU's time in nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the cache does not keep attention, and as [`Runtime::module`].
    pub fn add_attention(&mut self, runtime: &Runtime, columns: &DeviceBuffer, width: usize) -> Result<u64, CudaError> {
        if !self.shape.columns.contains(&Column::Attention) || width < self.max_len() {
            return Err(CudaError::Operand(
                "a cache that keeps no attention, or columns shorter than its lists".into(),
            ));
        }
        let received = Received::new(columns, [self.shape.lists(), width])?;
        self.run(runtime, "add_columns", [width.div_ceil(256), self.shape.lists(), 1], 256, &received)
    }

    /// Positions of the keys of each list, copied to the host: for what is reported.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the copy fails.
    pub fn read_positions(&self) -> Result<Vec<Vec<u32>>, CudaError> {
        self.read_numbers(&self.positions)
    }

    /// Positions at which the tokens of each list were appended; where the cache does not keep [`Column::Origin`], those of
    /// their keys.
    ///
    /// # Errors
    /// As [`DeviceCache::read_positions`].
    pub fn read_origins(&self) -> Result<Vec<Vec<u32>>, CudaError> {
        self.read_numbers(self.origins.as_ref().unwrap_or(&self.positions))
    }

    /// The numbers of the tokens of each list, of `[lists, max_tokens]`.
    fn read_numbers(&self, of: &DeviceBuffer) -> Result<Vec<Vec<u32>>, CudaError> {
        let mut all = vec![0u32; self.shape.lists() * self.shape.max_tokens];
        of.read(bytemuck::cast_slice_mut(&mut all))?;
        Ok(all.chunks(self.shape.max_tokens.max(1)).zip(&self.lens).map(|(row, &len)| row[..len].to_vec()).collect())
    }

    /// Keys (`part` 0) or values (`part` 1) of a list, `[len]` rows as they lie, copied to the host: for what is reported.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when a copy fails.
    pub fn read_rows(&self, list: usize, part: usize) -> Result<Vec<u8>, CudaError> {
        let row_bytes = self.rows.row_bytes(self.shape.head_dim)[part];
        let mut rows = vec![0; self.lens[list] * row_bytes];
        for (index, rows) in rows.chunks_mut(self.shape.page_tokens * row_bytes).enumerate() {
            self.pool.read(self.table[list * self.table_width() + index], part, rows)?;
        }
        Ok(rows)
    }

    /// The lists as kernels take them.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when an extent is too large for kernels.
    pub fn lists(&self) -> Result<Lists<'_>, CudaError> {
        self.some_lists(0..self.shape.lists())
    }

    /// Likewise, some of them.
    ///
    /// # Errors
    /// As [`DeviceCache::lists`].
    pub fn some_lists(&self, lists: Range<usize>) -> Result<Lists<'_>, CudaError> {
        Lists::new(&ListsOperands {
            kv: self.kv_from(lists.start),
            positions: &self.positions,
            origins: self.origins.as_ref(),
            carried: self.carried.as_ref(),
            lists: lists.len(),
            heads: self.shape.kv_heads,
            stride: self.shape.max_tokens,
            row_bytes: self.rows.row_bytes(self.shape.head_dim),
        })
    }

    /// Keys and values as paged attention reads them.
    pub fn kv(&self) -> PagedKv<'_> {
        self.kv_from(0)
    }

    /// Likewise, of the lists from `first_list` on.
    pub fn kv_from(&self, first_list: usize) -> PagedKv<'_> {
        PagedKv {
            slabs: self.pool.slabs(),
            first_list,
            table: &self.pages_there,
            lens: &self.news,
            origins: self.origins.as_ref().unwrap_or(&self.positions),
            stride: self.shape.max_tokens,
            slab_pages: self.shape.slab_pages(),
            shift: self.pool.shift(),
            page_tokens: self.shape.page_tokens,
            table_width: self.table_width(),
        }
    }

    /// Bytes of a row of elements.
    fn element_bytes(&self) -> usize {
        self.shape.head_dim * self.rows.dtype().bytes()
    }

    fn table_width(&self) -> usize {
        self.shape.pages(self.shape.max_tokens)
    }

    /// Runs a function of `compact.cu` over the lists.
    fn run(
        &self,
        runtime: &Runtime,
        function: &'static str,
        grid: [usize; 3],
        threads: u32,
        argument: &dyn crate::device::cuda::Argument,
    ) -> Result<u64, CudaError> {
        let launch = Launch { function, grid, threads, shared_bytes: 0 };
        let lists = self.lists()?;
        runtime.device().run(&*runtime.module(&self.program())?, &[launch], &[&lists, argument])
    }

    /// What is compiled for the cache.
    pub fn program(&self) -> Program {
        program(self.rows, self.shape.head_dim)
    }
}

/// What is compiled for caches, and for tokens that are copied, of such rows and head dim.
pub fn program(rows: GpuRows, head_dim: usize) -> Program {
    Program { source: SOURCE, dtype: rows.dtype(), head_dim, macros: rows.macros() }
}

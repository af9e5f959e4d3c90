//! Page lists over the pool: append, read, evict.

use super::pool::{PageId, PagePool};
use super::{CacheShape, PAGE_TOKENS};
use crate::attention::KvRows;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{DType, Rows, TensorView};
use std::ops::Range;

/// Most pages that are looked up to find rows that lie evenly.
const MOST_PAGES: usize = 16;

/// A cache of keys and values in pages, one list of pages per (sequence, KV head).
pub struct PagedCache {
    shape: CacheShape,
    pool: PagePool,
    /// `[B * Hkv, max_tokens / PAGE_TOKENS]` page numbers.
    table: Buffer<PageId>,
    lens: Vec<usize>,
}

impl PagedCache {
    /// An empty cache.
    ///
    /// # Errors
    /// When the arena has no room for the page tables.
    pub fn new(arena: &Arena, shape: CacheShape) -> Result<Self, ArenaError> {
        let table = arena.alloc(Label::Metadata, shape.lists() * shape.max_tokens.div_ceil(PAGE_TOKENS))?;
        Ok(PagedCache { shape, pool: PagePool::new(shape, arena), table, lens: vec![0; shape.lists()] })
    }

    /// What the cache holds.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Number of the list of `(batch, KV head)`.
    pub fn list(&self, batch: usize, head: usize) -> usize {
        batch * self.shape.kv_heads + head
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
        self.pool.used()
    }

    /// Appends the tokens `range` of `k` and `v` `[B, Hkv, L, D]` to every list; a token's position is its index.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When a list would grow past `max_tokens`.
    pub fn append<'a>(&mut self, k: TensorView<'a>, v: TensorView<'a>, range: Range<usize>) -> Result<(), ArenaError> {
        let mut rows = vec![0.0; PAGE_TOKENS * self.shape.head_dim];
        for batch in 0..self.shape.batch {
            for head in 0..self.shape.kv_heads {
                let list = self.list(batch, head);
                let mut next = range.start;
                while next < range.end {
                    let token = self.lens[list] % PAGE_TOKENS;
                    if token == 0 {
                        let page = self.pool.take()?;
                        self.set_page(list, self.lens[list] / PAGE_TOKENS, page);
                    }
                    let page = self.page(list, self.lens[list] / PAGE_TOKENS);
                    let count = (PAGE_TOKENS - token).min(range.end - next);
                    let rows = &mut rows[..count * self.shape.head_dim];
                    for (part, tensor) in [k, v].into_iter().enumerate() {
                        tensor.read_rows(batch, head, next, rows);
                        self.shape.dtype.encode(rows, self.pool.rows_mut(page, part, token, count));
                    }
                    for offset in 0..count {
                        self.pool.set_position(page, token + offset, (next + offset) as u32);
                        self.pool.set_attention(page, token + offset, 0.0);
                    }
                    self.lens[list] += count;
                    next += count;
                }
            }
        }
        Ok(())
    }

    /// Keeps the tokens of a list whose slots are in `keep` (ascending, unique) and gives pages behind them back.
    /// Works in place, front to back: no second copy of anything.
    ///
    /// # Panics
    /// When `keep` is not ascending or names a slot that is not there.
    pub fn retain(&mut self, list: usize, keep: impl IntoIterator<Item = usize>) {
        let mut kept = 0;
        let mut least = 0;
        for slot in keep {
            assert!(slot >= least && slot < self.lens[list], "slots to keep must ascend and exist");
            least = slot + 1;
            if slot != kept {
                self.pool.copy_token(self.token(list, slot), self.token(list, kept));
            }
            kept += 1;
        }
        for index in kept.div_ceil(PAGE_TOKENS)..self.lens[list].div_ceil(PAGE_TOKENS) {
            self.pool.give(self.page(list, index));
        }
        self.lens[list] = kept;
    }

    /// Gives memory that no page needs back to the arena, moving pages together where that empties a slab.
    pub fn release(&mut self) {
        let spare = self.pool.spare_slabs();
        for list in 0..self.shape.lists() {
            for index in 0..self.lens[list].div_ceil(PAGE_TOKENS) {
                let page = self.page(list, index);
                if PagePool::lies_in(page, &spare) {
                    let moved = self.pool.move_out(page, &spare);
                    self.set_page(list, index, moved);
                }
            }
        }
        self.pool.drop_slabs(&spare);
    }

    /// Position in its sequence of the token in a slot.
    pub fn position(&self, list: usize, slot: usize) -> usize {
        let (page, token) = self.token(list, slot);
        self.pool.position(page, token) as usize
    }

    /// Attention that the token in a slot has received, as far as it was added.
    pub fn attention(&self, list: usize, slot: usize) -> f32 {
        let (page, token) = self.token(list, slot);
        self.pool.attention(page, token)
    }

    /// Adds attention `[len]` to the tokens of a list, slot by slot.
    pub fn add_attention(&mut self, list: usize, received: &[f32]) {
        for (slot, value) in received.iter().enumerate().take(self.lens[list]) {
            let (page, token) = self.token(list, slot);
            let sum = self.pool.attention(page, token) + value;
            self.pool.set_attention(page, token, sum);
        }
    }

    fn token(&self, list: usize, slot: usize) -> (PageId, usize) {
        (self.page(list, slot / PAGE_TOKENS), slot % PAGE_TOKENS)
    }

    fn page(&self, list: usize, index: usize) -> PageId {
        self.table[self.table_index(list, index)]
    }

    fn set_page(&mut self, list: usize, index: usize, page: PageId) {
        let at = self.table_index(list, index);
        self.table[at] = page;
    }

    #[inline]
    fn table_index(&self, list: usize, index: usize) -> usize {
        let columns = self.shape.max_tokens.div_ceil(PAGE_TOKENS);
        assert!(index < columns, "a list grew past {} tokens", self.shape.max_tokens);
        list * columns + index
    }

    /// The rows of a list from `start` to the end of its page, and of pages after it that lie behind one another in
    /// memory, as those of one append do.
    #[inline]
    fn rows(&self, list: usize, part: usize, start: usize) -> Rows<'_> {
        let left = self.lens[list] - start;
        let token = start % PAGE_TOKENS;
        let from = self.table_index(list, start / PAGE_TOKENS);
        let pages = &self.table[from..][..(token + left).div_ceil(PAGE_TOKENS).min(MOST_PAGES)];
        let followers = pages.windows(2).take_while(|pair| PagePool::follows(pair[0], pair[1])).count();
        let count = ((1 + followers) * PAGE_TOKENS - token).min(left);
        let bytes = self.pool.rows(pages[0], part, token, count);
        Rows::contiguous(self.shape.dtype, bytes, [count, self.shape.head_dim])
    }
}

impl KvRows for PagedCache {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.lens[self.list(batch, head)]
    }

    fn dtype(&self) -> DType {
        self.shape.dtype
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(self.list(batch, head), 0, start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(self.list(batch, head), 1, start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::SLAB_PAGES;
    use crate::tensor::Tensor;
    use proptest::prelude::*;

    const WIDTH: usize = 3;

    /// Key and value of a token, different for every list, position and part.
    fn row(list: usize, position: usize, part: usize) -> [f32; WIDTH] {
        [0, 1, 2].map(|d| (list * 1_000_000 + position * 10 + part * 5 + d) as f32)
    }

    fn tensor(arena: &Arena, lists: usize, tokens: usize, part: usize) -> Tensor {
        let values: Vec<f32> =
            (0..lists).flat_map(|list| (0..tokens).flat_map(move |token| row(list, token, part))).collect();
        Tensor::from_f32(arena, Label::Input, DType::F32, [1, lists, tokens, WIDTH], &values).unwrap()
    }

    proptest! {
        /// A cache under random appends, evictions and releases holds what a plain list of positions says, and the
        /// arena counts exactly the pages that are in use.
        #[test]
        fn the_cache_agrees_with_a_plain_model(
            steps in prop::collection::vec((0usize..3, 1usize..900, any::<u64>()), 1..12),
        ) {
            let (arena, tokens, lists) = (Arena::unlimited(), 12_000, 2);
            let (k, v) = (tensor(&arena, lists, tokens, 0), tensor(&arena, lists, tokens, 1));
            let shape = CacheShape { batch: 1, kv_heads: lists, head_dim: WIDTH, dtype: DType::F32, max_tokens: tokens, with_attention: true };
            let mut cache = PagedCache::new(&arena, shape).unwrap();
            let mut model: Vec<Vec<usize>> = vec![Vec::new(); lists];
            let mut next = 0;
            for (action, count, seed) in steps {
                match action {
                    0 => {
                        cache.append(k.view(), v.view(), next..next + count).unwrap();
                        model.iter_mut().for_each(|list| list.extend(next..next + count));
                        next += count;
                    }
                    1 => {
                        for (list, positions) in model.iter_mut().enumerate() {
                            let keep = |slot: usize| (slot as u64 * 0x9E37_79B9 + seed + list as u64) % 7 < seed % 7;
                            let slots: Vec<usize> = (0..positions.len()).filter(|&slot| keep(slot)).collect();
                            *positions = slots.iter().map(|&slot| positions[slot]).collect();
                            cache.retain(list, slots);
                        }
                    }
                    _ => {
                        cache.release();
                        let slack = arena.live_bytes(Label::KvSlack);
                        prop_assert!(slack < SLAB_PAGES as u64 * shape.page_bytes(), "{slack} bytes of slack");
                    }
                }
                let pages: usize = model.iter().map(|list| list.len().div_ceil(PAGE_TOKENS)).sum();
                prop_assert_eq!(cache.pages(), pages);
                prop_assert_eq!(arena.live_bytes(Label::Kv), pages as u64 * shape.page_bytes());
                for (list, positions) in model.iter().enumerate() {
                    prop_assert_eq!(cache.lens()[list], positions.len());
                    let mut scratch = vec![0.0; positions.len() * WIDTH];
                    if positions.is_empty() {
                        continue;
                    }
                    let keys = cache.keys(0, list, 0, positions.len(), &mut scratch).to_vec();
                    let values = cache.values(0, list, 0, positions.len(), &mut scratch);
                    for (slot, &position) in positions.iter().enumerate() {
                        prop_assert_eq!(cache.position(list, slot), position);
                        prop_assert_eq!(&keys[slot * WIDTH..][..WIDTH], &row(list, position, 0));
                        prop_assert_eq!(&values[slot * WIDTH..][..WIDTH], &row(list, position, 1));
                    }
                }
            }
            drop(cache);
            prop_assert_eq!(arena.usage().live.keys().copied().collect::<Vec<_>>(), [Label::Input]);
        }
    }

    #[test]
    fn the_predicted_bytes_are_what_the_arena_shows() {
        for (tokens, dtype, with_attention) in
            [(1, DType::F32, false), (1500, DType::Bf16, true), (5000, DType::F16, false)]
        {
            let arena = Arena::unlimited();
            let (k, v) = (tensor(&arena, 3, tokens, 0), tensor(&arena, 3, tokens, 1));
            let before = arena.usage().live_bytes;
            let shape =
                CacheShape { batch: 1, kv_heads: 3, head_dim: WIDTH, dtype, max_tokens: tokens, with_attention };
            let mut cache = PagedCache::new(&arena, shape).unwrap();
            cache.append(k.view(), v.view(), 0..tokens).unwrap();
            let predicted: u64 = shape.bytes(3 * tokens.div_ceil(PAGE_TOKENS), 0).values().sum();
            assert_eq!(arena.usage().live_bytes - before, predicted);
        }
    }

    #[test]
    fn attention_moves_with_its_token() {
        let arena = Arena::unlimited();
        let (k, v) = (tensor(&arena, 1, 40, 0), tensor(&arena, 1, 40, 1));
        let shape = CacheShape {
            batch: 1,
            kv_heads: 1,
            head_dim: WIDTH,
            dtype: DType::F32,
            max_tokens: 40,
            with_attention: true,
        };
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        cache.append(k.view(), v.view(), 0..40).unwrap();
        let received: Vec<f32> = (0..40).map(|slot| slot as f32).collect();
        cache.add_attention(0, &received);
        cache.add_attention(0, &received);
        cache.retain(0, [3, 20, 39]);
        assert_eq!([0, 1, 2].map(|slot| cache.attention(0, slot)), [6.0, 40.0, 78.0]);
        assert_eq!([0, 1, 2].map(|slot| cache.position(0, slot)), [3, 20, 39]);
    }
}

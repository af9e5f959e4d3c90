//! The KV cache: pages of tokens, one page list per (sequence, KV head), memory that really shrinks.
//!
//! A page holds the keys and values of [`PAGE_TOKENS`] tokens of one head. Heads may keep different tokens: eviction
//! compacts each head's list in place and gives the pages behind it back to the pool, and the pool gives whole slabs
//! of free pages back to the arena. The arena's label `kv` counts pages in use, `kv_slack` pages that the pool holds
//! free (less than one slab after [`PagedCache::release`]), `metadata` positions and page tables.

mod paged;
mod pool;

pub use paged::PagedCache;

use crate::memory::{Label, LabelBytes};
use crate::tensor::DType;

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 16;
/// Pages that are taken from the arena together.
const SLAB_PAGES: usize = 64;

/// What a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Sequences.
    pub batch: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Element type in which keys and values are kept.
    pub dtype: DType,
    /// Most tokens that one head will hold at a time: the length of its page table.
    pub max_tokens: usize,
    /// Whether each token carries the attention it has received (for policies that accumulate it).
    pub with_attention: bool,
}

impl CacheShape {
    /// Page lists: `B * Hkv`.
    pub fn lists(&self) -> usize {
        self.batch * self.kv_heads
    }

    /// Bytes of one token of one head: its key and its value.
    pub fn token_bytes(&self) -> u64 {
        (2 * self.head_dim * self.dtype.bytes()) as u64
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> u64 {
        PAGE_TOKENS as u64 * self.token_bytes()
    }

    /// Bytes by label of a cache whose lists hold `pages` pages in all, at most `most_pages` of them at any moment
    /// since the last release: what the arena will show.
    pub fn bytes(&self, pages: usize, most_pages: usize) -> LabelBytes {
        let slabs = most_pages.max(pages).div_ceil(SLAB_PAGES);
        let held = (slabs * SLAB_PAGES * PAGE_TOKENS) as u64;
        let kv = pages as u64 * self.page_bytes();
        let table = 4 * (self.lists() * self.max_tokens.div_ceil(PAGE_TOKENS)) as u64;
        let attention = if self.with_attention { 4 * held } else { 0 };
        LabelBytes::from([
            (Label::Kv, kv),
            (Label::KvSlack, held * self.token_bytes() - kv),
            (Label::Metadata, table + 4 * held),
            (Label::Policy, attention),
        ])
    }
}

//! The KV cache: pages of tokens, one page list per (sequence, KV head), memory that really shrinks.
//!
//! Tokens lie in one store of pages, or where a format leaves some in full in three: the first, those that are coded, the newest.
//! A page holds the keys and values of [`CacheShape::page_tokens`] tokens of one head. Heads may keep different tokens:
//! eviction compacts each head's list in place and gives the pages behind it back to the pool, and the pool gives
//! whole slabs of free pages back to the arena. Sequences may share pages ([`PagedCache::fork`]); a shared page is
//! copied when one of them changes it. The arena's labels say what each byte is for: `kv` is tokens that are there,
//! `kv_fragmentation` the empty places of pages in use, `kv_slack` pages that the pool holds free (less than one slab
//! after [`PagedCache::release`]), `page_table` page tables and reference counts, `metadata` positions, `policy` the
//! columns.

mod arrival;
pub mod cuda;
#[cfg(test)]
mod full_tests;
mod paged;
mod pool;
mod retain;
mod sequences;
mod shapes;
mod slab;
mod store;
#[cfg(test)]
mod tests;
mod token;

pub use paged::PagedCache;
pub use sequences::Sequences;

use crate::format::KvFormat;
use crate::memory::LabelBytes;
use crate::tensor::DType;

/// Tokens of a page where nothing else is asked for.
pub const PAGE_TOKENS: usize = 16;
/// Most tokens of a page.
pub const MOST_PAGE_TOKENS: usize = 1024;
/// Fewest tokens that are taken from the arena together, about.
const SLAB_TOKENS: usize = 1024;
/// Tokens of each list that are taken together, if that is more: lists that grow in turn then lie in runs of about so
/// many tokens. Single pages of many lists in turn are half as slow again to read.
const SLAB_LIST_TOKENS: usize = 128;

/// A number that each token may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// Attention that the token has received so far (for policies that accumulate it, as H2O, arXiv 2306.14048);
    /// begins at 0.
    Attention,
    /// Tokens that the token stands for: how much was merged into it (as DMC, arXiv 2403.09636); begins at 1.
    Weight,
    /// What a policy's gate gave the token as it arrived, from its hidden state (as KVzap, arXiv 2601.07891); begins at 0.
    Gate,
    /// Position at which the token was appended, where keys are rotated to other positions
    /// ([`PagedCache::rerotate`]); whole numbers up to 16 million.
    Origin,
    /// What is added to the logit of the token's key for every query, a natural logarithm (as Attention Matching, arXiv
    /// 2602.16284); begins at 0. Kernels read it ([`KvRows::token_bias`](crate::attention::KvRows::token_bias)).
    Bias,
}

impl Column {
    /// Every column.
    pub const ALL: [Column; 5] = [Column::Attention, Column::Weight, Column::Origin, Column::Gate, Column::Bias];

    /// What a token begins with that is appended at `position`.
    pub fn initial(self, position: usize) -> f32 {
        match self {
            Column::Attention | Column::Gate | Column::Bias => 0.0,
            Column::Weight => 1.0,
            Column::Origin => position as f32,
        }
    }
}

/// What a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Sequences. The layers of a model fold into them: sequence `b` of layer `l` is `l * B + b`.
    pub batch: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// How keys and values are kept.
    pub format: KvFormat,
    /// Most tokens that one head will hold at a time: the length of its page table.
    pub max_tokens: usize,
    /// Tokens of a page, `1 ..= MOST_PAGE_TOKENS`; usually [`PAGE_TOKENS`].
    pub page_tokens: usize,
    /// What each token carries besides its key, value and position; 4 bytes each.
    pub columns: &'static [Column],
}

impl CacheShape {
    /// Page lists: `B * Hkv`.
    pub fn lists(&self) -> usize {
        self.batch * self.kv_heads
    }

    /// Element type of what is kept beside the cache in its precision (an index, a query): that of its rows, f32 where
    /// these are coded or differ.
    pub fn dtype(&self) -> DType {
        self.format.dtype().unwrap_or(DType::F32)
    }

    /// Bytes of one token of one head: its key and its value.
    pub fn token_bytes(&self) -> u64 {
        self.format.token_bytes(self.head_dim)
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> u64 {
        self.page_tokens as u64 * self.token_bytes()
    }

    /// Pages of a list of so many tokens.
    pub fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Pages that are taken from the arena together: about 128 tokens of each list, at least 1024 in all.
    pub fn slab_pages(&self) -> usize {
        (SLAB_TOKENS.max(SLAB_LIST_TOKENS * self.lists()) / self.page_tokens).max(1)
    }

    /// Bytes by label of a cache whose lists hold `lens` tokens, of which none was evicted, and share no pages, and that had at most `most_pages`
    /// pages of coded tokens in use at any moment since the last release: what the arena will show.
    pub fn bytes(&self, lens: impl IntoIterator<Item = usize>, most_pages: usize) -> LabelBytes {
        self.counted(lens).bytes(most_pages)
    }

    /// KV bytes of the pages of lists that hold `lens` tokens, of which none was evicted: what [`PagedCache::kv_bytes`] will say.
    pub fn kv_bytes(&self, lens: impl IntoIterator<Item = usize>) -> u64 {
        self.counted(lens).kv_bytes()
    }
}

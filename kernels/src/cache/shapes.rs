//! What the stores of a cache are, and the bytes they take.

use super::{CacheShape, Column};
use crate::format::{Full, KvFormat};
use crate::memory::{Label, LabelBytes};
use crate::tensor::DType;

/// What a store holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoreShape {
    /// Page lists.
    pub lists: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// How rows are kept.
    pub format: KvFormat,
    /// Pages that a list has room for.
    pub table_len: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Pages that are taken from the arena together.
    pub slab_pages: usize,
    /// What each token carries.
    pub columns: &'static [Column],
    /// Tokens that share scales, where keys do.
    pub group_tokens: Option<usize>,
}

impl StoreShape {
    /// Bytes of one token of one head.
    pub fn token_bytes(&self) -> u64 {
        (self.format.k.row_bytes(self.head_dim) + self.format.v.row_bytes(self.head_dim)) as u64
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> u64 {
        self.page_tokens as u64 * self.token_bytes()
    }

    /// Pages of a list of so many tokens.
    pub fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// What the groups of the tokens lie in.
    pub fn groups(&self) -> Option<StoreShape> {
        let slab_pages = (self.slab_pages * self.page_tokens / self.group_tokens?).max(1);
        let format = KvFormat::plain(DType::F16);
        Some(StoreShape {
            lists: 0,
            format,
            table_len: 0,
            page_tokens: 1,
            slab_pages,
            columns: &[],
            group_tokens: None,
            ..*self
        })
    }

    /// Adds the bytes by label of `tokens` tokens in `pages` pages, where room was taken for `most_pages`.
    pub fn add_bytes(&self, to: &mut LabelBytes, tokens: usize, pages: usize, most_pages: usize) {
        let held_pages = (most_pages.max(pages).div_ceil(self.slab_pages) * self.slab_pages) as u64;
        let held_tokens = held_pages * self.page_tokens as u64;
        let (kv, used) = (tokens as u64 * self.token_bytes(), pages as u64 * self.page_bytes());
        let grouped = if self.group_tokens.is_some() { 4 } else { 0 };
        for (label, bytes) in [
            (Label::Kv, kv),
            (Label::KvFragmentation, used - kv),
            (Label::KvSlack, held_pages * self.page_bytes() - used),
            (Label::PageTable, 4 * ((self.lists * self.table_len) as u64 + held_pages)),
            (Label::Metadata, (4 + grouped) * held_tokens),
            (Label::Policy, 4 * held_tokens * self.columns.len() as u64),
        ] {
            *to.entry(label).or_default() += bytes;
        }
    }
}

/// The stores of a cache: of coded tokens, and of the first and the newest ones in full.
pub(super) struct Shapes {
    pub coded: StoreShape,
    pub full: Option<[StoreShape; 2]>,
}

impl Shapes {
    pub fn new(cache: &CacheShape) -> Self {
        let format = cache.format;
        let coded = StoreShape {
            lists: cache.lists(),
            head_dim: cache.head_dim,
            format,
            table_len: cache.pages(cache.max_tokens),
            page_tokens: cache.page_tokens,
            slab_pages: cache.slab_pages(),
            columns: cache.columns,
            group_tokens: format.k.group_tokens(),
        };
        // A window keeps what is no whole group yet, and may begin anywhere in a page.
        let window = format.full.recent + format.group_tokens() - 1;
        let full = |tokens: usize, before: usize| {
            let page_tokens = cache.page_tokens.min(tokens.max(1));
            let table_len = if tokens == 0 || cache.max_tokens == 0 {
                0
            } else {
                (tokens + before.min(page_tokens - 1)).div_ceil(page_tokens)
            };
            StoreShape {
                format: KvFormat::plain(format.full.dtype),
                table_len,
                page_tokens,
                slab_pages: (table_len * cache.kv_heads).max(1),
                group_tokens: None,
                ..coded
            }
        };
        let full = format.keeps_full().then(|| [full(format.full.first, 0), full(window, usize::MAX)]);
        Shapes { coded, full }
    }
}

/// Tokens and pages of lists of which nothing was evicted.
pub(super) struct Counted {
    shapes: Shapes,
    /// Tokens and pages, and lists that have room for some: of the first, the newest and the coded ones.
    first: [usize; 3],
    recent: [usize; 3],
    coded: [usize; 3],
}

impl CacheShape {
    /// Counts lists of so many tokens.
    pub(super) fn counted(&self, lens: impl IntoIterator<Item = usize>) -> Counted {
        let shapes = Shapes::new(self);
        let Full { first, recent, .. } = self.format.full;
        let (group, none) = (self.format.group_tokens(), [0; 3]);
        let add = |to: &mut [usize; 3], tokens: usize, pages: usize| {
            *to = [to[0] + tokens, to[1] + pages, to[2] + usize::from(tokens > 0)];
        };
        let mut counted = Counted { shapes, first: none, recent: none, coded: none };
        for len in lens {
            let Some([of_first, of_recent]) = &counted.shapes.full else {
                add(&mut counted.coded, len, self.pages(len));
                continue;
            };
            let first = len.min(first);
            let coded = (len - first).saturating_sub(recent) / group * group;
            let recent = len - first - coded;
            // The newest begin in a page where the coded ones end.
            let begins = if recent > 0 { coded % of_recent.page_tokens } else { 0 };
            let pages = [of_first.pages(first), of_recent.pages(begins + recent)];
            add(&mut counted.first, first, pages[0]);
            add(&mut counted.recent, recent, pages[1]);
            counted.recent[2] += usize::from(recent == 0 && coded > 0);
            add(&mut counted.coded, coded, self.pages(coded));
        }
        counted
    }

    /// The most bytes of a cache whose lists hold `tokens` tokens each after some of the `seen` that came were evicted, where a format
    /// leaves tokens in full: which of them were evicted decides how many are in full, and how many groups of the others are left.
    pub fn most_bytes_evicted(&self, tokens: usize, seen: usize) -> u64 {
        let (Shapes { coded, full }, lists, mut bytes) = (Shapes::new(self), self.lists(), LabelBytes::new());
        coded.add_bytes(&mut bytes, lists * tokens, lists * (self.pages(tokens) + 1), 0);
        if let (Some(shape), Some(group)) = (coded.groups(), coded.group_tokens) {
            let groups = lists * tokens.min(seen / group);
            shape.add_bytes(&mut bytes, groups, groups, 0);
        }
        for shape in full.iter().flatten() {
            shape.add_bytes(&mut bytes, 0, 0, lists * shape.table_len);
        }
        bytes.values().sum()
    }
}

impl Counted {
    /// Groups of the coded tokens.
    fn groups(&self) -> Option<(StoreShape, usize)> {
        let group = self.shapes.coded.group_tokens?;
        self.shapes.coded.groups().map(|shape| (shape, self.coded[0] / group))
    }

    /// See [`CacheShape::bytes`].
    pub fn bytes(&self, most_pages: usize) -> LabelBytes {
        let mut bytes = LabelBytes::new();
        self.shapes.coded.add_bytes(&mut bytes, self.coded[0], self.coded[1], most_pages);
        if let Some((shape, groups)) = self.groups() {
            shape.add_bytes(&mut bytes, groups, groups, 0);
        }
        if let Some(full) = &self.shapes.full {
            for (shape, [tokens, pages, lists]) in full.iter().zip([self.first, self.recent]) {
                shape.add_bytes(&mut bytes, tokens, pages, lists * shape.table_len);
            }
        }
        bytes
    }

    /// See [`CacheShape::kv_bytes`].
    pub fn kv_bytes(&self) -> u64 {
        let full = self.shapes.full.iter().flatten().zip([self.first, self.recent]);
        let full: u64 = full.map(|(shape, [_, pages, _])| pages as u64 * shape.page_bytes()).sum();
        let groups = self.groups().map_or(0, |(shape, groups)| groups as u64 * shape.page_bytes());
        self.coded[1] as u64 * self.shapes.coded.page_bytes() + full + groups
    }
}

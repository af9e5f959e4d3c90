//! Some pages of each list of a cache as one list of rows, read where they lie.

use super::Lists;
use crate::attention::KvRows;
use crate::format::KvFormat;
use crate::tensor::Rows;

/// Pages that a kernel runs over in one go, at most.
const RUN_PAGES: usize = 32;

/// A cache of which some pages are seen.
pub struct Selected<'a> {
    cache: Lists<'a>,
    /// `[lists, stride]`: ascending pages of each list at the front of its part.
    pages: &'a [u32],
    stride: usize,
    count: usize,
}

impl<'a> Selected<'a> {
    /// Sees the first `count` of each `stride` of `pages`: ascending page numbers inside the lists.
    pub fn new(cache: Lists<'a>, pages: &'a [u32], stride: usize, count: usize) -> Self {
        Selected { cache, pages, stride, count }
    }

    /// Rows of all lists together.
    pub fn tokens(&self) -> usize {
        let shape = self.cache.shape();
        (0..shape.batch).flat_map(|batch| (0..shape.kv_heads).map(move |head| self.len(batch, head))).sum()
    }

    /// Rows of the longest list.
    pub fn max_len(&self) -> usize {
        self.count * self.cache.shape().page_tokens
    }

    fn pages(&self, batch: usize, head: usize) -> &'a [u32] {
        &self.pages[(batch * self.cache.shape().kv_heads + head) * self.stride..][..self.count]
    }

    /// The slot of row `start`, and how many rows follow it in pages that follow one another.
    fn run(&self, batch: usize, head: usize, start: usize) -> (usize, usize) {
        let page_tokens = self.cache.shape().page_tokens;
        let pages = &self.pages(batch, head)[start / page_tokens..];
        let token = start % page_tokens;
        let followers = pages.windows(2).take(RUN_PAGES).take_while(|pair| pair[1] == pair[0] + 1).count();
        (pages[0] as usize * page_tokens + token, (1 + followers) * page_tokens - token)
    }
}

impl KvRows for Selected<'_> {
    fn len(&self, batch: usize, head: usize) -> usize {
        let Some(&last) = self.pages(batch, head).last() else { return 0 };
        let page_tokens = self.cache.shape().page_tokens;
        // Only the last page of a list may hold fewer tokens.
        let in_last = (self.cache.rows().len(batch, head) - last as usize * page_tokens).min(page_tokens);
        (self.count - 1) * page_tokens + in_last
    }

    fn format(&self) -> KvFormat {
        self.cache.rows().format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let (slot, count) = self.run(batch, head, start);
        self.cache.rows().key_rows(batch, head, slot).first(count)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let (slot, count) = self.run(batch, head, start);
        self.cache.rows().value_rows(batch, head, slot).first(count)
    }

    fn token_bias(&self, batch: usize, head: usize, start: usize) -> Option<&[f32]> {
        let (slot, count) = self.run(batch, head, start);
        let run = self.cache.rows().token_bias(batch, head, slot)?;
        Some(&run[..run.len().min(count)])
    }
}

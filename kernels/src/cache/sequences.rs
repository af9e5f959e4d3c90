//! Some of a cache's sequences as a batch of their own: those of one layer, or one sequence through all layers.

use super::PagedCache;
use crate::attention::KvRows;
use crate::format::KvFormat;
use crate::tensor::Rows;

/// The sequences `first`, `first + step`, ... of a cache.
#[derive(Clone, Copy)]
pub struct Sequences<'a> {
    /// The cache.
    pub cache: &'a PagedCache,
    /// Sequence of the cache that is the first here.
    pub first: usize,
    /// Distance of neighbours.
    pub step: usize,
}

impl Sequences<'_> {
    /// Number in the cache of the list of `(sequence, KV head)`.
    pub fn list(&self, sequence: usize, head: usize) -> usize {
        self.cache.list(self.first + sequence * self.step, head)
    }

    /// Tokens of the longest list of the first `batch` sequences.
    pub fn max_len(&self, batch: usize) -> usize {
        let lists = (0..batch).flat_map(|b| (0..self.cache.shape().kv_heads).map(move |head| (b, head)));
        lists.map(|(b, head)| self.cache.lens()[self.list(b, head)]).max().unwrap_or(0)
    }
}

impl KvRows for Sequences<'_> {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.cache.lens()[self.list(batch, head)]
    }

    fn before(&self, batch: usize, head: usize, behind: usize) -> usize {
        self.cache.before(self.first + batch * self.step, head, behind)
    }

    fn format(&self) -> KvFormat {
        self.cache.format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.cache.key_rows(self.first + batch * self.step, head, start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.cache.value_rows(self.first + batch * self.step, head, start)
    }

    fn token_bias(&self, batch: usize, head: usize, start: usize) -> Option<&[f32]> {
        self.cache.token_bias(self.first + batch * self.step, head, start)
    }
}

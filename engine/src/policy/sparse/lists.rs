//! Neighbouring sequences of a cache, as KV selection sees them: all of an experiment's, or one of a model's layer.

use crate::attention::KvRows;
use crate::cache::{CacheShape, PagedCache};
use crate::format::KvFormat;
use crate::tensor::Rows;

/// The lists of `count` sequences of a cache, numbered from 0.
#[derive(Clone, Copy)]
pub struct Lists<'a> {
    cache: &'a PagedCache,
    first: usize,
    count: usize,
}

impl<'a> Lists<'a> {
    /// All of a cache.
    pub fn all(cache: &'a PagedCache) -> Self {
        Lists { cache, first: 0, count: cache.shape().batch }
    }

    /// Those of one sequence of a cache.
    pub fn of_sequence(cache: &'a PagedCache, sequence: usize) -> Self {
        Lists { cache, first: sequence, count: 1 }
    }

    /// What a cache of these alone would hold.
    pub fn shape(&self) -> CacheShape {
        CacheShape { batch: self.count, ..*self.cache.shape() }
    }

    /// Tokens in each list.
    pub fn lens(&self) -> &'a [usize] {
        let heads = self.cache.shape().kv_heads;
        &self.cache.lens()[self.first * heads..(self.first + self.count) * heads]
    }

    /// Tokens of the longest list.
    pub fn max_len(&self) -> usize {
        self.lens().iter().copied().max().unwrap_or(0)
    }

    /// The key in a slot, `[D]`.
    ///
    /// # Panics
    /// When the slot is empty or `key` has another length.
    pub fn read_key(&self, list: usize, slot: usize, key: &mut [f32]) {
        self.cache.read_key(self.first * self.cache.shape().kv_heads + list, slot, key);
    }
}

impl KvRows for Lists<'_> {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.cache.len(self.first + batch, head)
    }

    fn format(&self) -> KvFormat {
        self.cache.format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.cache.key_rows(self.first + batch, head, start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.cache.value_rows(self.first + batch, head, start)
    }

    fn token_bias(&self, batch: usize, head: usize, start: usize) -> Option<&[f32]> {
        self.cache.token_bias(self.first + batch, head, start)
    }
}

//! Neighbouring sequences of a cache, as KV selection sees them: all of an experiment's, or one of a model's layer.

use crate::cache::{CacheShape, PagedCache, Sequences};

/// The lists of `count` sequences of a cache, numbered from 0.
#[derive(Clone, Copy)]
pub struct Lists<'a> {
    rows: Sequences<'a>,
    count: usize,
}

impl<'a> Lists<'a> {
    /// All of a cache.
    pub fn all(cache: &'a PagedCache) -> Self {
        Lists { rows: Sequences { cache, first: 0, step: 1 }, count: cache.shape().batch }
    }

    /// Those of one sequence of a cache.
    pub fn of_sequence(cache: &'a PagedCache, sequence: usize) -> Self {
        Lists { rows: Sequences { cache, first: sequence, step: 1 }, count: 1 }
    }

    /// Their rows.
    pub fn rows(&self) -> &Sequences<'a> {
        &self.rows
    }

    /// What a cache of these alone would hold.
    pub fn shape(&self) -> CacheShape {
        CacheShape { batch: self.count, ..*self.rows.cache.shape() }
    }

    /// Tokens in each list.
    pub fn lens(&self) -> &'a [usize] {
        let (first, heads) = (self.rows.first, self.rows.cache.shape().kv_heads);
        &self.rows.cache.lens()[first * heads..(first + self.count) * heads]
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
        self.rows.cache.read_key(self.rows.list(0, 0) + list, slot, key);
    }
}

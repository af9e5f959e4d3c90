//! A sliding window over lists with gaps: slots are no positions there, so the window is cut out list by list.
//!
//! Queries go one by one; each sees the tokens of a list whose positions are within its window. That is slow only where
//! many tokens are fed after an eviction of a model with windows.

use super::{Chunk, Decoder};
use crate::attention::KvRows;
use crate::cache::Sequences;
use crate::format::KvFormat;
use crate::tensor::Rows;
use std::ops::Range;

/// Some slots of each list of a sequence.
pub(super) struct Narrow<'a> {
    pub kv: Sequences<'a>,
    /// Of each head.
    pub slots: Vec<Range<usize>>,
}

impl KvRows for Narrow<'_> {
    fn len(&self, _batch: usize, head: usize) -> usize {
        self.slots[head].len()
    }

    fn format(&self) -> KvFormat {
        self.kv.format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let Range { start: first, end } = self.slots[head];
        self.kv.key_rows(batch, head, first + start).first(end - first - start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let Range { start: first, end } = self.slots[head];
        self.kv.value_rows(batch, head, first + start).first(end - first - start)
    }

    fn token_bias(&self, batch: usize, head: usize, start: usize) -> Option<&[f32]> {
        let Range { start: first, end } = self.slots[head];
        let run = self.kv.token_bias(batch, head, first + start)?;
        Some(&run[..run.len().min(end - first - start)])
    }
}

impl Decoder<'_> {
    /// The slots that token `token` of a chunk sees in each head's list through a window.
    pub(super) fn seen_slots(
        &self,
        kv: &Sequences<'_>,
        chunk: &Chunk,
        token: usize,
        window: usize,
    ) -> Vec<Range<usize>> {
        let oldest = (chunk.first + token + 1).saturating_sub(window);
        let slots = |head| {
            let list = kv.list(0, head);
            let end = self.cache.lens()[list] - chunk.tokens + token + 1;
            self.cache.first_slot(list, oldest)..end
        };
        (0..self.model.config.kv_heads).map(slots).collect()
    }
}

//! Eviction in place: what is retained of a list moves together, and the pages behind it go back.
//!
//! Tokens move in runs, as long as both where they lie and where they go is one piece of memory, so that dropping one
//! token in the middle costs two moves for each slab that the rest lies in. Nothing is held twice.

use super::PagedCache;
use crate::memory::ArenaError;
use std::iter::Peekable;
use std::ops::Range;

impl PagedCache {
    /// Keeps the tokens of a list whose slots are in `keep` (ascending, unique) and gives pages behind them back.
    /// `keep` is gone through twice.
    ///
    /// # Errors
    /// When the arena has no room for a copy of pages that another sequence shares; the list is then as before.
    ///
    /// # Panics
    /// When `keep` is not ascending or names a slot that is not there; the list is then as before.
    pub fn retain<I>(&mut self, list: usize, keep: I) -> Result<(), ArenaError>
    where
        I: IntoIterator<Item = usize>,
        I::IntoIter: Clone,
    {
        self.retain_ranges(list, Runs(keep.into_iter().peekable()))
    }

    /// As [`PagedCache::retain`], with ranges of slots, such as `[0..slot, slot + 1..len]` to drop a single one.
    ///
    /// # Errors
    /// As [`PagedCache::retain`].
    ///
    /// # Panics
    /// As [`PagedCache::retain`].
    pub fn retain_ranges<I>(&mut self, list: usize, keep: I) -> Result<(), ArenaError>
    where
        I: IntoIterator<Item = Range<usize>>,
        I::IntoIter: Clone,
    {
        let (len, keep) = (self.lens[list], keep.into_iter());
        // Slots below `still` stay where they are.
        let (mut kept, mut still, mut end) = (0, 0, 0);
        for range in keep.clone() {
            let in_order = end <= range.start && range.start <= range.end && range.end <= len;
            assert!(in_order, "slots to keep must ascend and exist; {range:?} after {end} of {len}");
            if range.start == still {
                still = range.end;
            }
            kept += range.len();
            end = range.end;
        }
        if kept == len {
            return Ok(());
        }
        let page_tokens = self.shape.page_tokens;
        let (written, pages) = (still / page_tokens, self.shape.pages(kept));
        self.own_pages(list, written..pages)?;

        let mut to = still;
        for range in keep.filter(|range| range.start > still) {
            let mut from = range.start;
            while from < range.end {
                let (source, source_token, count) = self.run(list, from, range.end - from);
                let (target, target_token, count) = self.run(list, to, count);
                self.pool.copy((source, source_token), (target, target_token), count);
                (from, to) = (from + count, to + count);
            }
        }
        self.truncate_pages(list, pages);
        // Of the pages that stay, only the last one may hold fewer tokens than before.
        self.pool.count(0, len.min(pages * page_tokens) - kept);
        self.lens[list] = kept;
        self.pool.tell();
        Ok(())
    }
}

/// Ascending slots as ranges.
#[derive(Clone)]
struct Runs<I: Iterator<Item = usize>>(Peekable<I>);

impl<I: Iterator<Item = usize>> Iterator for Runs<I> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        let start = self.0.next()?;
        let mut end = start + 1;
        while self.0.next_if_eq(&end).is_some() {
            end += 1;
        }
        Some(start..end)
    }
}

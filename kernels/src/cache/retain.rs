//! Eviction in place: what is retained of a list moves together, and the pages behind it go back.
//!
//! Each store keeps its tokens: one that was coded stays as it is coded, with the scales of its group, which go with the last of its
//! tokens. Tokens move in runs, as long as both where they lie and where they go is one piece of memory, so that dropping one
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
        let (mut kept, mut end) = (0, 0);
        for range in keep.clone() {
            let in_order = end <= range.start && range.start <= range.end && range.end <= len;
            assert!(in_order, "slots to keep must ascend and exist; {range:?} after {end} of {len}");
            kept += range.len();
            end = range.end;
        }
        if kept == len {
            return Ok(());
        }
        let mut first = 0;
        for store in self.stores_mut() {
            let slots = first..first + store.lens[list];
            store.reserve_to_retain(list, within(keep.clone(), slots.clone()))?;
            first = slots.end;
        }
        let mut first = 0;
        for store in self.stores_mut() {
            let slots = first..first + store.lens[list];
            store.retain(list, within(keep.clone(), slots.clone()));
            store.tell();
            first = slots.end;
        }
        self.lens[list] = kept;
        Ok(())
    }
}

/// What of ascending ranges lies in another, counted from its start.
fn within(
    ranges: impl Iterator<Item = Range<usize>> + Clone,
    slots: Range<usize>,
) -> impl Iterator<Item = Range<usize>> + Clone {
    ranges.filter_map(move |range| {
        let (start, end) = (range.start.max(slots.start), range.end.min(slots.end));
        (start < end).then(|| start - slots.start..end - slots.start)
    })
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

//! Single tokens: what merging actions read and write, the numbers that tokens carry, and positions inside the cache.

use super::slab::Slab;
use super::{Column, PagedCache};
use crate::attention::rope::{Frequencies, Rotation};
use crate::memory::ArenaError;
use std::ops::Range;

impl PagedCache {
    /// The key in a slot, `[D]`.
    ///
    /// # Panics
    /// When the slot is empty or `key` has another length.
    pub fn read_key(&self, list: usize, slot: usize, key: &mut [f32]) {
        self.read(list, slot, 0, key);
    }

    /// The value in a slot, `[D]`.
    ///
    /// # Panics
    /// When the slot is empty or `value` has another length.
    pub fn read_value(&self, list: usize, slot: usize, value: &mut [f32]) {
        self.read(list, slot, 1, value);
    }

    /// Replaces the key in a slot, `[D]`, rounded as the cache's format rounds it; where keys share scales, to the nearest that
    /// its group spans.
    ///
    /// # Errors
    /// When another sequence shares the page and the arena has no room for a copy.
    ///
    /// # Panics
    /// When the slot is empty or `key` has another length.
    pub fn write_key(&mut self, list: usize, slot: usize, key: &[f32]) -> Result<(), ArenaError> {
        self.write(list, slot, 0, key)
    }

    /// Replaces the value in a slot, as [`PagedCache::write_key`].
    ///
    /// # Errors
    /// As [`PagedCache::write_key`].
    ///
    /// # Panics
    /// As [`PagedCache::write_key`].
    pub fn write_value(&mut self, list: usize, slot: usize, value: &[f32]) -> Result<(), ArenaError> {
        self.write(list, slot, 1, value)
    }

    /// What the token in a slot carries; what tokens begin with, if the cache does not keep the column.
    ///
    /// # Panics
    /// When the slot is empty.
    pub fn column(&self, list: usize, slot: usize, column: Column) -> f32 {
        let (slab, place) = self.at(list, slot);
        self.shape
            .columns
            .iter()
            .position(|&kept| kept == column)
            .map_or_else(|| column.initial(slab.positions[place] as usize), |at| slab.columns[at][place])
    }

    /// What the first tokens of a list carry in a column, as many as `to` holds.
    ///
    /// # Panics
    /// When the list has fewer tokens.
    pub fn read_column(&self, list: usize, column: Column, to: &mut [f32]) {
        assert!(to.len() <= self.lens[list], "{} tokens of {}", to.len(), self.lens[list]);
        let Some(at) = self.shape.columns.iter().position(|&kept| kept == column) else {
            return to.iter_mut().enumerate().for_each(|(slot, value)| *value = self.column(list, slot, column));
        };
        let mut slot = 0;
        while slot < to.len() {
            let (store, of_store) = self.store(list, slot);
            let run = store.column(list, of_store, at);
            let count = run.len().min(to.len() - slot);
            to[slot..slot + count].copy_from_slice(&run[..count]);
            slot += count;
        }
    }

    /// Position at which the token in a slot was appended; where the cache does not keep [`Column::Origin`], the position
    /// of its key.
    ///
    /// # Panics
    /// When the slot is empty.
    pub fn origin(&self, list: usize, slot: usize) -> usize {
        self.column(list, slot, Column::Origin) as usize
    }

    /// The first slot of a list whose token stands at `position` or later in its sequence; its length where there is none.
    pub fn first_slot(&self, list: usize, position: usize) -> usize {
        let (mut low, mut high) = (0, self.lens()[list]);
        while low < high {
            let middle = (low + high) / 2;
            match self.origin(list, middle) < position {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }

    /// Sets what the token in a slot carries.
    ///
    /// # Errors
    /// As [`PagedCache::write_key`].
    ///
    /// # Panics
    /// When the slot is empty or the cache does not keep the column.
    pub fn set_column(&mut self, list: usize, slot: usize, column: Column, value: f32) -> Result<(), ArenaError> {
        let at = self.kept(column);
        let (slab, place) = self.at_mut(list, slot)?;
        slab.columns[at][place] = value;
        Ok(())
    }

    /// Attention that the token in a slot has received, as far as it was added.
    ///
    /// # Panics
    /// When the slot is empty.
    pub fn attention(&self, list: usize, slot: usize) -> f32 {
        self.column(list, slot, Column::Attention)
    }

    /// Adds attention to the tokens of a list, slot by slot; numbers behind its last slot are not used.
    ///
    /// # Errors
    /// When another sequence shares pages and the arena has no room for copies; nothing is added then.
    ///
    /// # Panics
    /// When the cache does not keep [`Column::Attention`].
    pub fn add_attention(&mut self, list: usize, received: &[f32]) -> Result<(), ArenaError> {
        let at = self.kept(Column::Attention);
        let received = &received[..received.len().min(self.lens[list])];
        self.own_slots(list, 0..received.len())?;
        let mut slot = 0;
        while slot < received.len() {
            let (store, of_store) = self.store_mut(list, slot);
            let most = (received.len() - slot).min(store.lens[list] - of_store);
            let (page, token, count) = store.run(list, of_store, most);
            let (slab, place) = store.pool.at_mut(page, token);
            let sums = &mut slab.columns[at][place..place + count];
            sums.iter_mut().zip(&received[slot..]).for_each(|(sum, received)| *sum += received);
            slot += count;
        }
        Ok(())
    }

    /// Rotates the keys of a list from their positions to `0 .. len`, in place, and makes these the positions: the form of
    /// StreamingLLM (arXiv 2309.17453), whose positions are those inside the cache. Keys are rounded each time they are
    /// turned; those whose position stays are left alone.
    ///
    /// # Errors
    /// When another sequence shares pages that change and the arena has no room for copies; nothing is changed then.
    ///
    /// # Panics
    /// When the frequencies are of another head dim.
    pub fn rerotate(&mut self, list: usize, rope: &Frequencies) -> Result<(), ArenaError> {
        self.rerotate_from(list, 0, rope)
    }

    /// As [`PagedCache::rerotate`] where the keys before slot `from` are known to be rotated already.
    ///
    /// # Errors
    /// As [`PagedCache::rerotate`].
    ///
    /// # Panics
    /// As [`PagedCache::rerotate`].
    pub fn rerotate_from(&mut self, list: usize, from: usize, rope: &Frequencies) -> Result<(), ArenaError> {
        let len = self.lens[list];
        let Some(first) = (from..len).find(|&slot| self.position(list, slot) != slot) else { return Ok(()) };
        self.own_slots(list, first..len)?;
        let mut key = vec![0.0; self.shape.head_dim];
        // Tokens between two gaps turn by the same angles.
        let mut turn: Option<(i64, Rotation)> = None;
        for slot in first..len {
            let by = slot as i64 - self.position(list, slot) as i64;
            let rotation = match &turn {
                Some((last, rotation)) if *last == by => rotation,
                _ => &turn.insert((by, Rotation::new(rope, by))).1,
            };
            if by != 0 {
                self.read_key(list, slot, &mut key);
                rotation.rotate(&mut key);
                self.write_key(list, slot, &key)?;
                let (slab, place) = self.at_mut(list, slot)?;
                slab.positions[place] = slot as u32;
            }
        }
        Ok(())
    }

    /// The slab and the place in it of a slot.
    pub(super) fn at(&self, list: usize, slot: usize) -> (&Slab, usize) {
        assert!(slot < self.lens[list], "slot {slot} of {}", self.lens[list]);
        let (store, slot) = self.store(list, slot);
        store.at(list, slot)
    }

    /// As `at`, in a page of the list's own.
    fn at_mut(&mut self, list: usize, slot: usize) -> Result<(&mut Slab, usize), ArenaError> {
        assert!(slot < self.lens[list], "slot {slot} of {}", self.lens[list]);
        let (store, slot) = self.store_mut(list, slot);
        store.at_mut(list, slot)
    }

    /// Makes the pages of some slots the list's own.
    fn own_slots(&mut self, list: usize, slots: Range<usize>) -> Result<(), ArenaError> {
        let mut first = 0;
        for store in self.stores_mut() {
            let end = first + store.lens[list];
            let (start, stop) = (slots.start.clamp(first, end), slots.end.clamp(first, end));
            if start < stop {
                store.own_slots(list, start - first..stop - first)?;
            }
            first = end;
        }
        Ok(())
    }

    fn kept(&self, column: Column) -> usize {
        let at = self.shape.columns.iter().position(|&kept| kept == column);
        at.unwrap_or_else(|| panic!("the cache keeps {:?}, not {column:?}", self.shape.columns))
    }

    fn check(&self, row: &[f32]) {
        assert_eq!(row.len(), self.shape.head_dim, "a row of a head has as many elements as the head");
    }

    fn read(&self, list: usize, slot: usize, part: usize, row: &mut [f32]) {
        self.check(row);
        assert!(slot < self.lens[list], "slot {slot} of {}", self.lens[list]);
        let (store, slot) = self.store(list, slot);
        store.rows(list, part, slot).first(1).widen(row);
    }

    fn write(&mut self, list: usize, slot: usize, part: usize, row: &[f32]) -> Result<(), ArenaError> {
        self.check(row);
        assert!(slot < self.lens[list], "slot {slot} of {}", self.lens[list]);
        let (store, slot) = self.store_mut(list, slot);
        let format = *store.shape.format.of(part);
        let codes = store.rows(list, part, slot).channels().map(|channels| {
            let mut key = row.to_vec();
            format.to_codes(&mut key, channels);
            key
        });
        let (slab, place) = store.at_mut(list, slot)?;
        format.encode(codes.as_deref().unwrap_or(row), row.len(), slab.rows_mut(part, place, 1));
        Ok(())
    }
}

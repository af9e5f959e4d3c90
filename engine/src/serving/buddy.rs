//! A buddy allocator over any number of slots.
//!
//! Blocks are powers of two. A request takes the smallest free block that is large enough, of several the one that
//! lies first, and halves it until half of it would be too small. A block that comes back joins its other half when
//! that is free too. A pool that is no power of two is cut into the powers that it is made of, largest first, so that
//! every block begins at a multiple of its size and halves of different arenas never join.

use std::collections::BTreeSet;

/// Free blocks of a pool.
pub struct Buddy {
    /// Offsets of the free blocks of `2^order` slots, for each order.
    free: Vec<BTreeSet<usize>>,
}

impl Buddy {
    /// A pool of `slots` slots, all free.
    pub fn new(slots: usize) -> Self {
        let mut free = vec![BTreeSet::new(); usize::BITS as usize];
        let mut offset = 0;
        for order in (0..free.len()).rev().filter(|order| slots & (1 << order) != 0) {
            free[order].insert(offset);
            offset += 1 << order;
        }
        Buddy { free }
    }

    /// Takes a block of at least `slots` slots: its offset and its size. `None` when no free block is large enough.
    pub fn take(&mut self, slots: usize) -> Option<(usize, usize)> {
        let wanted = order_of(slots)?;
        let found = (wanted..self.free.len()).find(|&order| !self.free[order].is_empty())?;
        let offset = self.free[found].pop_first()?;
        for order in (wanted..found).rev() {
            self.free[order].insert(offset + (1 << order));
        }
        Some((offset, 1 << wanted))
    }

    /// Gives a block back, as [`Buddy::take`] returned it.
    pub fn give(&mut self, (mut offset, size): (usize, usize)) {
        let mut order = size.trailing_zeros() as usize;
        while self.free[order].remove(&(offset ^ (1 << order))) {
            offset &= !(1 << order);
            order += 1;
        }
        let is_new = self.free[order].insert(offset);
        assert!(is_new, "the block at {offset} was given back twice");
    }
}

/// The order of the smallest block that holds `slots`.
fn order_of(slots: usize) -> Option<usize> {
    Some(slots.max(1).checked_next_power_of_two()?.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is taken and given back: blocks lie inside the pool, never overlap, are at most twice too large,
        /// are refused only when no free block is large enough, and all of the pool is there again in the end.
        #[test]
        fn no_slot_is_lost_or_held_twice(
            slots in 1usize..3000,
            steps in prop::collection::vec((any::<bool>(), 1usize..700), 1..120),
        ) {
            let mut buddy = Buddy::new(slots);
            let whole = buddy.free.clone();
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (take, number) in steps {
                if !take {
                    if !held.is_empty() {
                        buddy.give(held.swap_remove(number % held.len()));
                    }
                    continue;
                }
                let sizes = (0..usize::BITS as usize).filter(|&order| !buddy.free[order].is_empty());
                let fitting = sizes.map(|order| 1usize << order).find(|&size| size >= number);
                let first = fitting.and_then(|size| buddy.free[size.trailing_zeros() as usize].first().copied());
                let taken = buddy.take(number);
                prop_assert_eq!(taken.map(|(offset, _)| offset), first);
                if let Some((offset, size)) = taken {
                    prop_assert!(size >= number && size < 2 * number && offset + size <= slots);
                    let apart = |&(other, length): &(usize, usize)| other + length <= offset || offset + size <= other;
                    prop_assert!(held.iter().all(apart));
                    held.push((offset, size));
                }
            }
            held.into_iter().for_each(|block| buddy.give(block));
            prop_assert_eq!(buddy.free, whole);
        }
    }
}

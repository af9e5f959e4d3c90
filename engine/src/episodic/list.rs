//! The facts themselves, the latest ones in a ring: what a memory of as many bytes is compared with. A cue gets the fact that
//! it is most like.

use super::matrix::{Matrix, cosine};
use super::{EpisodicError, FactMemoryEntry, MOST_FACTS, Method, Noise, Stays, Step, Store};
use crate::memory::{Arena, ArenaError, Label, LabelBytes};
use crate::named::Parameter;

pub const ENTRY: FactMemoryEntry = FactMemoryEntry {
    name: "list",
    about: "The latest facts as they are, each in a slot of its own; a cue gets the one of the largest cosine",
    paper: "",
    parameters: &[Parameter { name: "slots", default: "64", about: "facts that are kept" }],
    build: |named| Ok(Box::new(List { slots: named.count_in("slots", 64, 1..=MOST_FACTS)? })),
};

struct List {
    slots: usize,
}

impl Method for List {
    fn bytes(&self, width: usize) -> LabelBytes {
        [(Label::Facts, Ring::bytes(self.slots, width))].into()
    }

    fn workspace_bytes(&self, _width: usize, _step: Step) -> u64 {
        0
    }

    fn forgets(&self) -> bool {
        true
    }

    fn open(&self, width: usize, arena: &Arena) -> Result<Box<dyn Store>, EpisodicError> {
        Ok(Box::new(Ring::new(arena, self.slots, width)?))
    }
}

/// A ring of vectors; zeros where there is none.
pub(super) struct Ring {
    facts: Matrix,
    /// How many were added and not taken out, those that went among them: the row of the next one, around the ring. A matrix so that it
    /// is saved as all else is.
    next: Matrix,
}

impl Ring {
    pub(super) fn bytes(slots: usize, width: usize) -> u64 {
        Matrix::bytes(slots, width) + Matrix::bytes(1, 1)
    }

    pub(super) fn new(arena: &Arena, slots: usize, width: usize) -> Result<Self, ArenaError> {
        let matrix = |rows, columns| Matrix::zeros(arena, Label::Facts, rows, columns);
        Ok(Ring { facts: matrix(slots, width)?, next: matrix(1, 1)? })
    }

    /// Adds a vector; whether it has replaced the oldest.
    pub(super) fn add(&mut self, fact: &[f64]) -> bool {
        let added = self.added();
        let slot = added % self.facts.rows();
        let was_taken = self.holds(slot);
        self.facts.row_mut(slot).copy_from_slice(fact);
        self.next[0] = (added + 1) as f64;
        was_taken
    }

    fn added(&self) -> usize {
        let (next, slots) = (self.next[0] as usize, self.facts.rows());
        // Older files have the row alone. That of a full ring is taken, and nothing says how many went.
        if next < slots && self.holds(next) { next + 2 * slots } else { next }
    }

    fn holds(&self, index: usize) -> bool {
        self.facts.row(index).iter().any(|&value| value != 0.0)
    }

    /// Whether a vector is there; `false` where it may be one that went.
    pub(super) fn has(&self, fact: &[f64]) -> Result<bool, Stays> {
        let slots = self.facts.rows();
        let is_there = (0..slots).any(|index| self.facts.row(index) == fact);
        let held = (0..slots).filter(|&index| self.holds(index)).count();
        if !is_there && self.added() == held { Err(Stays::List) } else { Ok(is_there) }
    }

    /// Takes a vector out; `false` where it is not there. Later ones move up, so that the next is written to the place that is free and
    /// replaces none.
    pub(super) fn remove(&mut self, fact: &[f64]) -> bool {
        let (slots, width, added) = (self.facts.rows(), self.facts.columns(), self.added());
        let Some(mut at) = (0..slots).find(|&index| self.facts.row(index) == fact) else { return false };
        while (at + 1) % slots != added % slots {
            let later = (at + 1) % slots;
            self.facts.copy_within(later * width..(later + 1) * width, at * width);
            at = later;
        }
        self.facts.row_mut(at).fill(0.0);
        self.next[0] = (added - 1) as f64;
        true
    }

    /// The vector of the largest cosine, and this cosine; of equals the first. Where there is none it is zeros, infinitely far.
    pub(super) fn nearest(&self, cue: &[f64]) -> (&[f64], f64) {
        let mut best = (self.facts.row(0), f64::NEG_INFINITY);
        for index in (0..self.facts.rows()).filter(|&index| self.holds(index)) {
            let likeness = cosine(cue, self.facts.row(index));
            if likeness > best.1 {
                best = (self.facts.row(index), likeness);
            }
        }
        best
    }
}

impl Store for Ring {
    fn write(&mut self, facts: &Matrix, _noise: Noise<'_>) -> Result<(), EpisodicError> {
        for index in 0..facts.rows() {
            self.add(facts.row(index));
        }
        Ok(())
    }

    fn forget(&mut self, fact: &[f64]) -> Result<bool, EpisodicError> {
        // A fact that the ring has lost is forgotten.
        let was_there = self.has(fact)?;
        self.remove(fact);
        Ok(was_there)
    }

    fn read(&self, cues: &Matrix, _noise: Noise<'_>, target: &mut Matrix) -> Result<(), EpisodicError> {
        (0..cues.rows()).for_each(|index| target.row_mut(index).copy_from_slice(self.nearest(cues.row(index)).0));
        Ok(())
    }

    fn parts(&mut self) -> Vec<(&'static str, &mut Matrix)> {
        vec![("facts", &mut self.facts), ("next", &mut self.next)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Facts are numbers here, 1 and more.
    fn held(ring: &Ring) -> Vec<f64> {
        let mut held: Vec<f64> = ring.facts.iter().copied().filter(|&fact| fact != 0.0).collect();
        held.sort_by(f64::total_cmp);
        held
    }

    #[test]
    fn a_fact_that_went_makes_room_for_the_next_and_the_oldest_goes_first() {
        let mut ring = Ring::new(&Arena::unlimited(), 3, 1).unwrap();
        assert!(![1.0, 2.0, 3.0].iter().any(|&fact| ring.add(&[fact])));
        assert!(ring.remove(&[2.0]) && !ring.remove(&[2.0]));
        assert!(!ring.add(&[4.0]));
        assert_eq!(held(&ring), [1.0, 3.0, 4.0]);
        assert!(ring.add(&[5.0]));
        assert_eq!(held(&ring), [3.0, 4.0, 5.0]);
        assert!(ring.remove(&[5.0]) && ring.remove(&[3.0]));
        let replaced = [6.0, 7.0, 8.0].map(|fact| ring.add(&[fact]));
        assert_eq!(replaced, [false, false, true]);
        assert_eq!(held(&ring), [6.0, 7.0, 8.0]);
    }

    /// What was never there is told from what may have gone, after other facts were taken out too, and in files that hold the row of
    /// the next one alone.
    #[test]
    fn a_ring_knows_whether_it_has_lost_facts() {
        let mut ring = Ring::new(&Arena::unlimited(), 3, 1).unwrap();
        for fact in [1.0, 2.0, 3.0] {
            assert_eq!(ring.has(&[fact]), Err(Stays::List));
            ring.add(&[fact]);
            assert_eq!(ring.has(&[fact]), Ok(true));
        }
        assert_eq!((ring.has(&[4.0]), ring.has(&[3.0 + 1e-15])), (Err(Stays::List), Err(Stays::List)));
        assert!(ring.remove(&[2.0]) && ring.has(&[2.0]).is_err());
        assert_eq!([4.0, 5.0].map(|fact| ring.add(&[fact])), [false, true]);
        let holds_and_lost = |ring: &Ring| (ring.has(&[5.0]), ring.has(&[1.0]), ring.has(&[9.0]));
        assert_eq!(holds_and_lost(&ring), (Ok(true), Ok(false), Ok(false)));
        assert!(ring.remove(&[3.0]) && ring.remove(&[4.0]));
        assert_eq!(holds_and_lost(&ring), (Ok(true), Ok(false), Ok(false)));
        for added in 3..7 {
            let mut older = Ring::new(&Arena::unlimited(), 3, 1).unwrap();
            (1..=added).for_each(|fact| assert_eq!(older.add(&[f64::from(fact)]), fact > 3));
            older.next[0] %= 3.0;
            let last = f64::from(added);
            assert_eq!(older.has(&[9.0]), Ok(false), "{added}");
            assert!(older.remove(&[last]) && older.has(&[last]) == Ok(false), "{added}");
            assert_eq!([7.0, 8.0].map(|fact| older.add(&[fact])), [false, true], "{added}");
            assert_eq!((held(&older), older.has(&[9.0])), (vec![last - 1.0, 7.0, 8.0], Ok(false)), "{added}");
        }
    }

    #[test]
    fn sizes_that_no_memory_has_are_refused() {
        let error = crate::episodic::FactMemory::parse("list:slots=144115188075855872").err().unwrap().to_string();
        assert!(
            error.contains("slots is '144115188075855872'; it must be a whole number from 1 to 4294967296"),
            "{error}"
        );
    }

    #[test]
    fn an_empty_place_is_no_fact() {
        let mut ring = Ring::new(&Arena::unlimited(), 2, 1).unwrap();
        assert_eq!(ring.nearest(&[1.0]), (&[0.0][..], f64::NEG_INFINITY));
        ring.add(&[-3.0]);
        assert_eq!(ring.nearest(&[1.0]), (&[-3.0][..], -1.0));
    }
}

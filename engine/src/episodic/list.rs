//! The facts themselves, the latest ones in a ring: what a memory of as many bytes is compared with. A cue gets the fact that
//! it is most like.

use super::matrix::{Matrix, cosine};
use super::{EpisodicError, FactMemoryEntry, MOST_FACTS, Method, Noise, Step, Store};
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
    /// Row of the next one, a matrix so that it is saved as all else is.
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
        let (slot, slots) = (self.next[0] as usize, self.facts.rows());
        let place = self.facts.row_mut(slot % slots);
        let was_taken = place.iter().any(|&value| value != 0.0);
        place.copy_from_slice(fact);
        self.next[0] = ((slot + 1) % slots) as f64;
        was_taken
    }

    /// Takes a vector out; `false` where it is not there. Later ones move up, so that the next is written to the place that is free and
    /// replaces none.
    pub(super) fn remove(&mut self, fact: &[f64]) -> bool {
        let (slots, width, next) = (self.facts.rows(), self.facts.columns(), self.next[0] as usize % self.facts.rows());
        let Some(mut at) = (0..slots).find(|&index| self.facts.row(index) == fact) else { return false };
        while (at + 1) % slots != next {
            let later = (at + 1) % slots;
            self.facts.copy_within(later * width..(later + 1) * width, at * width);
            at = later;
        }
        self.facts.row_mut(at).fill(0.0);
        self.next[0] = at as f64;
        true
    }

    /// The vector of the largest cosine, and this cosine; of equals the first. Where there is none it is zeros, infinitely far.
    pub(super) fn nearest(&self, cue: &[f64]) -> (&[f64], f64) {
        let mut best = (self.facts.row(0), f64::NEG_INFINITY);
        let is_there = |index: &usize| self.facts.row(*index).iter().any(|&value| value != 0.0);
        for index in (0..self.facts.rows()).filter(is_there) {
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

    fn forget(&mut self, fact: &[f64]) -> Result<(), EpisodicError> {
        // A fact that the ring has lost is forgotten.
        self.remove(fact);
        Ok(())
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

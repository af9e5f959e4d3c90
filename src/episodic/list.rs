//! The facts themselves, the latest ones in a ring: what a memory of as many bytes is compared with. A cue gets the fact that
//! it is most like.

use super::matrix::{Matrix, cosine};
use super::{EpisodicError, FactMemoryEntry, Method, Noise, Step, Store};
use crate::memory::{Arena, ArenaError, Label, LabelBytes};
use crate::named::Parameter;

pub const ENTRY: FactMemoryEntry = FactMemoryEntry {
    name: "list",
    about: "The latest facts as they are, each in a slot of its own; a cue gets the one of the largest cosine",
    paper: "",
    parameters: &[Parameter { name: "slots", default: "64", about: "facts that are kept" }],
    build: |named| {
        let slots = named.count("slots", 64, 1)?;
        Ok(Box::new(List { slots }))
    },
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

    pub(super) fn add(&mut self, fact: &[f64]) {
        let (slot, slots) = (self.next[0] as usize, self.facts.rows());
        self.facts.row_mut(slot % slots).copy_from_slice(fact);
        self.next[0] = ((slot + 1) % slots) as f64;
    }

    /// Takes a vector out; `false` where it is not there.
    pub(super) fn remove(&mut self, fact: &[f64]) -> bool {
        let found = (0..self.facts.rows()).find(|&index| self.facts.row(index) == fact);
        if let Some(index) = found {
            self.facts.row_mut(index).fill(0.0);
        }
        found.is_some()
    }

    /// The vector of the largest cosine, and this cosine; of equals the first.
    pub(super) fn nearest(&self, cue: &[f64]) -> (&[f64], f64) {
        let mut best = (self.facts.row(0), f64::NEG_INFINITY);
        for index in 0..self.facts.rows() {
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
        (0..facts.rows()).for_each(|index| self.add(facts.row(index)));
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

//! Who holds the parameters of a model while it is trained.
//!
//! A network walks over a model unit by unit: the embedding, the blocks, the last norm, the output matrix, and back. Before it
//! touches a unit it asks its holder for the unit's weights, or for them and for room to add its gradients to, and says when these
//! are complete. One that holds everything hands out slices ([`Whole`]); one that holds a share of it gathers a unit when it is
//! asked for, and adds up the unit's gradients over ranks when they are complete ([`super::zero::Zero`]).

use super::weights::Weights;
use crate::ranks::RankError;
use std::ops::Range;

/// Parameters that are read together, and whose gradients are complete at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// The embedding, which is the output matrix too where they are tied.
    Embedding,
    /// A block.
    Block(usize),
    /// The norm after the last block.
    Norm,
    /// An output matrix of its own.
    Output,
}

/// Gradients of parameters that follow each other, from one on; gradients of other parameters are not there.
pub struct UnitGradients<'a> {
    /// The gradients.
    pub values: &'a mut [f32],
    /// Where the first of them lies among all.
    pub first: usize,
}

impl UnitGradients<'_> {
    /// Those that lie in a range among all.
    ///
    /// # Panics
    /// When they are not there.
    pub fn of(&mut self, range: &Range<usize>) -> &mut [f32] {
        &mut self.values[range.start - self.first..range.end - self.first]
    }
}

/// Holds the parameters of a model, and gradients.
pub trait Holder {
    /// A unit's weights, to be read until the next call.
    ///
    /// # Errors
    /// When another rank ended.
    fn weights(&mut self, unit: Unit) -> Result<Weights<'_>, RankError>;

    /// A unit's gradients of this step so far, to be added to.
    fn unit_gradients(&mut self, unit: Unit) -> UnitGradients<'_>;

    /// Both.
    ///
    /// # Errors
    /// When another rank ended.
    fn both(&mut self, unit: Unit) -> Result<(Weights<'_>, UnitGradients<'_>), RankError>;

    /// Says that a unit's gradients of this step are complete.
    ///
    /// # Errors
    /// When another rank ended.
    fn complete(&mut self, unit: Unit) -> Result<(), RankError>;
}

/// Weights and gradients that are all here.
pub struct Whole<'a> {
    /// All parameters.
    pub weights: Weights<'a>,
    /// The gradient by all that are trained.
    pub gradients: &'a mut [f32],
}

impl Holder for Whole<'_> {
    fn weights(&mut self, _: Unit) -> Result<Weights<'_>, RankError> {
        Ok(self.weights)
    }

    fn unit_gradients(&mut self, _: Unit) -> UnitGradients<'_> {
        UnitGradients { values: self.gradients, first: 0 }
    }

    fn both(&mut self, unit: Unit) -> Result<(Weights<'_>, UnitGradients<'_>), RankError> {
        let weights = self.weights;
        Ok((weights, self.unit_gradients(unit)))
    }

    fn complete(&mut self, _: Unit) -> Result<(), RankError> {
        Ok(())
    }
}

//! Data-parallel training with ZeRO (arXiv 1910.02054): every rank computes the gradient of its own sequences, and what is the same on all
//! ranks is shared out.
//!
//! | stage | a rank holds its part of | sent in a step besides the sum of gradients |
//! |---|---|---|
//! | 0 | nothing | the sum, to all |
//! | 1 | the optimizer's averages | new weights |
//! | 2 | gradients too: a unit's are added up as soon as they are complete, in room for one unit | new weights |
//! | 3 | parameters too: a unit is gathered before its forward pass and before its backward pass, in room for one | a unit's weights, twice |
//!
//! A sum over ranks begins with rank 0's number and goes on in their order, whatever the stage, so that all stages train with the
//! same bits, and so does one rank that adds up the gradients of as many parts of a batch. [`Sharing`] says what a rank holds and
//! sends, to the byte.

mod averages;
mod files;
mod sharing;

pub use sharing::Sharing;

use super::activations::{Extents, Recompute};
use super::adamw::{Constants, Update, sum_of_squares};
use super::holder::{Holder, Slopes, Unit};
use super::parameters::Parameters;
use super::run::TrainError;
use super::weights::Weights;
use crate::device::Cpu;
use crate::memory::{Arena, Buffer, Label, LabelBytes};
use crate::ranks::{Comm, RankError};
use averages::{Averages, in_memory};
use sharing::{Piece, parts};
use std::ops::Range;
use std::path::Path;

/// Weights, gradients and the optimizer's averages of one rank.
pub struct Zero<'a> {
    sharing: Sharing<'a>,
    comm: &'a Comm,
    cpu: &'a Cpu,
    pieces: Vec<Piece>,
    own_gradients: Vec<Range<usize>>,
    offload: bool,
    /// All, or this rank's parts.
    weights: Buffer<f32>,
    /// A unit's weights, where a rank has only parts.
    gathered: Buffer<f32>,
    /// All, or this rank's parts.
    gradients: Buffer<f32>,
    /// A unit's gradients before they are added up, where a rank has only parts; zeros in between.
    room: Buffer<f32>,
    received: Buffer<f32>,
    averages: Averages,
}

impl<'a> Zero<'a> {
    /// Takes [`Zero::training_bytes`] from the arena, less what a network takes. With an `offload` folder the optimizer's averages lie in a
    /// file of it.
    ///
    /// # Errors
    /// When the arena has no room, or the file cannot be made.
    pub fn new(
        arena: &Arena,
        comm: &'a Comm,
        cpu: &'a Cpu,
        parameters: &'a Parameters,
        stage: u8,
        offload: Option<&Path>,
    ) -> Result<Self, TrainError> {
        let sharing = Sharing::new(parameters, stage, comm.rank(), comm.size());
        let [weights, gathered, gradients, room] = sharing.counts();
        Ok(Zero {
            weights: arena.alloc(Label::Weights, weights)?,
            gathered: arena.alloc(Label::Weights, gathered)?,
            gradients: arena.alloc(Label::Gradients, gradients)?,
            room: arena.alloc(Label::Gradients, room)?,
            received: arena.alloc(Label::Workspace, sharing.scratch())?,
            averages: Averages::new(arena, sharing.averages(), offload)?,
            offload: offload.is_some(),
            pieces: sharing.pieces(),
            own_gradients: sharing.own_gradients(),
            sharing,
            comm,
            cpu,
        })
    }

    /// What this rank holds.
    pub fn sharing(&self) -> &Sharing<'a> {
        &self.sharing
    }

    /// Bytes that training takes from this rank's arena, for each label, with a network of these extents.
    pub fn training_bytes(&self, extents: &Extents<'_>, recompute: Recompute) -> LabelBytes {
        let averages = in_memory(self.sharing.averages(), self.offload);
        self.sharing.training_bytes(extents, recompute, self.cpu.threads(), averages)
    }

    /// Forgets the last step's gradients.
    pub fn begin(&mut self) {
        self.gradients.fill(0.0);
    }

    /// The loss over the sequences of all ranks, of their shares in it, and the norm of its gradient.
    ///
    /// # Errors
    /// When another rank ended.
    pub fn loss_and_norm(&self, share: f64) -> Result<(f64, f64), RankError> {
        let own = self.own_gradients.iter().map(|range| &self.gradients[range.clone()]);
        let mut said = vec![[0.0; 2]; self.comm.size()];
        said[self.comm.rank()] = [share, sum_of_squares(self.cpu, own)];
        self.comm.all_gather(&mut said.iter_mut().map(bytemuck::bytes_of_mut).collect::<Vec<_>>())?;
        let sum = |which: usize| said.iter().map(|of_rank| of_rank[which]).sum::<f64>();
        Ok((sum(0), sum(1).sqrt()))
    }

    /// Changes the weights by one step (`step` from 0) at learning rate `rate`, where the gradient has this norm.
    ///
    /// # Errors
    /// When another rank ended, or a file with averages cannot be read or written.
    pub fn update(&mut self, constants: &Constants, at: (usize, f32), norm: f64) -> Result<(), TrainError> {
        let update = Update::new(constants, at, norm);
        self.averages.update(self.cpu, &update, &self.pieces, &mut self.weights, &self.gradients)?;
        if (1..3).contains(&self.sharing.stage) {
            for (stretch, _) in self.sharing.trained() {
                all_gather(self.comm, &mut self.weights[stretch.weights.clone()])?;
            }
        }
        Ok(())
    }

    /// Takes of parameters that begin at `first` what this rank holds.
    pub(in crate::train) fn keep(&mut self, first: usize, values: &[f32]) {
        if self.sharing.stage < 3 {
            return self.weights[first..first + values.len()].copy_from_slice(values);
        }
        for stretch in &self.sharing.stretches {
            let own = self.sharing.own(stretch);
            let start = stretch.weights.start + own.start;
            let here = start.max(first)..(start + own.len()).min(first + values.len());
            if !here.is_empty() {
                let to = stretch.at + here.start - start;
                self.weights[to..to + here.len()].copy_from_slice(&values[here.start - first..here.end - first]);
            }
        }
    }

    fn gather(&mut self, unit: Unit) -> Result<(), RankError> {
        let first = self.sharing.weights_of(unit).start;
        for stretch in self.sharing.of_unit(unit) {
            let whole = &mut self.gathered[stretch.weights.start - first..stretch.weights.end - first];
            let own = self.sharing.own(stretch);
            let here = stretch.at..stretch.at + own.len();
            whole[own].copy_from_slice(&self.weights[here]);
            all_gather(self.comm, whole)?;
        }
        Ok(())
    }
}

impl Holder for Zero<'_> {
    fn weights(&mut self, unit: Unit) -> Result<Weights<'_>, RankError> {
        Ok(self.both(unit)?.0)
    }

    fn slopes(&mut self, unit: Unit) -> Slopes<'_> {
        slopes(&self.sharing, &mut self.gradients, &mut self.room, unit)
    }

    fn both(&mut self, unit: Unit) -> Result<(Weights<'_>, Slopes<'_>), RankError> {
        if self.sharing.stage >= 3 {
            self.gather(unit)?;
        }
        let Zero { sharing, weights, gathered, gradients, room, .. } = self;
        let weights = match sharing.stage {
            3 => Weights::Part(gathered, sharing.weights_of(unit).start),
            _ => Weights::F32(weights),
        };
        Ok((weights, slopes(sharing, gradients, room, unit)))
    }

    fn complete(&mut self, unit: Unit) -> Result<(), RankError> {
        let Zero { sharing, comm, gradients, room, received, .. } = self;
        if sharing.ranks == 1 {
            return Ok(());
        }
        let of_unit = sharing.gradients_of(unit);
        for stretch in sharing.of_unit(unit) {
            let Some(range) = stretch.gradient.clone() else { continue };
            if sharing.stage < 2 {
                let whole = &mut gradients[range];
                comm.reduce_scatter(whole, &parts(whole.len(), sharing.ranks), received)?;
                if sharing.stage == 0 {
                    all_gather(comm, whole)?;
                }
            } else {
                let first = sharing.room_of(unit).start + range.start - of_unit.start;
                let whole = &mut room[first..first + range.len()];
                comm.reduce_scatter(whole, &parts(whole.len(), sharing.ranks), received)?;
                let own = sharing.own(stretch);
                gradients[stretch.trained_at..stretch.trained_at + own.len()].copy_from_slice(&whole[own]);
                whole.fill(0.0);
            }
        }
        Ok(())
    }
}

/// Where a unit's gradients are added up: among all, or in room for them.
fn slopes<'a>(sharing: &Sharing<'_>, gradients: &'a mut [f32], room: &'a mut [f32], unit: Unit) -> Slopes<'a> {
    match sharing.stage {
        0 | 1 => Slopes { values: gradients, first: 0 },
        _ => Slopes { values: &mut room[sharing.room_of(unit)], first: sharing.gradients_of(unit).start },
    }
}

/// Gives every rank all parts of `values`.
fn all_gather(comm: &Comm, values: &mut [f32]) -> Result<(), RankError> {
    let (mut rest, mut all) = (&mut *values, Vec::new());
    for part in parts(rest.len(), comm.size()) {
        let (part, behind) = rest.split_at_mut(part.len());
        all.push(bytemuck::cast_slice_mut(part));
        rest = behind;
    }
    comm.all_gather(&mut all)
}

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
//!
//! Ranks may share blocks besides ([`super::tensor_parallel`]); then all of this is of those that have the same part of them.

mod averages;
mod files;
mod sharing;

pub use sharing::Sharing;

use super::activations::{Extents, Recompute};
use super::adamw::{Constants, Update, sum_of_squares};
use super::error::{GRADIENT_NORM, LOSS};
use super::holder::{Holder, Unit, UnitGradients};
use super::parameters::{Parameter, Parameters};
use super::run::TrainError;
use super::tensor_parallel::{self, Cut, cut};
use super::weights::Weights;
use super::{Batch, Network};
use crate::device::Cpu;
use crate::memory::{Arena, Buffer, Label, LabelBytes};
use crate::ranks::{Comm, RankError, parts};
use averages::{Averages, in_memory};
use sharing::Piece;
use std::ops::Range;
use std::path::Path;

/// Bytes that ranks which share blocks say of their gradients in each step.
const SQUARES_BYTES: u64 = 8;

/// A rank among those that read other sequences, and among those that share its blocks.
pub struct Groups {
    /// The first.
    pub data: Comm,
    /// The second: ranks that follow each other.
    pub tensor: Comm,
}

impl Groups {
    /// Groups of so many ranks that share blocks.
    ///
    /// # Errors
    /// When ranks cannot be dealt so.
    pub fn new(comm: &Comm, tensor: usize) -> Result<Self, RankError> {
        let (rank, ranks) = (comm.rank(), comm.size());
        if tensor == 0 || !ranks.is_multiple_of(tensor) {
            return Err(RankError::Unsupported(format!(
                "{ranks} ranks cannot share blocks {tensor} at a time; --tensor-parallel must divide --ranks"
            )));
        }
        let first = rank - rank % tensor;
        Ok(Groups {
            data: comm.among((rank % tensor..ranks).step_by(tensor).collect()),
            tensor: comm.among((first..first + tensor).collect()),
        })
    }
}

/// Weights, gradients and the optimizer's averages of one rank.
pub struct Zero<'a> {
    sharing: Sharing<'a>,
    whole: &'a Parameters,
    comm: &'a Comm,
    tensor: &'a Comm,
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
    /// Takes [`Zero::training_bytes`] from the arena, less what a network takes. Of the model's parameters, the first of both, this rank
    /// trains the second, which are fewer where ranks share blocks. With an `offload` folder the optimizer's averages lie in a
    /// file of it.
    ///
    /// # Errors
    /// When the arena has no room, or the file cannot be made.
    pub fn new(
        arena: &Arena,
        Groups { data: comm, tensor }: &'a Groups,
        cpu: &'a Cpu,
        [whole, parameters]: [&'a Parameters; 2],
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
            own_gradients: sharing.own_gradients(tensor),
            sharing,
            whole,
            tensor,
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
        training_bytes(&self.sharing, extents, recompute, self.cpu.threads(), (self.tensor.size(), self.offload))
    }

    /// Bytes that this rank sends in a step with a network of these extents.
    pub fn step_sent_bytes(&self, extents: &Extents<'_>, recompute: Recompute) -> u64 {
        let tensor = tensor_parallel::step_sent_bytes(extents, recompute, self.tensor);
        self.sharing.step_sent_bytes() + tensor + SQUARES_BYTES * (self.tensor.size() as u64 - 1)
    }

    /// Bytes that were sent since the last call.
    pub fn take_sent_bytes(&self) -> u64 {
        self.comm.take_traffic().sent_bytes + self.tensor.take_traffic().sent_bytes
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
        // The loss of ranks that share blocks is the same; their gradients are parts of one.
        let mut squares = vec![0.0; self.tensor.size()];
        squares[self.tensor.rank()] = sum(1);
        self.tensor.all_gather(&mut squares.iter_mut().map(bytemuck::bytes_of_mut).collect::<Vec<_>>())?;
        Ok((sum(0), squares.iter().sum::<f64>().sqrt()))
    }

    /// One step on this rank's part of a batch (`at` is its number from 0, and its learning rate): the loss over all ranks, and the norm of
    /// its gradient.
    ///
    /// # Errors
    /// When the loss or the norm is no number, and as [`Zero::update`].
    pub fn step(
        &mut self,
        network: &mut Network<'_>,
        batch: &Batch,
        constants: &Constants,
        at: (usize, f32),
    ) -> Result<(f64, f64), TrainError> {
        self.begin();
        let share = network.step_of(self, batch)?;
        let (loss, norm) = self.loss_and_norm(share)?;
        TrainError::diverged(LOSS, at.0, loss)?;
        TrainError::diverged(GRADIENT_NORM, at.0, norm)?;
        self.update(constants, at, norm)?;
        Ok((loss, norm))
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
                self.comm.gather_parts(&mut self.weights[stretch.weights.clone()])?;
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
            self.comm.gather_parts(whole)?;
        }
        Ok(())
    }
}

impl Holder for Zero<'_> {
    fn weights(&mut self, unit: Unit) -> Result<Weights<'_>, RankError> {
        Ok(self.both(unit)?.0)
    }

    fn unit_gradients(&mut self, unit: Unit) -> UnitGradients<'_> {
        unit_gradients(&self.sharing, &mut self.gradients, &mut self.room, unit)
    }

    fn both(&mut self, unit: Unit) -> Result<(Weights<'_>, UnitGradients<'_>), RankError> {
        if self.sharing.stage >= 3 {
            self.gather(unit)?;
        }
        let Zero { sharing, weights, gathered, gradients, room, .. } = self;
        let weights = match sharing.stage {
            3 => Weights::Part(gathered, sharing.weights_of(unit).start),
            _ => Weights::F32(weights),
        };
        Ok((weights, unit_gradients(sharing, gradients, room, unit)))
    }

    fn complete(&mut self, unit: Unit) -> Result<(), RankError> {
        if self.tensor.size() > 1 {
            let summed = |parameter: &&Parameter| cut(parameter) == Cut::Whole { summed: true };
            let parameters = self.sharing.parameters;
            for parameter in parameters.all.iter().filter(summed).filter(|one| parameters.unit_of(one) == unit) {
                let Some(range) = &parameter.gradient else { continue };
                let mut unit_gradients = unit_gradients(&self.sharing, &mut self.gradients, &mut self.room, unit);
                let mut scratch = vec![0.0; Comm::sum_scratch(self.tensor.size(), range.len())];
                self.tensor.sum(unit_gradients.of(range), &mut scratch)?;
            }
        }
        let Zero { sharing, comm, gradients, room, received, .. } = self;
        if sharing.ranks == 1 {
            return Ok(());
        }
        let of_unit = sharing.gradients_of(unit);
        for stretch in sharing.of_unit(unit) {
            let Some(range) = stretch.gradient.clone() else { continue };
            if sharing.stage < 2 {
                let whole = &mut gradients[range];
                match sharing.stage {
                    0 => comm.sum(whole, received)?,
                    _ => comm.reduce_scatter(whole, &parts(whole.len(), sharing.ranks), received)?,
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

/// Bytes that training takes from the arena of a rank of so many threads, for each label, with a network of these extents, where so many
/// ranks share its blocks and the optimizer's averages may lie in a file.
pub(in crate::train) fn training_bytes(
    sharing: &Sharing<'_>,
    extents: &Extents<'_>,
    recompute: Recompute,
    threads: usize,
    (tensor, offload): (usize, bool),
) -> LabelBytes {
    let averages = in_memory(sharing.averages(), offload);
    let mut bytes = sharing.training_bytes(extents, recompute, threads, averages);
    *bytes.entry(Label::Workspace).or_default() += 4 * tensor_parallel::sums(extents, tensor) as u64;
    bytes
}

/// Where a unit's gradients are added up: among all, or in room for them.
fn unit_gradients<'a>(
    sharing: &Sharing<'_>,
    gradients: &'a mut [f32],
    room: &'a mut [f32],
    unit: Unit,
) -> UnitGradients<'a> {
    match sharing.stage {
        0 | 1 => UnitGradients { values: gradients, first: 0 },
        _ => UnitGradients { values: &mut room[sharing.room_of(unit)], first: sharing.gradients_of(unit).start },
    }
}

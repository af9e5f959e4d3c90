//! Which numbers a rank holds, and what that takes: arithmetic alone.
//!
//! Parameters of a unit that follow each other and are all trained, or none of them, are a stretch. Each stretch is cut into one part
//! for each rank, as long as any other but for one number, so that what a rank holds falls as `1 / ranks` whatever is frozen.

use crate::memory::{Label, LabelBytes};
use crate::ranks::{Comm, parts};
use crate::train::activations::{Extents, Recompute};
use crate::train::holder::Unit;
use crate::train::parameters::Parameters;
use crate::train::tensor_parallel::{Cut, cut};
use std::ops::Range;

/// Parameters of a unit that follow each other, all of them trained or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stretch {
    pub unit: Unit,
    /// Where they lie among all.
    pub weights: Range<usize>,
    /// Where their gradients lie among all.
    pub gradient: Option<Range<usize>>,
    /// Where this rank's part begins among its parts of all stretches, and of those that are trained.
    pub at: usize,
    pub trained_at: usize,
}

/// Numbers that are updated together: where they lie in the buffers of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub decays: bool,
    pub weights: Range<usize>,
    pub gradients: Range<usize>,
    pub averages: Range<usize>,
}

/// How the numbers of training are shared out (ZeRO, arXiv 1910.02054), as one rank sees it.
#[derive(Debug, Clone)]
pub struct Sharing<'a> {
    /// The model, and what of it is trained.
    pub parameters: &'a Parameters,
    /// 0: every rank holds everything; from 1 on a part of the optimizer's averages, from 2 on of the gradients, with 3 of the
    /// parameters.
    pub stage: u8,
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub ranks: usize,
    pub(super) stretches: Vec<Stretch>,
}

/// The part of `0..len` that is a rank's.
pub(super) fn part(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    parts(len, ranks).swap_remove(rank)
}

impl<'a> Sharing<'a> {
    /// What rank `rank` of `ranks` holds in a stage of ZeRO. One rank holds everything in every stage.
    pub fn new(parameters: &'a Parameters, stage: u8, rank: usize, ranks: usize) -> Self {
        let stage = if ranks == 1 { 0 } else { stage };
        let mut stretches: Vec<Stretch> = Vec::new();
        for parameter in &parameters.all {
            let unit = parameters.unit_of(parameter);
            let (weights, gradient) = (parameter.range.clone(), parameter.gradient.clone());
            match stretches.last_mut() {
                Some(last) if last.unit == unit && last.gradient.is_some() == gradient.is_some() => {
                    last.weights.end = weights.end;
                    if let (Some(last), Some(gradient)) = (&mut last.gradient, gradient) {
                        last.end = gradient.end;
                    }
                }
                _ => stretches.push(Stretch { unit, weights, gradient, at: 0, trained_at: 0 }),
            }
        }
        let mut sharing = Sharing { parameters, stage, rank, ranks, stretches };
        let (mut at, mut trained_at) = (0, 0);
        for index in 0..sharing.stretches.len() {
            let own = sharing.own(&sharing.stretches[index]).len();
            let stretch = &mut sharing.stretches[index];
            (stretch.at, stretch.trained_at) = (at, trained_at);
            at += own;
            trained_at += if stretch.gradient.is_some() { own } else { 0 };
        }
        sharing
    }

    /// This rank's part of a stretch.
    pub(super) fn own(&self, stretch: &Stretch) -> Range<usize> {
        part(stretch.weights.len(), self.rank, self.ranks)
    }

    pub(super) fn of_unit(&self, unit: Unit) -> impl Iterator<Item = &Stretch> {
        self.stretches.iter().filter(move |stretch| stretch.unit == unit)
    }

    /// Stretches that are trained, and where their gradients lie.
    pub(super) fn trained(&self) -> impl Iterator<Item = (&Stretch, Range<usize>)> {
        self.stretches.iter().filter_map(|stretch| Some((stretch, stretch.gradient.clone()?)))
    }

    /// Where a unit's weights lie among all.
    pub(super) fn weights_of(&self, unit: Unit) -> Range<usize> {
        hull(self.of_unit(unit).map(|stretch| stretch.weights.clone()))
    }

    /// Where its gradients do.
    pub(super) fn gradients_of(&self, unit: Unit) -> Range<usize> {
        hull(self.of_unit(unit).filter_map(|stretch| stretch.gradient.clone()))
    }

    /// Numbers in this rank's parts: of all stretches, and of those that are trained.
    pub(super) fn own_counts(&self) -> [usize; 2] {
        let all = self.stretches.iter().map(|stretch| self.own(stretch).len()).sum();
        [all, self.trained().map(|(stretch, _)| self.own(stretch).len()).sum()]
    }

    fn units(&self) -> Vec<Unit> {
        let mut units: Vec<Unit> = self.stretches.iter().map(|stretch| stretch.unit).collect();
        units.dedup();
        units
    }

    /// Numbers of the weights that are here; of room for those of the largest unit, gathered; of gradients; and of room for a unit's
    /// gradients before they are added up.
    pub(in crate::train) fn counts(&self) -> [usize; 4] {
        let [own, own_trained] = self.own_counts();
        let (parameters, largest) =
            (self.parameters, |of: &dyn Fn(Unit) -> usize| self.units().into_iter().map(of).max());
        let gathered = largest(&|unit| self.weights_of(unit).len()).unwrap_or(0);
        let [weights, gathered] = if self.stage < 3 { [parameters.count(), 0] } else { [own, gathered] };
        let room = largest(&|unit| self.room_of(unit).end).unwrap_or(0);
        let [gradients, room] = if self.stage < 2 { [parameters.trained_count(), 0] } else { [own_trained, room] };
        [weights, gathered, gradients, room]
    }

    /// Where a unit's gradients lie in the room for them. Those of a tied embedding are held from the loss to the end of the
    /// backward pass, and all others in turn behind them.
    pub(super) fn room_of(&self, unit: Unit) -> Range<usize> {
        let held = match self.parameters.output_unit() {
            Unit::Embedding if unit != Unit::Embedding => self.gradients_of(Unit::Embedding).len(),
            _ => 0,
        };
        held..held + self.gradients_of(unit).len()
    }

    /// Numbers of each of the optimizer's averages.
    pub(in crate::train) fn averages(&self) -> usize {
        if self.stage < 1 { self.parameters.trained_count() } else { self.own_counts()[1] }
    }

    /// Scratch of sums over ranks.
    pub(super) fn scratch(&self) -> usize {
        let longest = self.trained().map(|(stretch, _)| stretch.weights.len().div_ceil(self.ranks)).max();
        Comm::sum_scratch(self.ranks, longest.unwrap_or(0))
    }

    /// This rank's parts of the gradient, where they lie in its buffer: what it adds up the squares of. Where it shares blocks with
    /// others (`tensor`), of parameters that all of them have only the first one's.
    pub(super) fn own_gradients(&self, tensor: &Comm) -> Vec<Range<usize>> {
        if self.ranks == 1 && tensor.size() == 1 {
            // As one, in the pieces of a run without ranks.
            let all = 0..self.parameters.trained_count();
            return vec![all];
        }
        let mut places = Vec::new();
        for (stretch, gradient) in self.trained() {
            let own = self.own(stretch);
            let ours = gradient.start + own.start..gradient.start + own.end;
            let first = if self.stage < 2 { ours.start } else { stretch.trained_at };
            if tensor.size() == 1 {
                places.push(first..first + ours.len());
                continue;
            }
            for parameter in &self.parameters.all {
                let Some(range) = &parameter.gradient else { continue };
                let range = ours.start.max(range.start)..ours.end.min(range.end);
                if !range.is_empty() && (tensor.rank() == 0 || !matches!(cut(parameter), Cut::Whole { .. })) {
                    places.push(first + range.start - ours.start..first + range.end - ours.start);
                }
            }
        }
        places
    }

    /// What this rank updates.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (stretch, gradient) in self.trained() {
            let own = if self.stage < 1 { 0..stretch.weights.len() } else { self.own(stretch) };
            let ours = stretch.weights.start + own.start..stretch.weights.start + own.end;
            for parameter in &self.parameters.all {
                let range = ours.start.max(parameter.range.start)..ours.end.min(parameter.range.end);
                if range.is_empty() {
                    continue;
                }
                // Places within the stretch, and within this rank's part of it.
                let (within, behind) = (range.start - stretch.weights.start, range.start - ours.start);
                let place = |shared: bool, whole: usize, share: usize| {
                    let first = if shared { share + behind } else { whole + within };
                    first..first + range.len()
                };
                pieces.push(Piece {
                    decays: parameter.role.decays(),
                    weights: place(self.stage >= 3, stretch.weights.start, stretch.at),
                    gradients: place(self.stage >= 2, gradient.start, stretch.trained_at),
                    averages: place(self.stage >= 1, gradient.start, stretch.trained_at),
                });
            }
        }
        pieces
    }

    /// Bytes that training takes from this rank's arena, for each label: [`Extents::training_bytes`] of its own sequences, with what is
    /// shared out divided. `averages` are the numbers of each average that are in memory.
    pub(super) fn training_bytes(
        &self,
        extents: &Extents<'_>,
        recompute: Recompute,
        threads: usize,
        averages: usize,
    ) -> LabelBytes {
        let mut bytes = extents.training_bytes(recompute, threads);
        let [weights, gathered, gradients, room] = self.counts();
        let floats = |count: usize| 4 * count as u64;
        bytes.insert(Label::Weights, floats(weights + gathered));
        bytes.insert(Label::Gradients, floats(gradients + room));
        bytes.insert(Label::Optimizer, floats(2 * averages));
        *bytes.entry(Label::Workspace).or_default() += floats(self.scratch());
        bytes.retain(|_, bytes| *bytes > 0);
        bytes
    }

    /// Bytes that this rank sends in a step: gathered weights, summed gradients, new weights, and loss and norm.
    pub fn step_sent_bytes(&self) -> u64 {
        let (rank, ranks) = (self.rank, self.ranks);
        if ranks == 1 {
            return 0;
        }
        let gathered = |stretch: &Stretch| {
            let len = stretch.weights.len();
            len - part(len, (rank + 1) % ranks, ranks).len()
        };
        let first = self.parameters.first_trained;
        let times = |unit: Unit| match unit {
            Unit::Embedding => 1 + usize::from(self.parameters.output_unit() == unit),
            Unit::Block(layer) => 1 + usize::from(layer >= first),
            Unit::Norm => 2,
            Unit::Output => 1,
        };
        let mut numbers = 0;
        for stretch in &self.stretches {
            if self.stage >= 3 {
                numbers += times(stretch.unit) * gathered(stretch);
            }
            if stretch.gradient.is_some() {
                numbers += stretch.weights.len() - self.own(stretch).len();
                // Sums in stage 0, new weights in the next two.
                numbers += if self.stage < 3 { gathered(stretch) } else { 0 };
            }
        }
        4 * numbers as u64 + SAID_BYTES * (ranks as u64 - 1)
    }
}

/// Bytes that a rank says of itself in each step: its part of the loss and of the squares of the gradient.
const SAID_BYTES: u64 = 16;

/// From the start of the first to the end of the last.
fn hull(mut ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let Some(first) = ranges.next() else { return 0..0 };
    first.start..ranges.last().map_or(first.end, |last| last.end)
}

//! A rank's numbers to and from files: rank 0 writes, all others send it their parts, a bucket at a time.

use super::Zero;
use super::averages::BUCKET;
use super::sharing::part;
use crate::train::checkpoint::{self, Array, Identity, Progress};
use crate::train::export;
use crate::train::origin::Start;
use crate::train::parameters::{Parameter, Parameters};
use crate::train::run::TrainError;
use crate::train::tensor_parallel::{self, part_of, whole_of};
use std::ops::Range;
use std::path::Path;

impl Zero<'_> {
    /// Takes the weights that training begins with.
    pub(in crate::train) fn start(&mut self, start: &Start, seed: u64) -> Result<(), TrainError> {
        let (mut pairs, mut pieces) = (tensor_parallel::pairs(self.whole, self.sharing.parameters), Pieces::default());
        let (rank, ranks) = (self.tensor.rank(), self.tensor.size());
        let mut first = 0;
        start.each_weight(self.whole, seed, &mut |mut values| {
            if ranks == 1 {
                self.keep(first, values);
                first += values.len();
                return;
            }
            while !values.is_empty() {
                let (whole, _) = pairs.clone().next().expect("as many numbers as there are");
                let Some(complete) = pieces.complete(&mut values, whole.range.len()) else { break };
                let own = part_of(whole, &complete, rank, ranks);
                self.keep(first, &own);
                first += own.len();
                pairs.next();
            }
        })
    }

    /// Goes on from a checkpoint, of any number of ranks.
    pub(in crate::train) fn load(&mut self, folder: &Path, identity: &Identity) -> Result<Progress, TrainError> {
        checkpoint::load(folder, identity, lens(self.whole), &mut |array, values| {
            for (whole, own) in tensor_parallel::pairs(self.whole, self.sharing.parameters) {
                let places = if array == Array::Weights { Some((&whole.range, &own.range)) } else { None };
                let trained = || whole.gradient.as_ref().zip(own.gradient.as_ref());
                let Some((from, to)) = places.or_else(trained) else { continue };
                let values = &values[from.clone()];
                match self.tensor.size() {
                    1 => self.restore(array, to.start, values)?,
                    ranks => self.restore(array, to.start, &part_of(whole, values, self.tensor.rank(), ranks))?,
                }
            }
            Ok(())
        })
    }

    /// Writes the model and a checkpoint; on every rank, of which the first writes.
    pub(in crate::train) fn save(
        &mut self,
        folder: &Path,
        identity: &Identity,
        progress: &Progress,
        files: &[(&str, String)],
    ) -> Result<(), TrainError> {
        if self.comm.rank() > 0 || self.tensor.rank() > 0 {
            let mut send = |array| self.each_whole(array, &mut |_| Ok(()));
            send(Array::Weights)?;
            return Array::ALL.into_iter().try_for_each(send);
        }
        // The checkpoint last: what goes on from the last step's has the model already.
        export::write(folder, files, self.whole, |take| self.each_whole(Array::Weights, take))?;
        checkpoint::save(folder, identity, progress, lens(self.whole), &mut |array, take| self.each_whole(array, take))
    }

    /// Lets the first rank `take` all numbers of an array of the whole model. Where ranks share blocks, the first of each part gathers its
    /// part, and hands on a parameter as soon as it is complete.
    pub(in crate::train) fn each_whole(
        &mut self,
        array: Array,
        take: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let tensor = self.tensor;
        if tensor.size() == 1 {
            return self.each(array, take);
        }
        let counts = |(whole, own): &(&Parameter, &Parameter)| {
            array == Array::Weights || whole.gradient.is_some() && own.gradient.is_some()
        };
        let mut pairs = tensor_parallel::pairs(self.whole, self.sharing.parameters).filter(counts).peekable();
        let mut pieces = Pieces::default();
        self.each(array, &mut |mut values| {
            while let Some((whole, share)) = pairs.peek().filter(|_| !values.is_empty()) {
                let Some(own) = pieces.complete(&mut values, share.range.len()) else { break };
                if tensor.rank() > 0 {
                    tensor.transfer(&[(0, bytemuck::cast_slice(&own))], &mut [])?;
                } else {
                    let mut of_ranks = vec![own];
                    for rank in 1..tensor.size() {
                        let mut part = vec![0.0f32; share.range.len()];
                        tensor.transfer(&[], &mut [(rank, bytemuck::cast_slice_mut(&mut part))])?;
                        of_ranks.push(part);
                    }
                    take(&whole_of(whole, &of_ranks))?;
                }
                pairs.next();
            }
            Ok(())
        })
    }

    /// Lets rank 0 of those with the same part of the model `take` all numbers of an array of it, from the first to the last.
    pub(in crate::train) fn each(
        &mut self,
        array: Array,
        take: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (rank, ranks, stage) = (self.sharing.rank, self.sharing.ranks, self.sharing.stage);
        let shared = stage >= if array == Array::Weights { 3 } else { 1 };
        if !shared {
            let len = lens(self.sharing.parameters)[array as usize];
            return if rank == 0 { self.here(array, 0..len, take) } else { Ok(()) };
        }
        let (comm, bucket) = (self.comm, self.received.len().min(BUCKET));
        for index in 0..self.sharing.stretches.len() {
            let stretch = self.sharing.stretches[index].clone();
            let at = match array {
                Array::Weights => stretch.at,
                _ if stretch.gradient.is_none() => continue,
                _ => stretch.trained_at,
            };
            for owner in 0..ranks {
                let len = part(stretch.weights.len(), owner, ranks).len();
                for first in (0..len).step_by(bucket) {
                    let count = bucket.min(len - first);
                    let here = at + first..at + first + count;
                    if rank == 0 && owner == 0 {
                        self.here(array, here, take)?;
                    } else if rank == 0 {
                        let room = &mut self.received[..count];
                        comm.transfer(&[], &mut [(owner, bytemuck::cast_slice_mut(room))])?;
                        take(room)?;
                    } else if rank == owner {
                        let send = |values: &[f32]| comm.transfer(&[(0, bytemuck::cast_slice(values))], &mut []);
                        self.here(array, here, &mut |values| Ok(send(values)?))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Numbers of an array that are here; of a bucket at most, in one piece.
    fn here(
        &mut self,
        array: Array,
        range: Range<usize>,
        take: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        match array {
            Array::Weights => take(&self.weights[range]),
            Array::Mean => self.averages.each(0, range, take),
            Array::Square => self.averages.each(1, range, take),
        }
    }

    /// Takes what this rank holds of numbers of an array, from one on.
    fn restore(&mut self, array: Array, first: usize, values: &[f32]) -> Result<(), TrainError> {
        let which = match array {
            Array::Weights => {
                self.keep(first, values);
                return Ok(());
            }
            Array::Mean => 0,
            Array::Square => 1,
        };
        if self.sharing.stage < 1 {
            return self.averages.fill(which, first, values);
        }
        for (stretch, gradient) in self.sharing.trained() {
            let own = self.sharing.own(stretch);
            let start = gradient.start + own.start;
            let here = start.max(first)..(start + own.len()).min(first + values.len());
            if !here.is_empty() {
                let own = &values[here.start - first..here.end - first];
                self.averages.fill(which, stretch.trained_at + here.start - start, own)?;
            }
        }
        Ok(())
    }
}

/// Numbers that come in pieces, put together to parameters.
#[derive(Default)]
struct Pieces(Vec<f32>);

impl Pieces {
    /// Takes of `values` what is missing of a parameter of `len` numbers, which is given once it is complete.
    fn complete(&mut self, values: &mut &[f32], len: usize) -> Option<Vec<f32>> {
        let missing = values.len().min(len - self.0.len());
        self.0.extend_from_slice(values.split_off(..missing).expect("no more than there are"));
        (self.0.len() == len).then(|| std::mem::take(&mut self.0))
    }
}

/// Numbers of the arrays of a model.
fn lens(parameters: &Parameters) -> [usize; 3] {
    [parameters.count(), parameters.trained_count(), parameters.trained_count()]
}

//! A rank's numbers to and from files: rank 0 writes, all others send it their parts, a bucket at a time.

use super::Zero;
use super::averages::BUCKET;
use super::sharing::part;
use crate::train::checkpoint::{self, Array, Progress};
use crate::train::export;
use crate::train::origin::Start;
use crate::train::run::TrainError;
use std::ops::Range;
use std::path::Path;

impl Zero<'_> {
    /// Takes the weights that training begins with.
    pub(in crate::train) fn start(&mut self, start: &Start, seed: u64) -> Result<(), TrainError> {
        let parameters = self.sharing.parameters;
        let mut first = 0;
        start.each_weight(parameters, seed, &mut |values| {
            self.keep(first, values);
            first += values.len();
        })
    }

    /// Goes on from a checkpoint, of any number of ranks.
    pub(in crate::train) fn load(&mut self, folder: &Path, digest: &str) -> Result<Progress, TrainError> {
        checkpoint::load(folder, digest, self.lens(), |array, values| self.restore(array, values))
    }

    /// Writes a checkpoint and the model; on every rank, of which rank 0 writes.
    pub(in crate::train) fn save(
        &mut self,
        folder: &Path,
        digest: &str,
        progress: &Progress,
        files: &[(&str, String)],
    ) -> Result<(), TrainError> {
        if self.comm.rank() > 0 {
            let mut send = |array| self.each(array, &mut |_| Ok(()));
            Array::ALL.into_iter().try_for_each(&mut send)?;
            return send(Array::Weights);
        }
        checkpoint::save(folder, digest, progress, self.lens(), |array, take| self.each(array, take))?;
        let parameters = self.sharing.parameters;
        export::write(folder, files, parameters, |take| self.each(Array::Weights, take))
    }

    fn lens(&self) -> [usize; 3] {
        let parameters = self.sharing.parameters;
        [parameters.count(), parameters.trained_count(), parameters.trained_count()]
    }

    /// Lets rank 0 `take` all numbers of an array, from the first to the last.
    pub(in crate::train) fn each(
        &mut self,
        array: Array,
        take: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (rank, ranks, stage) = (self.sharing.rank, self.sharing.ranks, self.sharing.stage);
        let shared = stage >= if array == Array::Weights { 3 } else { 1 };
        if !shared {
            let len = self.lens()[array as usize];
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

    /// Takes what this rank holds of a whole array.
    fn restore(&mut self, array: Array, values: &[f32]) -> Result<(), TrainError> {
        let which = match array {
            Array::Weights => {
                self.keep(0, values);
                return Ok(());
            }
            Array::Mean => 0,
            Array::Square => 1,
        };
        if self.sharing.stage < 1 {
            return self.averages.fill(which, 0, values);
        }
        for (stretch, gradient) in self.sharing.trained() {
            let own = self.sharing.own(stretch);
            let own = &values[gradient.start + own.start..gradient.start + own.end];
            self.averages.fill(which, stretch.trained_at, own)?;
        }
        Ok(())
    }
}

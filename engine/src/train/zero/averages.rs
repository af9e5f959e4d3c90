//! The optimizer's averages of a rank: in memory, or in a file of which a bucket at a time is in memory.
//!
//! The file has no name and goes away with the process. What of it the system keeps in its own cache is not the arena's, and can be
//! taken back whenever something needs the memory.

use super::sharing::Piece;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::train::adamw::{AdamW, Update};
use crate::train::run::TrainError;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Numbers of each average that are in memory at a time where they lie in a file.
pub(super) const BUCKET: usize = 1 << 16;

/// `[mean, square]` of the numbers that a rank updates.
pub(super) enum Averages {
    Memory(AdamW),
    File(InFile),
}

pub(super) struct InFile {
    folder: PathBuf,
    file: File,
    /// Numbers of each average.
    count: usize,
    /// A bucket of each.
    buckets: [Buffer<f32>; 2],
}

/// Numbers of each average that are in memory, of so many.
pub(super) fn in_memory(count: usize, offload: bool) -> usize {
    if offload { count.min(BUCKET) } else { count }
}

impl Averages {
    /// Zeros; in a file of `folder` if one is named.
    pub fn new(arena: &Arena, count: usize, folder: Option<&Path>) -> Result<Self, TrainError> {
        let Some(folder) = folder else { return Ok(Averages::Memory(AdamW::new(arena, count)?)) };
        let write = |error: &io::Error| TrainError::write(folder, error);
        let file = tempfile::tempfile_in(folder).map_err(|error| write(&error))?;
        file.set_len(8 * count as u64).map_err(|error| write(&error))?;
        let bucket = || -> Result<_, ArenaError> { arena.alloc(Label::Optimizer, in_memory(count, true)) };
        Ok(Averages::File(InFile { folder: folder.into(), file, count, buckets: [bucket()?, bucket()?] }))
    }

    /// Updates the weights of these pieces.
    pub fn update(
        &mut self,
        cpu: &Cpu,
        update: &Update,
        pieces: &[Piece],
        weights: &mut [f32],
        gradients: &[f32],
    ) -> Result<(), TrainError> {
        for Piece { decays, weights: at, gradients: from, averages } in pieces {
            let (weights, gradients) = (&mut weights[at.clone()], &gradients[from.clone()]);
            match self {
                Averages::Memory(AdamW { mean, square }) => {
                    let both = [&mut mean[averages.clone()], &mut square[averages.clone()]];
                    update.apply(cpu, *decays, weights, gradients, both);
                }
                Averages::File(file) => {
                    let buckets = weights.chunks_mut(BUCKET).zip(gradients.chunks(BUCKET)).enumerate();
                    for (index, (weights, gradients)) in buckets {
                        let first = averages.start + index * BUCKET;
                        let range = first..first + weights.len();
                        let [mean, square] = file.read(range.clone())?;
                        update.apply(cpu, *decays, weights, gradients, [mean, square]);
                        file.write(range)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Numbers of one of both, `0` or `1`, in buckets.
    pub fn each(
        &mut self,
        which: usize,
        range: Range<usize>,
        take: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        match self {
            Averages::Memory(AdamW { mean, square }) => [mean, square][which][range].chunks(BUCKET).try_for_each(take),
            Averages::File(file) => {
                for first in range.clone().step_by(BUCKET) {
                    take(file.read(first..range.end.min(first + BUCKET))?[which])?;
                }
                Ok(())
            }
        }
    }

    /// Sets numbers of one of both, from one on.
    pub fn fill(&mut self, which: usize, first: usize, values: &[f32]) -> Result<(), TrainError> {
        match self {
            Averages::Memory(AdamW { mean, square }) => {
                [mean, square][which][first..first + values.len()].copy_from_slice(values);
                Ok(())
            }
            Averages::File(file) => {
                let place = file.place(which, first);
                let done = file.file.seek(SeekFrom::Start(place));
                let done = done.and_then(|_| file.file.write_all(bytemuck::cast_slice(values)));
                done.map_err(|error| TrainError::write(&file.folder, &error))
            }
        }
    }
}

impl InFile {
    /// Where a number lies: all means, then all squares.
    fn place(&self, which: usize, first: usize) -> u64 {
        4 * (which * self.count + first) as u64
    }

    /// A range of both, of at most a bucket.
    fn read(&mut self, range: Range<usize>) -> Result<[&mut [f32]; 2], TrainError> {
        for which in 0..2 {
            let place = self.place(which, range.start);
            let done = self
                .file
                .seek(SeekFrom::Start(place))
                .and_then(|_| self.file.read_exact(bytemuck::cast_slice_mut(&mut self.buckets[which][..range.len()])));
            done.map_err(|error| TrainError::read(&self.folder, &error))?;
        }
        Ok(self.buckets.each_mut().map(|bucket| &mut bucket[..range.len()]))
    }

    /// Writes back what [`InFile::read`] gave.
    fn write(&mut self, range: Range<usize>) -> Result<(), TrainError> {
        for which in 0..2 {
            let place = self.place(which, range.start);
            let done = self
                .file
                .seek(SeekFrom::Start(place))
                .and_then(|_| self.file.write_all(bytemuck::cast_slice(&self.buckets[which][..range.len()])));
            done.map_err(|error| TrainError::write(&self.folder, &error))?;
        }
        Ok(())
    }
}

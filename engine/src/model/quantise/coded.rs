//! A matrix in codes, with what they stand for.

use crate::device::Cpu;
use crate::format::{Grid, RowFormat, Step};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use rayon::prelude::*;

/// A matrix in codes.
pub struct Coded {
    pub rows: usize,
    pub width: usize,
    pub grid: Grid,
    /// `[rows, width]`.
    pub codes: Buffer<u8>,
    /// `[rows, width / group]`.
    pub steps: Vec<Step>,
    /// The group of each column.
    pub group_of: Vec<u32>,
    /// How the source kept the matrix.
    pub from: RowFormat,
    /// Relative L2 distance from what was coded, and that of what both make of a text.
    pub rel_l2: f64,
    pub output_rel_l2: Option<f64>,
}

impl Coded {
    /// No codes yet.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(from: RowFormat, [rows, width]: [usize; 2], grid: Grid, arena: &Arena) -> Result<Self, ArenaError> {
        let codes = arena.alloc(Label::Workspace, rows * width)?;
        let steps = vec![Step::default(); rows * width / grid.group];
        let group_of = (0..width).map(|column| (column / grid.group) as u32).collect();
        Ok(Coded { rows, width, grid, codes, steps, group_of, from, rel_l2: 0.0, output_rel_l2: None })
    }

    /// Each weight's nearest code.
    pub fn round(&mut self, weights: &[f32], cpu: &Cpu) {
        let (grid, group, width) = (self.grid, self.grid.group, self.width);
        let rows = self.codes.par_chunks_mut(width).zip(self.steps.par_chunks_mut(width / group));
        cpu.install(|| {
            rows.zip(weights.par_chunks(width)).for_each(|((codes, steps), weights)| {
                for ((codes, step), weights) in codes.chunks_mut(group).zip(steps).zip(weights.chunks(group)) {
                    *step = grid.step(weights);
                    codes.iter_mut().zip(weights).for_each(|(code, &weight)| *code = step.code(grid, weight));
                }
            });
        });
    }

    /// What the codes stand for.
    pub fn widen(&self, to: &mut [f32], cpu: &Cpu) {
        let (width, groups) = (self.width, self.width / self.grid.group);
        let rows = to.par_chunks_mut(width).zip(self.codes.par_chunks(width)).zip(self.steps.par_chunks(groups));
        cpu.install(|| {
            rows.for_each(|((to, codes), steps)| {
                let each = to.iter_mut().zip(codes).zip(&self.group_of);
                each.for_each(|((to, &code), &group)| *to = steps[group as usize].element(code));
            });
        });
    }
}

//! Steps of training as cells: what the measures [`super::train`] and [`super::tune`] share.
//!
//! Both try ways to take the same steps of the same model: rounds of a few timed steps, each round begun anew. They differ in what a way
//! is.

use super::Measure;
use crate::experiment::cell::Cell;
use crate::experiment::spec::Grid;
use crate::memory::LabelBytes;
use crate::model::{Config, fingerprint, locate};
use crate::train::run::TrainError;
use std::path::Path;

/// Rounds of a cell where nothing is said.
const ROUNDS: usize = 5;
/// Timed steps of a round, behind one that is not.
pub(super) const STEPS: usize = 2;

/// The cells of a grid of ways to take steps.
pub(super) struct Stepped<'a> {
    pub measure: Measure,
    /// The grid's field of ways, and its values.
    pub field: &'static str,
    pub ways: &'a [String],
    /// What could be written there.
    pub example: &'static str,
    /// A cell that takes its steps in this way.
    pub with: fn(Cell, String) -> Cell,
    /// Opens a cell's steps: whatever cannot be trained so is said before anything runs.
    pub config: fn(&Cell) -> Result<Config, TrainError>,
}

impl Stepped<'_> {
    /// Models by contexts by batches by seeds by ways.
    ///
    /// # Errors
    ///
    /// One line where a field is missing or holds what cannot be run.
    pub(super) fn cells(&self, grid: &Grid) -> Result<Vec<Cell>, String> {
        let Stepped { measure, field, ways, example, .. } = *self;
        if ways.is_empty() || grid.context_tokens.is_empty() {
            let both = format!("{field} = {example} and context_tokens = 256");
            return Err(format!("{field} and context_tokens are both needed; write {both}"));
        }
        let rounds = grid.samples.unwrap_or(ROUNDS);
        if rounds == 0 {
            return Err("samples is 0; at least 1 round is needed".into());
        }
        let lengths = || grid.context_tokens.0.iter().flat_map(|tokens| tokens.lengths.clone());
        let mut cells = Vec::new();
        for model in grid.model.or("builtin".into()) {
            let folder = locate(Path::new(&model)).map_err(|error| error.to_string())?;
            let workload_hash = fingerprint(&folder).map_err(|error| error.to_string())?;
            let shapes = lengths().flat_map(|length| grid.batch.or(1).into_iter().map(move |batch| (length, batch)));
            for ((context_tokens, batch), seed) in
                shapes.flat_map(|shape| grid.seed.or(0).into_iter().map(move |seed| (shape, seed)))
            {
                for way in ways {
                    let cell = Cell {
                        measure,
                        model: Some(model.clone()),
                        kernel: "tiled".into(),
                        causal: true,
                        context_tokens,
                        batch,
                        samples: Some(rounds),
                        seed,
                        workload_hash: workload_hash.clone(),
                        ..Cell::default()
                    };
                    let cell = (self.with)(cell, way.clone());
                    let Config { q_heads, kv_heads, head_dim, layers, .. } =
                        (self.config)(&cell).map_err(|error| format!("{field} '{way}': {error}"))?;
                    cells.push(Cell { q_heads, kv_heads, head_dim, layers, ..cell });
                }
            }
        }
        Ok(cells)
    }
}

/// Rounds of a cell.
pub(super) fn rounds_of(cell: &Cell) -> usize {
    cell.samples.unwrap_or(ROUNDS)
}

/// Bytes of all labels.
pub(super) fn sum(bytes: &LabelBytes) -> u64 {
    bytes.values().sum()
}

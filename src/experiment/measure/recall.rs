//! `recall`: what memories of facts give back of drawn facts that were written, changed and forgotten (`docs/larimar.md`).
//!
//! Nothing is timed: a cell draws its episodes, and its record holds shares of right answers with intervals over them.

use super::{Choice, Comparisons, Measure, Measurement, Runs, Scope, Stage};
use crate::episodic::{Episode, EpisodicError, FactMemory};
use crate::experiment::cell::Cell;
use crate::experiment::recalled::Recalled;
use crate::experiment::record::{Memory, Record, Status};
use crate::experiment::spec::Grid;
use crate::memory::{Arena, Label};

/// Memories by episodes by seeds.
pub(super) struct Recall;

impl Measurement for Recall {
    fn name(&self) -> &'static str {
        "recall"
    }

    fn about(&self) -> &'static str {
        "facts as vectors, written into a memory, changed, forgotten and asked for"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["memory", "episode", "samples"]
    }

    fn compares(&self) -> Choice {
        Choice::Policy
    }

    fn expand(&self, grid: &Grid, _scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        if grid.memory.is_empty() || grid.episode.is_empty() {
            let example = "write memory = [\"larimar:slots=64\", \"list:slots=64\"] and episode = \"write:count=64\"";
            return Err(format!("memory and episode are both needed; {example}"));
        }
        let samples = grid.samples.unwrap_or(20);
        if samples == 0 {
            return Err("samples is 0; at least 1 is needed".into());
        }
        let mut cells = Vec::new();
        for episode in &grid.episode.0 {
            for seed in grid.seed.or(0) {
                for memory in &grid.memory.0 {
                    let cell = Cell {
                        measure: Measure::RECALL,
                        memory: Some(memory.clone()),
                        episode: Some(episode.clone()),
                        samples: Some(samples),
                        seed,
                        ..Cell::default()
                    };
                    let (memory, episode) = parts(&cell)?;
                    if episode.changes() && !memory.method.forgets() {
                        return Err(format!("{}: {}", cell.label(), EpisodicError::NoCovariance));
                    }
                    cells.push(cell);
                }
            }
        }
        Ok(cells)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

impl Comparisons for Recall {
    fn predicted_bytes(&self, cell: &Cell, _: usize) -> Option<u64> {
        let (memory, episode) = parts(cell).ok()?;
        Some(episode.peak_bytes(&memory))
    }

    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let of = records.len() as f64;
        let run = |(index, record): (usize, Record)| {
            each(&record.cell, index as f64 / of);
            let limit_bytes = stage.limit_bytes;
            stage.engine.cpu().install(|| recalled(record, limit_bytes))
        };
        records.into_iter().enumerate().map(run).collect()
    }
}

/// The memory and the episode of a cell.
fn parts(cell: &Cell) -> Result<(FactMemory, Episode), String> {
    let (Some(memory), Some(episode)) = (&cell.memory, &cell.episode) else {
        return Err("recall needs a memory and an episode".into());
    };
    let memory = FactMemory::parse(memory).map_err(|error| error.to_string())?;
    Ok((memory, Episode::parse(episode).map_err(|error| error.to_string())?))
}

/// A record with what its cell recalled, or why it did not.
fn recalled(record: Record, limit_bytes: u64) -> Record {
    let (memory, episode) = match parts(&record.cell) {
        Ok(parts) => parts,
        Err(reason) => return Record { status: Status::Failed, reason: Some(reason), ..record },
    };
    let predicted_peak_bytes = episode.peak_bytes(&memory);
    let bytes = Memory { predicted_peak_bytes, limit_bytes, ..Memory::default() };
    if predicted_peak_bytes > limit_bytes {
        let reason = format!("it needs {predicted_peak_bytes} bytes; the limit is {limit_bytes}");
        return Record { status: Status::Oom, reason: Some(reason), memory: Some(bytes), ..record };
    }
    let arena = Arena::with_limit(limit_bytes);
    let draws = 0..record.cell.samples.unwrap_or(1) as u64;
    let outcomes: Result<Vec<_>, _> = draws.map(|draw| episode.run(&memory, record.cell.seed, draw, &arena)).collect();
    match outcomes {
        Err(error) => {
            let status = if matches!(error, EpisodicError::Arena(_)) { Status::Oom } else { Status::Failed };
            Record { status, reason: Some(error.to_string()), memory: Some(bytes), ..record }
        }
        Ok(outcomes) => {
            let usage = arena.usage();
            let held_bytes = memory.bytes(&episode.shape()).get(&Label::Facts).copied().unwrap_or(0);
            let bytes = Memory {
                peak_bytes: usage.peak_bytes,
                residual_bytes: usage.peak_bytes as i64 - predicted_peak_bytes as i64,
                workspace_bytes: usage.peak.get(&Label::Workspace).copied().unwrap_or(0),
                arena_growth_bytes: usage.peak_bytes,
                peak_by_label: usage.peak,
                ..bytes
            };
            Record { memory: Some(bytes), recall: Recalled::over(&outcomes, &episode, held_bytes), ..record }
        }
    }
}

//! `serve`: a request trace through an allocation strategy, simulated (`docs/serving.md`).
//!
//! Nothing is timed and no tensor is made: each cell is simulated once, and its record holds shares of the pool's slots.

use super::{Choice, Comparisons, Measure, Measurement, Runs, Scope, Stage};
use crate::experiment::cell::Cell;
use crate::experiment::record::{Record, Status};
use crate::experiment::spec::Grid;
use crate::serving::{Trace, Usage, simulate, strategy};

/// Traces by strategies by seeds.
pub(super) struct Serve;

impl Measurement for Serve {
    fn name(&self) -> &'static str {
        "serve"
    }

    fn about(&self) -> &'static str {
        "a request trace through an allocation strategy, simulated"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["strategy", "trace"]
    }

    fn compares(&self) -> Choice {
        Choice::Strategy
    }

    fn expand(&self, grid: &Grid, _scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        if grid.strategy.is_empty() || grid.trace.is_empty() {
            let example = "write strategy = [\"max\", \"paged:page=16\"] and trace = \"sharegpt\"";
            return Err(format!("strategy and trace are both needed; {example}"));
        }
        let mut cells = Vec::new();
        for name in &grid.trace.0 {
            let trace = Trace::parse(name).map_err(|error| error.to_string())?;
            // What a trace draws stands in its name; what it reads does not.
            let workload_hash = trace.file_hash().unwrap_or_default();
            for seed in grid.seed.or(0) {
                for choice in &grid.strategy.0 {
                    strategy(choice, trace.pool).map_err(|error| error.to_string())?;
                    cells.push(cell(choice, name, seed, &workload_hash));
                }
            }
        }
        Ok(cells)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

impl Comparisons for Serve {
    fn run(&self, records: Vec<Record>, _stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let run = |record: Record| {
            each(&record.cell, 0.0);
            match simulated(&record.cell) {
                Ok(usage) => Record { serving: Some(usage), ..record },
                Err(reason) => Record { status: Status::Failed, reason: Some(reason), ..record },
            }
        };
        records.into_iter().map(run).collect()
    }
}

/// A cell without tensors.
fn cell(strategy: &str, trace: &str, seed: u64, workload_hash: &str) -> Cell {
    Cell {
        measure: Measure::SERVE,
        strategy: Some(strategy.into()),
        trace: Some(trace.into()),
        seed,
        workload_hash: workload_hash.into(),
        ..Cell::default()
    }
}

/// Simulates a cell.
///
/// # Errors
/// In words, when the cell is none of a simulation, or the trace's file is no longer what it was when the experiment
/// was read.
fn simulated(cell: &Cell) -> Result<Usage, String> {
    let (Some(strategy), Some(name)) = (&cell.strategy, &cell.trace) else {
        return Err("a simulation needs a strategy and a trace".into());
    };
    let trace = Trace::parse(name).map_err(|error| error.to_string())?;
    if trace.file_hash().unwrap_or_default() != cell.workload_hash {
        return Err(format!("trace '{name}' has changed since the experiment was read; run it again"));
    }
    simulate(&trace, strategy, cell.seed).map_err(|error| error.to_string())
}

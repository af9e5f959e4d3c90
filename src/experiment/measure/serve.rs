//! `serve`: a request trace through an allocation strategy, simulated (`docs/serving.md`).
//!
//! Nothing is timed and no tensor is made, so these cells take no turns and need no group: each is simulated once, and
//! its record holds shares of the pool's slots.

use crate::experiment::cell::{Cell, Measure};
use crate::experiment::spec::Grid;
use crate::serving::{Trace, Usage, simulate, strategy};

/// The cells of a grid with `measure = "serve"`: traces by strategies by seeds.
///
/// # Errors
/// In words, when an axis is missing, one does not belong here, or a name means nothing.
pub fn expand(grid: &Grid) -> Result<Vec<Cell>, String> {
    let strangers = [
        ("kernel", grid.kernel.is_empty()),
        ("context_tokens", grid.context_tokens.is_empty()),
        ("heads", grid.heads.is_empty()),
        ("head_dim", grid.head_dim.is_empty()),
        ("batch", grid.batch.is_empty()),
        ("dtype", grid.dtype.is_empty()),
        ("window", grid.window.is_none()),
        ("softcap", grid.softcap.is_none()),
        ("policy", grid.policy.is_empty()),
        ("memory", grid.memory.is_empty()),
        ("budget", grid.budget.is_empty()),
        ("new_tokens", grid.new_tokens.is_none()),
        ("page_tokens", grid.page_tokens.is_empty()),
    ];
    if let Some((name, _)) = strangers.into_iter().find(|(_, is_absent)| !is_absent) {
        return Err(format!("a simulation has no {name}; its axes are strategy, trace and seed"));
    }
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

/// A cell without tensors.
fn cell(strategy: &str, trace: &str, seed: u64, workload_hash: &str) -> Cell {
    Cell {
        measure: Measure::Serve,
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
pub fn run(cell: &Cell) -> Result<Usage, String> {
    let (Some(strategy), Some(name)) = (&cell.strategy, &cell.trace) else {
        return Err("a simulation needs a strategy and a trace".into());
    };
    let trace = Trace::parse(name).map_err(|error| error.to_string())?;
    if trace.file_hash().unwrap_or_default() != cell.workload_hash {
        return Err(format!("trace '{name}' has changed since the experiment was read; run it again"));
    }
    simulate(&trace, strategy, cell.seed).map_err(|error| error.to_string())
}

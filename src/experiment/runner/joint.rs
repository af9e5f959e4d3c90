//! One of several processes that share a run: claims comparisons, the heaviest first, until none is left to claim.
//!
//! Whoever has claimed a comparison runs what no one recorded of it. What failed counts as recorded: it would fail every
//! process that comes by.

use super::{Outcome, Progress, RunError, Runner, described, heaviest_first, prepare, to_run};
use crate::experiment::cell::{Cell, by_comparison};
use crate::experiment::engine::Engine;
use crate::experiment::environment;
use crate::experiment::grid::Experiment;
use crate::experiment::measure::Prepared;
use crate::experiment::record::{Record, Status};
use crate::experiment::runner::Options;
use crate::experiment::store::{Joint, finished};
use crate::policy::Registry;
use std::collections::HashSet;

/// The cells of a comparison, by how they run.
enum Work {
    Trials(Vec<Prepared>),
    Together(Vec<Cell>),
}

impl Work {
    fn cells(&self) -> usize {
        match self {
            Work::Trials(cells) => cells.len(),
            Work::Together(cells) => cells.len(),
        }
    }

    /// Leaves out cells that have a record and are not [`to_run`].
    fn without(self, recorded: &HashSet<String>, (limit_bytes, threads): (u64, usize)) -> Self {
        match self {
            Work::Trials(mut cells) => {
                cells.retain(|prepared| !recorded.contains(&prepared.cell.id()));
                Work::Trials(cells)
            }
            Work::Together(cells) => {
                let is_missing = |cell: &Cell| !recorded.contains(&cell.id());
                Work::Together(to_run(&cells.iter().collect::<Vec<_>>(), is_missing, (limit_bytes, threads)))
            }
        }
    }
}

/// Runs what no other process has claimed.
pub(super) fn run(
    experiment: &Experiment,
    registry: &Registry,
    engine: Engine<'_>,
    options: &Options,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, RunError> {
    let in_trials = heaviest_first(prepare(experiment, registry, engine)?);
    let in_trials = in_trials.into_iter().map(|(id, cells)| (id, Work::Trials(cells)));
    let together = by_comparison(experiment.in_comparisons().cloned(), |cell| cell);
    let together = together.into_iter().map(|(id, cells)| (id, Work::Together(cells)));
    let (config, environment) = described(experiment, engine, options);
    let base = options.out.join(&experiment.spec.name);
    let joint = Joint::open(&base, &experiment.config_hash(), &config, &environment)?;
    let room = (options.limit_bytes, engine.cpu().threads());
    let recorded = recorded_of(&joint.records()?, options.limit_bytes);
    let mut todo: Vec<(String, Work)> =
        together.chain(in_trials).map(|(id, work)| (id, work.without(&recorded, room))).collect();
    todo.retain(|(_, work)| work.cells() > 0);
    let cells = todo.iter().map(|(_, work)| work.cells()).sum();
    progress(Progress::Start { cells, resumed: recorded.len() });

    let worker = environment::worker();
    let mut failed = Vec::new();
    // What another process held may be free when all else is done: it died, or has left nothing to do.
    loop {
        let mut held = Vec::new();
        let before = todo.len();
        for (id, work) in todo {
            let Some((store, there)) = joint.claim(&id)? else {
                held.push((id, work));
                continue;
            };
            let all = work.cells();
            let work = work.without(&recorded_of(&there, options.limit_bytes), room);
            progress(Progress::Elsewhere(all - work.cells()));
            let worker = Some(worker.clone());
            let mut runner = Runner { experiment, engine, options, store, worker, records: Vec::new(), progress };
            match work {
                Work::Together(cells) if cells.is_empty() => {}
                Work::Together(cells) => runner.comparison(&cells, registry)?,
                Work::Trials(cells) => runner.trials(cells)?,
            }
            failed.extend(runner.records.into_iter().filter(|record| record.status == Status::Failed));
        }
        if held.len() == before {
            break;
        }
        todo = held;
    }
    let records = joint.records()?;
    let missing = experiment.cells.len() - ids(&records).len();
    Ok(Outcome { folder: joint.folder, run_id: joint.run_id, records, failed, missing })
}

/// Cells that are not run again: those that are done, and those that failed.
fn recorded_of(records: &[Record], limit_bytes: u64) -> HashSet<String> {
    let failed = records.iter().filter(|record| record.status == Status::Failed).map(|record| record.cell_id.clone());
    finished(records, limit_bytes).into_iter().chain(failed).collect()
}

fn ids(records: &[Record]) -> HashSet<String> {
    records.iter().map(|record| record.cell_id.clone()).collect()
}

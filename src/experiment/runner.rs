//! Runs an experiment: interleaved rounds, checked trials, records as cells end.
//!
//! Cells of one context length are a group. Their inputs are made once and their samples are taken interleaved, round
//! after round (A B C A B C), so that a slow moment of the machine falls on all of them. A cell leaves the rotation,
//! and its record is written, when its interval is tight or its time is up.

mod joint;
mod trials;

pub(super) use trials::LEAST_SAMPLES;

use super::cell::{Cell, by_comparison};
use super::engine::Engine;
use super::environment;
use super::grid::Experiment;
use super::measure::{Implementation, Prepared, Stage};
use super::record::{Latency, Memory, Record, Status, Worker};
use super::store::{CELLS, Store, StoreError, current, finished, latest};
use crate::device::cuda::CudaError;
use crate::policy::Registry;
use crate::stats::{median_with_interval, quantile};
use crate::workload::{Extents, Knobs, Workload, WorkloadError};
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

/// How a run is made.
pub struct Options {
    /// Folder in which `<experiment>/<run id>/` is made.
    pub out: PathBuf,
    /// Go on with the latest run of the same configuration, if there is one.
    pub resume: bool,
    /// Share the latest run of the same configuration with other processes, or begin one that others can join.
    pub join: bool,
    /// Run only the cells of shard `.0` (from 1) of `.1`.
    pub shard: Option<(usize, usize)>,
    /// Cells predicted to need more are `oom`.
    pub limit_bytes: u64,
    /// The command that makes the run again, for the records.
    pub repro: String,
}

/// What a run tells while it goes on.
pub enum Progress<'a> {
    /// So many cells will run; so many are there already.
    Start {
        /// Cells to run.
        cells: usize,
        /// Cells that an earlier run finished.
        resumed: usize,
    },
    /// A sample of this cell is taken.
    Trial(&'a Cell),
    /// So much of a comparison is done.
    Part {
        /// The cell that is at work.
        cell: &'a Cell,
        /// Cells of the comparison.
        cells: usize,
        /// 0 to 1.
        fraction: f64,
    },
    /// A cell ended.
    Done(&'a Record),
    /// So many cells of those to run were run by other processes.
    Elsewhere(usize),
}

/// What a run left behind.
pub struct Outcome {
    /// The run's folder.
    pub folder: PathBuf,
    /// Its name.
    pub run_id: String,
    /// The last record of every cell, those of an earlier run and of other processes included.
    pub records: Vec<Record>,
    /// Cells that failed now.
    pub failed: Vec<Record>,
    /// Cells without a record: other processes are at them, or died at them.
    pub missing: usize,
}

/// Why a run stopped.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The results cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The inputs cannot be made.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// A cell means nothing.
    #[error("{0}")]
    Cell(String),
    /// A GPU failed where no record can say so.
    #[error("{label}: {error}")]
    Gpu {
        /// The cell.
        label: String,
        /// What went wrong.
        error: CudaError,
    },
    /// A GPU does not work any more.
    #[error("{reason}; the records so far are in {}, and the same command with --resume runs the rest", folder.display())]
    Lost {
        /// What happened.
        reason: String,
        /// The run's folder.
        folder: PathBuf,
    },
}

/// Runs the cells of an experiment that are not finished yet.
///
/// # Errors
/// When inputs cannot be made, results cannot be written, or a GPU is lost for good; cells that fail are records, not
/// errors.
pub fn run<'e>(
    experiment: &Experiment,
    registry: &Registry,
    engine: impl Into<Engine<'e>>,
    options: &Options,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, RunError> {
    let engine = engine.into();
    if options.join {
        return joint::run(experiment, registry, engine, options, progress);
    }
    // Everything that a user can have got wrong is said before a folder is made.
    let cells = shard(prepare(experiment, registry, engine)?, options.shard);
    // Of evaluations and the like the tokens say how long they take, roughly: those of a comparison are of one length.
    let tokens = |cells: &Vec<&Cell>| {
        cells.iter().map(|cell| (cell.context_tokens * cell.samples.unwrap_or(1)) as u64).sum::<u64>()
    };
    let mut comparisons = comparisons(experiment.in_comparisons());
    if options.shard.is_some() {
        comparisons.sort_by_key(|cells| std::cmp::Reverse(tokens(cells)));
    }
    let comparisons = deal(comparisons, options.shard, tokens);
    let (base, hash, suffix) = place(experiment, options);
    let resumed = if options.resume { Store::resume(&base, &hash, &suffix)? } else { None };
    let (config, environment) = described(experiment, engine, options);
    let (store, mut records, worker) = match resumed {
        Some((store, records)) => {
            // What goes on with other threads or on another machine says so in its records: the folder's env.json is of the first.
            let begun = store.environment()?;
            store.renew_configuration(&config)?;
            let differs = |fact: &str| begun.pointer(fact) != environment.pointer(fact);
            let elsewhere = ["/machine/cpu", "/run/threads", "/run/isa_path"].into_iter().any(differs);
            (store, records, elsewhere.then(environment::worker))
        }
        None => (Store::create(&base, &hash, &suffix, &config, &environment, CELLS)?, Vec::new(), None),
    };
    let mut done = finished(&records, options.limit_bytes);
    let group = |prepared: &Prepared| prepared.cell.without_choice().id();
    let open = cells.iter().filter(|prepared| !done.contains(&prepared.cell.id()));
    let open: HashSet<String> = open.map(group).collect();
    // Ratios are of cells that were timed side by side: where one is missing, all of its comparison are timed again.
    let todo: Vec<Prepared> = cells.into_iter().filter(|prepared| open.contains(&group(prepared))).collect();
    for prepared in &todo {
        done.remove(&prepared.cell.id());
    }
    let mut missing = |cells: Vec<&'_ Cell>| -> Vec<Cell> {
        let room = (options.limit_bytes, engine.cpu().threads());
        let open = to_run(&cells, |cell| !done.contains(&cell.id()), room);
        for cell in &open {
            done.remove(&cell.id());
        }
        open
    };
    let comparisons: Vec<Vec<Cell>> =
        comparisons.into_iter().map(&mut missing).filter(|cells| !cells.is_empty()).collect();
    let cells = todo.len() + comparisons.iter().map(Vec::len).sum::<usize>();
    progress(Progress::Start { cells, resumed: done.len() });

    let mut runner = Runner { experiment, engine, options, store, worker, records: Vec::new(), progress };
    for cells in &comparisons {
        runner.comparison(cells, registry)?;
    }
    runner.trials(todo)?;
    let Runner { store: Store { folder, run_id, .. }, records: new, .. } = runner;
    let failed = new.iter().filter(|record| record.status == Status::Failed).cloned().collect();
    records.extend(new);
    Ok(Outcome { folder, run_id, records: current(records), failed, missing: 0 })
}

/// The folder of the run that one with these options would go on with.
pub fn earlier(experiment: &Experiment, options: &Options) -> Option<PathBuf> {
    let (base, hash, suffix) = place(experiment, options);
    latest(&base, &hash, &suffix)
}

/// Where a run's folder is made, the hash in its name, and how that ends.
fn place(experiment: &Experiment, options: &Options) -> (PathBuf, String, String) {
    let suffix = options.shard.map_or(String::new(), |(index, count)| format!("-shard{index}of{count}"));
    (options.out.join(&experiment.spec.name), experiment.config_hash(), suffix)
}

/// What a run's folder says of it: the configuration and the environment.
fn described(experiment: &Experiment, engine: Engine<'_>, options: &Options) -> (String, serde_json::Value) {
    let config = toml::to_string_pretty(&experiment.spec).expect("a spec is plain data");
    let mut environment = environment::probe(engine, &options.repro);
    environment["run"]["cells"] = experiment.cells.len().into();
    (config, environment)
}

/// Resolves every cell of an experiment that is measured and checks that its inputs can be made.
///
/// # Errors
/// Names the first cell that means nothing, or what its inputs lack; or says why none of the cells runs on the device.
pub fn prepare<'e>(
    experiment: &Experiment,
    registry: &Registry,
    engine: impl Into<Engine<'e>>,
) -> Result<Vec<Prepared>, RunError> {
    let engine = engine.into();
    let prepared = |cell: &Cell| {
        Prepared::new(cell.clone(), registry, engine)
            .map_err(|error| RunError::Cell(format!("{}: {error}", cell.label())))
    };
    let cells = experiment.in_trials().map(prepared).collect::<Result<Vec<_>, _>>()?;
    let nowhere = |prepared: &Prepared| match &prepared.implementation {
        Implementation::Missing(reason) => Some((prepared.cell.label(), reason.clone())),
        _ => None,
    };
    let refused = |cell: &Cell| Some((cell.label(), cell.measure.comparisons()?.refusal(engine.device())?));
    let all: Option<Vec<_>> = cells.iter().map(nowhere).chain(experiment.in_comparisons().map(refused)).collect();
    if let Some((label, reason)) = all.iter().flatten().next() {
        return Err(RunError::Cell(format!("none of the cells runs here: {label}: {reason}")));
    }
    let mut checked: Vec<(Extents, &str)> = Vec::new();
    for prepared in &cells {
        let inputs = (prepared.extents(), prepared.cell.workload_hash.as_str());
        if !checked.contains(&inputs) {
            match &experiment.file {
                Some(file) => file.check(&inputs.0)?,
                None => experiment.synthetic(prepared.cell.knobs.as_ref()).check_extents(&inputs.0)?,
            }
            checked.push(inputs);
        }
    }
    Ok(cells)
}

/// The cells of one shard. Whole comparisons are dealt, so that no ratio is of two processes.
fn shard(cells: Vec<Prepared>, shard: Option<(usize, usize)>) -> Vec<Prepared> {
    if shard.is_none() {
        return cells;
    }
    let work = |(_, cells): &(String, Vec<Prepared>)| work(cells);
    deal(heaviest_first(cells), shard, work).into_iter().flat_map(|(_, cells)| cells).collect()
}

/// Arithmetic of a trial of each cell.
fn work(cells: &[Prepared]) -> u64 {
    cells.iter().map(|prepared| prepared.work().flops).sum()
}

/// Comparisons of cells that take trials, those with most work first.
fn heaviest_first(cells: Vec<Prepared>) -> Vec<(String, Vec<Prepared>)> {
    let mut comparisons = by_comparison(cells, |prepared| &prepared.cell);
    comparisons.sort_by_cached_key(|(id, cells)| (std::cmp::Reverse(work(cells)), id.clone()));
    comparisons
}

/// Comparisons of cells, in the order of their first ones.
pub(super) fn comparisons<'c>(cells: impl Iterator<Item = &'c Cell>) -> Vec<Vec<&'c Cell>> {
    by_comparison(cells, |cell| cell).into_iter().map(|(_, cells)| cells).collect()
}

/// A shard's part: each of `all`, from the first on, is for the shard that has least to do so far. All without shards.
fn deal<T>(all: Vec<T>, shard: Option<(usize, usize)>, work: impl Fn(&T) -> u64) -> Vec<T> {
    let Some((index, count)) = shard else { return all };
    // Each is more than nothing: of more shards than these, the last ones get none.
    let mut loads = vec![0u64; count.min(all.len())];
    let is_ours = |one: &T| {
        let least = (0..loads.len()).min_by_key(|&shard| loads[shard]).expect("there is a shard");
        loads[least] += work(one).max(1);
        least == index - 1
    };
    all.into_iter().filter(is_ours).collect()
}

/// What decides a cell's inputs.
#[derive(Clone, PartialEq)]
struct InputKey {
    extents: Extents,
    seed: u64,
    knobs: Option<Knobs>,
}

impl InputKey {
    fn of(prepared: &Prepared) -> Self {
        InputKey { extents: prepared.extents(), seed: prepared.cell.seed, knobs: prepared.cell.knobs.clone() }
    }
}

/// Cells that are interleaved: those of one context length, as long as their inputs together take at most an eighth
/// of the memory limit; otherwise those of one input.
fn groups(cells: Vec<Prepared>, limit_bytes: u64) -> Vec<Vec<Prepared>> {
    let mut by_length: BTreeMap<usize, Vec<Prepared>> = BTreeMap::new();
    for prepared in cells {
        by_length.entry(prepared.cell.context_tokens).or_default().push(prepared);
    }
    let mut groups = Vec::new();
    for cells in by_length.into_values() {
        let mut by_input: Vec<(InputKey, Vec<Prepared>)> = Vec::new();
        for prepared in cells {
            let key = InputKey::of(&prepared);
            match by_input.iter_mut().find(|(known, _)| *known == key) {
                Some((_, cells)) => cells.push(prepared),
                None => by_input.push((key, vec![prepared])),
            }
        }
        let input_bytes: u64 = by_input.iter().map(|(key, _)| Workload::bytes(&key.extents)).sum();
        if input_bytes <= limit_bytes / 8 {
            groups.push(by_input.into_iter().flat_map(|(_, cells)| cells).collect());
        } else {
            groups.extend(by_input.into_iter().map(|(_, cells)| cells));
        }
    }
    groups
}

/// Cells of a comparison that are to run: the missing ones, and of those that are measured in turn all that have room beside them.
fn to_run(cells: &[&Cell], is_missing: impl Fn(&Cell) -> bool, (limit_bytes, threads): (u64, usize)) -> Vec<Cell> {
    let in_turn = cells[0].measure.comparisons().filter(|measure| measure.takes_turns());
    let in_turn = in_turn.filter(|_| cells.iter().any(|cell| is_missing(cell)));
    let has_room = |cell: &Cell| in_turn.is_some_and(|measure| measure.has_room(cell, limit_bytes, threads));
    cells.iter().filter(|cell| is_missing(cell) || has_room(cell)).map(|cell| (*cell).clone()).collect()
}

struct Runner<'a> {
    experiment: &'a Experiment,
    engine: Engine<'a>,
    options: &'a Options,
    store: Store,
    /// This process, where others share the run.
    worker: Option<Worker>,
    /// What this process measured.
    records: Vec<Record>,
    progress: &'a mut dyn FnMut(Progress<'_>),
}

impl Runner<'_> {
    /// Runs cells in trials, group by group.
    fn trials(&mut self, cells: Vec<Prepared>) -> Result<(), RunError> {
        groups(cells, self.options.limit_bytes).into_iter().try_for_each(|group| self.group(group))
    }

    /// Runs cells that are compared with one another and writes their records.
    fn comparison(&mut self, cells: &[Cell], registry: &Registry) -> Result<(), RunError> {
        let Some(comparisons) = cells[0].measure.comparisons() else { return Ok(()) };
        let start = Instant::now();
        let records: Vec<Record> = cells.iter().map(|cell| self.blank_record(cell)).collect();
        let records = match comparisons.refusal(self.engine.device()) {
            Some(reason) => {
                let skip = |record| Record { status: Status::Skipped, reason: Some(reason.clone()), ..record };
                records.into_iter().map(skip).collect()
            }
            None => {
                let folder = &self.store.folder;
                let stage = Stage { registry, engine: self.engine, limit_bytes: self.options.limit_bytes, folder };
                let of = cells.len();
                comparisons.run(records, &stage, &mut |cell, fraction| {
                    (self.progress)(Progress::Part { cell, cells: of, fraction });
                })
            }
        };
        // What is shared is shared out.
        let wall_ns = start.elapsed().as_nanos() as u64 / cells.len() as u64;
        // What failed is run again by a resume, which then needs what was kept for it.
        let has_failed = records.iter().any(|record| record.status == Status::Failed);
        records.into_iter().try_for_each(|record| self.end(Record { wall_ns, ..record }))?;
        if has_failed {
            return Ok(());
        }
        let folder = &self.store.folder;
        comparisons.finish(folder, &cells[0]).map_err(|error| unwritten(folder, &error))
    }

    fn new_record(&self, prepared: &Prepared) -> Record {
        let memory = Memory {
            predicted_peak_bytes: prepared.predict(self.engine),
            workspace_bytes: prepared.workspace_bytes(self.engine.cpu().threads()),
            limit_bytes: self.options.limit_bytes,
            context_bytes: self.engine.context_bytes(),
            ..Memory::default()
        };
        Record { memory: Some(memory), gemm: prepared.gemm(self.engine), ..self.blank_record(&prepared.cell) }
    }

    /// A record of a cell, without numbers.
    fn blank_record(&self, cell: &Cell) -> Record {
        Record {
            run_id: self.store.run_id.clone(),
            started_at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            repro: self.options.repro.clone(),
            threads: self.engine.cpu().threads(),
            isa_path: self.engine.path(),
            worker: self.worker.clone(),
            ..Record::blank(cell.clone())
        }
    }

    fn end(&mut self, mut record: Record) -> Result<(), RunError> {
        // A run under a larger limit tries again what did not fit into this one.
        if record.status == Status::Oom {
            let limit_bytes = self.options.limit_bytes;
            record.memory.get_or_insert_with(|| Memory { limit_bytes, ..Memory::default() });
        }
        self.store.append(&record)?;
        (self.progress)(Progress::Done(&record));
        self.records.push(record);
        Ok(())
    }
}

/// What the system refused in a run's folder.
fn unwritten(folder: &Path, error: &io::Error) -> RunError {
    StoreError::Write { path: folder.into(), reason: error.to_string() }.into()
}

/// Times of a phase, with their median and its interval.
pub(in crate::experiment) fn latency(samples_ns: Vec<u64>, warmups: usize, stop_reason: &str) -> Latency {
    let values: Vec<f64> = samples_ns.iter().map(|&ns| ns as f64).collect();
    let (median_ns, ci95_low_ns, ci95_high_ns) = median_with_interval(&values);
    Latency {
        median_ns,
        p10_ns: quantile(&values, 0.1),
        p90_ns: quantile(&values, 0.9),
        ci95_low_ns,
        ci95_high_ns,
        samples_ns,
        warmups,
        stop_reason: stop_reason.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::cell::Device;
    use crate::experiment::spec::Spec;

    #[test]
    fn shards_have_about_as_much_to_do() {
        // Each four times the one behind it, and of equal ones every shard has its part.
        for (work, loads) in [(vec![64u64, 16, 4, 1], [64, 21]), (vec![3; 5], [9, 6])] {
            let of = |index| deal(work.clone(), Some((index, 2)), |&work| work);
            assert_eq!([of(1), of(2)].map(|part| part.iter().sum::<u64>()), loads);
        }
        assert_eq!(deal(vec![5, 4], None, |&work| work), [5, 4]);
        // More shards than there is work for, however many.
        for count in [3, usize::MAX] {
            let of = |index| deal(vec![5, 4], Some((index, count)), |&work: &u64| work);
            assert_eq!([1, 2, 3, count].map(of), [vec![5], vec![4], vec![], vec![]]);
        }
    }

    #[test]
    fn what_is_measured_in_turn_is_measured_again_as_far_as_it_has_room() {
        let text = "name = \"x\"\n[[grid]]\nmeasure = \"ranks\"\nranks = [\"ring:1\", \"ring:2\"]\nheads = \"2/1\"\n\
                    head_dim = 32\ncontext_tokens = 256\n";
        let spec = Spec::parse(text, "x.toml").unwrap();
        let experiment = Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).unwrap();
        let cells: Vec<&Cell> = experiment.in_comparisons().collect();
        let bytes = cells[1].measure.comparisons().unwrap().predicted_bytes(cells[1], 1).unwrap();
        for (missing, limit_bytes, expected) in [
            (vec![], bytes, vec![]),
            (vec![0], bytes, vec![0, 1]),
            (vec![0], bytes - 1, vec![0]),
            (vec![1], 0, vec![1]),
        ] {
            let is_missing = |cell: &Cell| missing.iter().any(|&at: &usize| cells[at] == cell);
            let expected: Vec<Cell> = expected.into_iter().map(|at: usize| cells[at].clone()).collect();
            assert_eq!(to_run(&cells, is_missing, (limit_bytes, 1)), expected, "{missing:?} {limit_bytes}");
        }
    }
}

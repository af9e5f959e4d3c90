//! Runs an experiment: interleaved rounds, checked turns, records as cells end.
//!
//! Cells of one context length are a group. Their inputs are made once and their samples are taken in turn, round
//! after round (A B C A B C), so that a slow moment of the machine falls on all of them. A cell leaves the rotation,
//! and its record is written, when its interval is tight or its time is up.

use super::cell::{Cell, Measure};
use super::engine::{Engine, InputError, Inputs};
use super::grid::Experiment;
use super::measure::{Place, Prepared, Truth, TurnError, serve};
use super::record::{Latency, Memory, Record, SCHEMA, Status, Work};
use super::spec::Timing;
use super::stats::{median_with_interval, quantile};
use super::store::{CELLS, Store, StoreError, finished};
use crate::attention::Params;
use crate::policy::Registry;
use crate::workload::{Extents, Workload, WorkloadError};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

/// Samples that a cell takes even when its time is up.
const LEAST_SAMPLES: usize = 3;

/// How a run is made.
pub struct Options {
    /// Folder in which `<experiment>/<run id>/` is made.
    pub out: PathBuf,
    /// Go on with the latest run of the same configuration, if there is one.
    pub resume: bool,
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
    Turn(&'a Cell),
    /// A cell ended.
    Done(&'a Record),
}

/// What a run left behind.
pub struct Outcome {
    /// The run's folder.
    pub folder: PathBuf,
    /// Its name.
    pub run_id: String,
    /// All records, those of an earlier run included.
    pub records: Vec<Record>,
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
}

/// Runs the cells of an experiment that are not finished yet.
///
/// # Errors
/// When inputs cannot be made or results cannot be written; cells that fail are records, not errors.
pub fn run<'e>(
    experiment: &Experiment,
    registry: &Registry,
    engine: impl Into<Engine<'e>>,
    options: &Options,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, RunError> {
    let engine = engine.into();
    // Everything that a user can have got wrong is said before a folder is made.
    let cells = shard(prepare(experiment, registry, engine)?, options.shard);
    let simulated = deal(experiment.simulated().collect(), options.shard);
    let base = options.out.join(&experiment.spec.name);
    let suffix = options.shard.map_or(String::new(), |(index, count)| format!("-shard{index}of{count}"));
    let hash = experiment.config_hash();
    let resumed = if options.resume { Store::resume(&base, &hash, &suffix)? } else { None };
    let (store, records) = match resumed {
        Some(found) => found,
        None => {
            let config = toml::to_string_pretty(&experiment.spec).expect("a spec is plain data");
            let environment = super::environment::probe(engine, &options.repro);
            (Store::create(&base, &hash, &suffix, &config, &environment, CELLS)?, Vec::new())
        }
    };
    let done = finished(&records);
    let todo: Vec<Prepared> = cells.into_iter().filter(|prepared| !done.contains(&prepared.cell.id())).collect();
    let simulations: Vec<&Cell> = simulated.into_iter().filter(|cell| !done.contains(&cell.id())).collect();
    progress(Progress::Start { cells: todo.len() + simulations.len(), resumed: done.len() });

    let mut runner = Runner { experiment, engine, options, store, records, progress };
    for cell in simulations {
        runner.simulation(cell)?;
    }
    for group in groups(todo, options.limit_bytes) {
        runner.group(group)?;
    }
    Ok(Outcome { folder: runner.store.folder, run_id: runner.store.run_id, records: runner.records })
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
    let measured = experiment.cells.iter().filter(|cell| cell.measure != Measure::Serve);
    let cells = measured.map(prepared).collect::<Result<Vec<_>, _>>()?;
    let nowhere = |prepared: &Prepared| match &prepared.place {
        Place::Nowhere(reason) => Some(format!("none of the cells runs here: {}: {reason}", prepared.cell.label())),
        _ => None,
    };
    if let (Some(reason), true) = (cells.first().and_then(nowhere), cells.iter().all(|cell| nowhere(cell).is_some())) {
        return Err(RunError::Cell(reason));
    }
    let mut checked: Vec<Extents> = Vec::new();
    for extents in cells.iter().map(Prepared::extents) {
        if !checked.contains(&extents) {
            match &experiment.file {
                Some(file) => file.check(&extents)?,
                None => experiment.spec.synthetic.clone().unwrap_or_default().check_extents(&extents)?,
            }
            checked.push(extents);
        }
    }
    Ok(cells)
}

/// The cells of one shard: sorted by work and dealt in turn, so that shards cost about the same.
fn shard(mut cells: Vec<Prepared>, shard: Option<(usize, usize)>) -> Vec<Prepared> {
    if shard.is_some() {
        cells.sort_by_cached_key(|prepared| (std::cmp::Reverse(prepared.work().0), prepared.cell.id()));
    }
    deal(cells, shard)
}

/// Every n-th of `cells`; all of them without shards.
fn deal<T>(cells: Vec<T>, shard: Option<(usize, usize)>) -> Vec<T> {
    let (index, count) = shard.unwrap_or((1, 1));
    cells.into_iter().skip(index - 1).step_by(count).collect()
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
        let mut by_input: Vec<((Extents, u64), Vec<Prepared>)> = Vec::new();
        for prepared in cells {
            let key = (prepared.extents(), prepared.cell.seed);
            match by_input.iter_mut().find(|(known, _)| *known == key) {
                Some((_, cells)) => cells.push(prepared),
                None => by_input.push((key, vec![prepared])),
            }
        }
        let input_bytes: u64 = by_input.iter().map(|((extents, _), _)| Workload::bytes(extents)).sum();
        if input_bytes <= limit_bytes / 8 {
            groups.push(by_input.into_iter().flat_map(|(_, cells)| cells).collect());
        } else {
            groups.extend(by_input.into_iter().map(|(_, cells)| cells));
        }
    }
    groups
}

/// A cell in the rotation.
struct Running {
    prepared: Prepared,
    input: usize,
    record: Record,
    samples_ns: BTreeMap<&'static str, Vec<u64>>,
    spent: Duration,
}

/// Inputs of a group.
struct Input {
    key: (Extents, u64),
    there: Inputs,
    /// What the reference says, for each kind of pass over these inputs.
    truths: Vec<((Measure, Params), Rc<Truth>)>,
}

impl Input {
    /// The reference's rows for a cell, computed once for all cells that are checked on the same.
    fn truth(&mut self, cell: &Cell, engine: Engine<'_>) -> Result<Rc<Truth>, TurnError> {
        let key = (cell.measure, cell.params());
        if let Some((_, truth)) = self.truths.iter().find(|(known, _)| *known == key) {
            return Ok(truth.clone());
        }
        let workload = self.there.workload().ok_or_else(|| TurnError::Failed("blank inputs have no truth".into()))?;
        let truth = Rc::new(Truth::compute(cell, workload, engine.cpu())?);
        self.truths.push((key, truth.clone()));
        Ok(truth)
    }
}

struct Runner<'a> {
    experiment: &'a Experiment,
    engine: Engine<'a>,
    options: &'a Options,
    store: Store,
    records: Vec<Record>,
    progress: &'a mut dyn FnMut(Progress<'_>),
}

impl Runner<'_> {
    fn group(&mut self, cells: Vec<Prepared>) -> Result<(), RunError> {
        let mut inputs: Vec<Input> = Vec::new();
        let mut rotation = Vec::new();
        for prepared in cells {
            if let Place::Nowhere(reason) = &prepared.place {
                let record = self.blank_record(&prepared.cell);
                self.end(Record { status: Status::Skipped, reason: Some(reason.clone()), ..record })?;
                continue;
            }
            let record = self.new_record(&prepared);
            let predicted = prepared.predict(self.engine);
            if predicted > self.options.limit_bytes {
                let reason =
                    format!("needs {predicted} bytes, {} are allowed (--limit-memory)", self.options.limit_bytes);
                self.end(Record { status: Status::Oom, reason: Some(reason), ..record })?;
                continue;
            }
            if prepared.budget_holds_context() {
                let reason = format!(
                    "the budget holds the whole context of {} tokens: nothing to evict",
                    prepared.cell.context_tokens
                );
                self.end(Record { status: Status::Skipped, reason: Some(reason), ..record })?;
                continue;
            }
            let key = (prepared.extents(), prepared.cell.seed);
            let input = match inputs.iter().position(|input| input.key == key) {
                Some(input) => input,
                None => match self.input(key) {
                    Ok(input) => {
                        inputs.push(input);
                        inputs.len() - 1
                    }
                    Err(error) => {
                        self.end(ended(record, &error.into()))?;
                        continue;
                    }
                },
            };
            let running = Running { prepared, input, record, samples_ns: BTreeMap::new(), spent: Duration::ZERO };
            if let Some(running) = self.checked_turn(running, &mut inputs[input])? {
                rotation.push(running);
            }
        }
        self.rounds(rotation, &inputs)
    }

    fn input(&self, key: (Extents, u64)) -> Result<Input, InputError> {
        let there = self.engine.inputs(&key.0, self.options.limit_bytes, |arena| match &self.experiment.file {
            Some(file) => file.load(&key.0, arena),
            None => self.experiment.spec.synthetic.clone().unwrap_or_default().generate(&key.0, key.1, arena),
        })?;
        Ok(Input { key, there, truths: Vec::new() })
    }

    /// The first turn of a cell: compared with the reference, its memory measured by the arena and by the system.
    fn checked_turn(&mut self, mut running: Running, input: &mut Input) -> Result<Option<Running>, RunError> {
        (self.progress)(Progress::Turn(&running.prepared.cell));
        let truth = input.truth(&running.prepared.cell, self.engine);
        let start = Instant::now();
        let arena = &input.there.arena;
        let before_bytes = arena.usage().live_bytes;
        arena.reset_peak();
        let watch = self.engine.watch();
        let result = truth.and_then(|truth| running.prepared.turn(self.engine, &input.there, Some(&truth)));
        let (rss_growth_bytes, gpu_growth_bytes) = self.engine.growth(&watch);
        running.spent += start.elapsed();

        let usage = arena.usage();
        let memory = running.record.memory.get_or_insert_default();
        memory.peak_bytes = usage.peak_bytes;
        memory.residual_bytes = usage.peak_bytes as i64 - memory.predicted_peak_bytes as i64;
        memory.peak_by_label = usage.peak;
        memory.arena_growth_bytes = usage.peak_bytes - before_bytes;
        memory.rss_growth_bytes = rss_growth_bytes;
        memory.gpu_growth_bytes = gpu_growth_bytes;
        match result {
            Ok(turn) => {
                running.record.drift = turn.drift;
                running.record.eviction = turn.eviction;
                running.record.warnings.extend(turn.warnings);
                if memory.residual_bytes != 0 {
                    let residual = memory.residual_bytes;
                    running
                        .record
                        .warnings
                        .push(format!("measured peak differs from the predicted by {residual} bytes"));
                }
                Ok(Some(running))
            }
            Err(error) => {
                self.fail(running, &error)?;
                Ok(None)
            }
        }
    }

    fn rounds(&mut self, mut rotation: Vec<Running>, inputs: &[Input]) -> Result<(), RunError> {
        let timing = &self.experiment.spec.timing;
        for round in 1.. {
            let mut stay = Vec::new();
            for mut running in rotation {
                (self.progress)(Progress::Turn(&running.prepared.cell));
                let start = Instant::now();
                let result = running.prepared.turn(self.engine, &inputs[running.input].there, None);
                running.spent += start.elapsed();
                match result {
                    Err(error) => {
                        self.fail(running, &error)?;
                        continue;
                    }
                    // The checked turn was the first warm-up.
                    Ok(_) if round < timing.warmups => {}
                    Ok(turn) => {
                        for (phase, ns) in turn.samples_ns {
                            running.samples_ns.entry(phase).or_default().push(ns);
                        }
                    }
                }
                match stop_reason(timing, &running) {
                    Some(reason) => self.finish(running, reason)?,
                    None => stay.push(running),
                }
            }
            if stay.is_empty() {
                return Ok(());
            }
            rotation = stay;
        }
        Ok(())
    }

    /// Simulates a cell and writes its record.
    fn simulation(&mut self, cell: &Cell) -> Result<(), RunError> {
        (self.progress)(Progress::Turn(cell));
        let (record, start) = (self.blank_record(cell), Instant::now());
        let result = serve::run(cell);
        let wall_ns = start.elapsed().as_nanos() as u64;
        self.end(match result {
            Ok(usage) => Record { serving: Some(usage), wall_ns, ..record },
            Err(reason) => Record { status: Status::Failed, reason: Some(reason), wall_ns, ..record },
        })
    }

    fn new_record(&self, prepared: &Prepared) -> Record {
        let memory = Memory {
            predicted_peak_bytes: prepared.predict(self.engine),
            workspace_bytes: prepared.workspace_bytes(self.engine.cpu().threads()),
            limit_bytes: self.options.limit_bytes,
            context_bytes: self.engine.context_bytes(),
            ..Memory::default()
        };
        Record { memory: Some(memory), products: prepared.products(self.engine), ..self.blank_record(&prepared.cell) }
    }

    /// A record of a cell, without numbers.
    fn blank_record(&self, cell: &Cell) -> Record {
        Record {
            schema: SCHEMA.into(),
            run_id: self.store.run_id.clone(),
            cell_id: cell.id(),
            status: Status::Ok,
            reason: None,
            started_at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            wall_ns: 0,
            repro: self.options.repro.clone(),
            warnings: Vec::new(),
            cell: cell.clone(),
            threads: self.engine.cpu().threads(),
            isa_path: self.engine.path(),
            products: None,
            memory: None,
            refused: None,
            gpu: None,
            latency: BTreeMap::new(),
            work: None,
            drift: None,
            eviction: None,
            serving: None,
        }
    }

    /// Ends a cell that met an error.
    fn fail(&mut self, running: Running, error: &TurnError) -> Result<(), RunError> {
        self.finish(Running { record: ended(running.record, error), ..running }, "")
    }

    fn finish(&mut self, running: Running, stop: &str) -> Result<(), RunError> {
        let Running { prepared, mut record, samples_ns, spent, .. } = running;
        let warmups = self.experiment.spec.timing.warmups.max(1);
        record.gpu = self.engine.condition();
        record.wall_ns = spent.as_nanos() as u64;
        record.latency = samples_ns
            .into_iter()
            .map(|(phase, samples)| (phase.to_string(), latency(samples, warmups, stop)))
            .collect();
        let phase = if prepared.main_phase() == "decode" && record.eviction.is_some() {
            "prefill"
        } else {
            prepared.main_phase()
        };
        if let Some(latency) = record.latency.get(phase) {
            let (flops, kv_bytes_read) = prepared.work();
            record.work = Some(Work { flops, kv_bytes_read, flops_per_s: flops as f64 / (latency.median_ns / 1e9) });
        }
        self.end(record)
    }

    fn end(&mut self, record: Record) -> Result<(), RunError> {
        self.store.append(&record)?;
        (self.progress)(Progress::Done(&record));
        self.records.push(record);
        Ok(())
    }
}

/// The record of a cell that met this error.
fn ended(record: Record, error: &TurnError) -> Record {
    let refused = error.refused();
    let status = if refused.is_some() { Status::Oom } else { Status::Failed };
    Record { status, reason: Some(error.to_string()), refused, ..record }
}

/// Why a cell has enough samples, if it has.
fn stop_reason(timing: &Timing, running: &Running) -> Option<&'static str> {
    let samples = running.samples_ns.get(running.prepared.main_phase())?;
    if samples.len() >= timing.min_rounds {
        let values: Vec<f64> = samples.iter().map(|&ns| ns as f64).collect();
        let (median, low, high) = median_with_interval(&values);
        if (high - low) / 2.0 <= timing.target * median {
            return Some("interval");
        }
    }
    if samples.len() >= timing.max_rounds {
        return Some("rounds");
    }
    // An interval over fewer samples says nothing, however slow they are.
    let enough = samples.len() >= timing.min_rounds.min(LEAST_SAMPLES);
    (enough && running.spent.as_secs_f64() >= timing.cap_s).then_some("time cap")
}

fn latency(samples_ns: Vec<u64>, warmups: usize, stop_reason: &str) -> Latency {
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

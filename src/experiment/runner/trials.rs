//! The rotation of a group: a first trial of each cell that is checked, then rounds of samples until each has enough.

use super::{InputKey, RunError, Runner, latency};
use crate::attention::Params;
use crate::experiment::engine::{Engine, InputError, Inputs};
use crate::experiment::measure::{Implementation, Measure, Prepared, TrialError, Truth};
use crate::experiment::record::{Record, Status, Work};
use crate::experiment::runner::Progress;
use crate::experiment::spec::Timing;
use crate::stats::median_with_interval;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Samples that a cell takes even when its time is up.
pub(in crate::experiment) const LEAST_SAMPLES: usize = 3;

/// A cell in the rotation.
struct Running {
    prepared: Prepared,
    input: usize,
    record: Record,
    samples_ns: BTreeMap<&'static str, Vec<u64>>,
    spent: Duration,
    /// Samples when its interval was looked at last.
    looked: usize,
}

/// Inputs of a group.
struct Input {
    key: InputKey,
    there: Inputs,
    /// What the reference says, for each kind of pass over these inputs.
    truths: Vec<((Measure, Params), Rc<Truth>)>,
}

impl Input {
    /// The reference's rows for a cell, computed once for all cells that are checked on the same.
    fn truth(&mut self, prepared: &Prepared, engine: Engine<'_>) -> Result<Rc<Truth>, TrialError> {
        let key = (prepared.cell.measure, prepared.cell.params());
        if let Some((_, truth)) = self.truths.iter().find(|(known, _)| *known == key) {
            return Ok(truth.clone());
        }
        let workload = self.there.workload().ok_or_else(|| TrialError::Failed("blank inputs have no truth".into()))?;
        let truth = Rc::new(prepared.truth(workload, engine.cpu())?);
        self.truths.push((key, truth.clone()));
        Ok(truth)
    }
}

impl Runner<'_> {
    /// Runs the cells of a group.
    pub(super) fn group(&mut self, cells: Vec<Prepared>) -> Result<(), RunError> {
        let mut inputs: Vec<Input> = Vec::new();
        let mut rotation = Vec::new();
        for prepared in cells {
            if let Implementation::Missing(reason) = &prepared.implementation {
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
            let key = InputKey::of(&prepared);
            let input = match inputs.iter().position(|input| input.key == key) {
                Some(input) => input,
                None => match self.input(key) {
                    Ok(input) => {
                        inputs.push(input);
                        inputs.len() - 1
                    }
                    Err(error) => {
                        let error = error.into();
                        self.end(ended(record, &error))?;
                        self.recover(&error, &mut inputs)?;
                        continue;
                    }
                },
            };
            let running =
                Running { prepared, input, record, samples_ns: BTreeMap::new(), spent: Duration::ZERO, looked: 0 };
            if let Some(running) = self.checked_trial(running, &mut inputs)? {
                rotation.push(running);
            }
        }
        self.rounds(rotation, &mut inputs)
    }

    fn input(&self, key: InputKey) -> Result<Input, InputError> {
        let there =
            self.engine.inputs(&key.extents, self.options.limit_bytes, |arena| match &self.experiment.file {
                Some(file) => file.load(&key.extents, arena),
                None => self.experiment.synthetic(key.knobs.as_ref()).generate(&key.extents, key.seed, arena),
            })?;
        Ok(Input { key, there, truths: Vec::new() })
    }

    /// The first trial of a cell: compared with the reference, its memory measured by the arena and by the system.
    fn checked_trial(&mut self, mut running: Running, inputs: &mut Vec<Input>) -> Result<Option<Running>, RunError> {
        (self.progress)(Progress::Trial(&running.prepared.cell));
        let input = &mut inputs[running.input];
        let truth = input.truth(&running.prepared, self.engine);
        let start = Instant::now();
        let arena = &input.there.arena;
        let before_bytes = arena.usage().live_bytes;
        arena.reset_peak();
        let watch = self.engine.watch();
        let result = truth.and_then(|truth| running.prepared.trial(self.engine, &input.there, Some(&truth)));
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
            Ok(trial) => {
                running.record.drift = trial.drift;
                running.record.eviction = trial.eviction;
                running.record.warnings.extend(trial.warnings);
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
                self.fail(running, &error, inputs)?;
                Ok(None)
            }
        }
    }

    fn rounds(&mut self, mut rotation: Vec<Running>, inputs: &mut Vec<Input>) -> Result<(), RunError> {
        let timing = &self.experiment.spec.timing;
        for round in 1.. {
            let mut stay = Vec::new();
            for mut running in rotation {
                (self.progress)(Progress::Trial(&running.prepared.cell));
                let start = Instant::now();
                let result = running.prepared.trial(self.engine, &inputs[running.input].there, None);
                running.spent += start.elapsed();
                match result {
                    Err(error) => {
                        self.fail(running, &error, inputs)?;
                        continue;
                    }
                    // The checked trial was the first warm-up.
                    Ok(_) if round < timing.warmups => {}
                    Ok(trial) => {
                        for (phase, ns) in trial.samples_ns {
                            running.samples_ns.entry(phase).or_default().push(ns);
                        }
                    }
                }
                let start = Instant::now();
                let stop = stop_reason(timing, &mut running);
                running.spent += start.elapsed();
                match stop {
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

    /// Ends a cell that met an error, so that the others can go on.
    fn fail(&mut self, running: Running, error: &TrialError, inputs: &mut Vec<Input>) -> Result<(), RunError> {
        self.finish(Running { record: ended(running.record, error), ..running }, "")?;
        self.recover(error, inputs)
    }

    /// After an error that a GPU's context did not survive, and with it nothing in its memory: a new context, and the same
    /// inputs in it. Cells in the rotation go on with the samples they have.
    fn recover(&self, error: &TrialError, inputs: &mut Vec<Input>) -> Result<(), RunError> {
        if !error.is_fatal() {
            return Ok(());
        }
        // Every buffer goes before the context does.
        let kept: Vec<_> = inputs.drain(..).map(|Input { key, truths, .. }| (key, truths)).collect();
        let lost = |error: TrialError| RunError::Lost { reason: error.to_string(), folder: self.store.folder.clone() };
        self.engine.reopen().map_err(|error| lost(error.into()))?;
        for (key, truths) in kept {
            inputs.push(Input { truths, ..self.input(key).map_err(|error| lost(error.into()))? });
        }
        Ok(())
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
        let work = prepared.work();
        if let Some(latency) = record.latency.get(work.phase) {
            let (flops, kv_bytes_read) = (work.flops, work.kv_bytes_read);
            record.work = Some(Work { flops, kv_bytes_read, flops_per_s: flops as f64 / (latency.median_ns / 1e9) });
        }
        self.end(record)
    }
}

/// The record of a cell that met this error.
fn ended(record: Record, error: &TrialError) -> Record {
    let status = if error.is_memory() { Status::Oom } else { Status::Failed };
    Record { status, reason: Some(error.to_string()), refused: error.refused(), ..record }
}

/// Why a cell has enough samples, if it has.
fn stop_reason(timing: &Timing, running: &mut Running) -> Option<&'static str> {
    let samples = running.samples_ns.get(running.prepared.cell.measure.phase())?;
    // A look takes as long as a thousand passes over the samples: of thousands of short ones, looks after each would be all
    // of the time.
    if samples.len() >= timing.min_rounds && samples.len() >= running.looked + running.looked / 8 {
        running.looked = samples.len();
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

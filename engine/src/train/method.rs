//! Methods of training that go on from a model that is there (`dms`, `duo`, `kvzap`, `larimar`, fine-tuning), and the one loop
//! that runs them all. A method says what a step is, what is logged of it, and what it leaves in the run's folder; the loop
//! says when, in an order by which a run that is killed at any moment can go on.

use super::checkpoint::{self, Array, Identity, Progress};
use super::error::{GRADIENT_NORM, LOSS};
use super::export;
use super::log::{Line, Log};
use super::run::{Options, RECORD, TrainError};
use crate::memory::Usage;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

type Done = Result<(), TrainError>;
/// Logs a line.
pub(super) type Tell<'a> = &'a mut dyn FnMut(Line) -> Done;

/// What trains.
pub(super) trait Method {
    /// Steps from one line of the log to the next.
    const LOG_STEPS: usize = 5;
    /// Steps from one look at what is held out, and one checkpoint, to the next.
    const SAVE_STEPS: usize = 25;

    /// The numbers of a checkpoint's array, in parts.
    fn arrays(&mut self, array: Array) -> Vec<&mut [f32]>;

    /// Makes ready for the steps behind those of `progress`.
    ///
    /// # Errors
    /// As [`step`](Method::step).
    fn begin(&mut self, _progress: &Progress, _tell: Tell<'_>) -> Done {
        Ok(())
    }

    /// Takes the step that comes next.
    ///
    /// # Errors
    /// When it cannot be taken. A loss or a gradient that is no number is for the loop to refuse: it saves nothing of it.
    fn step(&mut self, progress: &Progress) -> Result<Step, TrainError>;

    /// Logs the steps since the last line.
    ///
    /// # Errors
    /// When the log cannot be written, or what it would say ends the run.
    fn log(&mut self, progress: &Progress, since: &Since, tell: Tell<'_>) -> Done;

    /// Whether there is more to save so many steps than their number.
    fn is_milestone(&self, _steps: usize) -> bool {
        false
    }

    /// Judges what is held out, logs it, and writes what the run is for.
    ///
    /// # Errors
    /// When something cannot be written, or a held-out loss is no number.
    fn save(&mut self, progress: &Progress, tell: Tell<'_>) -> Done;
}

/// What a step read and came to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Step {
    pub sequences: usize,
    pub tokens: usize,
    pub loss: f64,
    /// Before clipping.
    pub gradient_norm: f64,
    /// The learning rate.
    pub rate: f32,
}

/// What was added up since the last line of the log.
#[derive(Default)]
pub(super) struct Since {
    pub steps: usize,
    /// The last of the steps.
    pub last: Step,
    seconds: f64,
    tokens: usize,
    loss: f64,
    gradient_norm: f64,
}

impl Since {
    fn add(&mut self, step: Step, seconds: f64) {
        self.steps += 1;
        self.seconds += seconds;
        self.tokens += step.tokens;
        self.loss += step.loss;
        self.gradient_norm += step.gradient_norm;
        self.last = step;
    }

    /// Mean of the steps.
    pub fn loss(&self) -> f64 {
        self.loss / self.steps as f64
    }

    /// Mean of the steps.
    pub fn gradient_norm(&self) -> f64 {
        self.gradient_norm / self.steps as f64
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// The line of the log for steps on sequences of `length_tokens` that took so many floating-point operations.
    pub fn line(&self, progress: &Progress, length_tokens: usize, flop: f64) -> Line {
        Line::Step {
            step: progress.step,
            length_tokens,
            loss: self.loss(),
            rate: self.last.rate,
            gradient_norm: self.last.gradient_norm,
            tokens: progress.tokens,
            seconds: progress.seconds,
            tokens_per_second: self.tokens_per_second(),
            gflop_per_second: flop / self.seconds / 1e9,
        }
    }
}

/// A run of a method in its folder.
pub(super) struct Run<'a> {
    options: &'a Options,
    identity: Identity,
}

impl<'a> Run<'a> {
    /// Claims the folder for a run from `model`. It is known again, to be resumed, by its `identity`.
    ///
    /// # Errors
    /// When there is a run already, or none to go on with, or the folder cannot be made.
    pub fn begin(options: &'a Options, model: &Path, identity: Identity) -> Result<Self, TrainError> {
        checkpoint::check(options, Some(model))?;
        std::fs::create_dir_all(&options.out).map_err(|error| TrainError::write(&options.out, &error))?;
        Ok(Run { options, identity })
    }

    /// The run's folder.
    pub fn folder(&self) -> &'a Path {
        &self.options.out
    }

    /// Takes the steps up to `steps`, or to where the run is to stop, and says how far it came; nothing where this was all done before.
    ///
    /// # Errors
    /// Those of the method, and when a loss or a gradient is no number.
    pub fn steps<M: Method>(
        &self,
        method: &mut M,
        steps: usize,
        watch: &mut dyn FnMut(&Line),
    ) -> Result<Option<Progress>, TrainError> {
        let (folder, end) = (self.folder(), self.options.end(steps));
        let lens = Array::ALL.map(|array| method.arrays(array).iter().map(|part| part.len()).sum());
        let mut progress = Progress::default();
        if self.options.resume {
            progress = checkpoint::load(folder, &self.identity, lens, &mut |array, mut values| {
                for part in method.arrays(array) {
                    let (own, behind) = values.split_at(part.len());
                    part.copy_from_slice(own);
                    values = behind;
                }
                Ok(())
            })?;
        }
        let log = Log::open(folder, progress.step)?;
        if checkpoint::is_done(folder, &progress, end) {
            return Ok(None);
        }
        let mut tell = |line| log.tell(watch, line);
        method.begin(&progress, &mut tell)?;
        let mut since = Since::default();
        while progress.step < end {
            let (step, began) = (progress.step, Instant::now());
            let taken = method.step(&progress)?;
            TrainError::diverged(LOSS, step, taken.loss)?;
            TrainError::diverged(GRADIENT_NORM, step, taken.gradient_norm)?;
            since.add(taken, progress.add(taken.sequences, taken.tokens, began));
            let done = progress.step;
            // What is added up for a line is in no checkpoint, so that none is written between lines.
            if done.is_multiple_of(M::LOG_STEPS) || done == end || method.is_milestone(done) {
                method.log(&progress, &since, &mut tell)?;
                since = Since::default();
            }
            if done.is_multiple_of(M::SAVE_STEPS) || done == end || method.is_milestone(done) {
                method.save(&progress, &mut tell)?;
                // Last: a run that is killed before it does all of this again.
                checkpoint::save(folder, &self.identity, &progress, lens, &mut |array, take| {
                    method.arrays(array).into_iter().try_for_each(|part| take(part))
                })?;
            }
        }
        Ok(Some(progress))
    }

    /// Writes the record of what the run came to: what the method says of it, and what all records say.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn record(&self, progress: &Progress, usage: &Usage, mut record: Value) -> Done {
        let Progress { step, tokens, seconds, .. } = *progress;
        let common = json!({
            "steps": step,
            "tokens": tokens,
            "seconds": seconds,
            "peak_bytes": usage.peak,
            "peak_bytes_of_all": usage.peak_bytes,
            "environment": self.options.environment,
        });
        if let (Value::Object(all), Value::Object(common)) = (&mut record, common) {
            all.extend(common);
        }
        export::text(self.folder(), RECORD, &format!("{record:#}\n"))
    }
}

//! The log of a run: lines of JSON, from which the figures are drawn.

use super::export;
use super::run::TrainError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Name of the log in a run's folder.
pub const LOG: &str = "training.jsonl";

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// Steps since the last such line.
    Step {
        /// Steps that are done.
        step: usize,
        /// Tokens of a sequence.
        length_tokens: usize,
        /// Weighted cross-entropy, nats of a judged token; mean over the steps since the last line.
        loss: f64,
        /// Learning rate of the last step.
        rate: f32,
        /// Norm of the last step's gradient, before clipping.
        gradient_norm: f64,
        /// Tokens that were read, since the beginning.
        tokens: u64,
        /// Time at work, since the beginning.
        seconds: f64,
        /// Since the last line.
        tokens_per_second: f64,
        /// Since the last line: floating-point operations of the model's products and attention, without what is
        /// computed again.
        gflop_per_second: f64,
    },
    /// Steps of training gates since the last such line.
    Gates {
        /// Steps that are done.
        step: usize,
        /// Divergence from the dense model, nats; mean over the steps since the last line.
        kl: f64,
        /// Fraction of the tokens behind a window that were evicted, likewise.
        evicted: f64,
        /// What of them should be, in the last step.
        target: f64,
        /// Learning rate of the last step.
        rate: f32,
        /// Norm of the gates' gradient before clipping, mean over the steps since the last line.
        gradient_norm: f64,
        /// Tokens that were read, since the beginning.
        tokens: u64,
        /// Time at work, since the beginning.
        seconds: f64,
        /// Since the last line.
        tokens_per_second: f64,
    },
    /// Gates on text that no step has read, with decisions as they are at inference.
    HeldOutGates {
        /// Steps that are done.
        step: usize,
        /// Divergence from the dense model, nats.
        kl: f64,
        /// Fraction of the tokens behind a window that were evicted.
        evicted: f64,
    },
    /// Steps of training gates of heads since the last such line.
    Heads {
        /// Steps that are done.
        step: usize,
        /// Mean square of what the last norm's output is off the dense model's; mean over the steps since the last line.
        distance: f64,
        /// Mean of the gates.
        alpha: f64,
        /// Gates below one half.
        low: usize,
        /// Gates.
        heads: usize,
        /// Learning rate of the last step.
        rate: f32,
        /// Tokens that were read, since the beginning.
        tokens: u64,
        /// Time at work, since the beginning.
        seconds: f64,
        /// Since the last line.
        tokens_per_second: f64,
    },
    /// Sequences that no step has read, with half of the heads reading only what is near.
    HeldOutHeads {
        /// Steps that are done.
        step: usize,
        /// Mean square off the dense model, of the half with the lowest gates.
        distance: f64,
        /// Of a half by lot.
        random: f64,
    },
    /// Sequences that were read and repeated for the scores that gates are to foretell.
    Repeated {
        /// Sequences so far.
        step: usize,
        /// Tokens of them.
        tokens: u64,
        /// Time at work, since the beginning.
        seconds: f64,
        /// Since the beginning.
        tokens_per_second: f64,
    },
    /// Gates that foretell scores: the part of their variance that is explained, mean over layers and KV heads.
    Fitted {
        /// Sequences that they were fitted to.
        step: usize,
        /// On these.
        explained: f64,
        /// On text that was held out.
        held_out: f64,
        /// Elements of their inner layer; 0: they are linear.
        #[serde(default)]
        inner: usize,
    },
    /// Text that no step has read.
    HeldOut {
        /// Steps that are done.
        step: usize,
        /// Cross-entropy, nats of a token.
        loss: f64,
        /// Its exponential.
        perplexity: f64,
    },
    /// A task that no step has read.
    Evaluation {
        /// Steps that are done.
        step: usize,
        /// The task.
        task: String,
        /// Tokens of a sequence.
        length_tokens: usize,
        /// Samples whose every token of the answer was the likeliest.
        right: usize,
        /// Samples.
        samples: usize,
    },
}

impl Line {
    /// The steps that were done when it was written.
    pub fn step(&self) -> usize {
        match self {
            Line::Step { step, .. }
            | Line::Gates { step, .. }
            | Line::HeldOutGates { step, .. }
            | Line::Heads { step, .. }
            | Line::HeldOutHeads { step, .. }
            | Line::Repeated { step, .. }
            | Line::Fitted { step, .. }
            | Line::HeldOut { step, .. }
            | Line::Evaluation { step, .. } => *step,
        }
    }
}

/// Reads a log; a last line that a kill has torn is left out.
///
/// # Errors
/// When the file cannot be read.
pub fn read(folder: &Path) -> Result<Vec<Line>, TrainError> {
    let path = folder.join(LOG);
    let text = fs::read_to_string(&path).map_err(|error| TrainError::read(&path, &error))?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// The last line of a log of which `is_it` is so, as a record has it: what was judged last, by this run or the one that it goes on with.
///
/// # Errors
/// As [`read`].
pub(super) fn last(folder: &Path, is_it: impl Fn(&Line) -> bool) -> Result<Option<Value>, TrainError> {
    Ok(read(folder)?.iter().rev().find(|line| is_it(line)).and_then(|line| serde_json::to_value(line).ok()))
}

/// A log that lines are added to.
pub(super) struct Log {
    path: PathBuf,
}

impl Log {
    /// The log of a folder, without lines beyond `step`: they will be written again.
    pub fn open(folder: &Path, step: usize) -> Result<Self, TrainError> {
        let path = folder.join(LOG);
        let kept: Vec<Line> = if path.exists() { read(folder)? } else { Vec::new() };
        let texts = kept.iter().filter(|line| line.step() <= step).map(text);
        export::text(folder, LOG, &texts.collect::<String>())?;
        Ok(Log { path })
    }

    /// Adds a line, and hands it to `watch`.
    pub fn tell(&self, watch: &mut dyn FnMut(&Line), line: Line) -> Result<(), TrainError> {
        self.add(&line)?;
        watch(&line);
        Ok(())
    }

    /// Adds a line.
    fn add(&self, line: &Line) -> Result<(), TrainError> {
        let file = OpenOptions::new().append(true).open(&self.path);
        file.and_then(|mut file| file.write_all(text(line).as_bytes()))
            .map_err(|error| TrainError::write(&self.path, &error))
    }
}

fn text(line: &Line) -> String {
    format!("{}\n", serde_json::to_string(line).expect("a line is plain data"))
}

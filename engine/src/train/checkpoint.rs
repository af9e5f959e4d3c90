//! The state of a run, in one file that is there whole or not at all: weights, the optimizer's averages, and how far
//! the run is. Nothing else decides what follows.

use super::log::LOG;
use super::run::{Options, RECORD, TrainError};
use crate::model::is_of_model;
use crate::tensor::file::TensorFile;
use crate::tensor::stream;
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::time::Instant;

/// Name of the file in a run's folder.
pub(super) const CHECKPOINT: &str = "checkpoint.safetensors";

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Progress {
    /// Steps that are done.
    pub step: usize,
    /// Sequences that were read.
    pub sequences: u64,
    /// Tokens that were read.
    pub tokens: u64,
    /// Time at work.
    pub seconds: f64,
}

impl Progress {
    /// Counts a step that began then, and says how long it took, in seconds.
    pub fn add(&mut self, sequences: usize, tokens: usize, began: Instant) -> f64 {
        let seconds = began.elapsed().as_secs_f64();
        self.step += 1;
        self.sequences += sequences as u64;
        self.tokens += tokens as u64;
        self.seconds += seconds;
        seconds
    }
}

/// Refuses to begin where there is a run or a model, and to go on where there is no run.
///
/// # Errors
/// In these cases.
pub(super) fn check(options: &Options, model: Option<&Path>) -> Result<(), TrainError> {
    let out = options.out.canonicalize().ok();
    if model.is_some_and(|model| out.is_some() && model.canonicalize().ok() == out) {
        return Err(TrainError::Own(options.out.clone()));
    }
    match (options.out.join(CHECKPOINT).exists(), options.resume) {
        (true, false) => Err(TrainError::Taken(options.out.clone())),
        (false, true) => Err(TrainError::Nothing(options.out.clone())),
        (true, true) => Ok(()),
        // A run of ours that was ended within its first save has a log and no record.
        (false, false) if options.out.join(LOG).exists() && !options.out.join(RECORD).exists() => Ok(()),
        (false, false) => match file_of_model(&options.out) {
            Some(file) => Err(TrainError::Holds { folder: options.out.clone(), file }),
            None => Ok(()),
        },
    }
}

/// A file of a folder that is part of a model: the first by name.
fn file_of_model(folder: &Path) -> Option<String> {
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| is_of_model(name)).min()
}

/// What a folder's record says of the memory of the stages that it has behind it.
pub(super) fn noted_memory(folder: &Path) -> Vec<Value> {
    record_of(folder)["memory"].as_array().cloned().unwrap_or_default()
}

/// Whether `end` steps were taken and the record of a folder says so: everything was written before it, and nothing is to be added.
pub(super) fn is_done(folder: &Path, progress: &Progress, end: usize) -> bool {
    progress.step >= end && record_of(folder)["steps"] == progress.step
}

/// A folder's record; null where there is none.
fn record_of(folder: &Path) -> Value {
    let record = std::fs::read(folder.join(RECORD)).ok();
    record.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Settings as a record has them: by their text, in which an f32 of 0.003 is 0.003.
pub(super) fn as_written(settings: &impl Serialize) -> Value {
    let text = serde_json::to_string(settings).expect("settings are plain data");
    serde_json::from_str(&text).expect("written a line above")
}

/// What a run is known by: all that decides what it does, as JSON.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Identity(Value);

impl Identity {
    /// Of settings, the model that a run starts from and the text that it reads, as they are now.
    pub fn new(settings: &impl Serialize, model: Option<&str>, text: Option<&Path>) -> Self {
        let settings = as_written(settings);
        let text = text.and_then(|path| std::fs::read(path).ok()).map(|bytes| short_hash(&bytes));
        Identity(json!({"settings": settings, "contents of the model": model, "contents of the text": text}))
    }

    /// A short text of it.
    pub fn digest(&self) -> String {
        short_hash(self.0.to_string().as_bytes())
    }

    /// Refuses another one, and says what differs.
    fn check(&self, stored: &str) -> Result<(), String> {
        let own = self.0.to_string();
        if stored == own {
            return Ok(());
        }
        // Both read from their texts, so that numbers are rounded alike.
        let [then, now] = [stored, &own].map(|text| serde_json::from_str::<Value>(text).unwrap_or_default());
        if !then.is_object() {
            return Err("an earlier version of kvsieve wrote it; resume with that one, or name another folder".into());
        }
        let mut found = Vec::new();
        differences("", &then, &now, &mut found);
        Err(format!(
            "it is of another recipe or of other options ({}); resume with those that it was made with, or name another folder",
            found.join("; ")
        ))
    }
}

fn short_hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_string()
}

/// Adds a line for each value of two settings that is not the same.
fn differences(name: &str, stored: &Value, own: &Value, found: &mut Vec<String>) {
    match (stored, own) {
        (Value::Object(then), Value::Object(now)) => {
            let names: BTreeSet<_> = then.keys().chain(now.keys()).collect();
            for key in names {
                let name = if name.is_empty() || name == "settings" { key.clone() } else { format!("{name}.{key}") };
                differences(&name, &then[key.as_str()], now.get(key).unwrap_or(&Value::Null), found);
            }
        }
        _ if stored != own => found.push(format!("{name} was {stored} and is {own}")),
        _ => {}
    }
}

/// The arrays of numbers in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Array {
    Weights,
    Mean,
    Square,
}

impl Array {
    /// All, in their order.
    pub const ALL: [Array; 3] = [Array::Weights, Array::Mean, Array::Square];

    fn name(self) -> &'static str {
        ["weights", "mean", "square"][self as usize]
    }
}

type Done = Result<(), TrainError>;
/// Takes the numbers of an array, piece by piece.
type Take<'a> = &'a mut dyn FnMut(&[f32]) -> Done;

/// Writes the state: of arrays of these lengths `each` gives the numbers, from the first to the last.
pub(super) fn save(
    folder: &Path,
    identity: &Identity,
    progress: &Progress,
    lens: [usize; 3],
    each: &mut dyn FnMut(Array, Take<'_>) -> Done,
) -> Done {
    let tensors = Array::ALL.map(|array| (array.name().to_string(), Dtype::F32, vec![1, 1, 1, lens[array as usize]]));
    let Progress { step, sequences, tokens, seconds } = *progress;
    let metadata = HashMap::from([
        ("recipe".to_string(), identity.0.to_string()),
        ("step".into(), step.to_string()),
        ("sequences".into(), sequences.to_string()),
        ("tokens".into(), tokens.to_string()),
        ("seconds".into(), seconds.to_string()),
    ]);
    stream::write(&folder.join(CHECKPOINT), tensors, metadata, |sink| {
        Array::ALL
            .into_iter()
            .try_for_each(|array| each(array, &mut |values| Ok(sink.put(bytemuck::cast_slice(values))?)))
    })
}

/// Reads the state back, and hands each array of these lengths to `restore`.
pub(super) fn load(
    folder: &Path,
    identity: &Identity,
    lens: [usize; 3],
    restore: &mut dyn FnMut(Array, &[f32]) -> Done,
) -> Result<Progress, TrainError> {
    let path = folder.join(CHECKPOINT);
    let stored = TensorFile::open(&path)?;
    let damaged = |what: &str| TrainError::Checkpoint { path: path.clone(), reason: what.to_string() };
    let text = |key: &str| stored.metadata(key).ok_or_else(|| damaged(&format!("it does not say its {key}")));
    identity.check(&text("recipe")?).map_err(|reason| damaged(&reason))?;
    let entries = stored.entries()?;
    for (array, len) in Array::ALL.into_iter().zip(lens) {
        let name = array.name();
        let entry =
            entries.iter().find(|entry| entry.name == name).ok_or_else(|| damaged(&format!("it has no {name}")))?;
        let values: &[f32] = bytemuck::try_cast_slice(stored.bytes(entry.range.clone()))
            .map_err(|_| damaged(&format!("{name} does not hold f32")))?;
        if values.len() != len {
            return Err(damaged(&format!("{name} holds {} numbers; {len} are needed", values.len())));
        }
        restore(array, values)?;
    }
    let number = |key: &str| text(key)?.parse::<f64>().map_err(|_| damaged(&format!("its {key} is no number")));
    Ok(Progress {
        step: number("step")? as usize,
        sequences: number("sequences")? as u64,
        tokens: number("tokens")? as u64,
        seconds: number("seconds")?,
    })
}

//! The state of a run, in one file that is there whole or not at all: weights, the optimizer's averages, and how far
//! the run is. Nothing else decides what follows.

use super::adamw::AdamW;
use super::run::TrainError;
use crate::memory::{Arena, Label};
use crate::tensor::file::{self, Output, TensorFile};
use std::collections::HashMap;
use std::path::Path;

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

const NAMES: [&str; 3] = ["weights", "mean", "square"];

/// Writes the state.
pub(super) fn save(
    folder: &Path,
    digest: &str,
    progress: &Progress,
    weights: &[f32],
    adamw: &AdamW,
) -> Result<(), TrainError> {
    let arrays = [weights, &adamw.mean, &adamw.square];
    let outputs: Vec<Output<'_>> =
        NAMES.iter().zip(arrays).map(|(name, values)| Output::f32(name, vec![1, 1, 1, values.len()], values)).collect();
    let Progress { step, sequences, tokens, seconds } = *progress;
    let metadata = HashMap::from([
        ("recipe".to_string(), digest.to_string()),
        ("step".into(), step.to_string()),
        ("sequences".into(), sequences.to_string()),
        ("tokens".into(), tokens.to_string()),
        ("seconds".into(), seconds.to_string()),
    ]);
    Ok(file::write_with(&folder.join(CHECKPOINT), &outputs, Some(metadata))?)
}

/// Reads the state back into `weights` and `adamw`.
pub(super) fn load(
    folder: &Path,
    digest: &str,
    weights: &mut [f32],
    adamw: &mut AdamW,
) -> Result<Progress, TrainError> {
    let path = folder.join(CHECKPOINT);
    let stored = TensorFile::open(&path)?;
    let damaged = |what: &str| TrainError::Checkpoint { path: path.clone(), reason: what.to_string() };
    let text = |key: &str| stored.metadata(key).ok_or_else(|| damaged(&format!("it does not say its {key}")));
    let found = text("recipe")?;
    if found != digest {
        return Err(damaged(&format!(
            "it is of another recipe ({found}, this is {digest}); resume with the recipe it was made with, or name another folder"
        )));
    }
    let arena = Arena::unlimited();
    let targets = [weights, &mut *adamw.mean, &mut *adamw.square];
    for (name, target) in NAMES.iter().zip(targets) {
        let tensor = stored.load(name, &arena, Label::Input)?;
        let values: &[f32] = bytemuck::try_cast_slice(tensor.bytes()).map_err(|_| damaged("it does not hold f32"))?;
        if values.len() != target.len() {
            return Err(damaged(&format!("{name} holds {} numbers; {} are needed", values.len(), target.len())));
        }
        target.copy_from_slice(values);
    }
    let number = |key: &str| text(key)?.parse::<f64>().map_err(|_| damaged(&format!("its {key} is no number")));
    Ok(Progress {
        step: number("step")? as usize,
        sequences: number("sequences")? as u64,
        tokens: number("tokens")? as u64,
        seconds: number("seconds")?,
    })
}

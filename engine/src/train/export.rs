//! A trained model as a Hugging Face folder: configuration, tokenizer, and weights in the configuration's element type.

use super::parameters::Parameters;
use super::run::TrainError;
use crate::tensor::{file, stream};
use std::collections::HashMap;
use std::path::Path;

/// Numbers that are rounded at a time.
pub(super) const PIECE: usize = 1 << 16;

/// Writes the folder's files, each whole or not at all; `files` are names and contents of what stands beside the weights, which
/// `weights` gives piece by piece.
pub(super) fn write(
    folder: &Path,
    files: &[(&str, String)],
    parameters: &Parameters,
    weights: impl FnOnce(&mut dyn FnMut(&[f32]) -> Result<(), TrainError>) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    files.iter().try_for_each(|(name, content)| text(folder, name, content))?;
    let kept = parameters.config.dtype;
    let dtype = file::stored_as(kept);
    let tensors = parameters.all.iter().map(|parameter| (parameter.name.clone(), dtype, parameter.shape.clone()));
    // `transformers` asks a file which framework wrote it, and reads only what it knows.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    stream::write(&folder.join("model.safetensors"), tensors, metadata, |sink| {
        let mut rounded = Vec::new();
        weights(&mut |values| {
            for values in values.chunks(PIECE) {
                rounded.resize(kept.bytes() * values.len(), 0);
                kept.encode(values, &mut rounded);
                sink.put(&rounded)?;
            }
            Ok(())
        })
    })
}

/// Writes a text file of the folder.
pub(super) fn text(folder: &Path, name: &str, content: &str) -> Result<(), TrainError> {
    let fill = |path: &Path| std::fs::write(path, content).map_err(|error| error.to_string());
    Ok(file::replace(&folder.join(name), fill)?)
}

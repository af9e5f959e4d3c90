//! A trained model as a Hugging Face folder: configuration, tokenizer, and weights in the configuration's element type.

use super::parameters::Parameters;
use super::run::TrainError;
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;

/// Writes the folder's files, each whole or not at all; `files` are names and contents of what stands beside the weights.
pub(super) fn write(
    folder: &Path,
    files: &[(&str, String)],
    parameters: &Parameters,
    weights: &[f32],
) -> Result<(), TrainError> {
    files.iter().try_for_each(|(name, content)| text(folder, name, content))?;
    let kept = parameters.config.dtype;
    let (width, dtype) = match kept {
        DType::F32 => (4, Dtype::F32),
        DType::F16 => (2, Dtype::F16),
        DType::Bf16 => (2, Dtype::BF16),
    };
    let mut rounded = vec![0u8; width * weights.len()];
    kept.encode(weights, &mut rounded);
    let outputs = parameters.all.iter().map(|parameter| Output {
        name: &parameter.name,
        dtype,
        shape: parameter.shape.clone(),
        bytes: &rounded[width * parameter.range.start..width * parameter.range.end],
    });
    let outputs: Vec<Output<'_>> = outputs.collect();
    // `transformers` asks a file which framework wrote it, and reads only what it knows.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    Ok(file::write_with(&folder.join("model.safetensors"), &outputs, Some(metadata))?)
}

/// Writes a text file of the folder.
pub(super) fn text(folder: &Path, name: &str, content: &str) -> Result<(), TrainError> {
    let fill = |path: &Path| std::fs::write(path, content).map_err(|error| error.to_string());
    Ok(file::replace(&folder.join(name), fill)?)
}

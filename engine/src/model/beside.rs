//! The files of a model's folder that stand beside its weights, for who writes another folder of the same model.

use super::adapter::base;
use super::gguf::files_of_gguf;
use super::{Config, ModelError};
use serde_json::Value;
use std::path::Path;

/// Files that are part of a model, besides its weights and `config.json`.
const BESIDE: [&str; 5] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// Whether a file of this name in a model's folder is part of the model.
pub fn is_of_model(name: &str) -> bool {
    const OTHERS: [&str; 3] = ["config.json", "adapter_config.json", "tokenizer.model"];
    let is_weights = name.ends_with(".safetensors") && ["model", "adapter"].iter().any(|begin| name.starts_with(begin));
    is_weights || name.ends_with(".index.json") || BESIDE.iter().chain(&OTHERS).any(|other| *other == name)
}

/// Name and content of each file that stands beside the weights of a model of plain elements, `config.json` first: those of a folder, or
/// those that a GGUF file stands for.
///
/// # Errors
/// When one cannot be read or is not understood.
pub(crate) fn files_beside(model: &Path) -> Result<Vec<(&'static str, String)>, ModelError> {
    let folder = &*base(model)?;
    if let Some(files) = files_of_gguf(folder)? {
        return Ok(files);
    }
    let packing = Config::read(folder)?.packing;
    let there = |name: &&str| folder.join(name).exists();
    let names = std::iter::once("config.json").chain(BESIDE.into_iter().filter(there));
    let content = |name| {
        let path = folder.join(name);
        match std::fs::read_to_string(&path) {
            Err(error) => Err(ModelError::Config { path, reason: error.to_string() }),
            Ok(text) if name == "config.json" && packing.is_some() => Ok((name, unpacked(&text))),
            Ok(text) => Ok((name, text)),
        }
    };
    names.map(content).collect()
}

/// A `config.json` that was read, without what it says of packed weights.
fn unpacked(text: &str) -> String {
    let mut config: Value = serde_json::from_str(text).expect("it was read");
    config.as_object_mut().expect("it was read").remove("quantization_config");
    format!("{config:#}\n")
}

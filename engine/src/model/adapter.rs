//! Low-rank adapters (LoRA, arXiv 2106.09685) as `peft` saves them: a folder that names a base model.
//!
//! Such a folder is a model like any other: its base with `W + s B A` in place of each matrix `W` that has an adapter, `s` being
//! `lora_alpha / r`. What is merged is kept in f32 where the base keeps it in fewer bits, so that nothing of a small change is
//! lost; the file names the base by its fingerprint, where kvsieve wrote it, and another base is refused.

use super::locate::{fingerprint, locate};
use super::{ModelError, weights::Matrix};
use crate::device::gemm::{self, product};
use crate::format::RowFormat;
use crate::memory::Arena;
use crate::tensor::DType;
use crate::tensor::file::TensorFile;
use crate::tensor::file::read_as;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Names of an adapter's files, which are those of `peft`.
pub(crate) const CONFIG: &str = "adapter_config.json";
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";

/// Whether a folder holds an adapter.
pub(crate) fn is_adapter(folder: &Path) -> bool {
    folder.join(CONFIG).exists()
}

/// The base of an adapter's folder, or the folder or file itself.
///
/// # Errors
/// When the configuration of an adapter cannot be read, or its base is not there.
pub(super) fn base(folder: &Path) -> Result<PathBuf, ModelError> {
    if !is_adapter(folder) {
        return Ok(folder.into());
    }
    let path = folder.join(CONFIG);
    let config = config(&path)?;
    let wrong = |reason: String| ModelError::Config { path: path.clone(), reason };
    let name = config.get("base_model_name_or_path").and_then(Value::as_str);
    let name = name.ok_or_else(|| wrong("it has no base_model_name_or_path".into()))?;
    let beside = folder.join(name);
    let found =
        if beside.exists() { beside } else { locate(Path::new(name)).map_err(|_| base_missing(&path, name))? };
    match is_adapter(&found) {
        true => Err(wrong(format!("its base '{name}' is an adapter too; name the model that it was trained on"))),
        false => Ok(found),
    }
}

/// The configuration of an adapter's folder but for where its base lies, which changes no result.
///
/// # Errors
/// When it cannot be read.
pub(super) fn apart_from_base(folder: &Path) -> Result<String, ModelError> {
    let mut config = config(&folder.join(CONFIG))?;
    if let Some(config) = config.as_object_mut() {
        config.remove("base_model_name_or_path");
    }
    Ok(config.to_string())
}

fn base_missing(path: &Path, name: &str) -> ModelError {
    let reason =
        format!("its base '{name}' is not there; write the model's folder or GGUF file into base_model_name_or_path");
    ModelError::Config { path: path.into(), reason }
}

fn config(path: &Path) -> Result<Value, ModelError> {
    let wrong = |reason: String| ModelError::Config { path: path.into(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| wrong(format!("not JSON: {error}")))
}

/// A matrix and its extents.
type Part = (Vec<f32>, [usize; 2]);
/// `A` `[r, in]` and `B` `[out, r]` by the module that they belong to.
type Modules = BTreeMap<String, [Part; 2]>;

/// The adapters of a folder.
pub(super) struct Adapter {
    path: PathBuf,
    scale: f32,
    rank: usize,
    modules: Modules,
    /// Modules whose matrices were asked for.
    merged: BTreeSet<String>,
}

impl Adapter {
    /// Reads the adapter of a folder, if there is one.
    ///
    /// # Errors
    /// When it is damaged, of a kind that is not understood, or of another base.
    pub fn find(folder: &Path) -> Result<Option<Self>, ModelError> {
        if !is_adapter(folder) {
            return Ok(None);
        }
        let path = folder.join(CONFIG);
        let map = config(&path)?;
        let wrong = |reason: String| ModelError::Config { path: path.clone(), reason };
        let plain = [
            ("peft_type", Value::from("LORA")),
            ("bias", Value::from("none")),
            ("use_dora", Value::from(false)),
            ("fan_in_fan_out", Value::from(false)),
        ];
        for (key, expected) in plain {
            if let Some(value) = map.get(key).filter(|value| **value != expected && !value.is_null()) {
                return Err(wrong(format!("{key} is {value}; only {expected} is read")));
            }
        }
        let plain_only = [
            "modules_to_save",
            "rank_pattern",
            "alpha_pattern",
            "layer_replication",
            "alora_invocation_tokens",
            "target_parameters",
            "trainable_token_indices",
            "use_qalora",
        ];
        for key in plain_only {
            let is_empty = |value: &&Value| match value {
                Value::Null | Value::Bool(false) => true,
                Value::Array(all) => all.is_empty(),
                Value::Object(all) => all.is_empty(),
                _ => false,
            };
            if let Some(value) = map.get(key).filter(|value| !is_empty(value)) {
                return Err(wrong(format!("{key} is {value}; adapters with it are not read")));
            }
        }
        // Others begin from a base that they change, and are of that one.
        const OF_THE_BASE: [&str; 3] = ["gaussian", "eva", "orthogonal"];
        match map.get("init_lora_weights") {
            None | Some(Value::Null | Value::Bool(_)) => {}
            Some(Value::String(name)) if OF_THE_BASE.contains(&&**name) => {}
            Some(other) => {
                return Err(wrong(format!(
                    "init_lora_weights is {other}, which changes the base; save the adapter as one of the unchanged base"
                )));
            }
        }
        let rank = map.get("r").and_then(Value::as_u64).filter(|rank| *rank > 0);
        let rank = rank.ok_or_else(|| wrong("its r is no rank; it must be a whole number above 0".into()))? as usize;
        let alpha = map.get("lora_alpha").and_then(Value::as_f64);
        let alpha = alpha.ok_or_else(|| wrong("it has no lora_alpha".into()))?;
        let by = match map.get("use_rslora") {
            Some(Value::Bool(true)) => (rank as f64).sqrt(),
            None | Some(Value::Null | Value::Bool(false)) => rank as f64,
            Some(other) => return Err(wrong(format!("use_rslora is {other}; it must be true or false"))),
        };
        let scale = (alpha / by) as f32;
        if !scale.is_finite() {
            return Err(wrong(format!("lora_alpha is {alpha}; it must be a number of f32")));
        }
        let modules = modules(folder, rank)?;
        Ok(Some(Adapter { path: folder.join(WEIGHTS), scale, rank, modules, merged: BTreeSet::new() }))
    }

    /// `W + s B A` in the arena, if a tensor of this name has an adapter; as often as it is asked for.
    ///
    /// # Errors
    /// When the extents of the adapter are another matrix's, or the arena has no room.
    pub fn merge(&mut self, name: &str, matrix: &Matrix, arena: &Arena) -> Result<Option<Matrix>, ModelError> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let Some([(a, of_a), (b, of_b)]) = self.modules.get(module) else { return Ok(None) };
        let (expected_a, expected_b) = ([self.rank, matrix.width()], [matrix.rows(), self.rank]);
        if *of_a != expected_a || *of_b != expected_b {
            let reason = format!(
                "the adapter of '{module}' is {of_a:?} and {of_b:?}; {expected_a:?} and {expected_b:?} are needed"
            );
            return Err(ModelError::Weights { path: self.path.clone(), reason });
        }
        let add = |rows: &mut [f32], first: usize| {
            let count = rows.len() / matrix.width();
            let b: Vec<f32> = b[first * self.rank..][..count * self.rank].iter().map(|b| self.scale * b).collect();
            let (left, right) =
                (gemm::Matrix::new(&b, count, self.rank), gemm::Matrix::new(a, self.rank, matrix.width()));
            product(rows, matrix.width(), left, right, true, 1);
        };
        let changed = matrix.changed(RowFormat::plain(DType::F32), arena, add)?;
        self.merged.insert(module.into());
        Ok(Some(changed))
    }

    /// Refuses adapters of matrices that the model does not have.
    ///
    /// # Errors
    /// The first of them.
    pub fn finish(&self) -> Result<(), ModelError> {
        match self.modules.keys().find(|module| !self.merged.contains(*module)) {
            Some(module) => {
                let reason = format!("its adapter of '{module}' is of no matrix that the base has");
                Err(ModelError::Weights { path: self.path.clone(), reason })
            }
            None => Ok(()),
        }
    }
}

/// Every module's pair of matrices, of the base that the file names.
fn modules(folder: &Path, rank: usize) -> Result<Modules, ModelError> {
    let file = TensorFile::open(&folder.join(WEIGHTS))?;
    let wrong = |reason: String| ModelError::Weights { path: file.path().into(), reason };
    if let Some(trained_on) = file.metadata("base_model") {
        let found = fingerprint(&base(folder)?)?;
        if trained_on != found {
            return Err(wrong(format!("it was trained on another model ({trained_on}, its base is {found})")));
        }
    }
    let mut parts: BTreeMap<String, [Option<Part>; 2]> = BTreeMap::new();
    for entry in file.entries()? {
        let of =
            |part: &str| entry.name.strip_prefix("base_model.model.")?.strip_suffix(&format!(".lora_{part}.weight"));
        let (module, part) = match (of("A"), of("B")) {
            (Some(module), _) => (module, 0),
            (_, Some(module)) => (module, 1),
            _ => return Err(wrong(format!("tensor '{}' is not of a LoRA adapter of a linear layer", entry.name))),
        };
        let (dtype, [rows, width]) = match (read_as(entry.dtype), &entry.shape[..]) {
            (Some(dtype), &[rows, width]) => (dtype, [rows, width]),
            _ => {
                return Err(wrong(format!(
                    "tensor '{}' is {:?} {:?}; matrices of F32, F16 or BF16 are read",
                    entry.name, entry.dtype, entry.shape
                )));
            }
        };
        if [rows, width][part] != rank {
            return Err(wrong(format!(
                "tensor '{}' is {:?}, of rank {}; {CONFIG} says {rank}",
                entry.name,
                entry.shape,
                [rows, width][part]
            )));
        }
        let mut values = vec![0.0; rows * width];
        dtype.decode(file.bytes(entry.range.clone()), &mut values);
        parts.entry(module.into()).or_default()[part] = Some((values, [rows, width]));
    }
    let whole = parts.into_iter().map(|(module, [a, b])| match (a, b) {
        (Some(a), Some(b)) => Ok((module, [a, b])),
        _ => Err(wrong(format!("of the adapter of '{module}' only one matrix is there; lora_A and lora_B are needed"))),
    });
    whole.collect()
}

#[cfg(test)]
mod tests {
    use super::super::weights::Found;
    use super::*;
    use crate::model::Config;
    use tempfile::TempDir;

    /// AWQ and smoothing look at matrices twice.
    #[test]
    fn a_matrix_is_merged_as_often_as_it_is_asked_for() {
        let (fixture, copy, arena) =
            (Path::new("../tests/fixtures/adapter"), TempDir::new().unwrap(), Arena::unlimited());
        let folder = copy.path();
        // Its base is found from the root of the repository.
        let options = std::fs::read_to_string(fixture.join("adapter_config.json")).unwrap();
        let options = options.replace("models/builtin", "../models/builtin");
        std::fs::write(folder.join("adapter_config.json"), options).unwrap();
        std::fs::copy(fixture.join("adapter_model.safetensors"), folder.join("adapter_model.safetensors")).unwrap();
        let config = Config::read(folder).unwrap();
        let read = |found: &mut Found<'_>| {
            let (mut all, shape) = (Vec::new(), [config.q_width(), config.hidden]);
            let matrix = found.tensor("model.layers.0.self_attn.q_proj.weight", &shape).unwrap();
            all.resize(shape[0] * shape[1], 0.0);
            matrix.widen(0, &mut all);
            all
        };
        let mut found = Found::open(folder, &config, &arena).unwrap();
        let (first, second) = (read(&mut found), read(&mut found));
        assert!(first == second && first != read(&mut Found::open(&base(folder).unwrap(), &config, &arena).unwrap()));
        // Of all the others none was asked for.
        let error = found.finish().unwrap_err().to_string();
        assert!(error.contains("is of no matrix that the base has") && !error.contains("layers.0.self_attn.q_proj"));
    }
}

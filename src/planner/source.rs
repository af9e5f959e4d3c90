//! Where a model comes from: a preset, a `config.json` or its keys, a folder, a safetensors file's folder, or a GGUF file.
//!
//! Of files only headers are read: bytes of weights are then those of the tensors, to the byte, and not an estimate.

use super::PlanError;
use super::architecture::{Architecture, KvGroup};
use super::presets::{self, WEIGHT_FORMATS, weight_format};
use super::read;
use super::weights::WeightFormat;
use crate::model::{gguf_tensors, tensor_files};
use std::path::{Path, PathBuf};

/// Where the shape of a model was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The table of presets.
    Preset,
    /// A `config.json` without tensors, or its keys as they were written.
    Config(PathBuf),
    /// A folder with tensors, or a GGUF file.
    Tensors(PathBuf),
}

/// Bytes of weights, outside of blocks and in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Parts {
    /// Embedding, head, last norm.
    pub outside: u64,
    /// Of these the part behind the last block: the head, where it is not the embedding, and the last norm.
    pub last: u64,
    /// Blocks.
    pub layers: u64,
}

impl Parts {
    /// Both.
    pub fn total(self) -> u64 {
        self.outside + self.layers
    }

    /// What the first stage of a pipeline holds besides blocks.
    pub fn first_end(self) -> u64 {
        self.outside - self.last
    }

    /// What the last does. It needs the embedding again where it is the output matrix too.
    pub fn last_end(self, tied: bool) -> u64 {
        if tied { self.outside } else { self.last }
    }

    /// The larger of the two.
    pub fn fullest_end(self, tied: bool) -> u64 {
        self.first_end().max(self.last_end(tied))
    }
}

/// A model, with all that a plan asks of it.
#[derive(Debug, Clone)]
pub struct Subject {
    /// What it was called.
    pub name: String,
    /// Where it was found.
    pub source: Source,
    /// Its shape.
    pub architecture: Architecture,
    /// Blocks.
    pub layers: usize,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// `Hq`.
    pub heads: usize,
    /// Tokens that there are.
    pub vocab: usize,
    /// Layers that hold keys and values.
    pub groups: Vec<KvGroup>,
    /// Bytes of a sequence's recurrent states.
    pub state_bytes: u64,
    /// Elements that a token takes inside a block.
    pub activation_elements: u64,
    /// All parameters.
    pub parameters: u64,
    /// Those that a token is multiplied by.
    pub active_parameters: u64,
    /// Bytes of its files' tensors, where there are files.
    pub held: Option<Parts>,
    /// Bytes in each of [`WEIGHT_FORMATS`].
    formats: Vec<Parts>,
}

impl Subject {
    /// Finds a model by what was given as `--model`: an existing path, else a preset.
    ///
    /// # Errors
    /// When there is neither, or what is there is not understood.
    pub fn find(model: &Path) -> Result<Self, PlanError> {
        if !model.exists() {
            let name = model.to_string_lossy();
            if let Some((family, keys)) = name.split_once(':') {
                let wrong = |reason| PlanError::File { path: model.into(), reason };
                return Self::new(read::written(family, keys).map_err(wrong)?, Source::Config(model.into()), None);
            }
            if name.contains('/') || name.ends_with(".json") || name.ends_with(".gguf") {
                return Err(PlanError::File { path: model.into(), reason: "there is no such file or folder".into() });
            }
            return Self::new(presets::model(&name)?.clone(), Source::Preset, None);
        }
        if model.is_dir() {
            let architecture = read::config(&model.join("config.json"))?;
            let mut parts = Parts::default();
            for file in tensor_files(model)? {
                for entry in file.entries()? {
                    parts.add(&entry.name, entry.range.len() as u64);
                }
            }
            return Self::new(architecture, Source::Tensors(model.into()), Some(parts));
        }
        match model.extension().and_then(|extension| extension.to_str()) {
            Some("json") => Self::new(read::config(model)?, Source::Config(model.into()), None),
            Some("safetensors") => match model.parent().filter(|folder| folder.join("config.json").exists()) {
                Some(folder) => Self::find(folder),
                None => {
                    let reason =
                        "tensors alone do not say how many heads there are; a config.json must lie beside them";
                    Err(PlanError::File { path: model.into(), reason: reason.into() })
                }
            },
            _ => {
                let (metadata, tensors) = gguf_tensors(model)?;
                let wrong = |reason| PlanError::File { path: model.into(), reason };
                let mut parts = Parts::default();
                for tensor in &tensors {
                    parts.add(&tensor.name, read::ggml_bytes(tensor).map_err(wrong)?);
                }
                let architecture = read::gguf(&metadata, &tensors, model).map_err(wrong)?;
                Self::new(architecture, Source::Tensors(model.into()), Some(parts))
            }
        }
    }

    /// A model of a shape.
    ///
    /// # Errors
    /// When the shape is none.
    pub fn new(architecture: Architecture, source: Source, held: Option<Parts>) -> Result<Self, PlanError> {
        architecture.check().map_err(|reason| match &source {
            Source::Preset => PlanError::File { path: "presets".into(), reason },
            Source::Config(path) | Source::Tensors(path) => PlanError::File { path: path.clone(), reason },
        })?;
        let parts = |format: &WeightFormat| Parts {
            outside: format.outside_bytes(&architecture),
            last: format.last_bytes(&architecture),
            layers: format.bytes(&architecture) - format.outside_bytes(&architecture),
        };
        Ok(Subject {
            name: architecture.name.clone(),
            source,
            layers: architecture.layers,
            hidden: architecture.hidden,
            heads: architecture.heads,
            vocab: architecture.vocab,
            groups: architecture.kv_groups(),
            state_bytes: architecture.state_bytes(),
            activation_elements: architecture.activation_elements(),
            parameters: architecture.parameters(),
            active_parameters: architecture.active_parameters(),
            held,
            formats: WEIGHT_FORMATS.iter().map(parts).collect(),
            architecture,
        })
    }

    /// The format of the files that its makers published, where that is not of 16 bits.
    pub fn published(&self) -> Option<&'static WeightFormat> {
        let name = self.architecture.published.as_deref();
        name.map(|name| weight_format(name).expect("the tables are tested"))
    }

    /// Bytes of weights in a format; in that of the files, or bf16 without files, where none is asked for.
    pub fn weight_bytes(&self, format: Option<&'static WeightFormat>) -> Parts {
        let name = match (format, self.held) {
            (None, Some(held)) => return held,
            (None, None) => "bf16",
            (Some(format), _) => &format.name,
        };
        let at = WEIGHT_FORMATS.iter().position(|format| format.name == name);
        self.formats[at.expect("every format is of the table")]
    }

    /// Of `bytes`, or of anything else that blocks share as their bytes in a format: what the fullest `count` blocks in a row have.
    pub fn fullest_stage(&self, bytes: u64, format: Option<&'static WeightFormat>, count: u64) -> u64 {
        if count >= self.layers as u64 {
            return bytes;
        }
        // Files are shared out as the same model in bf16 is.
        let format = format.or_else(|| WEIGHT_FORMATS.iter().find(|format| format.name == "bf16"));
        let format = format.expect("bf16 is of the table");
        let layers: Vec<u64> = (0..self.layers).map(|layer| format.layer_bytes(&self.architecture, layer)).collect();
        let most = layers.windows((count as usize).max(1)).map(|stage| stage.iter().sum()).max();
        let (most, all): (u64, u64) = (most.unwrap_or(0), layers.iter().sum());
        (u128::from(bytes) * u128::from(most)).div_ceil(u128::from(all.max(1))) as u64
    }

    /// Elements of the largest matrix of a block.
    pub fn largest_matrix(&self) -> u64 {
        let shape = &self.architecture;
        let matrices = (0..shape.layers).flat_map(|layer| shape.matrices(layer));
        matrices.map(|[inputs, outputs, _]| inputs * outputs).max().unwrap_or(0)
    }
}

impl Parts {
    /// Counts a tensor where its name says that it belongs.
    fn add(&mut self, name: &str, bytes: u64) {
        let in_block = ["layers.", "blk.", "h."].iter().any(|part| {
            let at = name.find(part);
            at.is_some_and(|at| name[at + part.len()..].starts_with(|c: char| c.is_ascii_digit()))
        });
        *if in_block { &mut self.layers } else { &mut self.outside } += bytes;
        let is_last =
            ["lm_head.", "output.weight", "output_norm.", "model.norm."].iter().any(|part| name.starts_with(part));
        self.last += if is_last { bytes } else { 0 };
    }
}

//! The maps between a model's states and a memory of facts, and their file.

use super::{Affine, EditError, Encoded};
use crate::episodic::matrix::norm;
use crate::model::{Config, PrefixShape};
use crate::tensor::file::{self, Output, TensorFile};
use half::bf16;
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;

/// Places of a prefix.
pub const PREFIX: usize = 2;
/// Size of an encoding's value beside its subject: a read projects a cue without a value on what was written, and the smaller
/// values are, the less the missing half pulls it away.
pub const VALUE_SCALE: f64 = 0.3;
/// Most numbers of a subject, and of a value.
const WIDTH: usize = 128;

/// Numbers of a subject and of a value of a model.
pub fn widths(config: &Config) -> [usize; 2] {
    [WIDTH.min(config.hidden); 2]
}

/// Everything that is trained, of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Maps {
    /// Fingerprint of the model.
    pub base: String,
    /// Layer before whose attention states are taken.
    pub layer: usize,
    /// States of stems and questions to `s`.
    pub subject: Affine,
    /// States of values to `v`.
    pub value: Affine,
    /// Places of the prefix.
    pub tokens: usize,
    /// `W` `[outputs, V]`, and `b` `[outputs]`.
    pub readout: [Vec<f32>; 2],
    /// Largest distance of a cue from a written fact at which it is answered.
    pub threshold: f64,
}

impl Maps {
    /// `C`, numbers of an encoding.
    pub fn width(&self) -> usize {
        self.subject.outputs() + self.value.outputs()
    }

    /// The encoding of a fact, or of a question, whose value is nothing.
    pub fn encoding(&self, encoded: &Encoded) -> Vec<f64> {
        let mut z = self.subject.apply(&encoded.subject);
        // As long whatever is around a key: what a read gives is as long as the cue.
        let scale = (z.len() as f64).sqrt() / norm(&z).max(f64::MIN_POSITIVE);
        z.iter_mut().for_each(|value| *value *= scale);
        match &encoded.value {
            Some(value) => z.extend(self.value.apply(value).into_iter().map(|value| VALUE_SCALE * value)),
            None => z.resize(self.width(), 0.0),
        }
        z
    }

    /// Keys and values of a prefix, of what a memory has for a cue.
    pub fn prefix(&self, read: &[f64]) -> Vec<f32> {
        let [weight, bias] = &self.readout;
        let value: Vec<f32> = read[self.subject.outputs()..].iter().map(|value| (value / VALUE_SCALE) as f32).collect();
        let rows = weight.chunks_exact(value.len()).zip(bias);
        rows.map(|(row, bias)| bias + row.iter().zip(&value).map(|(w, x)| w * x).sum::<f32>()).collect()
    }

    /// Writes the file: whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), EditError> {
        let (hidden, [weight, bias]) = (self.subject.inputs(), &self.readout);
        let affine = |affine: &Affine| vec![affine.outputs(), hidden];
        // Nearly all of the file: noise that the read-out was trained with is larger than this rounding.
        let rounded: Vec<bf16> = weight.iter().map(|&weight| bf16::from_f32(weight)).collect();
        let shape = vec![bias.len(), self.value.outputs()];
        let outputs = [
            Output::f32("subject.mean", vec![hidden], &self.subject.mean),
            Output::f32("subject.weight", affine(&self.subject), &self.subject.matrix),
            Output::f32("value.mean", vec![hidden], &self.value.mean),
            Output::f32("value.weight", affine(&self.value), &self.value.matrix),
            Output { name: "readout.weight", dtype: Dtype::BF16, shape, bytes: bytemuck::cast_slice(&rounded) },
            Output::f32("readout.bias", vec![bias.len()], bias),
        ];
        let metadata = HashMap::from([
            ("base_model".to_string(), self.base.clone()),
            ("layer".into(), self.layer.to_string()),
            ("prefix_tokens".into(), self.tokens.to_string()),
            ("threshold".into(), self.threshold.to_string()),
        ]);
        Ok(file::write_with(path, &outputs, Some(metadata))?)
    }

    /// Reads the file of a model.
    ///
    /// # Errors
    /// When it is no such file, or of another model.
    pub fn load(path: &Path, config: &Config, fingerprint: &str) -> Result<Self, EditError> {
        let stored = TensorFile::open(path)?;
        let wrong = |reason: String| EditError::Maps { path: path.into(), reason };
        let text = |key: &str| {
            stored
                .metadata(key)
                .ok_or_else(|| wrong(format!("it does not say its {key}; give what `train --method larimar` wrote")))
        };
        let base = text("base_model")?;
        if base != fingerprint {
            let of = |hash: &str| hash.chars().take(16).collect::<String>();
            let (found, this) = (of(&base), of(fingerprint));
            return Err(wrong(format!("it is of another model ({found}, this is {this}); train maps on this one")));
        }
        let number = |key: &str| {
            let found = text(key)?;
            found
                .parse::<f64>()
                .ok()
                .filter(|value| value.is_finite() && *value >= 0.0)
                .ok_or_else(|| wrong(format!("its {key} is '{found}', which is no number")))
        };
        let (layer, tokens) = (number("layer")? as usize, number("prefix_tokens")? as usize);
        let [subject, value] = widths(config);
        let outputs = PrefixShape::new(config, tokens).numbers();
        let entries = stored.entries()?;
        let tensor = |name: &str, shape: &[usize]| -> Result<Vec<f32>, EditError> {
            let entry = entries.iter().find(|entry| entry.name == name);
            let entry = entry.ok_or_else(|| wrong(format!("it has no tensor '{name}'")))?;
            let bytes = stored.bytes(entry.range.clone());
            let values: Vec<f32> = match entry.dtype {
                Dtype::F32 if entry.shape == shape => {
                    bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()
                }
                Dtype::BF16 if entry.shape == shape => {
                    bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()
                }
                dtype => {
                    let found = &entry.shape;
                    return Err(wrong(format!("{name} is {dtype:?} {found:?}; F32 or BF16 {shape:?} is needed")));
                }
            };
            match values.iter().find(|value| !value.is_finite()) {
                Some(value) => Err(wrong(format!("{name} holds {value}; every number must be finite"))),
                None => Ok(values),
            }
        };
        let affine = |name: &str, outputs: usize| {
            let mean = tensor(&format!("{name}.mean"), &[config.hidden])?;
            Ok::<_, EditError>(Affine { mean, matrix: tensor(&format!("{name}.weight"), &[outputs, config.hidden])? })
        };
        if layer >= config.layers || tokens == 0 {
            return Err(wrong(format!("layer {layer} and {tokens} places; the model has {} layers", config.layers)));
        }
        Ok(Maps {
            layer,
            subject: affine("subject", subject)?,
            value: affine("value", value)?,
            tokens,
            readout: [tensor("readout.weight", &[outputs, value])?, tensor("readout.bias", &[outputs])?],
            threshold: number("threshold")?,
            base,
        })
    }
}

//! A memory of facts in a file: its matrices as f64 tensors, with its name, its shape and a hash of all of these.

use super::matrix::Matrix;
use super::{EpisodicError, FactMemory, FactShape, Facts, MOST_FACTS};
use crate::memory::{Arena, Label};
use crate::tensor::file::{self, Entry, Output, TensorFile};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;

impl Facts {
    /// Writes the memory, which was opened from `text` for `shape`: whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&mut self, path: &Path, text: &str, shape: &FactShape) -> Result<(), EpisodicError> {
        let origin = self.origin.clone();
        let parts = self.parts();
        let said = [text, &shape.width.to_string(), &shape.most_facts.to_string(), &origin].join("\n");
        let hash = hash(&said, parts.iter().map(|(_, part)| bytemuck::cast_slice(part)));
        let outputs: Vec<Output<'_>> = parts
            .iter()
            .map(|(name, part)| Output {
                name,
                dtype: Dtype::F64,
                shape: vec![part.rows(), part.columns()],
                bytes: bytemuck::cast_slice(part),
            })
            .collect();
        let metadata = HashMap::from([
            ("memory".to_string(), text.to_string()),
            ("width".into(), shape.width.to_string()),
            ("most_facts".into(), shape.most_facts.to_string()),
            ("hash".into(), hash),
            ("origin".into(), origin),
        ]);
        Ok(file::write_with(path, &outputs, Some(metadata))?)
    }

    /// Reads a memory back: the text it was opened from, its shape, and its facts.
    ///
    /// # Errors
    /// When the file is torn, damaged or no memory of facts.
    pub fn load(path: &Path, arena: &Arena) -> Result<(String, FactShape, Facts), EpisodicError> {
        let stored = TensorFile::open(path)?;
        let wrong = |reason: String| EpisodicError::Saved { path: path.into(), reason };
        let text = |key: &str| stored.metadata(key).ok_or_else(|| wrong(format!("it does not say its {key}")));
        let count = |key: &str| -> Result<usize, EpisodicError> {
            let found = text(key)?;
            found.parse().map_err(|_| wrong(format!("its {key} is '{found}', which is no count")))
        };
        let (name, shape) = (text("memory")?, FactShape { width: count("width")?, most_facts: count("most_facts")? });
        let entries = stored.entries()?;
        // Before anything is made of that size.
        let is_there = |entry: &Entry| entry.shape.last() == Some(&shape.width);
        if shape.width == 0 || !entries.iter().any(is_there) || !(1..=MOST_FACTS).contains(&shape.most_facts) {
            let FactShape { width, most_facts } = shape;
            return Err(wrong(format!(
                "it says that it holds {most_facts} facts of {width} numbers, which its tensors do not"
            )));
        }
        let mut facts = FactMemory::parse(&name)?.open(&shape, arena)?;
        facts.origin = stored.metadata("origin").unwrap_or_default();
        for (name, part) in facts.parts() {
            let entry = entries.iter().find(|entry| entry.name == name);
            let entry = entry.ok_or_else(|| wrong(format!("it has no tensor '{name}'")))?;
            let expected = [part.rows(), part.columns()];
            if entry.shape != expected || entry.dtype != Dtype::F64 {
                let found = (&entry.shape, entry.dtype);
                return Err(wrong(format!(
                    "tensor '{name}' is {:?} {:?}; it must be {expected:?} F64",
                    found.0, found.1
                )));
            }
            bytemuck::cast_slice_mut(part).copy_from_slice(stored.bytes(entry.range.clone()));
        }
        let said = [&name, &text("width")?, &text("most_facts")?, &facts.origin].map(String::as_str).join("\n");
        let found = hash(&said, facts.parts().iter().map(|(_, part)| bytemuck::cast_slice(part)));
        if found != text("hash")? {
            return Err(wrong("its numbers and words are not those that were saved (their hash differs)".into()));
        }
        Ok((name, shape, facts))
    }

    fn parts(&mut self) -> Vec<(&'static str, &mut Matrix)> {
        let Facts { store, detector, .. } = self;
        store.parts().into_iter().chain(detector.parts()).collect()
    }
}

/// The vectors `z` `[N, C]` of a safetensors file, F32 or F64.
///
/// # Errors
/// When there is none of this shape and type, or a number is not finite.
pub fn read_vectors(path: &Path, arena: &Arena) -> Result<Matrix, EpisodicError> {
    let stored = TensorFile::open(path)?;
    let wrong = |reason: String| EpisodicError::Vectors { path: path.into(), reason };
    let entries = stored.entries()?;
    let names = || entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>().join(", ");
    let entry = entries.iter().find(|entry| entry.name == "z");
    let entry = entry.ok_or_else(|| wrong(format!("it has no tensor 'z', only {}", names())))?;
    let (rows, columns) = match entry.shape[..] {
        [rows, columns] if rows * columns > 0 => (rows, columns),
        _ => return Err(wrong(format!("z has shape {:?}; [N, C] is needed, each at least 1", entry.shape))),
    };
    let mut vectors = Matrix::zeros(arena, Label::Input, rows, columns)?;
    let bytes = stored.bytes(entry.range.clone());
    match entry.dtype {
        Dtype::F64 => bytemuck::cast_slice_mut(&mut vectors).copy_from_slice(bytes),
        Dtype::F32 => {
            for (value, bytes) in vectors.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*bytes).into();
            }
        }
        other => return Err(wrong(format!("z is {other:?}; F32 or F64 are read"))),
    }
    match vectors.iter().position(|value| !value.is_finite()) {
        None => Ok(vectors),
        Some(at) => {
            let (row, column) = (at / columns, at % columns);
            Err(wrong(format!("z holds {} at [{row}, {column}]; every number must be finite", vectors[at])))
        }
    }
}

/// Of what a file says and of its numbers.
fn hash<'b>(said: &str, parts: impl Iterator<Item = &'b [u8]>) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(said.as_bytes());
    parts.for_each(|bytes| {
        hasher.update(bytes);
    });
    hasher.finalize().to_hex().to_string()
}

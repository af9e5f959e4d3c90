//! The tiny checkpoints of `tests/checkpoints/`, and what `transformers` gave for them.

use kvsieve::model::Setup;
use kvsieve::tensor::DType;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// What a checkpoint must give.
pub struct Checkpoint {
    pub folder: PathBuf,
    pub tokens: Vec<u32>,
    /// `[L, vocab]`.
    pub logits: Vec<f32>,
    /// Likewise, behind an eviction.
    pub evicted: Option<Vec<f32>>,
    pub greedy: Vec<u32>,
}

pub fn checkpoint(name: &str) -> Checkpoint {
    let folder = Path::new("tests/checkpoints").join(name);
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let whole = |name| -> Vec<u32> {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32).collect()
    };
    let real = |name| -> Option<Vec<f32>> {
        let data = file.tensor(name).ok()?.data();
        Some(data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect())
    };
    Checkpoint {
        tokens: whole("tokens"),
        logits: real("logits").unwrap(),
        evicted: real("evicted"),
        greedy: whole("greedy"),
        folder,
    }
}

/// Every checkpoint of the folder.
pub fn all() -> Vec<String> {
    let folders = std::fs::read_dir("tests/checkpoints").unwrap().map(|entry| entry.unwrap());
    let folders = folders.filter(|entry| entry.path().join("config.json").exists());
    let mut names: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 15, "{names:?}");
    names
}

/// Standard deviation.
pub fn deviation(values: &[f32]) -> f32 {
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}

/// The largest difference; NaN where there is one.
pub fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

/// How the checkpoints are run: unrounded, with the logits of every token.
pub fn setup(batch: usize, chunk_tokens: usize) -> Setup<'static> {
    Setup { batch, chunk_tokens, all_logits: true, ..Setup::of(80, DType::F32) }
}

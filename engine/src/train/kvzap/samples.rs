//! Samples that are kept for functions which have to see them more than once: of some tokens of each sequence the hidden state and the
//! logarithm of the score of each KV head, in every layer. A file holds a sequence, so that a run that was killed has all but the last.

use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::file::{self, FileError, Output, TensorFile};
use crate::train::run::TrainError;
use half::bf16;
use rand::{SeedableRng, seq::index::sample};
use rand_chacha::ChaCha8Rng;
use safetensors::Dtype;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Most tokens of a sequence that are kept.
const KEPT: usize = 256;

/// Bytes of the samples of a layer, of as many sequences as this, of widths `[hidden, KV heads]`.
pub(super) fn bytes(sequences: u64, widths: [usize; 2]) -> u64 {
    sequences * (KEPT * 4 * widths.iter().sum::<usize>()) as u64
}

/// A run's samples, in a folder of their own.
pub(super) struct Samples {
    folder: PathBuf,
    /// `[layers, KV heads, hidden]` of the model.
    extents: [usize; 3],
    seed: u64,
}

/// Samples of a layer: hidden states `[samples, hidden]` and logarithms of scores `[samples, KV heads]`.
pub(super) struct OfLayer {
    hidden: Buffer<f32>,
    scores: Buffer<f32>,
    widths: [usize; 2],
    count: usize,
}

impl OfLayer {
    /// Room for `most` samples of widths `[hidden, KV heads]`.
    pub fn with_room(arena: &Arena, most: usize, widths: [usize; 2]) -> Result<Self, ArenaError> {
        let [hidden, scores] = widths.map(|width| arena.alloc(Label::Workspace, most * width));
        Ok(OfLayer { hidden: hidden?, scores: scores?, widths, count: 0 })
    }

    /// Adds a sample.
    ///
    /// # Panics
    /// When there is no room.
    pub fn add(&mut self, hidden: impl Iterator<Item = f32>, scores: impl Iterator<Item = f32>) {
        let [width, heads] = self.widths;
        self.hidden[self.count * width..][..width].iter_mut().zip(hidden).for_each(|(to, x)| *to = x);
        self.scores[self.count * heads..][..heads].iter_mut().zip(scores).for_each(|(to, x)| *to = x);
        self.count += 1;
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// `[hidden, KV heads]`.
    pub fn widths(&self) -> [usize; 2] {
        self.widths
    }

    /// Hidden states and logarithms of scores.
    pub fn both(&self) -> [&[f32]; 2] {
        let [width, heads] = self.widths;
        [&self.hidden[..self.count * width], &self.scores[..self.count * heads]]
    }

    /// The same, to be changed.
    pub fn both_mut(&mut self) -> [&mut [f32]; 2] {
        let [width, heads] = self.widths;
        [&mut self.hidden[..self.count * width], &mut self.scores[..self.count * heads]]
    }
}

impl Samples {
    /// Of a run whose folder this is.
    pub fn new(run: &Path, extents: [usize; 3], seed: u64) -> Self {
        Samples { folder: run.join("samples"), extents, seed }
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{number}.safetensors"))
    }

    /// Keeps samples of sequence `number`, whose layers have these hidden states `[tokens, hidden]` and scores `[KV heads, tokens]`.
    pub fn keep(&self, number: u64, layers: &[(&[f32], &[f32])]) -> Result<(), TrainError> {
        let [_, heads, width] = self.extents;
        let tokens = layers[0].0.len() / width;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(number);
        let kept = sample(&mut rng, tokens, KEPT.min(tokens)).into_vec();
        let (mut hidden, mut logarithms) = (Vec::new(), Vec::new());
        for (states, scores) in layers {
            for &token in &kept {
                hidden.extend(states[token * width..][..width].iter().map(|&state| bf16::from_f32(state)));
                logarithms.extend(scores.chunks_exact(tokens).map(|head| head[token].ln()));
            }
        }
        let shape = |last| vec![layers.len(), kept.len(), last];
        let bytes = bytemuck::cast_slice(&hidden);
        let hidden = Output { name: "hidden", dtype: Dtype::BF16, shape: shape(width), bytes };
        std::fs::create_dir_all(&self.folder).map_err(|error| TrainError::write(&self.folder, &error))?;
        Ok(file::write(&self.path(number), &[hidden, Output::f32("scores", shape(heads), &logarithms)])?)
    }

    /// Those of a layer, of these sequences; tokens that some head never looked at have no logarithm, and are left out.
    pub fn of_layer(&self, layer: usize, numbers: Range<u64>, arena: &Arena) -> Result<OfLayer, TrainError> {
        let [layers, heads, width] = self.extents;
        let mut all = OfLayer::with_room(arena, (numbers.end - numbers.start) as usize * KEPT, [width, heads])?;
        for number in numbers {
            let path = self.path(number);
            let file = TensorFile::open(&path)?;
            let part = |name: &str| -> Result<&[u8], FileError> {
                let entry = file.entries()?.into_iter().find(|entry| entry.name == name);
                let missing = || FileError::Missing { path: path.clone(), name: name.into(), found: String::new() };
                let bytes = file.bytes(entry.ok_or_else(missing)?.range);
                let len = bytes.len() / layers;
                Ok(&bytes[layer * len..][..len])
            };
            let hidden = part("hidden")?.chunks_exact(2 * width);
            for (states, scores) in hidden.zip(part("scores")?.chunks_exact(4 * heads)) {
                let scores = scores.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four")));
                if scores.clone().all(f32::is_finite) {
                    let states = states.chunks_exact(2);
                    all.add(states.map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()), scores);
                }
            }
        }
        Ok(all)
    }

    /// Removes the folder: what was fitted is all that is left of them.
    pub fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

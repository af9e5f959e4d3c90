//! Bytes of weights: parameters by part of the model, times the bits that a format gives the part.

use super::architecture::{Architecture, Counts};
use serde::Deserialize;

/// How weights are kept.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightFormat {
    /// Name on the command line.
    pub name: String,
    /// One line.
    pub about: String,
    /// Whether it is made of 16-bit weights on the card, as they are loaded.
    #[serde(default)]
    pub at_load: bool,
    /// Bits of an element, scales included.
    pub bits: Bits,
}

/// Bits of an element by part of the model.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bits {
    /// Matrices of blocks.
    pub layers: f64,
    /// The token table.
    pub embedding: f64,
    /// The output matrix, and a token table that is tied to it.
    pub head: f64,
    /// Norms and biases.
    pub vectors: f64,
    /// Values' projections, where they differ.
    pub v: Option<f64>,
    /// Attention's output projections, where they differ.
    pub o: Option<f64>,
    /// Second matrices of MLPs, where they differ.
    pub down: Option<f64>,
    /// Values' projections and second matrices in the layers that llama.cpp thinks more of.
    pub more: Option<f64>,
    /// Values' projections and second matrices in the first layers, where they differ.
    pub early: Option<Early>,
    /// Values' projections where four query heads or more share a KV head.
    pub grouped_v: Option<f64>,
}

/// What the first layers have.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Early {
    /// Bits of an element.
    bits: f64,
    /// Layers whose values' projections they are.
    v: usize,
    /// One part in so many of the layers, whose second matrices they are.
    down: usize,
}

impl WeightFormat {
    /// Bytes outside of blocks.
    pub fn outside_bytes(&self, model: &Architecture) -> u64 {
        let Counts { embedding, head, vectors, .. } = model.outside();
        let table = if model.tied { self.bits.head } else { self.bits.embedding };
        bytes(&[(embedding, table), (head, self.bits.head), (vectors, self.bits.vectors)])
    }

    /// Bytes of block `layer`.
    pub fn layer_bytes(&self, model: &Architecture, layer: usize) -> u64 {
        let Bits { layers, vectors, more, early, grouped_v, .. } = self.bits;
        let more = more.filter(|_| is_favoured(layer, model.layers));
        let first = |layers: fn(Early, usize) -> usize| {
            early.filter(|&early| layer < layers(early, model.layers)).map(|early| early.bits)
        };
        let grouped_v = grouped_v.filter(|_| model.heads >= 4 * model.kv_heads);
        let counts = model.layer(layer);
        bytes(&[
            (counts.v, more.or(first(|early, _| early.v)).or(grouped_v).or(self.bits.v).unwrap_or(layers)),
            (counts.o, self.bits.o.unwrap_or(layers)),
            (counts.down, more.or(first(|early, all| all / early.down)).or(self.bits.down).unwrap_or(layers)),
            (counts.matrices, layers),
            (counts.vectors, vectors),
        ])
    }

    /// Bytes of all weights.
    pub fn bytes(&self, model: &Architecture) -> u64 {
        self.outside_bytes(model) + (0..model.layers).map(|layer| self.layer_bytes(model, layer)).sum::<u64>()
    }
}

/// llama.cpp's `use_more_bits`: the first and the last eighth of the layers, and every third between.
fn is_favoured(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Whole bytes of each part.
fn bytes(parts: &[(u64, f64)]) -> u64 {
    // Counts stay below 2^53, and bits are multiples of 1/1024 or estimates.
    parts.iter().map(|&(count, bits)| (count as f64 * bits / 8.0).ceil() as u64).sum()
}

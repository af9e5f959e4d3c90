//! Bytes of weights: parameters by part of the model, times the bits that a format gives the part.

use super::PlanError;
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
    /// Matrices of experts that tokens are routed to, where they differ; such a format is of models that have some.
    pub experts: Option<f64>,
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
    /// Refuses a model that has nothing which the format is made for.
    ///
    /// # Errors
    /// When it is a format of experts, and the model has none.
    pub fn check(&self, model: &Architecture) -> Result<(), PlanError> {
        match self.is_for(model) {
            true => Ok(()),
            false => Err(PlanError::Value {
                what: "--weights",
                value: self.name.clone(),
                expected: format!(
                    "it is for matrices of experts, and {} has none; take one of `kvsieve list weights`",
                    model.name
                ),
            }),
        }
    }

    /// Whether a model has what the format is made for.
    pub fn is_for(&self, model: &Architecture) -> bool {
        self.bits.experts.is_none() || model.experts.is_some()
    }

    /// Bytes outside of blocks.
    pub fn outside_bytes(&self, model: &Architecture) -> u64 {
        self.embedding_bytes(model) + self.last_bytes(model)
    }

    /// Bytes of the token table, and of positions that are looked up beside it.
    fn embedding_bytes(&self, model: &Architecture) -> u64 {
        let table = if model.tied { self.bits.head } else { self.bits.embedding };
        bytes(&[(model.outside().embedding, self.in_rows(table, model.hidden))])
    }

    /// Bytes behind the last block: the output matrix, where it is not the token table, and vectors.
    pub fn last_bytes(&self, model: &Architecture) -> u64 {
        let Counts { head, vectors, .. } = model.outside();
        bytes(&[(head, self.in_rows(self.bits.head, model.hidden)), (vectors, self.bits.vectors)])
    }

    /// Bits of an element in rows of `width`: where these are not whole blocks of a type of GGUF's, those of the type that
    /// llama.cpp takes in its place.
    fn in_rows(&self, bits: f64, width: usize) -> f64 {
        let is_super = self.is_super(bits);
        match (bits, width) {
            (_, width) if width.is_multiple_of(256) => bits,
            (_, width) if !width.is_multiple_of(32) && (is_super || BLOCKS_OF_32.contains(&bits)) => 16.0,
            _ if !is_super => bits,
            (6.5625, _) => 8.5,
            (5.5, _) => 6.0,
            (4.5, _) => 5.5,
            _ => 4.5,
        }
    }

    /// Whether so many bits are super-blocks of 256; of 4.5 and 5.5 the format says it.
    fn is_super(&self, bits: f64) -> bool {
        match bits {
            2.625 | 3.4375 | 6.5625 => true,
            4.25 => self.name != "mxfp4",
            4.5 => !["q4_0", "iq4_nl"].contains(&self.name.as_str()),
            5.5 => self.name != "q5_0",
            _ => false,
        }
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
        let v = more.or(first(|early, _| early.v)).or(grouped_v).or(self.bits.v).unwrap_or(layers);
        // llama.cpp's rule for models of 70 billion parameters, whose values are few.
        let is_large = model.layers == 80 && model.heads > model.kv_heads && self.is_super(v);
        let v = if is_large && [3.4375, 4.5].contains(&v) { 5.5 } else { v };
        let down = more.or(first(|early, all| all / early.down)).or(self.bits.down).unwrap_or(layers);
        let (routed, routed_bits) = self.bits.experts.map_or((0, layers), |bits| (model.routed(layer), bits));
        let inner = model.experts.filter(|experts| layer >= experts.dense_layers).map_or(model.ffn, |one| one.ffn);
        bytes(&[
            (counts.v, self.in_rows(v, model.hidden)),
            (counts.o, self.in_rows(self.bits.o.unwrap_or(layers), model.heads * model.head_dims()[1])),
            (counts.down - routed, self.in_rows(down, inner)),
            (counts.matrices - 2 * routed, self.in_rows(layers, model.hidden)),
            (3 * routed, self.in_rows(routed_bits, inner)),
            (counts.vectors, vectors),
        ])
    }

    /// Bytes of what is gathered at once where ranks share parameters: a block, the token table or the output matrix.
    pub fn largest_unit_bytes(&self, model: &Architecture) -> u64 {
        let blocks = (0..model.layers).map(|layer| self.layer_bytes(model, layer)).max().unwrap_or(0);
        let head = bytes(&[(model.outside().head, self.in_rows(self.bits.head, model.hidden))]);
        blocks.max(self.embedding_bytes(model)).max(head)
    }

    /// Bytes of all weights.
    pub fn bytes(&self, model: &Architecture) -> u64 {
        self.outside_bytes(model) + (0..model.layers).map(|layer| self.layer_bytes(model, layer)).sum::<u64>()
    }
}

/// Bits of the types of GGUF whose blocks have 32 elements.
const BLOCKS_OF_32: [f64; 5] = [4.5, 5.0, 5.5, 6.0, 8.5];

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

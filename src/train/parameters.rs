//! The parameters of a model: one flat array of f32, cut into named matrices and vectors.
//!
//! Gradients and the optimizer's averages are arrays of the same layout. The projections to q, k and v follow each
//! other, and so do gate and up: one matrix product reads each group as one matrix.

use crate::attention::rope::Frequencies;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What every token's embedding has in common at first, as a share of its size, and how many frequencies of RoPE the
/// first block's heads read from it, with what size after normalisation.
const COMMON: f32 = 0.33;
const FREQUENCIES: usize = 5;
const LOOK: f32 = 7.0;

/// Extents and constants of a decoder, as a recipe gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads of a block, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// KV heads of a block.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub ffn: usize,
    /// Longest sequence that the model is made for, in tokens.
    pub max_positions: usize,
    /// Base of the frequencies of RoPE.
    pub rope_theta: f64,
    /// Added to the mean square of a row before its root.
    pub norm_eps: f32,
}

impl ModelSpec {
    /// Width of the queries of a token.
    pub fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Width of the keys of a token, and of its values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of queries, keys and values of a token.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Says what is wrong with it, if anything.
    ///
    /// # Errors
    /// One line with the field, its value and what would be right.
    pub fn check(&self) -> Result<(), String> {
        let counts = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("q_heads", self.q_heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("max_positions", self.max_positions),
        ];
        if let Some((name, value)) = counts.iter().find(|(_, value)| !(1..=1 << 20).contains(value)) {
            return Err(format!("model.{name} is {value}; it must be 1 to 1048576"));
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "model.q_heads is {}; it must be a multiple of kv_heads, {}",
                self.q_heads, self.kv_heads
            ));
        }
        if self.head_dim % 2 == 1 || self.head_dim > 256 {
            return Err(format!("model.head_dim is {}; it must be even and at most 256", self.head_dim));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return Err(format!("model.rope_theta is {}; it must be finite and above 1", self.rope_theta));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return Err(format!("model.norm_eps is {}; it must be finite and above 0", self.norm_eps));
        }
        Ok(())
    }
}

/// A matrix `[rows, columns]` of the array, or a vector of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name in Hugging Face's Llama.
    pub name: String,
    /// Its shape in a file: `[out, in]`, or `[hidden]` of a norm.
    pub shape: Vec<usize>,
    /// Where it lies.
    pub range: Range<usize>,
    /// Standard deviation of its first values; `None` for a norm, which begins at 1 and does not decay.
    pub spread: Option<f32>,
}

/// Where a block's parameters lie.
#[derive(Debug, Clone)]
pub(super) struct BlockRanges {
    pub norm1: Range<usize>,
    /// `[qkv_width, hidden]`.
    pub qkv: Range<usize>,
    /// `[hidden, q_width]`.
    pub out: Range<usize>,
    pub norm2: Range<usize>,
    /// `[2 * ffn, hidden]`.
    pub gate_up: Range<usize>,
    /// `[hidden, ffn]`.
    pub down: Range<usize>,
}

/// The layout of all parameters.
#[derive(Debug, Clone)]
pub struct Parameters {
    spec: ModelSpec,
    /// Every one, in the order in which they lie.
    pub all: Vec<Parameter>,
    /// `[vocab, hidden]`: the embedding, and the output matrix.
    pub(super) embedding: Range<usize>,
    pub(super) blocks: Vec<BlockRanges>,
    pub(super) norm: Range<usize>,
}

impl Parameters {
    /// The layout of a model with `vocab` tokens.
    pub fn new(spec: &ModelSpec, vocab: usize) -> Self {
        let mut list = List { all: Vec::new(), end: 0 };
        // A product with a row of size 1 has size 1; what is added to the residual stream 2 * layers times has less.
        let size_of = |inputs: usize| 1.0 / (inputs as f32).sqrt();
        let (whole, part) = (Some(size_of(spec.hidden)), 1.0 / (2.0 * spec.layers as f32));
        let embedding = list.add("model.embed_tokens", vec![vocab, spec.hidden], whole);
        let mut blocks = Vec::with_capacity(spec.layers);
        for layer in 0..spec.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let norm1 = list.add(&name("input_layernorm"), vec![spec.hidden], None);
            let q = list.add(&name("self_attn.q_proj"), vec![spec.q_width(), spec.hidden], whole);
            list.add(&name("self_attn.k_proj"), vec![spec.kv_width(), spec.hidden], whole);
            let v = list.add(&name("self_attn.v_proj"), vec![spec.kv_width(), spec.hidden], whole);
            let out = list.add(
                &name("self_attn.o_proj"),
                vec![spec.hidden, spec.q_width()],
                Some(part * size_of(spec.q_width())),
            );
            let norm2 = list.add(&name("post_attention_layernorm"), vec![spec.hidden], None);
            let gate = list.add(&name("mlp.gate_proj"), vec![spec.ffn, spec.hidden], whole);
            let up = list.add(&name("mlp.up_proj"), vec![spec.ffn, spec.hidden], whole);
            let down = list.add(&name("mlp.down_proj"), vec![spec.hidden, spec.ffn], Some(part * size_of(spec.ffn)));
            let (qkv, gate_up) = (q.start..v.end, gate.start..up.end);
            blocks.push(BlockRanges { norm1, qkv, out, norm2, gate_up, down });
        }
        let norm = list.add("model.norm", vec![spec.hidden], None);
        Parameters { spec: *spec, all: list.all, embedding, blocks, norm }
    }

    /// Number of f32 elements.
    pub fn count(&self) -> usize {
        self.norm.end
    }

    /// First values for training: normal deviates from `seed`, ones for norms, and heads that look back in the first
    /// block.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn initial(&self, arena: &Arena, seed: u64) -> Result<Buffer<f32>, ArenaError> {
        let mut weights = arena.alloc(Label::Weights, self.count())?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for parameter in &self.all {
            let values = &mut weights[parameter.range.clone()];
            match parameter.spread {
                None => values.fill(1.0),
                Some(spread) => {
                    let normal = Normal::new(0.0f32, spread).expect("a spread is finite and not negative");
                    values.iter_mut().for_each(|value| *value = normal.sample(&mut rng));
                }
            }
        }
        self.look_back(&mut weights);
        Ok(weights)
    }

    /// Lets query head `h` of the first block look at the token `h + 1` places before its own.
    ///
    /// To answer by content a model must bring together what a place holds and what came before it (induction heads,
    /// Olsson et al. 2022, arXiv 2209.11895). Neither is of use without the other, so that from normal deviates alone
    /// training stays on a plateau until both are there by chance. Here the second is there from the start: the first
    /// component of every embedding is the same number, from which q and k of some frequencies of RoPE are read, turned
    /// by the distance. All of it can be unlearned.
    fn look_back(&self, weights: &mut [f32]) {
        let ModelSpec { hidden, head_dim, q_heads, rope_theta, .. } = self.spec;
        let size = 1.0 / (hidden as f32).sqrt();
        let common = COMMON / (1.0 + COMMON * COMMON).sqrt();
        // A row of q or k that gives `LOOK` for every token: after RMSNorm its first component is common * sqrt(hidden).
        let gain = LOOK * size / common;
        weights[self.embedding.clone()].chunks_exact_mut(hidden).for_each(|row| row[0] = COMMON);
        let qkv = &mut weights[self.blocks[0].qkv.clone()];
        let mut set = |row: usize, value: f32| {
            let row = &mut qkv[row * hidden..][..hidden];
            row.fill(0.0);
            row[0] = gain * value;
        };
        let (half, frequencies) = (head_dim / 2, Frequencies::new(head_dim, rope_theta));
        for head in 0..q_heads + self.spec.kv_heads {
            let back = if head < q_heads { head + 1 } else { 0 };
            for pair in 0..FREQUENCIES.min(half) {
                let angle = -(back as f64) * frequencies.rad_per_token()[pair];
                set(head * head_dim + pair, angle.cos() as f32);
                set(head * head_dim + half + pair, angle.sin() as f32);
            }
        }
    }
}

struct List {
    all: Vec<Parameter>,
    end: usize,
}

impl List {
    fn add(&mut self, name: &str, shape: Vec<usize>, spread: Option<f32>) -> Range<usize> {
        let range = self.end..self.end + shape.iter().product::<usize>();
        self.end = range.end;
        self.all.push(Parameter { name: format!("{name}.weight"), shape, range: range.clone(), spread });
        range
    }
}

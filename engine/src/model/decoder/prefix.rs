//! Keys and values that stand before a sequence's first token and belong to no token: a prefix (prefix tuning, arXiv
//! 2101.00190).

use super::Decoder;
use crate::model::{Config, ModelError};
use crate::tensor::{DType, TensorView};
use std::ops::Range;

/// The extents of a prefix, `[layers, key | value, Hkv, P, D]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixShape {
    /// Layers of the model.
    pub layers: usize,
    /// KV heads of each.
    pub kv_heads: usize,
    /// `P`, places that it takes.
    pub tokens: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl PrefixShape {
    /// A prefix of `tokens` places for a model.
    pub fn new(config: &Config, tokens: usize) -> Self {
        PrefixShape { layers: config.layers, kv_heads: config.kv_heads, tokens, head_dim: config.head_dim }
    }

    /// Numbers of it.
    pub fn numbers(&self) -> usize {
        2 * self.layers * self.kv_heads * self.tokens * self.head_dim
    }

    /// Where the keys (`part` 0) or values (1) of a head lie.
    pub fn rows(&self, layer: usize, part: usize, head: usize) -> Range<usize> {
        let each = self.tokens * self.head_dim;
        let start = ((layer * 2 + part) * self.kv_heads + head) * each;
        start..start + each
    }
}

impl Decoder<'_> {
    /// Gives an empty sequence keys and values for its first places; its tokens come behind them. Keys are taken as they
    /// are, without RoPE.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When the sequence has tokens, there is a policy or a memory in place of the cache, or the numbers are not those of the
    /// shape.
    pub fn prefix(&mut self, sequence: usize, shape: &PrefixShape, numbers: &[f32]) -> Result<(), ModelError> {
        assert!(self.seen[sequence] == 0, "a prefix stands before the first token");
        assert!(self.memory.is_none() && self.evictor.is_none(), "a prefix stands in a whole cache");
        assert_eq!(numbers.len(), shape.numbers(), "the numbers of a prefix");
        let dims = [1, shape.kv_heads, shape.tokens, shape.head_dim];
        for layer in 0..shape.layers {
            let [k, v] = [0, 1].map(|part| {
                let start = shape.rows(layer, part, 0).start;
                let rows = &numbers[start..start + dims.iter().product::<usize>()];
                TensorView::contiguous(DType::F32, dims, bytemuck::cast_slice(rows))
            });
            let to = layer * self.setup.batch + sequence;
            self.cache.append_at(to, k, v, 0, 0..shape.tokens, 0)?;
        }
        self.seen[sequence] = shape.tokens;
        Ok(())
    }
}

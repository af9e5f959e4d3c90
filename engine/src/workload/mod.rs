//! The inputs of an experiment: what every kernel and every policy of a comparison reads.
//!
//! A [`Workload`] is one contiguous sequence: `context_tokens` of prefill and then `new_tokens` late steps, keys and
//! queries after RoPE. It is either made by a [`SyntheticSpec`], with sinks, heavy hitters, locality and needles
//! planted so that the knobs are shares of attention (`docs/workload.md` tells the story), or read from a
//! [`FileSource`]. The three tensors are all the memory that it takes from the arena.

mod ask;
mod calibrate;
mod file;
mod knobs;
mod plan;
mod spec;
mod synthetic;

pub use crate::attention::rope;
pub use file::{FileSource, looks_swapped};
pub use knobs::Knobs;
pub use spec::SyntheticSpec;

use crate::attention::rope::RopeBase;
use crate::attention::{AttentionError, Shape};
use crate::memory::{Arena, ArenaError, Label};
use crate::tensor::file::FileError;
use crate::tensor::{DType, Tensor};
use std::path::PathBuf;

/// Inputs of one cell, `N = context_tokens + new_tokens`; `B` with layers folded in.
pub struct Workload {
    /// Queries after RoPE, `[B, Hq, N, D]`.
    pub q: Tensor,
    /// Keys after RoPE, `[B, Hkv, N, D]`.
    pub k: Tensor,
    /// Values, `[B, Hkv, N, D]`.
    pub v: Tensor,
    /// Planted tokens that a late query looks for; empty for files and without late steps.
    pub needles: Vec<Needle>,
    /// RoPE of queries and keys, where it is known.
    pub rope: Option<RopeBase>,
}

impl Workload {
    /// A workload whose bytes are all zero but those of `v`, which are `v_byte`: it takes the memory and costs no time to
    /// make. Every query sees equal keys, so every output is that one value.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn blank(extents: &Extents, arena: &Arena, v_byte: u8) -> Result<Self, ArenaError> {
        let zeros = |dims| Tensor::zeros(arena, Label::Input, extents.dtype, dims);
        let mut v = zeros(extents.kv_dims())?;
        v.bytes_mut().fill(v_byte);
        let (q, k) = (zeros(extents.q_dims())?, zeros(extents.kv_dims())?);
        Ok(Workload { q, k, v, needles: Vec::new(), rope: None })
    }

    /// Bytes that a workload of these extents takes from the arena, under [`crate::memory::Label::Input`].
    pub fn bytes(extents: &Extents) -> u64 {
        Tensor::bytes_of(extents.dtype, extents.q_dims()) + 2 * Tensor::bytes_of(extents.dtype, extents.kv_dims())
    }
}

/// A planted token and the late query that looks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needle {
    /// Sequence, layers folded in.
    pub batch: usize,
    /// KV head; all query heads of its group look for the needle.
    pub kv_head: usize,
    /// Token of the context, below `context_tokens`.
    pub position: usize,
    /// Token that looks for it, at least `context_tokens`.
    pub asked_by: usize,
    /// Whether one of the last tokens of the context looked for it too.
    pub hinted: bool,
}

/// Extents of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Layers, folded into the batch: sequence `layer * batch + b`.
    pub layers: usize,
    /// `B` of one layer.
    pub batch: usize,
    /// `Hq`, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Tokens of the context (prefill).
    pub context_tokens: usize,
    /// Late tokens after the context (decode steps); may be 0.
    pub new_tokens: usize,
    /// Element type of the tensors.
    pub dtype: DType,
}

impl Extents {
    /// Tokens of the sequence: context and late steps.
    pub fn total_tokens(&self) -> usize {
        self.context_tokens + self.new_tokens
    }

    /// Sequences of all layers.
    pub fn folded(&self) -> usize {
        self.layers * self.batch
    }

    /// `[layers * B, Hq, N, D]`.
    pub fn q_dims(&self) -> [usize; 4] {
        [self.folded(), self.q_heads, self.total_tokens(), self.head_dim]
    }

    /// `[layers * B, Hkv, N, D]`.
    pub fn kv_dims(&self) -> [usize; 4] {
        [self.folded(), self.kv_heads, self.total_tokens(), self.head_dim]
    }

    /// Says whether these are the extents of an attention problem.
    fn check(&self) -> Result<(), WorkloadError> {
        let &Extents { q_heads, kv_heads, head_dim, context_tokens, .. } = self;
        let shape = Shape {
            batch: self.folded(),
            q_heads,
            kv_heads,
            q_len: context_tokens,
            kv_len: self.total_tokens(),
            head_dim,
        };
        Ok(shape.check()?)
    }
}

/// A workload that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// A knob out of range.
    #[error("workload: {knob} is {value}; it must be {expected}")]
    Knob {
        /// The knob.
        knob: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// Extents that the synthetic story has no room for.
    #[error("synthetic workload: {what} is {value}; it must be {expected}")]
    Extent {
        /// The extent.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What would be right.
        expected: String,
    },
    /// A share of attention that so few channels cannot hold against so many tokens.
    #[error(
        "synthetic workload: {knob} = {value} cannot be reached with head dim {head_dim} at {tokens} tokens; \
         lower {knob}, raise the head dim or shorten the context"
    )]
    Unreachable {
        /// The knob.
        knob: &'static str,
        /// Its value.
        value: f64,
        /// `D`.
        head_dim: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A sequence in which the slowest RoPE pair turns too far to carry the cone of the keys.
    #[error(
        "synthetic workload: with rope_theta {rope_theta} the slowest RoPE pair turns {turn_rad:.2} rad over {tokens} \
         tokens, at most 0.5 is possible; rope_theta must be at least {needed:.0}"
    )]
    RopeTheta {
        /// The knob.
        rope_theta: f64,
        /// Turn of the slowest pair over the sequence, in radians.
        turn_rad: f64,
        /// Tokens of the sequence.
        tokens: usize,
        /// The least value that would do.
        needed: f64,
    },
    /// A file whose tensors are not what was asked for.
    #[error("'{path}' has {found} {what}; needed: {asked}; {remedy}")]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The extent that differs.
        what: &'static str,
        /// What the file has.
        found: String,
        /// What is needed.
        asked: String,
        /// What would be right.
        remedy: String,
    },
    /// Extents that make no attention problem.
    #[error(transparent)]
    Shape(#[from] AttentionError),
    /// A file or a tensor in it that cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

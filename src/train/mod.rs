//! Training of a small Llama-type decoder with this project's own forward and backward passes.
//!
//! A block is RMSNorm, RoPE, grouped-query attention by the kernel `tiled`, RMSNorm and a SwiGLU MLP; the embedding is
//! also the output matrix. Numbers are f32. Rows of all sequences of a batch lie below each other, `[B * L, width]`.
//! Work is cut into pieces of a fixed size, each with one owner, so that the bits do not depend on the number of
//! threads; what a step reads depends on nothing but the recipe's seed and the step's number, so that a run that was
//! killed goes on with the same bits.

pub mod activations;
pub mod adamw;
mod block;
mod checkpoint;
pub mod data;
mod export;
mod heads;
mod linear;
pub mod log;
pub mod loss;
pub mod network;
mod norm;
pub mod parameters;
pub mod recipe;
pub mod run;
mod swiglu;
pub mod vocabulary;

pub use activations::Recompute;
pub use network::{Batch, Network};
pub use parameters::{ModelSpec, Parameters};

/// Rows of a piece of work that one thread does: fixed, so that sums over pieces have one order.
const PIECE_ROWS: usize = 256;

#[cfg(test)]
mod tests;

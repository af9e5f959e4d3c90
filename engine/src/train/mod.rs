//! Training of the decoders of [`crate::model`]: small ones from nothing, and any that can be loaded.
//!
//! A model is what its [`crate::model::Config`] says, with its table of parameters, norms, RoPE, activations and options
//! of attention; here are the backward passes, and what of a forward pass they read. Attention is the kernel `tiled`.
//! Numbers are f32. Rows of all sequences of a batch lie below each other, `[B * L, width]`.
//! Work is cut into pieces of a fixed size, each with one owner, so that the bits do not depend on the number of
//! threads; what a step reads depends on nothing but the recipe's seed and the step's number, so that a run that was
//! killed goes on with the same bits.

mod accumulation;
pub mod activations;
mod adafactor;
pub mod adamw;
mod block;
mod checkpoint;
pub mod data;
mod distil;
pub mod dms;
pub mod duo;
mod eight_bit;
mod error;
mod export;
pub mod fine_tuned;
mod gate_functions;
pub mod gates;
pub mod head_gates;
mod heads;
pub mod holder;
pub mod kvzap;
pub mod larimar;
mod linear;
pub mod log;
pub mod lora;
pub mod loss;
mod method;
mod mlp;
pub mod network;
mod norm;
pub mod optimizer;
pub mod origin;
pub mod parameters;
pub mod readout;
pub mod recipe;
mod ridge;
pub mod run;
mod sensitivity;
pub mod steps;
pub mod tensor_parallel;
mod text;
pub mod tune;
mod tuned;
pub mod tuning;
pub mod vocabulary;
pub mod weights;
mod written;
pub mod zero;

pub use activations::Recompute;
pub use network::{Batch, Network};
pub use parameters::Parameters;
pub use sensitivity::sensitivity;
pub use weights::Weights;

/// Rows of a piece of work that one thread does: fixed, so that sums over pieces have one order.
const PIECE_ROWS: usize = 256;

#[cfg(test)]
mod tests;

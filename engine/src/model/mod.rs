//! Decoders of the Llama kind, read from a Hugging Face folder or a GGUF file and run through this project's kernels and cache.
//!
//! [`Config`] says what a model is, [`Weights`] are its mapped files, and a [`Decoder`] runs tokens through it: chunk by
//! chunk, with sequences of different lengths in one batch, attention only through [`crate::attention::Kernel`] over a
//! [`crate::cache::PagedCache`] into whose sequences layers are folded.

pub(crate) mod adapter;
mod beside;
mod capture;
mod chat;
pub mod config;
pub mod cuda;
mod decoder;
mod evictor;
mod generate;
mod gguf;
mod hook;
mod linear;
mod locate;
pub(crate) mod mlp;
pub(crate) mod norm;
mod packed;
mod padded;
pub(crate) mod parameters;
mod quantise;
mod recall;
mod repeat;
pub(crate) mod rope;
mod sample;
mod sequences;
mod text;
mod weights;

pub(crate) use beside::files_beside;
pub use beside::is_of_model;
pub use capture::{Capture, Captured};
pub use chat::{ChatTemplate, Message};
pub use config::Config;
pub(crate) use decoder::params;
pub use decoder::{Decoder, PrefixShape, Setup, bytes, bytes_of_calls, bytes_unopened, bytes_with_memory};
pub use evictor::Eviction;
pub use generate::{Generated, OneSequence, generate};
pub use gguf::{GgufTensor, gguf_tensors};
pub use hook::{Activation, Hook};
pub use locate::{BUILTIN, fingerprint, locate};
pub use quantise::{Calibration, Importance, Mixture, Planned, Quantised, Recipe, Scaled};
pub use quantise::{quantise, quantise_folder, quantise_scaled};
pub use recall::Recall;
pub use repeat::{Gradients, Repeat};
pub use sample::{Sampler, Sampling, likeliest};
pub use sequences::sequences;
pub use text::Text;
pub(crate) use weights::{Matrix, mapped, weight_paths, widen};
pub use weights::{Weights, packed_bytes, tensor_files};

use crate::attention::AttentionError;
use crate::device::cuda::CudaError;
use crate::format::{FormatError, RowFormat};
use crate::memory::{Arena, ArenaError};
use crate::named::NamedError;
use crate::policy::cuda::DevicePolicyError;
use crate::policy::{BudgetError, PolicyError};
use crate::tensor::file::FileError;
use std::path::{Path, PathBuf};

/// A model that cannot be read or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A configuration that cannot be read or is not understood.
    #[error("'{path}': {reason}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What was wrong, its value, and what would be right.
        reason: String,
    },
    /// A file of weights that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Weights that do not fit the configuration.
    #[error("'{path}': {reason}")]
    Weights {
        /// The file or folder.
        path: PathBuf,
        /// What was wrong, its value, and what would be right.
        reason: String,
    },
    /// A token that the model does not have.
    #[error("token {token} at place {place} of sequence {sequence}; the model has tokens 0 to {last}", last = vocab - 1)]
    Token {
        /// The token.
        token: u32,
        /// Its sequence.
        sequence: usize,
        /// Its place in the sequence.
        place: usize,
        /// Tokens that there are.
        vocab: usize,
    },
    /// A sequence that is longer than the model was made for.
    #[error(
        "a sequence of {tokens} tokens; the model was made for at most {most}, give a shorter one, or --beyond-limit where a command has it to run it all the same"
    )]
    TooLong {
        /// Tokens of the sequence.
        tokens: usize,
        /// Most tokens.
        most: usize,
    },
    /// A memory whose segments are longer than the model was made for.
    #[error(
        "a window of {tokens} tokens; the model was made for at most {most}, give a shorter one, or --beyond-limit to run it all the same"
    )]
    Segment {
        /// Tokens of a segment.
        tokens: usize,
        /// Most tokens.
        most: usize,
    },
    /// An activation that is no number.
    #[error("an activation of layer {layer} is {value} at token {token}; weights or activations are not finite")]
    Activation {
        /// Its layer.
        layer: usize,
        /// The token's place.
        token: usize,
        /// What it is.
        value: f32,
    },
    /// A logit that is no number.
    #[error("the logit of token {token} is {logit}; weights or activations are not finite")]
    Logit {
        /// The logit.
        logit: f32,
        /// Its token.
        token: u32,
    },
    /// Attention that cannot be computed.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// A kernel that there is not.
    #[error(transparent)]
    Kernel(#[from] NamedError),
    /// Heads that the cache's format cannot keep.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A policy that cannot be applied.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A GPU that cannot do it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

/// A model ready to run.
pub struct Model {
    /// What it is.
    pub config: Config,
    /// Its parameters.
    pub weights: Weights,
    /// By which it is known again ([`fingerprint`]).
    pub fingerprint: String,
    /// The fingerprint of the model that these are other weights of, where one is: the same in codes, or with adapters. What was trained on
    /// that one serves here too.
    pub weights_of: Option<String>,
}

impl Model {
    /// Opens a Hugging Face folder: `config.json` and safetensors in one file or shards.
    ///
    /// # Errors
    /// When something is missing, damaged, or not understood.
    pub fn open(folder: &Path, arena: &Arena) -> Result<Self, ModelError> {
        Model::open_in(folder, None, arena)
    }

    /// The same with all matrices in a format; `None` is that of their files.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_in(folder: &Path, format: Option<RowFormat>, arena: &Arena) -> Result<Self, ModelError> {
        let config = Config::read(folder)?;
        let weights = Weights::open(folder, &config, format, arena)?;
        Ok(Model { config, weights, fingerprint: fingerprint(folder)?, weights_of: None })
    }

    /// Refuses a sequence that is longer than the model was made for.
    ///
    /// # Errors
    /// How long it may be.
    pub fn check_length(&self, tokens: usize) -> Result<(), ModelError> {
        let most = self.config.most_tokens();
        if tokens > most { Err(ModelError::TooLong { tokens, most }) } else { Ok(()) }
    }

    /// Refuses a token that the model does not have; the first of `tokens` stands at `place` of its sequence.
    fn check_tokens(&self, sequence: usize, place: usize, tokens: &[u32]) -> Result<(), ModelError> {
        let vocab = self.config.vocab;
        match tokens.iter().position(|&token| token as usize >= vocab) {
            Some(at) => Err(ModelError::Token { token: tokens[at], sequence, place: place + at, vocab }),
            None => Ok(()),
        }
    }

    /// What is added to the weights of norms.
    fn norm_shift(&self) -> f32 {
        self.config.norm_shift()
    }
}

impl From<DevicePolicyError> for ModelError {
    fn from(error: DevicePolicyError) -> Self {
        match error {
            DevicePolicyError::Policy(error) => error.into(),
            DevicePolicyError::Cuda(error) => error.into(),
        }
    }
}

impl From<BudgetError> for ModelError {
    fn from(error: BudgetError) -> Self {
        ModelError::Policy(error.into())
    }
}

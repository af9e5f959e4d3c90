//! Decoders of the Llama kind, read from a Hugging Face folder and run through this project's kernels and cache.

pub mod config;

pub use config::Config;

use std::path::PathBuf;

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
}

//! Models in one GGUF file, as llama.cpp writes them: configuration, tokenizer and weights.
//!
//! A file is read as the Hugging Face folder that it was made from. Its metadata becomes the keys of a `config.json`
//! ([`config`]) and of a `tokenizer.json` ([`tokenizer`]), and tensors are found by the folder's names ([`tensors`]), with
//! what the conversion changed undone. So everything behind the loader, and every check in it, is the same for both.
//! Quantised blocks are formats of rows ([`types`]): matrices are read as they lie in the file.
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod config;
mod container;
mod folder;
mod hub;
mod importance;
mod rope;
mod sentencepiece;
mod tensors;
mod tokenizer;
mod types;
mod write;

pub(super) use container::Gguf;
pub use container::{GgufTensor, gguf_tensors};
pub(super) use hub::files_of_gguf;
pub(super) use importance::{MeanSquares, read_importance};
pub(super) use rope::tensors as rope_tensors;
pub(super) use tensors::{Located, head_rows, more, own_name, row_of_folder};
pub(super) use types::number;
pub(super) use write::{Keys, header, padded};

use std::path::Path;

/// Whether a model is a file of this kind, and not a folder.
pub(super) fn is_gguf(path: &Path) -> bool {
    path.is_file() || path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

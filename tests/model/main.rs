//! Models: against `transformers`, from every kind of file, with policies and with memories.

#[path = "../common/byte_model.rs"]
mod byte_model;
#[path = "../common/mod.rs"]
mod common;
mod episodic;
mod families;
mod gguf;
mod larimar;
mod memories;
mod packed;
mod policies;
mod quantize;
mod tokenizers;
mod weights;

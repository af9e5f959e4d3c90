//! Training as its users meet it.

#[path = "../common/byte_model.rs"]
mod byte_model;
#[path = "../common/gguf.rs"]
mod gguf;
mod recipes;
mod tune;

//! What runs on a GPU, or on the emulated device (docs/testing-kernels.md). Ignored unless asked for:
//! `cargo test --release -- --ignored cuda`. Tests that need the memory of a GPU for themselves are in `tests/cuda_run.rs`.

mod attend;
#[path = "../common/mod.rs"]
mod common;
mod faults;
mod formats;
mod kernels;
mod list;
mod models;
mod policies;

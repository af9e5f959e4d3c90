//! Attention: kernels over dense, ragged and coded keys and values, forward and backward, on every instruction path.

mod accuracy;
mod backward;
mod bias;
#[path = "../common/mod.rs"]
mod common;
mod export;
mod extremes;
mod formats;
mod forward;
mod gaps;
mod invariance;
mod sparse;

/// Whatever is asked here holds on each instruction path of the machine.
#[test]
fn every_instruction_path_passes_these_tests() {
    common::pass_on_every_path();
}

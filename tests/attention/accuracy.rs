//! kvsieve is as close to f64 as PyTorch's CPU attention is, type by type, on the same inputs.
//!
//! PyTorch's errors were recorded by `benches/peers/compare.py --accuracy-fixture`; inputs are made again from the seed.

use crate::common::accuracy::{Checked, Described};
use kvsieve::device::simd::Isa;
use serde::Deserialize;

/// kvsieve's error may be this many times PyTorch's: the order of sums differs from one CPU to another. Without a fused
/// multiply-add, which PyTorch had when it was recorded, each product is rounded once more.
fn margin() -> f64 {
    if Isa::chosen().unwrap() == Isa::PORTABLE { 1.1 } else { 1.05 }
}

#[derive(Deserialize)]
struct Recorded {
    torch: String,
    cpu_capability: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    #[serde(flatten)]
    problem: Described,
    seed: u64,
    pytorch_error: f64,
}

#[test]
fn errors_are_no_larger_than_those_of_pytorch() {
    let recorded: Recorded = serde_json::from_str(include_str!("../fixtures/pytorch_cpu_errors.json")).unwrap();
    println!("PyTorch {} on {}", recorded.torch, recorded.cpu_capability);
    assert!(!recorded.cases.is_empty());
    let mut too_far = Vec::new();
    for Case { problem, seed, pytorch_error } in recorded.cases {
        let evicted = Checked::new(problem.problem().unwrap(), seed);
        // `decode` is made for few queries.
        let kernels: &[&str] = if problem.q_len == 1 { &["tiled", "decode"] } else { &["tiled"] };
        for kernel in kernels {
            let error = evicted.error(kernel);
            let line = format!("{kernel} {error:.3e}, PyTorch {pytorch_error:.3e}: {problem:?}, seed {seed}");
            println!("{line}");
            if error.is_nan() || error > margin() * pytorch_error {
                too_far.push(line);
            }
        }
    }
    assert!(too_far.is_empty(), "further from f64 than PyTorch:\n{}", too_far.join("\n"));
}

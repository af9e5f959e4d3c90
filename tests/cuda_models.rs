//! Models on a GPU against what `transformers` gave, and against the CPU. Ignored unless asked for:
//! `cargo test --release -- --ignored cuda`, on a GPU or on the emulated device (`tests/kernels/emulate/device.py`).

mod common;

use common::models::{all, checkpoint, deviation, furthest};
use kvsieve::device::cuda::Runtime;
use kvsieve::memory::Arena;
use kvsieve::model::cuda::{DeviceDecoder, DeviceModel};
use kvsieve::model::{Model, Sampler, Sampling, Setup, generate};
use kvsieve::tensor::DType;

fn setup(chunk_tokens: usize) -> Setup {
    Setup { batch: 1, max_tokens: 80, chunk_tokens, all_logits: true, kv_dtype: DType::F32, columns: &[] }
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_logits_are_those_of_transformers_whatever_the_chunks() {
    let runtime = Runtime::open(0, None).unwrap();
    let mut failed = Vec::new();
    for name in all() {
        let expected = checkpoint(&name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let bound = 1e-3 * deviation(&expected.logits);
        let arena = Arena::unlimited();
        let there = DeviceModel::new(&model, &runtime, &arena).unwrap();
        assert_eq!(arena.usage().live_bytes, there.bytes());
        for chunk in [80, 1, 7] {
            let mut decoder = DeviceDecoder::new(&there, setup(chunk), &arena).unwrap();
            let mut got = Vec::new();
            // Twice, the second time where other tokens were.
            for _ in 0..2 {
                decoder.clear().unwrap();
                got.clear();
                let feed = decoder.feed(0, &expected.tokens, |place, logits| {
                    assert_eq!(got.len(), place * logits.len());
                    got.extend_from_slice(logits);
                });
                feed.unwrap();
            }
            let off = furthest(&got, &expected.logits);
            println!("{name}, chunks of {chunk}: off by {off}, allowed {bound}");
            if off.is_nan() || off > bound {
                failed.push(format!("{name}, chunks of {chunk}: off by {off}, allowed {bound}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_greedy_continuations_are_those_of_transformers() {
    let runtime = Runtime::open(0, None).unwrap();
    for name in all() {
        let expected = checkpoint(&name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let arena = Arena::unlimited();
        let there = DeviceModel::new(&model, &runtime, &arena).unwrap();
        let setup = Setup { all_logits: false, ..setup(16) };
        let mut decoder = DeviceDecoder::new(&there, setup, &arena).unwrap();
        let mut sampler = Sampler::new(Sampling::GREEDY);
        let most_tokens = expected.greedy.len();
        let generated = generate(&mut decoder, &expected.tokens, &mut sampler, &[], most_tokens, |_| ()).unwrap();
        assert_eq!(generated.tokens, expected.greedy, "{name}");
    }
}

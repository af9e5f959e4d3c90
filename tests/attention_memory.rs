//! One formula: what a pass is predicted to take is what the arena sees, to the byte, and nothing hides beside it.

mod common;

use common::{Problem, VARIANTS, WITH_BACKWARD, call, inputs, shape};
use kvsieve::attention::{Backward, DenseKv, Gradients, Inputs, Outputs, Params, Shape, kernel};
use kvsieve::memory::{Arena, Label, os};
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The resident set is that of the whole process, so that the tests of this file run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measured minus predicted peak of a forward pass, and of a backward pass where there is one.
fn residuals(name: &str, problem: &Problem, threads: usize) -> (i64, Option<i64>) {
    let Problem { shape, params, dtype } = *problem;
    let (kernel, arena) = (kernel(name).unwrap(), Arena::unlimited());
    let input = |dims| Tensor::zeros(&arena, Label::Input, dtype, dims).unwrap();
    let inputs = Inputs { q: input(shape.q_dims()), k: input(shape.kv_dims()), v: input(shape.kv_dims()) };
    let mut outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
    let size = kernel.workspace(&shape, &params, dtype, threads);
    let mut workspace = size.allocate(&arena).unwrap();
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    kernel.forward(&call(problem, &inputs, &kv, threads), &mut outputs, &mut workspace).unwrap();

    let input_bytes = Tensor::bytes_of(dtype, shape.q_dims()) + 2 * Tensor::bytes_of(dtype, shape.kv_dims());
    let held = input_bytes + Outputs::bytes(&shape, dtype);
    let forward_residual = arena.usage().peak_bytes as i64 - (held + size.bytes()) as i64;
    assert_eq!(arena.usage().live.get(&Label::Scores).copied().unwrap_or(0), 4 * size.scores as u64);
    drop(workspace);

    let backward_residual = kernel.backward_workspace(&shape, &params, dtype, threads).map(|size| {
        arena.reset_peak();
        let grad_o = input(shape.q_dims());
        let mut gradients = Gradients::allocate(&arena, &shape, dtype).unwrap();
        let mut workspace = size.allocate(&arena).unwrap();
        let forward = call(problem, &inputs, &kv, threads);
        let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: grad_o.view() };
        kernel.backward(&call, &mut gradients, &mut workspace).unwrap();
        let added = Tensor::bytes_of(dtype, shape.q_dims()) + Gradients::bytes(&shape, dtype) + size.bytes();
        arena.usage().peak_bytes as i64 - (held + added) as i64
    });
    drop((outputs, inputs));
    assert_eq!(arena.usage().live_bytes, 0, "{name} gave everything back");
    (forward_residual, backward_residual)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_peak_is_the_prediction(
        (batch, kv_heads, group) in (1usize..3, 1usize..4, 1usize..4),
        (q_len, kv_len, head_dim) in (1usize..200, 1usize..400, 1usize..100),
        causal: bool,
        window in prop_oneof![Just(None), (1usize..100).prop_map(Some)],
        dtype in prop::sample::select(DType::ALL.to_vec()),
        threads in 1usize..=3,
    ) {
        let _alone = alone();
        let shape = shape([batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim]);
        let params = Params { window, ..Params::new(head_dim, causal) };
        // A call for each score is slow and needs no more memory for it.
        for name in VARIANTS.into_iter().filter(|name| !name.contains("br=1,bc=1")).chain(["reference"]) {
            let (forward, backward) = residuals(name, &Problem { shape, params, dtype }, threads);
            prop_assert_eq!((forward, backward.unwrap_or(0)), (0, 0), "{}", name);
            prop_assert_eq!(backward.is_some(), WITH_BACKWARD.contains(&name) || name.starts_with("tiled"));
        }
    }
}

#[test]
fn only_naive_is_quadratic() {
    let _alone = alone();
    let extents = |len| Shape { q_len: len, kv_len: len, ..shape([1, 4, 2, 1, 1, 64]) };
    let params = Params::new(64, true);
    let bytes = |name: &str, len| kernel(name).unwrap().workspace(&extents(len), &params, DType::Bf16, 2).bytes();
    let backward =
        |name: &str, len, dtype| kernel(name).unwrap().backward_workspace(&extents(len), &params, dtype, 2).unwrap();

    let size = kernel("naive").unwrap().workspace(&extents(3000), &params, DType::Bf16, 2);
    assert_eq!(4 * size.scores as u64, 4 * 4 * 3000 * 3000, "4 bytes for each of B * Hq * Lq * Lk scores");
    assert_eq!(backward("naive", 3000, DType::Bf16).scores, 2 * size.scores);

    for name in VARIANTS.into_iter().filter(|name| name.starts_with("tiled")) {
        assert_eq!(bytes(name, 1 << 13), bytes(name, 1 << 20), "{name}: beyond a tile the length does not matter");
        for (dtype, row) in [(DType::F32, 1), (DType::Bf16, 1 + 64)] {
            let (short, long) = (backward(name, 1 << 13, dtype), backward(name, 1 << 14, dtype));
            assert_eq!((short.scores, long.scores), (0, 0));
            let more = long.scratch - short.scratch;
            assert_eq!(
                more,
                row * 4 * (1 << 13),
                "{name}: for each row a delta and in bf16 the sum of dq, no more tiles"
            );
        }
    }
    assert!(bytes("tiled", 16) < bytes("tiled", 1 << 13), "a short problem takes small tiles");
    // The oracle keeps one row of logits for each thread.
    assert_eq!(bytes("reference", 5000) - bytes("reference", 4000), 2 * 8 * 1000);
    // Few queries: partial results grow with the number of splits of 1024 keys.
    let decode = |kv_len| {
        let shape = Shape { q_len: 1, kv_len, ..extents(1) };
        kernel("decode").unwrap().workspace(&shape, &params, DType::Bf16, 2).bytes()
    };
    assert_eq!(decode(64 << 10) - decode(32 << 10), 32 * 4 * 4 * 66);
}

/// Growth of the process while a pass runs in memory that was allocated, and is resident, before it.
#[test]
fn no_kernel_takes_memory_beside_the_arena() {
    let _alone = alone();
    let problem =
        Problem { shape: shape([1, 2, 1, 2048, 2048, 64]), params: Params::new(64, true), dtype: DType::Bf16 };
    let Problem { shape, params, dtype } = problem;
    let inputs = inputs(&problem, 1);
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    // The products pack blocks of their operands, as large as a cache, into memory of their own: in the backward pass of naive, with
    // AVX2 and 32 MiB of last-level cache, 4 MiB for each thread that takes part, of which there are two, or three with the one
    // that asks. A copy of even one head's 16 MiB of scores would show.
    const ALLOWED_BYTES: u64 = 14 << 20;
    let growth = |what: &str, run: &mut dyn FnMut()| {
        if !os::reset_peak() {
            return;
        }
        let Some(before) = os::resident() else { return };
        run();
        let growth = os::resident().unwrap().peak_bytes.saturating_sub(before.now_bytes);
        println!("{what} grew the process by {growth} bytes");
        assert!(growth <= ALLOWED_BYTES, "{what} took {growth} bytes beside the arena");
    };
    for name in ["naive", "tiled", "decode"] {
        let (kernel, arena) = (kernel(name).unwrap(), Arena::unlimited());
        let mut outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
        let mut workspace = kernel.workspace(&shape, &params, dtype, 2).allocate(&arena).unwrap();
        growth(name, &mut || kernel.forward(&call(&problem, &inputs, &kv, 2), &mut outputs, &mut workspace).unwrap());
        if let Some(size) = kernel.backward_workspace(&shape, &params, dtype, 2) {
            let mut gradients = Gradients::allocate(&arena, &shape, dtype).unwrap();
            let mut workspace = size.allocate(&arena).unwrap();
            let (forward, grad_o) = (call(&problem, &inputs, &kv, 2), inputs.q.view());
            let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o };
            growth(&format!("{name} backward"), &mut || {
                kernel.backward(&call, &mut gradients, &mut workspace).unwrap()
            });
        }
    }
}

#[test]
fn without_room_a_workspace_is_an_error_and_not_a_crash() {
    let _alone = alone();
    let problem = shape([1, 8, 8, 4096, 4096, 64]);
    let size = kernel("naive").unwrap().workspace(&problem, &Params::new(64, true), DType::F32, 2);
    let error = size.allocate(&Arena::with_limit(1 << 20)).err().unwrap().to_string();
    assert!(error.contains("536870912 bytes for scores requested"), "{error}");
}

#[test]
fn every_instruction_path_passes_these_tests() {
    common::pass_on_every_path();
}

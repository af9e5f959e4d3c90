//! Gradients: against central differences of an f64 attention on small problems, against each other on large ones.

use crate::common;
use crate::common::{Problem, WITH_BACKWARD, backward, grad_o, inputs, root_mean_square_error, shape, widen};
use kvsieve::attention::{Backward, DenseKv, Gradients, Inputs, Params, kernel, reference};
use kvsieve::memory::Arena;
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;

/// Largest error of a gradient. Half types round `o`, from which `delta` comes, and the gradients themselves.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::Bf16 => 1.6e-2,
        DType::F16 => 2e-3,
    }
}

/// Checks `dq`, `dk` and `dv` of all kernels against expected ones; returns the largest error.
fn check(problem: &Problem, inputs: &Inputs, grad_o: &Tensor, expected: &[Vec<f64>; 3]) -> f64 {
    let mut worst = 0.0f64;
    for (index, name) in WITH_BACKWARD.into_iter().enumerate() {
        let got = backward(name, problem, inputs, grad_o, 1 + index % 3);
        for ((which, got), wanted) in ["dq", "dk", "dv"].iter().zip(&got).zip(expected) {
            let error = root_mean_square_error(got, wanted);
            assert!(error <= tolerance(problem.dtype), "{name}: {which} is off by {error:e} in {problem:?}");
            worst = worst.max(error);
        }
    }
    worst
}

/// Checks a problem against central differences.
fn check_by_differences(problem: &Problem, seed: u64) -> f64 {
    let (inputs, grad_o) = (inputs(problem, seed), grad_o(problem, seed));
    let [q, k, v, g] = [&inputs.q, &inputs.k, &inputs.v, &grad_o].map(|tensor| widen(&tensor.to_f32()));
    let expected = common::exact::gradients(&problem.shape, &problem.params, [&q, &k, &v], &g);
    // The oracle of experiments, which has gradients by q alone.
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let at = reference::sample_rows(&problem.shape, problem.shape.q_len);
    let by_rows = reference::query_gradients(&common::call(problem, &inputs, &kv, 2), &grad_o.view(), &at);
    let by_rows = by_rows.iter().flat_map(|row| &row.dq);
    let pairs = by_rows.zip(&expected[0]).collect::<Vec<_>>();
    assert!(pairs.iter().all(|(got, wanted)| (*got - *wanted).abs() < 1e-5), "{problem:?}: {pairs:?}");
    check(problem, &inputs, &grad_o, &expected)
}

#[test]
fn gradients_equal_central_differences() {
    let capped = |cap, params| Params { softcap: Some(cap), ..params };
    let windowed = |window, params| Params { window: Some(window), ..params };
    let (full, causal) = (Params::new(6, false), Params::new(6, true));
    let cases = [
        ([1, 1, 1, 1, 1, 1], Params::new(1, false)),
        ([1, 1, 1, 5, 7, 6], full),
        ([2, 2, 2, 5, 7, 6], causal),
        ([1, 4, 2, 6, 6, 6], causal),
        ([2, 6, 1, 3, 9, 6], full),
        ([1, 2, 1, 9, 4, 6], causal),
        ([1, 2, 1, 9, 4, 6], windowed(2, full)),
        ([1, 1, 1, 8, 8, 6], windowed(1, causal)),
        ([1, 2, 2, 8, 11, 6], windowed(3, capped(2.0, causal))),
        ([1, 2, 1, 5, 8, 6], capped(0.5, full)),
        ([1, 2, 1, 5, 8, 6], capped(15.0, causal)),
        ([1, 1, 1, 4, 8, 6], Params { scale: -0.7, ..full }),
        ([1, 1, 1, 4, 8, 6], Params { scale: 0.0, ..full }),
        ([1, 2, 1, 2, 3, 17], Params::new(17, true)),
    ];
    let mut worst = [0.0f64; 3];
    for (seed, (extents, params)) in cases.into_iter().enumerate() {
        for dtype in DType::ALL {
            let problem = Problem { shape: shape(extents), params, dtype };
            worst[dtype as usize] = worst[dtype as usize].max(check_by_differences(&problem, seed as u64));
        }
    }
    println!("largest errors: f32 {:.2e}, bf16 {:.2e}, f16 {:.2e}", worst[0], worst[1], worst[2]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn gradients_equal_central_differences_on_random_problems(
        (batch, kv_heads, group) in (1usize..3, 1usize..3, 1usize..3),
        (q_len, kv_len, head_dim) in (1usize..8, 1usize..10, 1usize..7),
        causal: bool,
        window in prop_oneof![Just(None), (1usize..9).prop_map(Some)],
        softcap in prop_oneof![Just(None), (0.5f32..30.0).prop_map(Some)],
        dtype in prop::sample::select(DType::ALL.to_vec()),
        seed in 0u64..1 << 40,
    ) {
        let shape = shape([batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim]);
        let params = Params { softcap, window, ..Params::new(head_dim, causal) };
        check_by_differences(&Problem { shape, params, dtype }, seed);
    }
}

#[test]
fn kernels_agree_with_each_other_on_large_problems() {
    let cases = [
        ([1, 2, 1, 200, 333, 64], Params::new(64, true)),
        ([2, 4, 2, 97, 130, 40], Params { window: Some(50), ..Params::new(40, true) }),
        ([1, 2, 2, 300, 90, 128], Params { softcap: Some(15.0), ..Params::new(128, true) }),
        ([1, 3, 1, 65, 513, 111], Params::new(111, false)),
        ([1, 1, 1, 100, 257, 256], Params { softcap: Some(30.0), ..Params::new(256, false) }),
    ];
    for (seed, (extents, params)) in cases.into_iter().enumerate() {
        for dtype in DType::ALL {
            let problem = Problem { shape: shape(extents), params, dtype };
            let (inputs, grad_o) = (inputs(&problem, seed as u64), grad_o(&problem, seed as u64));
            let naive = backward("naive", &problem, &inputs, &grad_o, 2);
            check(&problem, &inputs, &grad_o, &naive.map(|gradient| widen(&gradient)));
        }
    }
}

#[test]
fn rows_and_keys_that_meet_nothing_have_no_gradient() {
    // 9 causal queries over 4 keys: the first five see none. A window of one leaves each key to one query.
    let problem = Problem { shape: shape([1, 2, 1, 9, 4, 8]), params: Params::new(8, true), dtype: DType::F32 };
    let (data, grad) = (inputs(&problem, 1), grad_o(&problem, 1));
    for name in WITH_BACKWARD {
        let [dq, dk, dv] = backward(name, &problem, &data, &grad, 2);
        for (row, dq) in dq.chunks_exact(8).enumerate() {
            // The sixth sees one key: nothing to choose, no gradient but for rounding.
            let most = [0.0, 1e-6, f32::INFINITY][usize::from(row % 9 > 4) + usize::from(row % 9 > 5)];
            assert!(dq.iter().all(|x| x.abs() <= most), "{name}: dq of row {row}: {dq:?}");
            assert!(row % 9 < 6 || dq.iter().all(|x| x.abs() > 1e-6), "{name}: dq of row {row}: {dq:?}");
        }
        assert!(dk.iter().chain(&dv).all(|x| x.is_finite() && *x != 0.0), "{name}");
    }
    // Queries 0 and 1 of 2, window 1, 6 keys: keys 0 to 3 are seen by nobody.
    let params = Params { window: Some(1), ..Params::new(8, true) };
    let problem = Problem { shape: shape([1, 1, 1, 2, 6, 8]), params, dtype: DType::F32 };
    let (data, grad) = (inputs(&problem, 2), grad_o(&problem, 2));
    for name in WITH_BACKWARD {
        let [_, dk, dv] = backward(name, &problem, &data, &grad, 2);
        assert!(dk[..4 * 8].iter().chain(&dv[..4 * 8]).all(|&x| x == 0.0), "{name}: {dk:?} {dv:?}");
        assert!(dv[4 * 8..].iter().all(|&x| x != 0.0), "{name}: {dv:?}");
    }
}

#[test]
fn a_kernel_without_a_backward_pass_says_who_has_one() {
    let problem = Problem { shape: shape([1, 1, 1, 2, 2, 8]), params: Params::new(8, true), dtype: DType::F32 };
    let (inputs, grad_o) = (inputs(&problem, 1), grad_o(&problem, 1));
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let arena = Arena::unlimited();
    for name in ["decode", "reference"] {
        let kernel = kernel(name).unwrap();
        assert!(kernel.backward_workspace(&problem.shape, &problem.params, DType::F32, 1).is_none());
        let forward = common::call(&problem, &inputs, &kv, 1);
        let outputs = common::forward_call(&*kernel, &common::call(&problem, &inputs, &kv, 1), DType::F32);
        let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: grad_o.view() };
        let mut gradients = Gradients::allocate(&arena, &problem.shape, DType::F32).unwrap();
        let mut workspace = kernel.workspace(&problem.shape, &problem.params, DType::F32, 1).allocate(&arena).unwrap();
        let error = kernel.backward(&call, &mut gradients, &mut workspace).unwrap_err().to_string();
        assert_eq!(error, format!("kernel '{name}' has no backward pass; use naive or tiled"));
    }
}

/// Gradients of logits add up to nothing over a row, so that what all keys share leaves none: not where probabilities are computed
/// otherwise than in the forward pass.
#[test]
fn an_offset_of_all_keys_costs_no_digits() {
    let problem = Problem { shape: shape([1, 2, 1, 128, 128, 64]), params: Params::new(64, true), dtype: DType::F32 };
    let (mut inputs, grad_o) = (inputs(&problem, 5), grad_o(&problem, 5));
    let offset: Vec<f32> = inputs.k.to_f32().chunks(64).flat_map(|key| key.iter().map(|x| x + 60.0)).collect();
    inputs.k = common::tensor(DType::F32, problem.shape.kv_dims(), &offset);
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let at = reference::sample_rows(&problem.shape, 128);
    let expected = reference::query_gradients(&common::call(&problem, &inputs, &kv, 2), &grad_o.view(), &at);
    let expected: Vec<f64> = expected.into_iter().flat_map(|row| row.dq).collect();
    let [naive, tiled] = ["naive", "tiled"]
        .map(|name| common::relative_l2(&backward(name, &problem, &inputs, &grad_o, 2)[0], &expected));
    assert!(naive < 2e-4 && tiled < 3.0 * naive, "naive is off by {naive:e}, tiled by {tiled:e}");
}

//! Values that break careless kernels: huge and equal logits, outliers, rows that see nothing, the ends of f16.

use crate::common;
use crate::common::{Problem, VARIANTS, cpu, forward, forward_call, normal, rng, shape, tensor};
use kvsieve::attention::{DenseKv, Forward, Inputs, Params, Shape, kernel, reference};
use kvsieve::tensor::DType;

const WIDTH: usize = 16;

/// One sequence of two heads on one KV head.
fn problem(q_len: usize, kv_len: usize, params: Params) -> Problem {
    Problem { shape: shape([1, 2, 1, q_len, kv_len, WIDTH]), params, dtype: DType::F32 }
}

/// Scale 1: an inner product is its own logit.
fn plain(causal: bool) -> Params {
    Params { scale: 1.0, ..Params::new(WIDTH, causal) }
}

/// Queries of ones and keys `[level, 0, 0, ...]`: the logit of key `j` is `levels[j]`, for every query. Values are
/// normal.
fn with_logits(problem: &Problem, levels: &[f32]) -> Inputs {
    let Shape { kv_len, .. } = problem.shape;
    let mut k = vec![0.0; kv_len * WIDTH];
    k.iter_mut().step_by(WIDTH).zip(levels.iter().cycle()).for_each(|(k, &level)| *k = level);
    Inputs {
        q: tensor(problem.dtype, problem.shape.q_dims(), &vec![1.0; problem.shape.rows() * WIDTH]),
        k: tensor(problem.dtype, problem.shape.kv_dims(), &k),
        v: tensor(problem.dtype, problem.shape.kv_dims(), &normal(&mut rng(3), kv_len * WIDTH, 1.0)),
    }
}

/// Checks every kernel against the reference: `o` to a relative error, `lse` to an absolute one.
fn check(what: &str, problem: &Problem, inputs: &Inputs, o_error: f64, lse_error: f64) {
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let call = Forward { shape: problem.shape, params: problem.params, q: inputs.q.view(), kv: &kv, cpu: cpu(2) };
    let at = reference::sample_rows(&problem.shape, problem.shape.q_len);
    let expected = reference::rows(&call, &at);
    for name in VARIANTS {
        let outputs = forward_call(&*kernel(name).unwrap(), &call, problem.dtype);
        let error = reference::relative_error(&outputs.o.view(), &at, &expected);
        assert!(error <= o_error, "{name}, {what}: o is off by {error:e}");
        for (&got, expected) in outputs.lse.iter().zip(&expected) {
            let same = f64::from(got) == expected.lse || (f64::from(got) - expected.lse).abs() <= lse_error;
            assert!(same, "{name}, {what}: lse is {got}, not {}", expected.lse);
        }
    }
}

#[test]
fn logits_far_from_zero_lose_no_more_than_their_own_rounding() {
    // A logit of size M is known to M * 2^-24 in f32, in base 2 and through a dot product a few times that.
    for (size, causal) in [(80.0f32, false), (80.0, true), (1e4, false), (1e4, true)] {
        let problem = problem(70, 300, plain(causal));
        let rounding = 3.0 * f64::from(size) * 2f64.powi(-24);
        let ramp = |step: f32| -> Vec<f32> { (0..300).map(|j| size * (j as f32 * step - 1.0)).collect() };
        for (what, levels) in [
            ("rising", ramp(2.0 / 300.0)),
            ("falling", ramp(2.0 / 300.0).into_iter().rev().collect()),
            ("alternating", vec![-size, size]),
            ("all high", vec![size, size - 1.0, size - 0.5]),
            ("all low", vec![-size, 1.0 - size, 0.5 - size]),
        ] {
            check(what, &problem, &with_logits(&problem, &levels), 1e-6 + rounding, 1e-6 + rounding);
        }
        let mut large = common::inputs(&problem, 5);
        large.q =
            tensor(DType::F32, problem.shape.q_dims(), &normal(&mut rng(6), problem.shape.rows() * WIDTH, size / 4.0));
        // Random products of this scale reach about four times the size.
        check("random", &problem, &large, 1e-6 + 4.0 * rounding, 1e-6 + 4.0 * rounding);
    }
}

#[test]
fn equal_scores_average_the_values() {
    let none = |problem: &Problem| with_logits(problem, &[0.0]);
    for params in [plain(false), plain(true), Params { softcap: Some(5.0), ..plain(true) }] {
        let problem = problem(33, 257, params);
        check("all zero", &problem, &none(&problem), 1e-6, 1e-6);
        check("all 3", &problem, &with_logits(&problem, &[3.0]), 1e-6, 2e-6);
        let mut zero_q = common::inputs(&problem, 8);
        zero_q.q = tensor(DType::F32, problem.shape.q_dims(), &vec![0.0; problem.shape.rows() * WIDTH]);
        check("queries of zero", &problem, &zero_q, 1e-6, 1e-6);
        for name in VARIANTS {
            let lse = forward(name, &problem, &zero_q, 2).1;
            assert!((lse[32] - 257f32.ln()).abs() < 1e-6, "{name}: the last query sees 257 equal keys: {}", lse[32]);
        }
    }
}

#[test]
fn an_outlier_key_takes_everything() {
    for position in [0, 100, 256] {
        let problem = problem(3, 257, plain(false));
        let mut levels = vec![0.0; 257];
        levels[position] = 1e4;
        let inputs = with_logits(&problem, &levels);
        let value = inputs.v.to_f32()[position * WIDTH..][..WIDTH].to_vec();
        for name in VARIANTS {
            let (o, lse) = forward(name, &problem, &inputs, 2);
            for (row, lse) in o.chunks_exact(WIDTH).zip(lse) {
                assert_eq!(row, value, "{name}: outlier at {position}");
                assert!((lse - 1e4).abs() < 2e-3, "{name}: {lse}");
            }
        }
    }
}

#[test]
fn rows_that_see_no_key_are_zero_with_a_log_sum_exp_of_minus_infinity() {
    let params = [
        plain(true),
        Params { window: Some(2), ..plain(false) },
        Params { softcap: Some(9.0), window: Some(1), ..plain(true) },
    ];
    for params in params {
        for (q_len, kv_len) in [(5, 3), (130, 1), (200, 70), (2, 1)] {
            for dtype in DType::ALL {
                let problem = Problem { dtype, ..problem(q_len, kv_len, params) };
                let inputs = common::inputs(&problem, 9);
                for name in VARIANTS.into_iter().chain(["reference"]) {
                    let (o, lse) = forward(name, &problem, &inputs, 2);
                    for (row, (o, lse)) in o.chunks_exact(WIDTH).zip(lse).enumerate() {
                        let empty = row % q_len < q_len - kv_len;
                        assert_eq!(lse == f32::NEG_INFINITY, empty, "{name}: lse of row {row} is {lse}, {problem:?}");
                        assert_eq!(o.iter().all(|&x| x == 0.0), empty, "{name}: row {row} is {o:?}, {problem:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_single_key_returns_its_value() {
    for dtype in DType::ALL {
        let problem = Problem { dtype, ..problem(4, 1, Params::new(WIDTH, false)) };
        let inputs = common::inputs(&problem, 10);
        for name in VARIANTS.into_iter().chain(["reference"]) {
            let (o, _) = forward(name, &problem, &inputs, 1);
            o.chunks_exact(WIDTH).for_each(|row| assert_eq!(row, inputs.v.to_f32(), "{name} in {dtype}"));
        }
    }
}

#[test]
fn the_largest_f16_values_overflow_nowhere() {
    let scale = 1e-9;
    let problem = Problem { dtype: DType::F16, ..problem(20, 150, Params { scale, ..plain(true) }) };
    let near_max = |seed, dims: [usize; 4]| {
        let signs = normal(&mut rng(seed), dims.iter().product(), 1.0);
        let values: Vec<f32> = signs.iter().map(|x| if *x > 0.5 { -65504.0 } else { 60000.0 }).collect();
        tensor(DType::F16, dims, &values)
    };
    let inputs = Inputs {
        q: near_max(1, problem.shape.q_dims()),
        k: near_max(2, problem.shape.kv_dims()),
        v: near_max(3, problem.shape.kv_dims()),
    };
    check("near the largest f16", &problem, &inputs, 5e-4, 1e-4);
    let v = tensor(DType::F16, problem.shape.kv_dims(), &vec![65504.0; 150 * WIDTH]);
    let inputs = Inputs { v, ..inputs };
    for name in VARIANTS {
        let (o, _) = forward(name, &problem, &inputs, 2);
        assert!(o.iter().all(|&x| x == 65504.0), "{name}: averages of the largest value stay it");
    }
}

#[test]
fn what_is_not_a_number_shows_in_the_rows_that_saw_it_and_in_no_other() {
    let problem = problem(6, 140, plain(false));
    for poison in [f32::NAN, f32::INFINITY] {
        let mut inputs = common::inputs(&problem, 12);
        let mut q = inputs.q.to_f32();
        q[4 * WIDTH + 1] = poison;
        inputs.q = tensor(DType::F32, problem.shape.q_dims(), &q);
        for name in VARIANTS.into_iter().chain(["reference"]) {
            let (o, lse) = forward(name, &problem, &inputs, 1);
            for (row, (o, lse)) in o.chunks_exact(WIDTH).zip(lse).enumerate() {
                let shown = (o.iter().all(|x| x.is_nan()), lse.is_nan());
                assert_eq!(shown, (row == 4, row == 4), "{name}: row {row} with a {poison} in query 4: {lse} {o:?}");
            }
        }
    }
}

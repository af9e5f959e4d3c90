//! What must not change a result, bit for bit: memory layout, the rest of the batch, the number of threads; and lists
//! of keys that differ in length from head to head.

use crate::common;
use crate::common::ragged::Ragged;
use crate::common::{
    Problem, VARIANTS, WITH_BACKWARD, backward, bits, cpu, forward, forward_over, grad_o, inputs, shape,
};
use kvsieve::attention::{DenseKv, Inputs, Params, Shape};
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;

/// Problems that are small, large enough for the products to take several threads, and of every kind of mask.
fn problems() -> Vec<Problem> {
    let causal = |width| Params::new(width, true);
    let shapes = [
        (shape([2, 4, 2, 67, 130, 40]), causal(40)),
        (shape([2, 1, 1, 5, 3, 8]), causal(8)),
        (shape([2, 2, 1, 1, 2100, 64]), Params::new(64, false)),
        (shape([2, 1, 1, 300, 517, 128]), Params { softcap: Some(20.0), ..Params::new(128, false) }),
        (shape([2, 3, 3, 130, 130, 33]), Params { window: Some(17), ..causal(33) }),
    ];
    let problem = |(index, (shape, params))| Problem { shape, params, dtype: DType::ALL[index % 3] };
    let single = shape([1, 1, 1, 520, 530, 64]);
    let mut problems: Vec<Problem> = shapes.into_iter().enumerate().map(problem).collect();
    problems.push(Problem { shape: single, params: causal(64), dtype: DType::F32 });
    problems
}

/// `[B, H, L, D]` values in the order of `[B, L, H, D]`.
fn sequence_first(tensor: &Tensor) -> Tensor {
    let [batch, heads, len, width] = tensor.dims();
    let values = tensor.to_f32();
    let rows = (0..batch * len * heads).flat_map(|row| {
        let (b, l, h) = (row / (len * heads), row / heads % len, row % heads);
        values[((b * heads + h) * len + l) * width..][..width].iter().copied()
    });
    common::tensor(tensor.dtype(), [batch, len, heads, width], &rows.collect::<Vec<_>>())
}

/// The sequence `index` of a batch.
fn sequence(tensor: &Tensor, index: usize) -> Tensor {
    let [batch, heads, len, width] = tensor.dims();
    let values = tensor.to_f32();
    let part = values.len() / batch;
    common::tensor(tensor.dtype(), [1, heads, len, width], &values[index * part..][..part])
}

#[test]
fn permuted_storage_gives_the_same_bits() {
    for (seed, problem) in problems().iter().enumerate() {
        let inputs = inputs(problem, seed as u64);
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(sequence_first);
        let [q, k, v] = [&q, &k, &v].map(|tensor| tensor.view().permuted([0, 2, 1, 3]));
        let kv = DenseKv::new(k, v).unwrap();
        for name in VARIANTS {
            let straight = forward(name, problem, &inputs, 2);
            let permuted = forward_over(name, problem, q, &kv, cpu(2));
            assert_eq!(bits(&straight.0), bits(&permuted.0), "{name}: o of {problem:?}");
            assert_eq!(bits(&straight.1), bits(&permuted.1), "{name}: lse of {problem:?}");
        }
    }
}

#[test]
fn a_sequence_does_not_feel_the_rest_of_the_batch() {
    for (seed, problem) in problems().iter().enumerate().filter(|(_, problem)| problem.shape.batch == 2) {
        let both = inputs(problem, seed as u64);
        let alone = Problem { shape: Shape { batch: 1, ..problem.shape }, ..*problem };
        for name in VARIANTS {
            let (o, lse) = forward(name, problem, &both, 2);
            for index in 0..2 {
                let one = |tensor| sequence(tensor, index);
                let inputs = Inputs { q: one(&both.q), k: one(&both.k), v: one(&both.v) };
                let (single_o, single_lse) = forward(name, &alone, &inputs, 2);
                let halves = (&o[index * single_o.len()..], &lse[index * single_lse.len()..]);
                assert_eq!(bits(&single_o), bits(&halves.0[..single_o.len()]), "{name}: o of {problem:?}");
                assert_eq!(bits(&single_lse), bits(&halves.1[..single_lse.len()]), "{name}: lse of {problem:?}");
            }
        }
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    for (seed, problem) in problems().iter().enumerate() {
        let inputs = inputs(problem, seed as u64);
        for name in VARIANTS.into_iter().chain(["reference"]) {
            let (o, lse) = forward(name, problem, &inputs, 1);
            for threads in [2, 3] {
                let (many_o, many_lse) = forward(name, problem, &inputs, threads);
                assert_eq!(bits(&o), bits(&many_o), "{name}: o with {threads} threads, {problem:?}");
                assert_eq!(bits(&lse), bits(&many_lse), "{name}: lse with {threads} threads, {problem:?}");
            }
        }
        let grad_o = grad_o(problem, seed as u64);
        for name in WITH_BACKWARD {
            let one = backward(name, problem, &inputs, &grad_o, 1);
            for threads in [2, 3] {
                let many = backward(name, problem, &inputs, &grad_o, threads);
                for (which, (one, many)) in ["dq", "dk", "dv"].iter().zip(one.iter().zip(&many)) {
                    assert_eq!(bits(one), bits(many), "{name}: {which} with {threads} threads, {problem:?}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn lists_of_different_lengths_are_separate_problems(
        lens in prop::collection::vec(0usize..150, 4),
        group in 1usize..3,
        q_len in 1usize..30,
        causal: bool,
        window in prop_oneof![Just(None), (1usize..60).prop_map(Some)],
        spare in 0usize..20,
        threads in 1usize..=3,
        seed in 0u64..1 << 40,
    ) {
        // Two sequences of two KV heads; the shape's key length may exceed even the longest list.
        let kv_len = (lens.iter().max().unwrap() + spare).max(1);
        let shape = shape([2, 2 * group, 2, q_len, kv_len, 24]);
        let problem = Problem { shape, params: Params { window, ..Params::new(24, causal) }, dtype: DType::F32 };
        let inputs = inputs(&problem, seed);
        let (q, k, v) = (inputs.q.to_f32(), inputs.k.to_f32(), inputs.v.to_f32());
        let ragged = Ragged::prefixes(2, 24, kv_len, &k, &v, &lens);
        for name in VARIANTS.into_iter().chain(["reference"]) {
            let (o, lse) = forward_over(name, &problem, inputs.q.view(), &ragged, cpu(threads));
            for (list, &len) in lens.iter().enumerate() {
                let alone = Shape { batch: 1, q_heads: group, kv_heads: 1, kv_len: len, ..shape };
                let rows = group * q_len;
                let (part, part_lse) = (&o[list * rows * 24..][..rows * 24], &lse[list * rows..][..rows]);
                if len == 0 {
                    prop_assert!(part.iter().all(|&x| x == 0.0), "{name}: an empty list gives zeros");
                    prop_assert!(part_lse.iter().all(|&x| x == f32::NEG_INFINITY), "{name}");
                    continue;
                }
                let alone_inputs = Inputs {
                    q: common::tensor(DType::F32, alone.q_dims(), &q[list * rows * 24..][..rows * 24]),
                    k: common::tensor(DType::F32, alone.kv_dims(), &ragged.k[list]),
                    v: common::tensor(DType::F32, alone.kv_dims(), &ragged.v[list]),
                };
                let dense = forward(name, &Problem { shape: alone, ..problem }, &alone_inputs, 1);
                prop_assert!(common::relative_l2(part, &common::widen(&dense.0)) < 1e-6, "{name}: o of list {list}");
                for (got, wanted) in part_lse.iter().zip(&dense.1) {
                    prop_assert!(got == wanted || (got - wanted).abs() < 2e-6, "{name}: lse {got}, alone {wanted}");
                }
            }
        }
    }
}

//! Column sums of the softmax: against the definition in f64, over all kinds of masks, ranges and lists.

mod common;

use common::ragged::Ragged;
use common::{Problem, bits, cpu, exact, forward_over, inputs, shape, widen};
use kvsieve::attention::{Forward, KvRows, Params, Shape, export};
use kvsieve::tensor::{DType, TensorView};
use proptest::prelude::*;
use std::ops::Range;

/// Column sums by the crate, in poisoned memory.
fn by_tiles<'a>(
    problem: &Problem,
    q: TensorView<'a>,
    kv: &'a dyn KvRows,
    lse: &[f32],
    queries: Range<usize>,
    threads: usize,
) -> Vec<f32> {
    let Problem { shape, params, .. } = *problem;
    let call = Forward { shape, params, q, kv, cpu: cpu(threads) };
    let mut sums = vec![f32::NAN; shape.batch * shape.kv_heads * shape.kv_len];
    let mut scratch = vec![f32::NAN; export::workspace(&shape, threads)];
    export::column_sums(&call, lse, queries, &mut sums, &mut scratch);
    sums
}

/// Column sums by the definition: `[B, Hkv, Lk]`, averaged over the group.
fn by_definition(
    shape: &Shape,
    params: &Params,
    [q, k]: [&[f64]; 2],
    len: impl Fn(usize, usize) -> usize,
    queries: Range<usize>,
) -> Vec<f64> {
    let probabilities = exact::probabilities(shape, params, q, k, len).0;
    let mut sums = vec![0.0; shape.batch * shape.kv_heads * shape.kv_len];
    for (row, probabilities) in probabilities.chunks_exact(shape.kv_len).enumerate() {
        if queries.contains(&(row % shape.q_len)) {
            // Query heads of a group follow one another, as do the KV heads they belong to.
            let list = row / shape.q_len / shape.group();
            let sums = &mut sums[list * shape.kv_len..][..shape.kv_len];
            sums.iter_mut().zip(probabilities).for_each(|(sum, p)| *sum += p / shape.group() as f64);
        }
    }
    sums
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn column_sums_are_sums_of_the_softmax(
        (batch, kv_heads, group) in (1usize..3, 1usize..3, 1usize..4),
        (q_len, kv_len, head_dim) in (1usize..150, 1usize..600, 1usize..70),
        (causal, softcap) in (any::<bool>(), prop_oneof![Just(None), (1f32..40.0).prop_map(Some)]),
        window in prop_oneof![Just(None), (1usize..300).prop_map(Some)],
        last in prop_oneof![Just(1usize), Just(16), Just(usize::MAX)],
        dtype in prop::sample::select(DType::ALL.to_vec()),
        ragged: bool,
        threads in 1usize..=3,
        seed in 0u64..1 << 40,
    ) {
        let shape = shape([batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim]);
        let params = Params { softcap, window, ..Params::new(head_dim, causal) };
        let problem = Problem { shape, params, dtype };
        let inputs = inputs(&problem, seed);
        let (k, v) = (inputs.k.to_f32(), inputs.v.to_f32());
        let full = vec![kv_len; batch * kv_heads];
        let lens: Vec<usize> = if ragged {
            (0..full.len()).map(|list| 1 + (seed as usize).wrapping_mul(list + 7) % kv_len).collect()
        } else {
            full
        };
        let lists = Ragged::prefixes(kv_heads, head_dim, kv_len, &k, &v, &lens);
        let lse = forward_over("tiled", &problem, inputs.q.view(), &lists, cpu(threads)).1;
        let queries = q_len.saturating_sub(last)..q_len;
        let sums = by_tiles(&problem, inputs.q.view(), &lists, &lse, queries.clone(), threads);
        let len = |batch, head| lens[batch * kv_heads + head];
        let (q64, k64) = (widen(&inputs.q.to_f32()), widen(&k));
        let expected = by_definition(&shape, &params, [&q64, &k64], len, queries.clone());
        for (index, (&got, &wanted)) in sums.iter().zip(&expected).enumerate() {
            let apart = (f64::from(got) - wanted).abs();
            prop_assert!(apart <= 3e-6 * (0.1 + wanted), "key {}: {} is not {}", index, got, wanted);
            prop_assert!(wanted > 0.0 || got == 0.0, "key {} is seen by nobody", index);
        }
        // All the mass of the rows that see something, and no more.
        let rows = lse.iter().enumerate().filter(|(row, lse)| queries.contains(&(row % q_len)) && lse.is_finite());
        let mass = rows.count() as f64 / group as f64;
        let total: f64 = sums.iter().map(|&x| f64::from(x)).sum();
        prop_assert!((total - mass).abs() <= 1e-5 * (1.0 + mass), "{} rows give {}", mass, total);
        // The number of threads changes nothing.
        let other = by_tiles(&problem, inputs.q.view(), &lists, &lse, queries, 4 - threads);
        prop_assert_eq!(bits(&sums), bits(&other));
    }
}

#[test]
fn the_workspace_of_an_export_does_not_grow_with_the_context() {
    let square = |len| Shape { q_len: len, kv_len: len, ..shape([1, 8, 2, 1, 1, 128]) };
    assert_eq!(export::workspace(&square(1 << 10), 2), export::workspace(&square(1 << 20), 2));
    assert_eq!(export::workspace(&square(1 << 10), 4), 2 * export::workspace(&square(1 << 10), 2));
    assert!(export::workspace(&square(1 << 20), 1) < 1 << 20);
}

#[test]
fn a_query_range_that_is_empty_gives_zeros() {
    let problem = Problem { shape: shape([1, 2, 1, 4, 9, 8]), params: Params::new(8, true), dtype: DType::F32 };
    let inputs = inputs(&problem, 1);
    let lists = Ragged::prefixes(1, 8, 9, &inputs.k.to_f32(), &inputs.v.to_f32(), &[9]);
    let sums = by_tiles(&problem, inputs.q.view(), &lists, &[0.0; 8], 2..2, 2);
    assert_eq!(sums, [0.0; 9]);
}

#[test]
fn every_instruction_path_passes_these_tests() {
    common::pass_on_every_path();
}

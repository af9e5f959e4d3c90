//! Columns of the softmax, reduced: against the definition in f64, over all kinds of masks, ranges and lists.

use crate::common::ragged::Ragged;
use crate::common::{Problem, bits, cpu, exact, forward_over, inputs, shape, widen};
use kvsieve::attention::export::{self, OverGroup, OverQueries, Reduction};
use kvsieve::attention::{Forward, KvRows, Params, Shape};
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
    reduced_by_tiles(problem, q, kv, lse, queries, Reduction::RECEIVED, threads)
}

/// A reduction by the crate, in poisoned memory.
fn reduced_by_tiles<'a>(
    problem: &Problem,
    q: TensorView<'a>,
    kv: &'a dyn KvRows,
    lse: &[f32],
    queries: Range<usize>,
    reduction: Reduction,
    threads: usize,
) -> Vec<f32> {
    let Problem { shape, params, .. } = *problem;
    let call = Forward { shape, params, q, kv, cpu: cpu(threads) };
    let mut sums = vec![f32::NAN; shape.batch * shape.kv_heads * shape.kv_len];
    let mut scratch = vec![f32::NAN; export::workspace(&shape, threads)];
    export::columns(&call, lse, queries, reduction, &mut sums, &mut scratch);
    sums
}

/// A reduction by the definition, `[B, Hkv, Lk]`: the least and the most that rounding allows it to be.
fn reduced_by_definition(
    shape: &Shape,
    params: &Params,
    [q, k]: [&[f64]; 2],
    queries: Range<usize>,
    reduction: Reduction,
) -> Vec<[f64; 2]> {
    let p = exact::probabilities(shape, params, q, k, |_, _| shape.kv_len).0;
    let mut reduced = Vec::new();
    for list in 0..shape.batch * shape.kv_heads {
        for key in 0..shape.kv_len {
            let heads = (list * shape.group()..(list + 1) * shape.group()).map(|head| {
                let mut of_head = [0.0f64; 2];
                for i in queries.clone() {
                    let row = &p[(head * shape.q_len + i) * shape.kv_len..][..shape.kv_len];
                    let seen = (0..shape.kv_len).filter(|&j| exact::sees(params, i, j, shape.q_len, shape.kv_len));
                    let share = row[key] * seen.count() as f64;
                    let sees = exact::sees(params, i, key, shape.q_len, shape.kv_len);
                    of_head = match reduction.queries {
                        OverQueries::Sum => of_head.map(|sum| sum + row[key]),
                        OverQueries::SumOfSquares => of_head.map(|sum| sum + row[key] * row[key]),
                        OverQueries::Max => of_head.map(|most| most.max(row[key])),
                        // Too near to an even share to tell in f32.
                        OverQueries::CountBelowEven if (share - 1.0).abs() < 1e-4 => [of_head[0], of_head[1] + 1.0],
                        OverQueries::CountBelowEven if sees && share < 1.0 => of_head.map(|count| count + 1.0),
                        OverQueries::CountBelowEven => of_head,
                    };
                }
                of_head
            });
            let start = [0.0; 2];
            reduced.push(match reduction.group {
                OverGroup::Sum => heads.fold(start, |[a, b], [x, y]| [a + x, b + y]),
                OverGroup::Max => heads.fold(start, |[a, b], [x, y]| [a.max(x), b.max(y)]),
                OverGroup::Mean => {
                    heads.fold(start, |[a, b], [x, y]| [a + x, b + y]).map(|sum| sum / shape.group() as f64)
                }
            });
        }
    }
    reduced
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_reduction_is_that_of_the_softmax(
        (batch, kv_heads, group) in (1usize..3, 1usize..3, 1usize..4),
        (q_len, kv_len, head_dim) in (1usize..70, 1usize..260, 1usize..20),
        (causal, softcap) in (any::<bool>(), prop_oneof![Just(None), (1f32..40.0).prop_map(Some)]),
        window in prop_oneof![Just(None), (1usize..100).prop_map(Some)],
        last in prop_oneof![Just(1usize), Just(16), Just(usize::MAX)],
        queries in prop::sample::select(vec![OverQueries::Sum, OverQueries::SumOfSquares, OverQueries::Max, OverQueries::CountBelowEven]),
        over in prop::sample::select(vec![OverGroup::Mean, OverGroup::Sum, OverGroup::Max]),
        seed in 0u64..1 << 40,
    ) {
        let shape = shape([batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim]);
        let params = Params { softcap, window, ..Params::new(head_dim, causal) };
        let problem = Problem { shape, params, dtype: DType::F32 };
        let inputs = inputs(&problem, seed);
        let (k, v) = (inputs.k.to_f32(), inputs.v.to_f32());
        let lists = Ragged::prefixes(kv_heads, head_dim, kv_len, &k, &v, &vec![kv_len; batch * kv_heads]);
        let lse = forward_over("tiled", &problem, inputs.q.view(), &lists, cpu(1)).1;
        let (range, reduction) = (q_len.saturating_sub(last)..q_len, Reduction { queries, group: over });
        let got = reduced_by_tiles(&problem, inputs.q.view(), &lists, &lse, range.clone(), reduction, 1);
        let (q64, k64) = (widen(&inputs.q.to_f32()), widen(&k));
        let expected = reduced_by_definition(&shape, &params, [&q64, &k64], range.clone(), reduction);
        for (index, (&got, [least, most])) in got.iter().zip(expected).enumerate() {
            let (got, slack) = (f64::from(got), 3e-6 * (0.1 + most));
            prop_assert!(least - slack <= got && got <= most + slack, "key {index}: {got} is not {least} to {most}");
        }
        let other = reduced_by_tiles(&problem, inputs.q.view(), &lists, &lse, range, reduction, 3);
        prop_assert_eq!(bits(&got), bits(&other));
    }
}

#[test]
fn even_attention_is_not_below_even() {
    let problem = Problem { shape: shape([1, 1, 1, 40, 40, 8]), params: Params::new(8, true), dtype: DType::F32 };
    let inputs = inputs(&problem, 1);
    let (k, v) = (vec![0.0; 40 * 8], inputs.v.to_f32());
    let lists = Ragged::prefixes(1, 8, 40, &k, &v, &[40]);
    let lse = forward_over("tiled", &problem, inputs.q.view(), &lists, cpu(1)).1;
    let reduction = Reduction { queries: OverQueries::CountBelowEven, group: OverGroup::Mean };
    assert_eq!(reduced_by_tiles(&problem, inputs.q.view(), &lists, &lse, 0..40, reduction, 1), [0.0; 40]);
    // All keys alike, far from zero: logits have few digits left, and all lose the same.
    for size in [1.0f32, 30.0, 300.0, 3000.0] {
        let key: Vec<f32> = v[..8].iter().map(|x| size * x).collect();
        let lists = Ragged::prefixes(1, 8, 40, &key.repeat(40), &v, &[40]);
        let lse = forward_over("tiled", &problem, inputs.q.view(), &lists, cpu(1)).1;
        let counts = reduced_by_tiles(&problem, inputs.q.view(), &lists, &lse, 0..40, reduction, 1);
        assert_eq!(counts, [0.0; 40], "keys of {size}");
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

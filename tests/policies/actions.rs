//! What becomes of evicted tokens, and keys that are rotated: on caches small enough to do by hand, and as properties.

use crate::common::{cpu, normal, rng, tensor};
use kvsieve::attention::rope::{Frequencies, Rotation};
use kvsieve::attention::{DenseKv, Forward, Params, Shape};
use kvsieve::cache::{CacheShape, Column, PagedCache};
use kvsieve::eviction::{Given, retain};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::action::{Asked, Fold};
use kvsieve::policy::{PolicyError, Registry};
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;

/// A cache of one list under a policy, with these keys and values.
fn cache(arena: &Arena, policy: &str, dtype: DType, width: usize, keys: &[f32], values: &[f32]) -> PagedCache {
    let tokens = keys.len() / width;
    let columns = Registry::default().policy(policy).unwrap().columns();
    let shape = CacheShape {
        batch: 1,
        kv_heads: 1,
        head_dim: width,
        format: dtype.into(),
        max_tokens: tokens,
        page_tokens: 4,
        columns,
    };
    let mut cache = PagedCache::new(arena, shape).unwrap();
    let of = |values: &[f32]| -> Tensor { tensor(dtype, [1, 1, tokens, width], values) };
    cache.append(of(keys).view(), of(values).view(), 0..tokens).unwrap();
    cache
}

/// Shrinks the only list of a cache.
fn shrink(arena: &Arena, policy: &str, cache: &mut PagedCache, kept: &[u32], draws: Option<&[f32]>, threads: usize) {
    let rope = cache.shape().head_dim.is_multiple_of(2).then(|| Frequencies::new(cache.shape().head_dim, 10_000.0));
    let fold = Fold { arena, cpu: cpu(threads), seed: 7, number: 0, draws, rope: rope.as_ref(), asked: None };
    Registry::default().policy(policy).unwrap().shrink(&fold, cache, 0, kept).unwrap();
    assert_eq!(cache.lens(), [kept.len()]);
}

fn values(cache: &PagedCache) -> Vec<f32> {
    let mut rows = vec![0.0; cache.lens()[0] * cache.shape().head_dim];
    rows.chunks_exact_mut(cache.shape().head_dim).enumerate().for_each(|(slot, row)| cache.read_value(0, slot, row));
    rows
}

fn keys(cache: &PagedCache) -> Vec<f32> {
    let mut rows = vec![0.0; cache.lens()[0] * cache.shape().head_dim];
    rows.chunks_exact_mut(cache.shape().head_dim).enumerate().for_each(|(slot, row)| cache.read_key(0, slot, row));
    rows
}

fn assert_near(got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len());
    let near = got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0));
    assert!(near, "{got:?}, expected {wanted:?}");
}

#[test]
fn merge_averages_values_into_the_most_similar_key() {
    // Slots 1 and 3 stay. Key 0 is key 1 three times as long; key 2 lies at 45 degrees between both (the earlier one
    // takes it); key 4 points away from both.
    let keys_of = [[3.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [-1.0, -1.0]].concat();
    let values_of = [[6.0f32, 8.0], [0.0, 5.0], [-5.0, 0.0], [1.0, 1.0], [9.0, 9.0]].concat();
    let merged = |policy: &str| {
        let arena = Arena::unlimited();
        let mut cache = cache(&arena, policy, DType::F32, 2, &keys_of, &values_of);
        shrink(&arena, policy, &mut cache, &[1, 3], None, 2);
        assert_eq!(keys(&cache), [1.0, 0.0, 0.0, 2.0]);
        values(&cache)
    };
    // Norms 10 and 5 against 5: weights 1 * 2/3 and cos 45 * 1/2.
    let (near, wide) = (2.0 / 3.0, 0.5f32.sqrt() / 2.0);
    let both = [(near * 6.0 - wide * 5.0) / (1.0 + near + wide), (5.0 + near * 8.0) / (1.0 + near + wide)];
    assert_near(&merged("knorm+merge"), &[both[0], both[1], 1.0, 1.0]);
    let one = [near * 6.0 / (1.0 + near), (5.0 + near * 8.0) / (1.0 + near)];
    assert_near(&merged("knorm+merge:threshold=0.9"), &[one[0], one[1], 1.0, 1.0]);
}

#[test]
fn cam_shares_a_value_among_the_next_kept_tokens() {
    // Slots 2, 3 and 6 stay of 8; the window is 2. Slot 7 has nothing behind it.
    let attention = [0.5, 3.0, 1.0, 3.0, 0.0, 1.0, 2.0, 9.0];
    let (keys_of, values_of) = ([1.0; 8], [10.0, 20.0, 1.0, 2.0, 30.0, 40.0, 3.0, 50.0]);
    let merged = |draws: [f32; 8]| {
        let arena = Arena::unlimited();
        let policy = "knorm+cam:window=2";
        let mut cache = cache(&arena, policy, DType::F32, 1, &keys_of, &values_of);
        cache.add_attention(0, &attention).unwrap();
        shrink(&arena, policy, &mut cache, &[2, 3, 6], Some(&draws), 1);
        values(&cache)
    };
    // Chances: 0.5 / 2 and 1 (3 / 2) for the window (2, 3); none and 1 / 2 for (6).
    let sure = [0.3, 0.99, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0];
    assert_near(&merged(sure), &[1.0 + 10.0, 2.0 + 10.0, 3.0]);
    let lucky = [0.2, 0.99, 0.0, 0.0, 0.0, 0.4, 0.0, 0.0];
    assert_near(&merged(lucky), &[1.0 + 15.0, 2.0 + 15.0, 3.0 + 40.0]);
}

#[test]
fn cam_draws_as_often_as_its_chance() {
    // Every second token stays and has received four times what the evicted tokens have: a chance of a quarter each.
    let tokens = 4000;
    let (keys_of, values_of) = (vec![1.0; tokens], vec![1.0; tokens]);
    let arena = Arena::unlimited();
    let policy = "knorm+cam:window=1";
    let merged = |seed: u64| {
        let mut cache = cache(&arena, policy, DType::F32, 1, &keys_of, &values_of);
        let attention: Vec<f32> = (0..tokens).map(|slot| if slot % 2 == 1 { 4.0 } else { 1.0 }).collect();
        cache.add_attention(0, &attention).unwrap();
        let kept: Vec<u32> = (1..tokens as u32).step_by(2).collect();
        let fold = Fold { arena: &arena, cpu: cpu(2), seed, number: 0, draws: None, rope: None, asked: None };
        Registry::default().policy(policy).unwrap().shrink(&fold, &mut cache, 0, &kept).unwrap();
        values(&cache)
    };
    let (one, again, other) = (merged(1), merged(1), merged(2));
    assert!(one == again && one != other, "draws belong to the seed");
    let merges = one.iter().filter(|&&value| value == 2.0).count();
    assert!((400..=600).contains(&merges), "{merges} of 2000 were merged");
}

/// What `random` evicts drew low there; CAM draws anew.
#[test]
fn cam_draws_otherwise_than_random() {
    let (tokens, arena, policy) = (4000, Arena::unlimited(), "random+cam:window=1");
    let (keys_of, values_of) = (vec![1.0; tokens], vec![1.0; tokens]);
    let mut cache = cache(&arena, policy, DType::F32, 1, &keys_of, &values_of);
    cache.add_attention(0, &vec![1.0; tokens]).unwrap();
    let random = Registry::default().policy("random").unwrap();
    let input = |values: &[f32]| tensor(DType::F32, [1, 1, tokens, 1], values);
    let (q, k, v) = (input(&keys_of), input(&keys_of), input(&values_of));
    let kv = DenseKv::new(k.view(), v.view()).unwrap();
    let shape = Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len: tokens, kv_len: tokens, head_dim: 1 };
    let call = Forward { shape, params: Params::new(1, true), q: q.view(), kv: &kv, cpu: cpu(2) };
    let given = Given { seed: 7, ..Given::budget(tokens / 2) };
    let retained = retain(&random, call, given, &arena).unwrap();
    let scores = retained.scores.unwrap();
    // Every second token stays whatever it drew: of the others, half of which drew below a half, a quarter gives a quarter.
    let attention: Vec<f32> = (0..tokens).map(|slot| if slot % 2 == 1 { 4.0 } else { 1.0 }).collect();
    cache.add_attention(0, &attention.iter().map(|x| x - 1.0).collect::<Vec<_>>()).unwrap();
    let kept: Vec<u32> = (1..tokens as u32).step_by(2).collect();
    let fold = Fold { arena: &arena, cpu: cpu(2), seed: 7, number: 0, draws: None, rope: None, asked: None };
    Registry::default().policy(policy).unwrap().shrink(&fold, &mut cache, 0, &kept).unwrap();
    let merged = values(&cache).iter().map(|&value| value == 2.0).collect::<Vec<_>>();
    let low = (0..tokens / 2).filter(|&gap| scores[2 * gap] < 0.25);
    let (low, both) = low.fold((0, 0), |(low, both), gap| (low + 1, both + usize::from(merged[gap])));
    assert!(4 * both < 2 * low, "{both} of {low} that drew low were merged, where a quarter is by chance");
}

#[test]
fn accumulate_averages_runs_and_counts_them() {
    let arena = Arena::unlimited();
    let policy = "knorm+accumulate";
    let (keys_of, values_of) = ([1.0, 3.0, 5.0, 7.0, 9.0, 11.0], [6.0, 4.0, 2.0, 0.0, -2.0, -4.0]);
    let mut cache = cache(&arena, policy, DType::F32, 1, &keys_of, &values_of);
    let weights = |cache: &PagedCache| -> Vec<f32> {
        (0..cache.lens()[0]).map(|slot| cache.column(0, slot, Column::Weight)).collect()
    };
    // What comes before the first retained token goes into it as well.
    shrink(&arena, policy, &mut cache, &[1, 4], None, 1);
    assert_near(&keys(&cache), &[4.0, 10.0]);
    assert_near(&values(&cache), &[3.0, -3.0]);
    assert_eq!(weights(&cache), [4.0, 2.0]);
    // Again: four tokens weigh twice as much as two.
    shrink(&arena, policy, &mut cache, &[0], None, 1);
    assert_near(&keys(&cache), &[6.0]);
    assert_near(&values(&cache), &[1.0]);
    assert_eq!(weights(&cache), [6.0]);
}

/// What is averaged are keys before RoPE, and a slot stands where its newest token does.
#[test]
fn accumulate_into_the_later_token_averages_keys_before_rope() {
    let (policy, rope) = ("knorm+accumulate:into=later", Frequencies::new(4, 10_000.0));
    let before_rope = normal(&mut rng(3), 7 * 4, 1.0);
    let turned = |rows: &[f32], positions: &[usize]| {
        let mut rows = rows.to_vec();
        let turned = rows.chunks_exact_mut(4).zip(positions);
        turned.for_each(|(row, &position)| Rotation::new(&rope, position as i64).rotate(row));
        rows
    };
    let mean = |rows: &[f32]| -> Vec<f32> {
        let count = (rows.len() / 4) as f32;
        (0..4).map(|column| rows.iter().skip(column).step_by(4).sum::<f32>() / count).collect()
    };
    let arena = Arena::unlimited();
    let keys_of = turned(&before_rope, &[0, 1, 2, 3, 4, 5, 6]);
    let mut cache = cache(&arena, policy, DType::F32, 4, &keys_of, &before_rope);
    shrink(&arena, policy, &mut cache, &[1, 2, 5], None, 1);
    // What comes behind the last retained token goes into it as well.
    let slots = [mean(&before_rope[..8]), before_rope[8..12].to_vec(), mean(&before_rope[12..])].concat();
    assert_near(&values(&cache), &slots);
    assert_near(&keys(&cache), &turned(&slots, &[1, 2, 5]));
    // Again, from slots that stand for two tokens, for one and for four.
    shrink(&arena, policy, &mut cache, &[2], None, 1);
    assert_near(&values(&cache), &mean(&before_rope));
    assert_near(&keys(&cache), &turned(&mean(&before_rope), &[5]));
    assert_eq!((cache.column(0, 0, Column::Weight), cache.position(0, 0)), (7.0, 5));

    let fold = Fold { arena: &arena, cpu: cpu(1), seed: 0, number: 0, draws: None, rope: None, asked: None };
    cache
        .append(
            tensor(DType::F32, [1, 1, 1, 4], &[1.0; 4]).view(),
            tensor(DType::F32, [1, 1, 1, 4], &[1.0; 4]).view(),
            0..1,
        )
        .unwrap();
    let error = Registry::default().policy(policy).unwrap().shrink(&fold, &mut cache, 0, &[1]).unwrap_err();
    assert!(error.to_string().contains("rope_theta"), "{error}");
}

#[test]
fn turned_keys_stand_at_positions_without_gaps() {
    let arena = Arena::unlimited();
    let policy = "knorm+rerotate";
    let keys_of = normal(&mut rng(3), 9 * 4, 1.0);
    let mut rotated = cache(&arena, policy, DType::F32, 4, &keys_of, &keys_of);
    shrink(&arena, policy, &mut rotated, &(0..9).collect::<Vec<u32>>(), None, 1);
    assert_eq!(keys(&rotated), keys_of, "where nothing goes, nothing changes");
    shrink(&arena, policy, &mut rotated, &[0, 4, 8], None, 1);
    let mut wanted: Vec<f32> = [0, 4, 8].iter().flat_map(|&slot| keys_of[slot * 4..][..4].to_vec()).collect();
    let rope = Frequencies::new(4, 10_000.0);
    Rotation::new(&rope, 1 - 4).rotate(&mut wanted[4..8]);
    Rotation::new(&rope, 2 - 8).rotate(&mut wanted[8..]);
    assert_near(&keys(&rotated), &wanted);
    let places: Vec<_> = (0..3).map(|slot| (rotated.position(0, slot), rotated.origin(0, slot))).collect();
    assert_eq!(places, [(0, 0), (1, 4), (2, 8)]);
    // Without RoPE's base it is refused.
    let fold = Fold { arena: &arena, cpu: cpu(1), seed: 0, number: 0, draws: None, rope: None, asked: None };
    let policy = Registry::default().policy(policy).unwrap();
    let error = policy.shrink(&fold, &mut rotated, 0, &[0, 1]).unwrap_err();
    assert!(matches!(error, PolicyError::Missing { policy: "rerotate", .. }), "{error}");
}

/// Shrinks the only list of a cache under a policy that refits it to queries `[1, Hq, n, D]`.
fn refit(arena: &Arena, policy: &str, cache: &mut PagedCache, kept: &[u32], q: &Tensor, threads: usize) {
    let params = Params::new(cache.shape().head_dim, true);
    let asked = Some(Asked { q: q.view(), list: 0, params });
    let fold = Fold { arena, cpu: cpu(threads), seed: 0, number: 0, draws: None, rope: None, asked };
    // The action itself too where everything stays, which `shrink` spares it.
    let policy = Registry::default().policy(policy).unwrap();
    match kept.len() == cache.lens()[0] {
        true => policy.action.unwrap().fold(&fold, cache, 0, kept).unwrap(),
        false => policy.shrink(&fold, cache, 0, kept).unwrap(),
    }
}

fn biases(cache: &PagedCache) -> Vec<f32> {
    (0..cache.lens()[0]).map(|slot| cache.column(0, slot, Column::Bias)).collect()
}

#[test]
fn a_token_that_stays_alone_stands_for_all() {
    // Keys of zeros: every query looks at all four tokens alike.
    let q = tensor(DType::F32, [1, 2, 3, 1], &[1.0, -2.0, 0.5, 0.0, 3.0, 1.0]);
    for (bound, bias) in [("20", 4.0f32.ln()), ("1", 1.0)] {
        let arena = Arena::unlimited();
        let policy = format!("knorm+match:ridge=1e-9,bound={bound}");
        let mut cache = cache(&arena, &policy, DType::F32, 1, &[0.0; 4], &[1.0, 2.0, 3.0, 6.0]);
        refit(&arena, &policy, &mut cache, &[1], &q, 1);
        assert_near(&values(&cache), &[3.0]);
        assert_near(&biases(&cache), &[bias]);
    }
}

#[test]
fn a_fork_and_every_format_are_refitted_as_a_list_of_their_own() {
    let (tokens, width) = (150, 32);
    let (keys_of, values_of) = (normal(&mut rng(1), tokens * width, 1.0), normal(&mut rng(2), tokens * width, 1.0));
    let q = tensor(DType::F32, [1, 2, 9, width], &normal(&mut rng(3), 18 * width, 1.0));
    let policy = "knorm+match";
    let kept: Vec<u32> = (0..tokens as u32).step_by(3).collect();
    let mut exact = Vec::new();
    for (format, most) in [("f32", 0.0), ("bf16", 0.01), ("int8", 0.03), ("q4_0:recent=8", 0.3), ("kivi:bits=4", 0.3)] {
        let arena = Arena::unlimited();
        let columns = Registry::default().policy(policy).unwrap().columns();
        let format = format.parse().unwrap();
        let shape =
            CacheShape { batch: 2, kv_heads: 1, head_dim: width, format, max_tokens: tokens, page_tokens: 4, columns };
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        let of = |values: &[f32]| -> Tensor { tensor(DType::F32, [2, 1, tokens, width], &[values, values].concat()) };
        cache.append_sequence(1, of(&keys_of).view(), of(&values_of).view(), 1, 0..tokens).unwrap();
        cache.fork(1, 0);
        let rows = |cache: &PagedCache, list: usize| -> Vec<f32> {
            let mut rows = vec![0.0; cache.lens()[list] * width];
            let each = rows.chunks_exact_mut(width).enumerate();
            each.for_each(|(slot, row)| cache.read_value(list, slot, row));
            rows
        };
        let before = rows(&cache, 1);
        refit(&arena, policy, &mut cache, &kept, &q, 2);
        assert_eq!(
            (cache.lens(), rows(&cache, 1)),
            (&[kept.len(), tokens][..], before),
            "the other sequence, {format}"
        );
        assert!((0..tokens).all(|slot| cache.column(1, slot, Column::Bias) == 0.0));
        let got = rows(&cache, 0);
        if exact.is_empty() {
            exact.clone_from(&got);
        }
        let (difference, size) = got.iter().zip(&exact).fold((0.0f32, 0.0f32), |(difference, size), (got, exact)| {
            (difference + (got - exact).powi(2), size + exact * exact)
        });
        assert!((difference / size).sqrt() <= most, "{format}: {}", (difference / size).sqrt());
    }
}

#[test]
fn what_is_refitted_cannot_be_evicted_from_again_or_rotated() {
    for (policy, reason) in [
        ("h2o+match+every", "leave 'every' and 'delayed' out"),
        ("knorm+match:fit=values,of=context+delayed", "leave 'every' and 'delayed' out"),
        ("snapkv+match+rerotate", "leave 'rerotate' out"),
        ("snapkv+match:fit=none", "fit is 'none'; it must be both, bias or values"),
        ("snapkv+match:of=future", "of is 'future'; it must be recent or context"),
        ("snapkv+match:ridge=0", "ridge is '0'; it must be a number between"),
    ] {
        let error = Registry::default().policy(policy).err().expect(policy).to_string();
        assert!(error.contains(reason), "{policy}: {error}");
    }
    // Without queries it says so.
    let arena = Arena::unlimited();
    let mut cache = cache(&arena, "knorm+match", DType::F32, 1, &[0.0; 4], &[0.0; 4]);
    let fold = Fold { arena: &arena, cpu: cpu(1), seed: 0, number: 0, draws: None, rope: None, asked: None };
    let error = Registry::default().policy("knorm+match").unwrap().shrink(&fold, &mut cache, 0, &[0]).unwrap_err();
    assert!(matches!(error, PolicyError::Missing { policy: "match", .. }), "{error}");
}

/// What queries `[n, D]` are given by a list: the weight of each token in f64, by slot, beside that of the highest logit of
/// `of`; and their outputs.
fn answers(cache: &PagedCache, queries: &[f32], highest: Option<&[f64]>) -> (Vec<Vec<f64>>, Vec<f64>, Vec<f64>) {
    let (width, len) = (cache.shape().head_dim, cache.lens()[0]);
    let (keys, values, biases) = (keys(cache), values(cache), biases(cache));
    let (mut weights, mut outputs, mut tops) = (Vec::new(), Vec::new(), Vec::new());
    for (index, query) in queries.chunks_exact(width).enumerate() {
        let logit = |slot: usize| {
            let key = &keys[slot * width..][..width];
            let inner: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            inner * f64::from(Params::new(width, true).scale) + f64::from(biases[slot])
        };
        let logits: Vec<f64> = (0..len).map(logit).collect();
        let top = highest.map_or(logits.iter().copied().fold(f64::NEG_INFINITY, f64::max), |tops| tops[index]);
        let of: Vec<f64> = logits.iter().map(|logit| (logit - top).exp()).collect();
        let mass: f64 = of.iter().sum();
        for channel in 0..width {
            let sum: f64 = of.iter().enumerate().map(|(slot, w)| w * f64::from(values[slot * width + channel])).sum();
            outputs.push(sum / mass);
        }
        weights.push(of);
        tops.push(top);
    }
    (weights, outputs, tops)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_refitted_list_answers_its_queries_no_worse_and_takes_what_it_says(
        (len, width, group, queries) in (2usize..90, 1usize..12, 1usize..4, 1usize..9),
        keep_every in 1usize..6,
        part in prop::sample::select(vec!["match", "match:fit=bias", "match:fit=values", "match:of=context,queries=3,bound=1"]),
        ridge in prop::sample::select(vec!["1e-6", "0.01"]),
        seed in any::<u64>(),
    ) {
        let policy = format!("knorm+{part}{}ridge={ridge}", if part.contains(':') { ',' } else { ':' });
        let (keys_of, values_of) = (normal(&mut rng(seed), len * width, 1.0), normal(&mut rng(seed ^ 1), len * width, 1.0));
        let asked = normal(&mut rng(seed ^ 2), group * queries * width, 2.0);
        let q = tensor(DType::F32, [1, group, queries, width], &asked);
        let kept: Vec<u32> = (0..len as u32).filter(|slot| slot.is_multiple_of(keep_every as u32)).collect();
        let action = Registry::default().policy(&policy).unwrap().action.unwrap();
        let run = |threads: usize| {
            let arena = Arena::unlimited();
            let mut cache = cache(&arena, &policy, DType::F32, width, &keys_of, &values_of);
            refit(&arena, &policy, &mut cache, &kept, &q, threads);
            let shape = Shape { batch: 1, q_heads: group, kv_heads: 1, q_len: queries, kv_len: len, head_dim: width };
            let peak = arena.usage().peak.get(&Label::Workspace).copied().unwrap_or(0);
            assert_eq!(peak, action.scratch_bytes(&shape, threads), "{policy}");
            (keys(&cache), values(&cache), biases(&cache))
        };
        let (one_keys, one_values, one_biases) = run(1);
        prop_assert_eq!(&(one_keys.clone(), one_values.clone(), one_biases.clone()), &run(3), "{} on three threads", &policy);

        // Dropped, and with the new biases and the old values.
        let arena = Arena::unlimited();
        let with = |biases: Option<&[f32]>, values: Option<&[f32]>| {
            let mut cache = cache(&arena, "knorm+match", DType::F32, width, &keys_of, &values_of);
            cache.retain(0, kept.iter().map(|&slot| slot as usize)).unwrap();
            for slot in 0..kept.len() {
                biases.iter().for_each(|of| cache.set_column(0, slot, Column::Bias, of[slot]).unwrap());
                values.iter().for_each(|of| cache.write_value(0, slot, &of[slot * width..][..width]).unwrap());
            }
            cache
        };
        let dropped = with(None, None);
        prop_assert_eq!(&one_keys, &keys(&dropped), "keys stay as they were");
        if part.contains("values") {
            prop_assert!(one_biases.iter().all(|&bias| bias == 0.0));
        }
        if part.contains("bias") {
            prop_assert_eq!(&one_values, &values(&dropped));
        }
        if keep_every == 1 {
            prop_assert!(one_biases.iter().all(|bias| bias.abs() < 1e-5), "{:?}", one_biases);
            let unchanged = one_values.iter().zip(&values_of).all(|(got, was)| (got - was).abs() < 1e-5);
            prop_assert!(unchanged, "where everything stays, nothing changes");
        }
        prop_assume!(!part.contains("context"));
        let whole = cache(&arena, "knorm+match", DType::F32, width, &keys_of, &values_of);
        let (all, wanted, tops) = answers(&whole, &asked, None);
        let masses: Vec<f64> = all.iter().map(|weights| weights.iter().sum()).collect();
        let missed = |cache: &PagedCache| -> (f64, f64) {
            let (weights, outputs, _) = answers(cache, &asked, Some(&tops));
            let mass = weights.iter().zip(&masses).map(|(of, mass)| (of.iter().sum::<f64>() - mass).powi(2)).sum();
            (mass, outputs.iter().zip(&wanted).map(|(got, wanted)| (got - wanted).powi(2)).sum())
        };
        let (before, biased) = (missed(&dropped), missed(&with(Some(&one_biases), None)));
        let after = missed(&with(Some(&one_biases), Some(&one_values)));
        prop_assert!(biased.0 <= before.0 * (1.0 + 1e-5) + 1e-8, "mass {} by biases, {} before", biased.0, before.0);
        prop_assert!(after.1 <= biased.1 * (1.0 + 1e-5) + 1e-8, "outputs {} by values, {} before", after.1, biased.1);
        if part == "match:fit=values" {
            prop_assert!(after.1 <= before.1 * (1.0 + 1e-5) + 1e-8);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn actions_touch_only_what_they_should_and_take_what_they_say(
        (len, width) in (2usize..700, 1usize..20),
        keep_every in 2usize..40,
        dtype in prop::sample::select(DType::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let (keys_of, values_of) = (normal(&mut rng(seed), len * width, 1.0), normal(&mut rng(seed ^ 1), len * width, 1.0));
        let kept: Vec<u32> = (0..len as u32).filter(|slot| (slot + seed as u32 % 7).is_multiple_of(keep_every as u32)).collect();
        prop_assume!(!kept.is_empty() && kept.len() < len);
        let later = width.is_multiple_of(2).then_some("accumulate:into=later");
        for part in ["merge", "cam:window=3", "cam:window=5000", "accumulate"].into_iter().chain(later) {
            let policy = format!("knorm+{part}");
            let run = |threads: usize| {
                let arena = Arena::unlimited();
                let mut cache = cache(&arena, &policy, dtype, width, &keys_of, &values_of);
                if part.starts_with("cam") {
                    let received: Vec<f32> = normal(&mut rng(seed ^ 2), len, 1.0).iter().map(|x| x.abs()).collect();
                    cache.add_attention(0, &received).unwrap();
                }
                shrink(&arena, &policy, &mut cache, &kept, None, threads);
                let shape = Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: len, head_dim: width };
                let action = Registry::default().policy(&policy).unwrap().action.unwrap();
                let peak = arena.usage().peak.get(&Label::Workspace).copied().unwrap_or(0);
                assert_eq!(peak, action.scratch_bytes(&shape, threads), "{policy}");
                (keys(&cache), values(&cache), (0..kept.len()).map(|slot| cache.column(0, slot, Column::Weight)).sum::<f32>())
            };
            let (one_keys, one_values, weight) = run(1);
            prop_assert_eq!(&(one_keys.clone(), one_values.clone(), weight), &run(3), "{} on three threads", &policy);
            prop_assert!(one_keys.iter().chain(&one_values).all(|x| x.is_finite()));
            if part.starts_with("accumulate") {
                prop_assert_eq!(weight, len as f32, "every token counts once");
            } else {
                // Keys stay as they were.
                let arena = Arena::unlimited();
                let mut plain = cache(&arena, "knorm", dtype, width, &keys_of, &values_of);
                shrink(&arena, "knorm", &mut plain, &kept, None, 1);
                prop_assert_eq!(one_keys, keys(&plain), "{}", &policy);
            }
        }
    }
}

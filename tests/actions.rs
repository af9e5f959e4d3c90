//! What becomes of evicted tokens, and keys that are rotated: on caches small enough to do by hand, and as properties.

mod common;

use common::{cpu, normal, rng, tensor};
use kvsieve::attention::rope::{Frequencies, Rotation};
use kvsieve::cache::{CacheShape, Column, PagedCache};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::action::Fold;
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
    let fold = Fold { arena, cpu: cpu(threads), seed: 7, draws, rope: rope.as_ref() };
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
        let fold = Fold { arena: &arena, cpu: cpu(2), seed, draws: None, rope: None };
        Registry::default().policy(policy).unwrap().shrink(&fold, &mut cache, 0, &kept).unwrap();
        values(&cache)
    };
    let (one, again, other) = (merged(1), merged(1), merged(2));
    assert!(one == again && one != other, "draws belong to the seed");
    let merges = one.iter().filter(|&&value| value == 2.0).count();
    assert!((400..=600).contains(&merges), "{merges} of 2000 were merged");
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
    let fold = Fold { arena: &arena, cpu: cpu(1), seed: 0, draws: None, rope: None };
    let policy = Registry::default().policy(policy).unwrap();
    let error = policy.shrink(&fold, &mut rotated, 0, &[0, 1]).unwrap_err();
    assert!(matches!(error, PolicyError::Missing { policy: "rerotate", .. }), "{error}");
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
        for part in ["merge", "cam:window=3", "cam:window=5000", "accumulate"] {
            let policy = format!("knorm+{part}");
            let run = |threads: usize| {
                let arena = Arena::unlimited();
                let mut cache = cache(&arena, &policy, dtype, width, &keys_of, &values_of);
                if part.starts_with("cam") {
                    let received: Vec<f32> = normal(&mut rng(seed ^ 2), len, 1.0).iter().map(|x| x.abs()).collect();
                    cache.add_attention(0, &received).unwrap();
                }
                shrink(&arena, &policy, &mut cache, &kept, None, threads);
                let shape = kvsieve::attention::Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: len, head_dim: width };
                let action = Registry::default().policy(&policy).unwrap().action.unwrap();
                let peak = arena.usage().peak.get(&Label::Workspace).copied().unwrap_or(0);
                assert_eq!(peak, action.scratch_bytes(&shape, threads), "{policy}");
                (keys(&cache), values(&cache), (0..kept.len()).map(|slot| cache.column(0, slot, Column::Weight)).sum::<f32>())
            };
            let (one_keys, one_values, weight) = run(1);
            prop_assert_eq!(&(one_keys.clone(), one_values.clone(), weight), &run(3), "{} on three threads", &policy);
            prop_assert!(one_keys.iter().chain(&one_values).all(|x| x.is_finite()));
            if part == "accumulate" {
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

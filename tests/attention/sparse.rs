//! KV selection: what is chosen, that it is read where it lies, and how many bytes that is.

use crate::common;
use crate::common::{cpu, inputs, normal, rng, shape, tensor};
use kvsieve::attention::{DenseKv, Forward, KvRows, Outputs, Params, Shape, kernel};
use kvsieve::cache::{CacheShape, PAGE_TOKENS, PagedCache};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::Registry;
use kvsieve::policy::sparse::{KvSelection, Lists, Selected, Start};
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;

const SEQUENCES: usize = 2;
const HEADS: usize = 2;
const GROUP: usize = 3;

fn selection(text: &str) -> Box<dyn KvSelection> {
    Registry::default().policy(text).unwrap().selection.unwrap()
}

fn cache_shape(width: usize, dtype: DType, page_tokens: usize, max_tokens: usize) -> CacheShape {
    CacheShape {
        batch: SEQUENCES,
        kv_heads: HEADS,
        head_dim: width,
        format: dtype.into(),
        max_tokens,
        page_tokens,
        columns: &[],
    }
}

fn noise(dtype: DType, heads: usize, tokens: usize, width: usize, seed: u64) -> Tensor {
    let dims = [SEQUENCES, heads, tokens, width];
    tensor(dtype, dims, &normal(&mut rng(seed), dims.iter().product(), 1.0))
}

/// A decode step over some rows: the bits of `o` and the log-sum-exps.
fn attend(q: &Tensor, kv: &dyn KvRows, kv_len: usize, dtype: DType) -> (Vec<u8>, Vec<f32>) {
    let [batch, q_heads, q_len, head_dim] = q.dims();
    let shape = Shape { batch, q_heads, kv_heads: HEADS, q_len, kv_len, head_dim };
    let (params, arena, kernel) = (Params::new(head_dim, true), Arena::unlimited(), kernel("decode").unwrap());
    let mut outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
    let mut workspace = kernel.workspace(&shape, &params, dtype, 2).allocate(&arena).unwrap();
    let call = Forward { shape, params, q: q.view(), kv, cpu: cpu(2) };
    kernel.forward(&call, &mut outputs, &mut workspace).unwrap();
    (outputs.o.bytes().to_vec(), outputs.lse.to_vec())
}

/// Rows of a tensor in f64.
fn row(tensor: &Tensor, sequence: usize, head: usize, token: usize) -> Vec<f64> {
    let mut row = vec![0.0; tensor.dims()[3]];
    tensor.view().read_rows(sequence, head, token, &mut row);
    row.into_iter().map(f64::from).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn selected_pages_are_read_as_if_they_were_all_there_is(
        page_tokens in prop::sample::select(vec![1usize, 8, 16, 100]),
        (tokens, width) in (1usize..400, 1usize..40),
        every in 1usize..4,
        dtype in prop::sample::select(DType::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let (k, v) = (noise(dtype, HEADS, tokens, width, seed), noise(dtype, HEADS, tokens, width, seed ^ 1));
        let arena = Arena::unlimited();
        let shape = cache_shape(width, dtype, page_tokens, tokens);
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        // Token by token, so that pages of the lists alternate.
        (0..tokens).for_each(|token| cache.append(k.view(), v.view(), token..token + 1).unwrap());
        let pages = shape.pages(tokens);
        let count = pages.div_ceil(every);
        // Each list sees other pages, the last one always.
        let chosen = |list: usize| -> Vec<u32> {
            let mut chosen: Vec<u32> = (0..pages as u32 - 1).filter(|page| (*page as usize + list).is_multiple_of(every)).collect();
            chosen.truncate(count - 1);
            (0..pages as u32 - 1).for_each(|page| if chosen.len() < count - 1 && !chosen.contains(&page) { chosen.push(page) });
            chosen.sort_unstable();
            chosen.push(pages as u32 - 1);
            chosen
        };
        let all: Vec<u32> = (0..SEQUENCES * HEADS).flat_map(chosen).collect();
        let selected = Selected::new(Lists::all(&cache), &all, count, count);
        let len = (count - 1) * page_tokens + tokens - (pages - 1) * page_tokens;
        prop_assert_eq!(selected.tokens(), SEQUENCES * HEADS * len);
        let gathered = [&k, &v].map(|tensor_of| {
            let mut values = Vec::new();
            for list in 0..SEQUENCES * HEADS {
                for token in chosen(list).iter().flat_map(|&page| (page as usize * page_tokens..tokens).take(page_tokens)) {
                    values.extend(row(tensor_of, list / HEADS, list % HEADS, token).iter().map(|&x| x as f32));
                }
            }
            tensor(dtype, [SEQUENCES, HEADS, len, width], &values)
        });
        let dense = DenseKv::new(gathered[0].view(), gathered[1].view()).unwrap();
        let q = noise(dtype, HEADS * GROUP, 1, width, seed ^ 2);
        prop_assert_eq!(attend(&q, &selected, len, dtype), attend(&q, &dense, len, dtype));
    }

    #[test]
    fn quest_reads_the_pages_with_the_highest_bounds(
        (context, new) in (1usize..500, 1usize..20),
        width in 1usize..40,
        budget in 16usize..300,
        dtype in prop::sample::select(DType::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let tokens = context + new;
        let (k, q) = (noise(dtype, HEADS, tokens, width, seed), noise(dtype, HEADS * GROUP, tokens, width, seed ^ 1));
        let (arena, shape) = (Arena::unlimited(), cache_shape(width, dtype, PAGE_TOKENS, tokens));
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        cache.append(k.view(), k.view(), 0..context).unwrap();
        let before = arena.usage().live_bytes;
        let quest = selection("quest");
        let start = Start { cache: Lists::all(&cache), q: q.view().tokens(context - 1..context), budget_tokens: budget, cpu: cpu(2), arena: &arena };
        let mut selector = quest.open(&start).unwrap();
        let step = Shape { batch: SEQUENCES, q_heads: HEADS * GROUP, kv_heads: HEADS, q_len: 1, kv_len: tokens, head_dim: width };
        prop_assert_eq!(arena.usage().live_bytes - before, quest.bytes(&shape, &step, 2));
        for token in context..tokens {
            cache.append(k.view(), k.view(), token..token + 1).unwrap();
            selector.step(q.view().tokens(token..token + 1), Lists::all(&cache), cpu(2));
        }
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let read = (budget / PAGE_TOKENS).min(pages);
        let (name, choice) = selector.choice();
        prop_assert_eq!(name, "pages");
        for (list, chosen) in choice.iter().enumerate() {
            let (sequence, head) = (list / HEADS, list % HEADS);
            let bounds: Vec<f64> = (0..pages).map(|page| {
                let keys: Vec<Vec<f64>> = (page * PAGE_TOKENS..tokens.min((page + 1) * PAGE_TOKENS)).map(|token| row(&k, sequence, head, token)).collect();
                (head * GROUP..(head + 1) * GROUP).map(|q_head| {
                    let query = row(&q, sequence, q_head, tokens - 1);
                    let bound = (0..width).map(|d| {
                        let of = |pick: fn(f64, f64) -> f64| query[d] * keys.iter().map(|key| key[d]).reduce(pick).unwrap();
                        of(f64::min).max(of(f64::max))
                    }).sum::<f64>();
                    for key in &keys {
                        let logit: f64 = key.iter().zip(&query).map(|(a, b)| a * b).sum();
                        assert!(logit <= bound + 1e-9, "a bound is a bound");
                    }
                    bound
                }).fold(f64::NEG_INFINITY, f64::max)
            }).collect();
            prop_assert_eq!(chosen.len(), read);
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert_eq!(chosen[read - 1], pages as i64 - 1, "the query's own page");
            let least = chosen[..read - 1].iter().map(|&page| bounds[page as usize]).fold(f64::INFINITY, f64::min);
            for (page, &bound) in bounds[..pages - 1].iter().enumerate() {
                prop_assert!(chosen.contains(&(page as i64)) || bound <= least + 1e-4 || read == 1, "page {page} is better");
            }
        }
        let rows = (read - 1) * PAGE_TOKENS + tokens - (pages - 1) * PAGE_TOKENS;
        let bytes = (SEQUENCES * HEADS * (rows + pages)) as u64 * shape.token_bytes();
        prop_assert_eq!(selector.read_bytes(Lists::all(&cache)), bytes);
        // With room for everything, everything is read.
        if read == pages {
            let query = tensor(dtype, [SEQUENCES, HEADS * GROUP, 1, width], &(0..SEQUENCES * HEADS * GROUP).flat_map(|at| row(&q, at / (HEADS * GROUP), at % (HEADS * GROUP), tokens - 1)).map(|x| x as f32).collect::<Vec<f32>>());
            let rows = selector.rows(Lists::all(&cache)).unwrap();
            prop_assert_eq!(attend(&query, &rows, tokens, dtype), attend(&query, &cache, tokens, dtype));
        }
    }
}

#[test]
fn think_keeps_the_channels_that_queries_and_keys_are_large_in() {
    // One query of two heads, three keys, four channels: mean q^2 is 1, 5, 0, 5 and mean k^2 is 9, 2, 100, 1.
    let q = [[1.0f32, 3.0, 0.0, 1.0], [-1.0, 1.0, 0.0, 3.0]].concat();
    let k = [[3.0f32, 1.0, 10.0, 1.0], [-3.0, 2.0, 10.0, -1.0], [3.0, -1.0, -10.0, 1.0]].concat();
    let arena = Arena::unlimited();
    let shape = CacheShape {
        batch: 1,
        kv_heads: 1,
        head_dim: 4,
        format: (DType::F32).into(),
        max_tokens: 4,
        page_tokens: PAGE_TOKENS,
        columns: &[],
    };
    let (q, k) = (tensor(DType::F32, [1, 2, 1, 4], &q), tensor(DType::F32, [1, 1, 3, 4], &k));
    // Scores 9, 10, 0, 5.
    for (policy, budget_tokens, kept) in
        [("think:ratio=0.5", 3, vec![0i64, 1]), ("think:ratio=0.3", 3, vec![0, 1, 3]), ("think", 1, vec![1])]
    {
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        cache.append(k.view(), k.view(), 0..3).unwrap();
        let start = Start { cache: Lists::all(&cache), q: q.view(), budget_tokens, cpu: cpu(1), arena: &arena };
        let selector = selection(policy).open(&start).unwrap();
        assert_eq!(selector.choice(), ("channels", vec![kept.clone()]), "{policy}");
        selector.prune(&mut cache, 0).unwrap();
        cache.append(k.view(), k.view(), 0..1).unwrap();
        // The context's keys are without the other channels, and those behind it, and values, are whole.
        let mut key = [0.0; 4];
        for slot in 0..4 {
            cache.read_key(0, slot, &mut key);
            let wanted = row(&k, 0, 0, slot % 3);
            for (channel, &got) in key.iter().enumerate() {
                let stays = slot == 3 || kept.contains(&(channel as i64));
                let wanted = if stays { wanted[channel] } else { 0.0 };
                assert_eq!(f64::from(got), wanted, "{policy}, slot {slot}, channel {channel}");
            }
            cache.read_value(0, slot, &mut key);
            assert_eq!(key.map(f64::from).to_vec(), row(&k, 0, 0, slot % 3), "{policy}, slot {slot}");
        }
        let bytes = 3 * 4 * (kept.len() as u64 + 4) + 4 * (4 + 4);
        assert_eq!(selector.read_bytes(Lists::all(&cache)), bytes, "{policy}");
        drop(selector);
        assert_eq!(arena.live_bytes(Label::Activations) + arena.live_bytes(Label::Workspace), 0);
    }
}

#[test]
fn a_reader_without_room_says_so() {
    let made = inputs(
        &common::Problem { shape: shape([2, 6, 2, 4, 200, 8]), params: Params::new(8, true), dtype: DType::F32 },
        1,
    );
    let source = Arena::unlimited();
    let mut cache = PagedCache::new(&source, cache_shape(8, DType::F32, PAGE_TOKENS, 200)).unwrap();
    cache.append(made.k.view(), made.v.view(), 0..200).unwrap();
    for policy in ["quest", "think"] {
        let arena = Arena::with_limit(100);
        let start =
            Start { cache: Lists::all(&cache), q: made.q.view(), budget_tokens: 50, cpu: cpu(1), arena: &arena };
        assert!(selection(policy).open(&start).is_err(), "{policy}");
        assert_eq!(arena.usage().live_bytes, 0);
    }
}

//! Lists that have lost tokens: a query sees what is left of the tokens up to its own, whether its own is there or not.

use crate::common::{cpu, normal, rng, tensor};
use kvsieve::attention::{Forward, Outputs, Params, Shape, export, kernel};
use kvsieve::cache::{CacheShape, PagedCache, Sequences};
use kvsieve::memory::Arena;
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;
use rand::RngExt;

const HEADS: usize = 2;
const GROUP: usize = 3;
const WIDTH: usize = 20;

fn noise(heads: usize, tokens: usize, seed: u64) -> Tensor {
    let dims = [1, heads, tokens, WIDTH];
    tensor(DType::F32, dims, &normal(&mut rng(seed), dims.iter().product(), 1.0))
}

fn row(tensor: &Tensor, head: usize, token: usize) -> Vec<f64> {
    let mut row = vec![0.0; WIDTH];
    tensor.view().read_rows(0, head, token, &mut row);
    row.into_iter().map(f64::from).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn queries_see_by_positions_what_is_left_of_a_list(
        (tokens, queries) in (1usize..300, 1usize..40),
        share in 0.05f64..1.0,
        window in prop::option::of(1usize..80),
        seed in any::<u64>(),
    ) {
        let queries = queries.min(tokens);
        let (k, v) = (noise(HEADS, tokens, seed), noise(HEADS, tokens, seed ^ 1));
        let q = noise(HEADS * GROUP, queries, seed ^ 2);
        let arena = Arena::unlimited();
        let shape = CacheShape {
            batch: 1,
            kv_heads: HEADS,
            head_dim: WIDTH,
            format: DType::F32.into(),
            max_tokens: tokens,
            page_tokens: 16,
            columns: &[],
        };
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        cache.append(k.view(), v.view(), 0..tokens).unwrap();
        let mut draw = rng(seed ^ 3);
        // Of the latest token every list has its key.
        let left: Vec<Vec<usize>> = (0..HEADS)
            .map(|_| (0..tokens).filter(|&token| token + 1 == tokens || draw.random_bool(share)).collect())
            .collect();
        for (list, left) in left.iter().enumerate() {
            cache.retain(list, left.iter().copied()).unwrap();
        }
        let kv = Sequences { cache: &cache, first: 0, step: 1 };
        let kv_len = kv.max_len(1);
        let extents = Shape { batch: 1, q_heads: HEADS * GROUP, kv_heads: HEADS, q_len: queries, kv_len, head_dim: WIDTH };
        let params = Params { window, ..Params::new(WIDTH, true) };
        let call = Forward { shape: extents, params, q: q.view(), kv: &kv, cpu: cpu(2) };
        let lse = |name: &str| {
            let kernel = kernel(name).unwrap();
            let mut outputs = Outputs::allocate(&arena, &extents, DType::F32).unwrap();
            let mut workspace = kernel.workspace(&extents, &params, DType::F32, 2).allocate(&arena).unwrap();
            kernel.forward(&call, &mut outputs, &mut workspace).unwrap();
            outputs.lse.to_vec()
        };
        let [exact, decoded] = ["reference", "decode"].map(lse);
        let mut sums = vec![0.0; HEADS * kv_len];
        let mut scratch = vec![0.0; export::workspace(&extents, 2)];
        export::column_sums(&call, &exact, 0..queries, &mut sums, &mut scratch);
        for (head, left) in left.iter().enumerate() {
            let mut received = vec![0.0; left.len()];
            for (member, query) in (0..GROUP).flat_map(|member| (0..queries).map(move |query| (member, query))) {
                let at = (head * GROUP + member) * queries + query;
                let (position, asks) = (tokens - queries + query, row(&q, head * GROUP + member, query));
                let is_seen = |token: usize| token <= position && window.is_none_or(|window| token + window > position);
                let logit = |token: usize| {
                    row(&k, head, token).iter().zip(&asks).map(|(a, b)| a * b).sum::<f64>() * f64::from(params.scale)
                };
                let logits: Vec<Option<f64>> = left.iter().map(|&token| is_seen(token).then(|| logit(token))).collect();
                let sum: f64 = logits.iter().flatten().map(|logit| logit.exp()).sum();
                for lse in [exact[at], decoded[at]] {
                    prop_assert!(lse == sum.ln() as f32 || (f64::from(lse) - sum.ln()).abs() < 1e-4, "{lse} {}", sum.ln());
                }
                let pairs = received.iter_mut().zip(&logits);
                pairs.for_each(|(received, logit)| *received += logit.map_or(0.0, |logit| logit.exp() / sum) / GROUP as f64);
            }
            for (got, expected) in sums[head * kv_len..].iter().zip(&received) {
                prop_assert!((f64::from(*got) - expected).abs() < 1e-4, "{got} {expected}");
            }
        }
    }
}

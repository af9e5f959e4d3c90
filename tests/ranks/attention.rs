//! Attention over ranks is one rank's attention: results, bytes and messages, on threads of one process.

use crate::common::{normal, rng, shape};
use kvsieve::attention::{Backward, DenseKv, Forward, Gradients, Outputs, Params, Shape, kernel};
use kvsieve::cache::{CacheShape, PagedCache};
use kvsieve::device::Cpu;
use kvsieve::eviction::{Given, retain};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::{Policy, Registry};
use kvsieve::ranks::evict::{Held, Sharded};
use kvsieve::ranks::{Placement, Rank, RankError, Ring, RingBackward, Shards, Tree, threads};
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;
use std::ops::Range;

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

/// A problem with its tensors, and one rank's results.
struct Whole {
    shape: Shape,
    params: Params,
    dtype: DType,
    /// `q`, `k`, `v`, `do`.
    inputs: [Tensor; 4],
    outputs: Outputs,
    gradients: Gradients,
}

impl Whole {
    fn new(shape: Shape, params: Params, dtype: DType, seed: u64) -> Self {
        let (arena, mut rng, cpu) = (Arena::unlimited(), rng(seed), Cpu::new(Some(1)).unwrap());
        let mut draw = |dims: [usize; 4]| {
            let values = normal(&mut rng, dims.iter().product(), 1.0);
            Tensor::from_f32(&arena, Label::Input, dtype, dims, &values).unwrap()
        };
        let inputs = [shape.q_dims(), shape.kv_dims(), shape.kv_dims(), shape.q_dims()].map(&mut draw);
        let tiled = kernel("tiled").unwrap();
        let kv = DenseKv::new(inputs[1].view(), inputs[2].view()).unwrap();
        let forward = Forward { shape, params, q: inputs[0].view(), kv: &kv, cpu: &cpu };
        let mut outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
        let mut workspace = tiled.workspace(&shape, &params, dtype, 1).allocate(&arena).unwrap();
        tiled.forward(&forward, &mut outputs, &mut workspace).unwrap();
        let mut gradients = Gradients::allocate(&arena, &shape, dtype).unwrap();
        let mut workspace = tiled.backward_workspace(&shape, &params, dtype, 1).unwrap().allocate(&arena).unwrap();
        let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: inputs[3].view() };
        tiled.backward(&call, &mut gradients, &mut workspace).unwrap();
        Whole { shape, params, dtype, inputs, outputs, gradients }
    }
}

fn part(tensor: &Tensor, ranges: &[Range<usize>], arena: &Arena) -> Tensor {
    Tensor::from_tokens(arena, Label::Input, tensor.dtype(), tensor.dims(), tensor.bytes(), ranges).unwrap()
}

/// Largest difference of a rank's part from the whole, and the largest number there.
fn distance(part_of: &Tensor, whole: &Tensor, ranges: &[Range<usize>]) -> (f32, f32) {
    let expected = part(whole, ranges, &Arena::unlimited()).to_f32();
    assert_eq!(part_of.dims()[2], ranges.iter().map(Range::len).sum::<usize>());
    let pairs = part_of.to_f32().into_iter().zip(&expected);
    let most = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    (pairs.fold(0.0, |most, (a, b)| if (a - b).abs() > most || a.is_nan() { (a - b).abs() } else { most }), most)
}

/// Several times what the rounding of `dtype` explains.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 4e-3,
        DType::Bf16 => 3e-2,
    }
}

fn assert_close(name: &str, got: &Tensor, whole: &Tensor, ranges: &[Range<usize>]) {
    let (distance, most) = distance(got, whole, ranges);
    assert!(distance <= tolerance(got.dtype()) * most.max(1.0), "{name} is {distance} off, of {most}");
}

fn assert_close_lse(got: &[f32], whole: &Whole, ranges: &[Range<usize>]) {
    let tokens: Vec<usize> = ranges.iter().cloned().flatten().collect();
    for (row, &lse) in got.iter().enumerate() {
        let expected = whole.outputs.lse[row / tokens.len() * whole.shape.q_len + tokens[row % tokens.len()]];
        assert!(lse == expected || (lse - expected).abs() < 1e-3, "row {row}: {lse}, one rank {expected}");
    }
}

fn ring(whole: &Whole, ranks: usize, threads: usize) -> Result<(), RankError> {
    let Whole { shape, params, dtype, inputs, .. } = whole;
    let ring = Ring::new(*shape, *params, *dtype, ranks)?;
    let tiled = kernel("tiled").unwrap();
    threads::run(ranks, |comm| {
        let (rank, arena, cpu) = (comm.rank(), Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
        let on = Rank { comm, cpu: &cpu, arena: &arena, kernel: &*tiled };
        let (q_of, kv_of) = (ring.queries().of(rank), ring.keys().of(rank));
        let own = [(0, &q_of), (1, &kv_of), (2, &kv_of), (3, &q_of)];
        let [q, k, v, grad_o] = own.map(|(index, ranges)| part(&inputs[index], ranges, &arena));
        let held = ring.input_bytes(rank) + Tensor::bytes_of(*dtype, grad_o.dims());
        assert_eq!(arena.usage().live_bytes, held);

        arena.reset_peak();
        let outputs = ring.forward(on, q.view(), [&k, &v])?;
        assert_eq!(arena.usage().peak_bytes - held, ring.forward_bytes(&*tiled, rank, threads), "forward, rank {rank}");
        assert_eq!(comm.take_traffic().sent_bytes, ring.forward_sent_bytes(rank));
        assert_close("o", &outputs.o, &whole.outputs.o, &q_of);
        assert_close_lse(&outputs.lse, whole, &q_of);

        let held = arena.usage().live_bytes;
        arena.reset_peak();
        let call = RingBackward { q: q.view(), o: outputs.o.view(), lse: &outputs.lse, grad_o: grad_o.view() };
        let gradients = ring.backward(on, call, [&k, &v])?;
        let expected = ring.backward_bytes(&*tiled, rank, threads).unwrap();
        assert_eq!(arena.usage().peak_bytes - held, expected, "backward, rank {rank}");
        assert_eq!(comm.take_traffic().sent_bytes, ring.backward_sent_bytes(rank));
        assert_close("dq", &gradients.q, &whole.gradients.q, &q_of);
        assert_close("dk", &gradients.k, &whole.gradients.k, &kv_of);
        assert_close("dv", &gradients.v, &whole.gradients.v, &kv_of);

        ring.send_alone(on, [&k, &v])?;
        assert_eq!(comm.take_traffic().sent_bytes, ring.forward_sent_bytes(rank));
        Ok(())
    })
    .map(drop)
}

fn tree(whole: &Whole, ranks: usize, name: &str) -> Result<(), RankError> {
    let Whole { shape, params, dtype, inputs, .. } = whole;
    let tree = Tree::new(*shape, *params, *dtype, ranks)?;
    let kernel = kernel(name).unwrap();
    let first = threads::run(ranks, |comm| {
        let (rank, arena, cpu) = (comm.rank(), Arena::unlimited(), Cpu::new(Some(1)).unwrap());
        let on = Rank { comm, cpu: &cpu, arena: &arena, kernel: &*kernel };
        let all = vec![Range { start: 0, end: shape.q_len }];
        let own = [(0, &all[..]), (1, &tree.keys().of(rank)), (2, &tree.keys().of(rank))];
        let [q, k, v] = own.map(|(index, ranges)| part(&inputs[index], ranges, &arena));
        assert_eq!(arena.usage().live_bytes, tree.input_bytes(rank));
        arena.reset_peak();
        let outputs = tree.forward(on, q.view(), &DenseKv::new(k.view(), v.view())?)?;
        let peak_bytes = arena.usage().peak_bytes - tree.input_bytes(rank);
        assert_eq!(peak_bytes, tree.forward_bytes(&*kernel, rank, 1), "rank {rank}");
        assert_eq!(comm.take_traffic().sent_bytes, tree.forward_sent_bytes(rank));
        assert_close("o", &outputs.o, &whole.outputs.o, &all);
        assert_close_lse(&outputs.lse, whole, &all);
        Ok::<_, RankError>(outputs.o.bytes().to_vec())
    })?;
    assert!(first.iter().all(|o| *o == first[0]), "all ranks hold the same bits");
    Ok(())
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_ring_computes_what_one_rank_does(
        heads in prop_oneof![Just([1, 1]), Just([4, 2]), Just([6, 1])],
        batch in 1usize..3, lens in [16usize..150, 16usize..150], same: bool, causal: bool,
        width in prop_oneof![Just(8usize), Just(20), Just(64)],
        softcap in prop_oneof![Just(None), Just(Some(5.0f32))], dtype in dtypes(), seed: u64,
    ) {
        let kv_len = if same { lens[0] } else { lens[1] };
        let shape = shape([batch, heads[0], heads[1], lens[0], kv_len, width]);
        let whole = Whole::new(shape, Params { softcap, ..Params::new(width, causal) }, dtype, seed);
        for ranks in RANKS {
            ring(&whole, ranks, 1 + ranks % 2).unwrap();
        }
    }

    #[test]
    fn a_tree_computes_what_one_rank_does(
        heads in prop_oneof![Just([1, 1]), Just([4, 2]), Just([6, 1])],
        batch in 1usize..3, q_len in 1usize..6, kv_len in 8usize..3000, causal: bool, dtype in dtypes(), seed: u64,
    ) {
        let shape = shape([batch, heads[0], heads[1], q_len, kv_len, 24]);
        let whole = Whole::new(shape, Params::new(24, causal), dtype, seed);
        for ranks in RANKS {
            tree(&whole, ranks, if seed % 2 == 0 { "decode" } else { "tiled" }).unwrap();
        }
    }
}

#[test]
fn what_cannot_be_shared_out_is_refused() {
    let shape = shape([1, 2, 1, 20, 20, 8]);
    let windowed = Params { window: Some(4), ..Params::new(8, true) };
    let error = Ring::new(shape, windowed, DType::F32, 2).unwrap_err();
    assert!(error.to_string().starts_with("a window of 4 is not available over ranks"), "{error}");
    let error = Ring::new(shape, Params::new(8, true), DType::F32, 11).unwrap_err();
    assert!(error.to_string().starts_with("20 tokens cannot be shared by 11 ranks; at least 22"), "{error}");
    assert!(Shards::new(7, 8, Placement::Contiguous).is_err());
}

/// What a policy retains of a context on one rank, by list.
fn retained_alone(whole: &Whole, policy: &Policy, budget_tokens: usize) -> Vec<Vec<u32>> {
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
    let kv = DenseKv::new(whole.inputs[1].view(), whole.inputs[2].view()).unwrap();
    let call = Forward { shape: whole.shape, params: whole.params, q: whole.inputs[0].view(), kv: &kv, cpu: &cpu };
    let retained = retain(policy, call, Given::budget(budget_tokens), &arena).unwrap();
    (0..whole.shape.batch * whole.shape.kv_heads).map(|list| retained.selection.kept(list).to_vec()).collect()
}

/// The same of a cache that is shared out, put together again; checks that each rank gave its bytes back.
fn retained_shared(whole: &Whole, name: &str, policy: &Policy, budget_tokens: usize, ranks: usize) -> Vec<Vec<u32>> {
    let Whole { shape, params, dtype, inputs, .. } = whole;
    let tree = Tree::new(*shape, *params, *dtype, ranks).unwrap();
    let sharded = Sharded::new(name, policy).unwrap();
    let tiled = kernel("tiled").unwrap();
    let of_ranks = threads::run(ranks, |comm| {
        let (rank, arena, cpu) = (comm.rank(), Arena::unlimited(), Cpu::new(Some(1)).unwrap());
        let on = Rank { comm, cpu: &cpu, arena: &arena, kernel: &*tiled };
        let tokens = tree.keys().of(rank);
        let cache_shape = CacheShape {
            batch: shape.batch,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            format: (*dtype).into(),
            max_tokens: tokens[0].len(),
            page_tokens: 16,
            columns: &[],
        };
        let mut cache = PagedCache::new(&arena, cache_shape)?;
        let [k, v] = [1, 2].map(|index| part(&inputs[index], &tokens, &Arena::unlimited()));
        cache.append(k.view(), v.view(), 0..tokens[0].len())?;
        let held = Held { tree: &tree, q: inputs[0].view(), budget_tokens, layers: 1, seed: 0 };
        sharded.evict(on, held, &mut cache)?;
        assert_eq!(comm.take_traffic().sent_bytes, sharded.sent_bytes(&tree, rank), "rank {rank} of {ranks}");
        let kept: Vec<Vec<u32>> = (0..cache_shape.lists())
            .map(|list| {
                (0..cache.lens()[list]).map(|slot| (tokens[0].start + cache.position(list, slot)) as u32).collect()
            })
            .collect();
        let tokens_bytes = kept.iter().map(Vec::len).sum::<usize>() as u64 * cache_shape.token_bytes();
        assert_eq!(arena.live_bytes(Label::Kv), tokens_bytes);
        Ok::<_, RankError>(kept)
    });
    let mut lists = vec![Vec::new(); shape.batch * shape.kv_heads];
    for kept in of_ranks.unwrap() {
        lists.iter_mut().zip(kept).for_each(|(all, kept)| all.extend(kept));
    }
    lists
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn a_cache_that_is_shared_out_keeps_what_one_rank_keeps(
        name in prop::sample::select(vec![
            "streaming-llm", "knorm", "keydiff", "h2o", "h2o:age=true", "snapkv:window=8", "snapkv:window=40,group=max",
            "snapkv:window=5,queries=max,pool=max", "tova", "max-attention", "knorm+protect:sink=3", "snapkv:window=8+ada",
            "keydiff+global",
        ]),
        heads in prop_oneof![Just([1, 1]), Just([4, 2]), Just([6, 2])],
        len in 24usize..300, budget in 0.1f64..0.9, seed: u64,
    ) {
        let policy = Registry::default().policy(name).unwrap();
        let whole = Whole::new(shape([2, heads[0], heads[1], len, len, 16]), Params::new(16, true), DType::F32, seed);
        let budget_tokens = ((len as f64 * budget) as usize).max(6);
        let alone = retained_alone(&whole, &policy, budget_tokens);
        for ranks in RANKS {
            prop_assert_eq!(&retained_shared(&whole, name, &policy, budget_tokens, ranks), &alone, "{} ranks", ranks);
        }
    }
}

#[test]
fn policies_that_need_more_than_is_gathered_are_refused() {
    for (name, why) in [
        ("full", "it evicts nothing"),
        ("lagkv", "its scores are no single statistic of a token"),
        ("scissorhands", "it counts the keys that a query sees"),
        ("knorm+merge", "tokens that it merges or moves"),
    ] {
        let policy = Registry::default().policy(name).unwrap();
        let error = Sharded::new(name, &policy).err().unwrap().to_string();
        assert!(error.starts_with(&format!("policy '{name}' is not available over ranks: {why}")), "{error}");
    }
}

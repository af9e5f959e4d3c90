//! Eviction policies through `retain`: what each promises, on random problems and on ones small enough to do by hand.

use crate::common::exact;
use crate::common::{Problem, cpu, inputs, normal, rng, shape, tensor, widen};
use kvsieve::attention::rope::Frequencies;
use kvsieve::attention::{DenseKv, Forward, Inputs, Params, Shape};
use kvsieve::cache::PAGE_TOKENS;
use kvsieve::eviction::{Given, retain};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::{
    Budget, BudgetError, Decoding, PARTS, POLICIES, PRESETS, PolicyError, Registry, Statistic, markdown,
};
use kvsieve::tensor::{DType, Tensor};
use proptest::prelude::*;

/// What an eviction step gave, out of the arena.
#[derive(Debug, Clone, PartialEq)]
struct Verdict {
    kept: Vec<Vec<u32>>,
    scores: Option<Vec<f32>>,
    best_lost: Vec<f32>,
    tie_rate: f64,
}

/// How a problem is evicted.
#[derive(Clone, Copy)]
struct How<'a> {
    policy: &'a str,
    budget_tokens: usize,
    seed: u64,
    threads: usize,
    layers: usize,
    future: Option<&'a Tensor>,
}

fn how(policy: &str, budget_tokens: usize) -> How<'_> {
    How { policy, budget_tokens, seed: 0, threads: 2, layers: 1, future: None }
}

fn try_verdict(how: How<'_>, shape: Shape, inputs: &Inputs) -> Result<Verdict, PolicyError> {
    let policy = Registry::default().policy(how.policy).unwrap();
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let params = Params::new(shape.head_dim, true);
    let call = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: cpu(how.threads) };
    let arena = Arena::unlimited();
    // RoPE rotates pairs of channels: heads of odd width have none.
    let rope = shape.head_dim.is_multiple_of(2).then(|| Frequencies::new(shape.head_dim, 10_000.0));
    let given = Given {
        layers: how.layers,
        future: how.future.map(Tensor::view),
        rope: rope.as_ref(),
        seed: how.seed,
        ..Given::budget(how.budget_tokens)
    };
    let evicted = retain(&policy, call, given, &arena)?;
    let lists = shape.batch * shape.kv_heads;
    let verdict = Verdict {
        kept: (0..lists).map(|list| evicted.selection.kept(list).to_vec()).collect(),
        scores: evicted.scores.as_ref().map(|scores| scores.to_vec()),
        best_lost: evicted.selection.best_lost.clone(),
        tie_rate: evicted.tie_rate,
    };
    drop(evicted);
    assert_eq!(arena.usage().live_bytes, 0, "an eviction step leaves nothing behind");
    Ok(verdict)
}

fn verdict(how: How<'_>, shape: Shape, inputs: &Inputs) -> Verdict {
    try_verdict(how, shape, inputs).unwrap()
}

fn problem(shape: Shape, dtype: DType) -> Problem {
    Problem { shape, params: Params::new(shape.head_dim, true), dtype }
}

/// Inputs of f32 with the given keys; queries and values are noise.
fn with_keys(shape: Shape, keys: &[f32]) -> Inputs {
    let mut made = inputs(&problem(shape, DType::F32), 1);
    made.k = tensor(DType::F32, shape.kv_dims(), keys);
    made
}

/// Softmax probabilities in f64, `[B, Hq, Lq, Lk]`.
fn probabilities(shape: &Shape, params: &Params, q: &Tensor, k: &Tensor) -> Vec<f64> {
    exact::probabilities(shape, params, &widen(&q.to_f32()), &widen(&k.to_f32()), |_, _| shape.kv_len).0
}

/// Attention that `queries` give each key of each KV head, summed over queries and averaged over the group.
fn column_sums(shape: &Shape, p: &[f64], queries: std::ops::Range<usize>) -> Vec<f64> {
    let mut sums = vec![0.0; shape.batch * shape.kv_heads * shape.kv_len];
    for (row, p) in p.chunks_exact(shape.kv_len).enumerate() {
        let (head, i) = (row / shape.q_len, row % shape.q_len);
        if queries.contains(&i) {
            let target = &mut sums[head / shape.group() * shape.kv_len..][..shape.kv_len];
            target.iter_mut().zip(p).for_each(|(sum, p)| *sum += p / shape.group() as f64);
        }
    }
    sums
}

/// The `count` best of each list by an f64 score, later ones first among equals; ascending.
fn best(scores: &[f64], kv_len: usize, count: usize) -> Vec<Vec<u32>> {
    let lists = scores.chunks_exact(kv_len).map(|scores| {
        let mut order: Vec<u32> = (0..kv_len as u32).collect();
        order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(b.cmp(&a)));
        order.truncate(count);
        order.sort_unstable();
        order
    });
    lists.collect()
}

fn assert_scores(got: &[f32], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len());
    for (index, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let error = (f64::from(got) - wanted).abs();
        assert!(error <= tolerance * wanted.abs().max(1.0), "score {index} is {got}, expected {wanted}");
    }
}

/// Whether a policy needs neither a file nor a model, as one that repeats its context.
fn works_alone(name: &str) -> bool {
    let policy = Registry::default().policy(name).unwrap();
    policy.reconstruction.is_none() && policy.parameters.missing().is_none()
}

/// The methods of which that is so.
fn without_file() -> impl Iterator<Item = &'static str> {
    POLICIES.iter().map(|entry| entry.name).filter(|name| works_alone(name))
}

/// The methods and presets of the registry, every part on some method, and some with other parameters.
fn names() -> Vec<String> {
    let mut names: Vec<String> = without_file().map(|name| name.to_string()).collect();
    names.extend(PRESETS.iter().map(|preset| preset.name.to_string()).filter(|name| works_alone(name)));
    // Of a threshold the budget is the most that stays, unless all reach it.
    let parts = PARTS.iter().map(|part| part.name).filter(|part| *part != "threshold");
    names.extend(parts.map(|part| format!("knorm+{part}")));
    let more = [
        "knorm+threshold:at=-1e9",
        "streaming-llm:sink=0",
        "snapkv:window=3,kernel=1",
        "h2o:window=0",
        "h2o:window=5",
        "h2o:age=true+ada:floor=0.5",
        "delayed-keydiff:window=2",
        "knorm+protect:sink=2,window=3+ada",
        "keydiff+pyramid:beta=2+ada:floor=0",
        "knorm+blocks:size=7",
        "leverage+blocks:size=20+ada",
        "lagkv:lag=5,sink=2",
        "lagkv:lag=9,cross=true",
        "cur:window=3,leverage=avg",
        "leverage:sketch=0",
        "non-causal:chunk=16",
        "compactor:start=2,end=3,chunk=7,sketch=0",
        "expected-attention:sink=0,covariance=false,vnorm=false",
        "cap:sink=0,tau=2",
        "snapkv:window=3+critical",
        "h2o+critical:first=0.25+ada",
        "snapkv:window=5+chunkkv:length=7+ada",
        "expected-attention+vnorm+chunkkv:length=7+protect",
    ];
    names.extend(more.map(String::from));
    names
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_policy_meets_its_budget_and_repeats_itself(
        (batch, kv_heads, group) in (1usize..3, 1usize..4, 1usize..4),
        (q_len, kv_len, head_dim) in (1usize..50, 1usize..90, 1usize..20),
        dtype in prop::sample::select(DType::ALL.to_vec()),
        budget in 1usize..100,
        seed in any::<u64>(),
    ) {
        let shape = shape([batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim]);
        let made = inputs(&problem(shape, dtype), seed);
        let future = tensor(dtype, [batch, kv_heads * group, 3, head_dim], &normal(&mut rng(seed), batch * kv_heads * group * 3 * head_dim, 1.0));
        for name in names() {
            let policy = Registry::default().policy(&name).unwrap();
            let tokens = match policy.budget_tokens(&name, Some(&Budget::Tokens(budget)), kv_len, 8, batch * kv_heads) {
                Ok(tokens) => tokens,
                Err(error) => {
                    let refused = match error {
                        BudgetError::Sinks { .. } => budget <= 8,
                        BudgetError::Selection { .. } => policy.selection.is_some() && budget < PAGE_TOKENS,
                        _ => false,
                    };
                    prop_assert!(refused, "{name}: {error}");
                    continue;
                }
            };
            if head_dim % 2 == 1 && policy.looks_at(Statistic::BeforeRope) {
                continue;
            }
            // What is written behind the context counts where that is evicted from, or read, too.
            let is_of_all = policy.selection.is_some() || matches!(policy.schedule.decoding, Decoding::EverySteps(_));
            let expected = if is_of_all { budget } else { budget.min(kv_len) };
            prop_assert_eq!(tokens, if policy.keeps_all() { kv_len } else { expected }, "{}", &name);
            // The batch is as well that many layers of one sequence.
            let layers = if seed.is_multiple_of(2) { batch } else { 1 };
            let how = How { policy: &name, budget_tokens: tokens, seed, threads: 1, layers, future: Some(&future) };
            let one = verdict(how, shape, &made);
            for kept in &one.kept {
                prop_assert!(kept.windows(2).all(|pair| pair[0] < pair[1]), "{name}: {kept:?}");
                prop_assert!(kept.iter().all(|&slot| (slot as usize) < kv_len), "{name}: {kept:?}");
            }
            if policy.scorer.is_none() {
                prop_assert!(one.scores.is_none() && one.kept.iter().all(|kept| kept.len() == kv_len), "{name}");
                continue;
            } else {
                let scores = one.scores.as_ref().expect("every other policy has scores");
                prop_assert!(scores.iter().all(|score| score.is_finite()), "{name}");
            }
            let tokens = tokens.min(kv_len);
            // Layers of a sequence share its budget; with one layer every sequence has its own.
            for sequence in one.kept.chunks(kv_heads * layers) {
                let kept: usize = sequence.iter().map(Vec::len).sum();
                prop_assert_eq!(kept, tokens * kv_heads * layers, "{}", &name);
            }
            if POLICIES.iter().any(|entry| entry.name == name) {
                prop_assert!(one.kept.iter().all(|kept| kept.len() == tokens), "{name}");
            }
            prop_assert!((0.0..=1.0).contains(&one.tie_rate));
            prop_assert_eq!(&verdict(how, shape, &made), &one, "{} again", &name);
            prop_assert_eq!(&verdict(How { threads: 3, ..how }, shape, &made), &one, "{} on three threads", &name);
        }
    }
}

#[test]
fn streaming_llm_keeps_the_first_and_the_latest() {
    let shape = shape([2, 4, 2, 3, 20, 4]);
    let made = inputs(&problem(shape, DType::Bf16), 3);
    let cases: [(&str, usize, &[u32]); 4] = [
        ("streaming-llm", 7, &[0, 1, 2, 3, 17, 18, 19]),
        ("streaming-llm:sink=2", 5, &[0, 1, 17, 18, 19]),
        ("streaming-llm:sink=0", 3, &[17, 18, 19]),
        ("streaming-llm:sink=1", 2, &[0, 19]),
    ];
    for (policy, budget, expected) in cases {
        assert_eq!(verdict(how(policy, budget), shape, &made).kept, vec![expected; 4], "{policy}");
    }
}

#[test]
fn knorm_keeps_the_keys_of_smallest_norm() {
    // Norms 5, 1, 3, 2, 4 in the first head; 1, 2, 3, 4, 5 in the second.
    let keys = [[3.0f32, 4.0], [0.0, -1.0], [3.0, 0.0], [0.0, 2.0], [-4.0, 0.0]];
    let second = [[1.0f32, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 4.0], [3.0, -4.0]];
    let shape = shape([1, 2, 2, 2, 5, 2]);
    let made = with_keys(shape, &[keys, second].concat().concat());
    let got = verdict(how("knorm", 2), shape, &made);
    assert_eq!(got.kept, [[1, 3], [0, 1]]);
    assert_scores(&got.scores.unwrap(), &[-5.0, -1.0, -3.0, -2.0, -4.0, -1.0, -2.0, -3.0, -4.0, -5.0], 1e-6);
}

#[test]
fn what_is_protected_stays_above_scores_of_any_size() {
    // Norms of 1e9, whose neighbours in f32 are 64 apart: all as good as the best, but for the sinks.
    let keys: Vec<f32> = (0..12).flat_map(|slot| [0.0, if slot < 2 { 5e9 } else { 1e9 }]).collect();
    let shape = shape([1, 1, 1, 1, 12, 2]);
    let got = verdict(how("knorm+protect:sink=2,window=1", 4), shape, &with_keys(shape, &keys));
    assert_eq!(got.kept, [[0, 1, 10, 11]]);
}

#[test]
fn a_part_that_a_preset_brings_is_replaced_by_the_one_that_is_given() {
    let shape = shape([1, 4, 2, 96, 96, 16]);
    let made = inputs(&problem(shape, DType::F32), 7);
    let kept = |policy: &str| verdict(how(policy, 24), shape, &made).kept;
    assert_eq!(kept("chunkkv:window=8+chunkkv:length=7"), kept("snapkv:window=8+chunkkv:length=7"));
    assert_ne!(kept("chunkkv:window=8"), kept("chunkkv:window=8+chunkkv:length=7"));
}

#[test]
fn what_ada_gives_every_head_is_of_the_first_stage() {
    let shape = shape([1, 4, 2, 96, 96, 16]);
    let made = inputs(&problem(shape, DType::F32), 7);
    let kept = |policy: &str| verdict(how(policy, 24), shape, &made).kept;
    assert_eq!(kept("snapkv:window=8+critical:first=0+ada:floor=1"), kept("snapkv:window=8"));
    assert_ne!(kept("snapkv:window=8+critical:first=0"), kept("snapkv:window=8"));
}

#[test]
fn auto_goes_to_the_part_that_knows_it() {
    let named = |text: &str| Registry::default().policy(text).map(drop).map_err(|error| error.to_string());
    for text in ["duoattention:sink=auto", "duoattention:recent=auto"] {
        assert_eq!(named(text), Ok(()), "{text}");
    }
    assert!(named("ada-snapkv:window=auto").unwrap_err().contains("window is 'auto'"));
}

#[test]
fn keydiff_keeps_the_keys_least_like_the_mean() {
    // Unit vectors (1,0) three times, (0,1) once, of several lengths: the anchor is (3,1) / 4, and lengths do not count.
    let keys = [1.0, 0.0, 7.0, 0.0, 0.0, 5.0, 0.5, 0.0];
    let shape = shape([1, 1, 1, 1, 4, 2]);
    let got = verdict(how("keydiff", 2), shape, &with_keys(shape, &keys));
    let (near, far) = (-3.0 / 10f64.sqrt(), -1.0 / 10f64.sqrt());
    assert_scores(&got.scores.unwrap(), &[near, near, far, near], 1e-6);
    // Of the three equal ones the latest stays.
    assert_eq!(got.kept, [[2, 3]]);
    assert_eq!(got.tie_rate, 0.75);
    // A zero key is like nothing.
    let got = verdict(how("keydiff", 1), shape, &with_keys(shape, &[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]));
    assert_eq!(got.kept, [[0]]);
}

#[test]
fn h2o_keeps_a_recent_half_and_the_tokens_with_most_attention() {
    for (q_len, kv_len) in [(40, 40), (9, 40), (300, 300)] {
        let shape = shape([2, 6, 2, q_len, kv_len, 8]);
        let made = inputs(&problem(shape, DType::F32), 5);
        let p = probabilities(&shape, &Params::new(8, true), &made.q, &made.k);
        let sums = column_sums(&shape, &p, 0..q_len);
        for (policy, budget, window) in [("h2o", 11, 5), ("h2o:window=3", 11, 3), ("h2o:window=0", 6, 0)] {
            let got = verdict(how(policy, budget), shape, &made);
            let scores = got.scores.unwrap();
            let highest = sums.iter().copied().fold(0.0, f64::max);
            let mut expected = sums.clone();
            for list in expected.chunks_mut(kv_len) {
                list[kv_len - window..].fill(highest + 1.0);
            }
            assert_scores(&scores, &expected, 1e-5);
            assert_eq!(got.kept, best(&expected, kv_len, budget), "{policy}");
        }
    }
}

#[test]
fn snapkv_follows_kvpress() {
    // kvpress: softmax rows of the last `window` queries, mean over them, the window's own columns cut off, average
    // pool with zero padding, mean over the group, and the window above all.
    for (q_len, window, kernel) in [(70, 16, 5), (70, 16, 1), (20, 64, 7), (70, 1, 3)] {
        let shape = shape([2, 4, 2, q_len, 70, 8]);
        let made = inputs(&problem(shape, DType::F32), 7);
        let p = probabilities(&shape, &Params::new(8, true), &made.q, &made.k);
        let observers = q_len.saturating_sub(window)..q_len;
        let count = observers.len() as f64;
        let means: Vec<f64> = column_sums(&shape, &p, observers).iter().map(|sum| sum / count).collect();
        let evicted = 70 - window;
        let mut expected = vec![0.0; means.len()];
        for (mean, target) in means.chunks_exact(70).zip(expected.chunks_exact_mut(70)) {
            for (j, out) in target[..evicted].iter_mut().enumerate() {
                let padded = |at: isize| usize::try_from(at).ok().filter(|&at| at < evicted).map_or(0.0, |at| mean[at]);
                let half = (kernel / 2) as isize;
                *out = (-half..=half).map(|offset| padded(j as isize + offset)).sum::<f64>() / kernel as f64;
            }
        }
        let highest = expected.iter().copied().fold(0.0, f64::max);
        expected.chunks_exact_mut(70).for_each(|list| list[evicted..].fill(highest + 1.0));
        let text = format!("snapkv:window={window},kernel={kernel}");
        let got = verdict(how(&text, 66), shape, &made);
        assert_scores(got.scores.as_ref().unwrap(), &expected, 1e-6);
        assert_eq!(got.kept, best(&expected, 70, 66), "{text}");
    }
    // Under a budget smaller than the window, the latest of the window stay.
    let shape = shape([1, 1, 1, 70, 70, 8]);
    let got = verdict(how("snapkv", 10), shape, &inputs(&problem(shape, DType::F32), 8));
    assert_eq!(got.kept, [(60..70).collect::<Vec<u32>>()]);
}

#[test]
fn tova_keeps_the_same_tokens_in_every_head() {
    let shape = shape([2, 6, 3, 12, 50, 8]);
    let made = inputs(&problem(shape, DType::F32), 9);
    let p = probabilities(&shape, &Params::new(8, true), &made.q, &made.k);
    let sums = column_sums(&shape, &p, 11..12);
    let mut expected = Vec::new();
    for sequence in sums.chunks_exact(3 * 50) {
        let mut mean: Vec<f64> =
            (0..50).map(|j| (0..3).map(|head| sequence[head * 50 + j]).sum::<f64>() / 3.0).collect();
        mean[49] = 2.0; // the latest token is not evicted
        expected.extend([mean.clone(), mean.clone(), mean].concat());
    }
    let got = verdict(how("tova", 13), shape, &made);
    assert_eq!(got.kept, best(&expected, 50, 13));
    assert!(got.kept[..3].iter().all(|kept| *kept == got.kept[0]) && got.kept[0].contains(&49));
    assert_ne!(got.kept[0], got.kept[3], "sequences are evicted apart");
}

#[test]
fn delayed_keydiff_divides_one_budget_over_heads_by_a_threshold() {
    // The first head's keys are all smaller than the second's: under knorm it keeps what the second gives up.
    let shape = shape([1, 2, 2, 4, 8, 1]);
    let keys: Vec<f32> = (1..=16).map(|norm| norm as f32).collect();
    let made = with_keys(shape, &keys);
    let got = verdict(how("knorm+ada:floor=0+delayed:window=1", 4), shape, &made);
    assert_eq!(got.kept, [vec![0, 1, 2, 3, 4, 5, 7], vec![7]]);
    // What delayed eviction compares with: the best that each head lost.
    assert_eq!(got.best_lost, [-7.0, -9.0]);
    // The window never takes more than the budget: then it is all that stays.
    let got = verdict(how("delayed-keydiff", 3), shape, &made);
    assert_eq!(got.kept, [[5, 6, 7]; 2]);
}

#[test]
fn under_a_threshold_what_scores_enough_stays_and_the_budget_is_the_most() {
    // Two layers of two heads of six tokens; knorm scores a key of one number x by -|x|.
    let shape = shape([2, 2, 2, 6, 6, 1]);
    let keys = [
        [1.0, 9.0, 2.0, 9.0, 9.0, 9.0], // three below 3, one of them protected
        [9.0; 6],
        [1.0, 1.0, 1.0, 1.0, 1.0, 5.0],
        [3.0, 9.0, 9.0, 9.0, 9.0, 9.0],
    ];
    let inputs = with_keys(shape, &keys.concat());
    let kept = |policy, budget| verdict(How { layers: 2, ..how(policy, budget) }, shape, &inputs).kept;
    let none: Vec<u32> = vec![];
    assert_eq!(kept("knorm+threshold:at=-3", 6), [vec![0, 2], none.clone(), vec![0, 1, 2, 3, 4], vec![0]]);
    assert_eq!(kept("knorm+threshold:at=-0.5", 6), vec![none; 4]);
    // The latest token is protected, whatever it scores.
    let protected = kept("knorm+protect:sink=0,window=1+threshold:at=-3", 6);
    assert_eq!(protected, [vec![0, 2, 5], vec![5], vec![0, 1, 2, 3, 4, 5], vec![0, 5]]);
    let protected = kept("knorm+protect:sink=0,window=1+threshold:at=5", 6);
    assert_eq!(protected, vec![vec![5]; 4]);
    // Of eight that score enough only the best of all fit a budget of one a list.
    assert_eq!(kept("knorm+threshold:at=-3", 1).concat().len(), 4);
    // Tokens that come later are held against the threshold, and not against the best that was lost.
    let lost = verdict(How { layers: 2, ..how("knorm+threshold:at=-3", 6) }, shape, &inputs).best_lost;
    assert!(lost.iter().all(|lost| *lost == (-3.0f32).next_down()), "{lost:?}");
}

#[test]
fn the_oracle_keeps_what_later_queries_attend_to() {
    let shape = shape([2, 4, 2, 30, 30, 8]);
    let made = inputs(&problem(shape, DType::F32), 11);
    let future = tensor(DType::F32, [2, 4, 5, 8], &normal(&mut rng(12), 2 * 4 * 5 * 8, 1.0));
    // Every later query sees the whole context.
    let p = probabilities(&Shape { q_len: 5, ..shape }, &Params::new(8, false), &future, &made.k);
    let expected = column_sums(&Shape { q_len: 5, ..shape }, &p, 0..5);
    let how = How { future: Some(&future), ..how("oracle", 9) };
    let got = verdict(how, shape, &made);
    assert_scores(got.scores.as_ref().unwrap(), &expected, 1e-5);
    assert_eq!(got.kept, best(&expected, 30, 9));
    let error = try_verdict(How { future: None, ..how }, shape, &made).unwrap_err().to_string();
    assert_eq!(error, "policy 'oracle' needs the queries that come after the context");
}

/// Squared error of the future outputs of `kept`, f64, `p` being the attention `[rows, Lk]` and `v` `[Lk, D]`.
fn output_error(p: &[f64], v: &[f64], width: usize, kept: &[u32]) -> f64 {
    let output = |p: &[f64], slots: &mut dyn Iterator<Item = usize>| {
        let (mut sum, mut mass) = (vec![0.0; width], 0.0);
        for slot in slots {
            mass += p[slot];
            sum.iter_mut().zip(&v[slot * width..]).for_each(|(sum, v)| *sum += p[slot] * v);
        }
        sum.into_iter().map(|sum| sum / mass).collect::<Vec<f64>>()
    };
    let tokens = v.len() / width;
    let row = |p: &[f64]| {
        let (full, got) = (output(p, &mut (0..tokens)), output(p, &mut kept.iter().map(|&slot| slot as usize)));
        full.iter().zip(got).map(|(a, b)| (a - b).powi(2)).sum::<f64>()
    };
    p.chunks_exact(tokens).map(row).sum()
}

/// Against every set of 6 of 12 tokens: greedy is near the best, and better than to keep the most attention.
#[test]
fn the_output_oracle_is_near_the_best_of_all_sets() {
    const TOKENS: usize = 12;
    const WIDTH: usize = 4;
    let shape = shape([1, 2, 1, TOKENS, TOKENS, WIDTH]);
    let [mut best, mut greedy, mut by_mass] = [0.0; 3];
    for seed in 0..20 {
        let made = inputs(&problem(shape, DType::F32), 40 + seed);
        let future = tensor(DType::F32, [1, 2, 3, WIDTH], &normal(&mut rng(70 + seed), 2 * 3 * WIDTH, 2.0));
        let p = probabilities(&Shape { q_len: 3, ..shape }, &Params::new(WIDTH, false), &future, &made.k);
        let v = widen(&made.v.to_f32());
        let error = |policy| {
            let got = verdict(How { future: Some(&future), ..how(policy, 6) }, shape, &made);
            output_error(&p, &v, WIDTH, &got.kept[0])
        };
        let sets = (0u32..1 << TOKENS).filter(|set| set.count_ones() == 6);
        let of_set = |set: u32| (0..TOKENS as u32).filter(|slot| set >> slot & 1 == 1).collect::<Vec<u32>>();
        let least = sets.map(|set| output_error(&p, &v, WIDTH, &of_set(set))).fold(f64::INFINITY, f64::min);
        let got = error("oracle-output");
        assert!(got >= least * (1.0 - 1e-6), "seed {seed}: {got} is less than the least, {least}");
        (best, greedy, by_mass) = (best + least, greedy + got, by_mass + error("oracle"));
    }
    assert!(greedy < 1.15 * best && 1.5 * greedy < by_mass, "{greedy}, best {best}, by attention {by_mass}");
}

#[test]
fn random_depends_on_the_seed_alone() {
    let shape = shape([1, 4, 2, 4, 200, 4]);
    let (one, other) = (inputs(&problem(shape, DType::F32), 1), inputs(&problem(shape, DType::F32), 2));
    let seeded = |seed, made: &Inputs| verdict(How { seed, ..how("random", 50) }, shape, made).kept;
    assert_eq!(seeded(1, &one), seeded(1, &other));
    assert_ne!(seeded(1, &one), seeded(2, &one));
    let kept = seeded(1, &one);
    assert_ne!(kept[0], kept[1], "heads draw for themselves");
    // A quarter of each half stays, give or take: nothing favours a place.
    let early = kept.concat().iter().filter(|&&slot| slot < 100).count();
    assert!((30..=70).contains(&early), "{early} of 100 are early");
}

#[test]
fn of_equal_scores_the_latest_stay() {
    let shape = shape([1, 2, 1, 6, 12, 4]);
    let made = with_keys(shape, &[0.5; 12 * 4]);
    for policy in ["knorm", "keydiff"] {
        let got = verdict(how(policy, 5), shape, &made);
        assert_eq!((got.kept, got.tie_rate), (vec![vec![7, 8, 9, 10, 11]], 1.0), "{policy}");
    }
    // 0 and -0 are equal.
    let shape = self::shape([1, 1, 1, 4, 6, 1]);
    let keys = [-0.0, -0.0, 0.0, 0.0, 1.0, 1.0];
    assert_eq!(verdict(how("keydiff", 2), shape, &with_keys(shape, &keys)).kept, [[2, 3]]);
}

#[test]
fn budgets_are_fractions_tokens_and_bytes() {
    // 100 tokens, 4 lists, 32 bytes a token of a list: 128 bytes a token of all.
    let cases = [
        ("0.25", Ok(25)),
        ("0.999", Ok(99)),
        ("1.0", Ok(100)),
        ("7", Ok(7)),
        ("1k", Ok(100)),
        ("1280B", Ok(10)),
        ("1KiB", Ok(8)),
        ("1MiB", Ok(100)),
        ("0.001", Err("budget 0.001 leaves no token of 100 in a KV head; at least 1 must stay")),
        ("127B", Err("budget 127B leaves no token of 100")),
    ];
    let policy = Registry::default().policy("knorm").unwrap();
    for (text, expected) in cases {
        let budget: Budget = text.parse().unwrap();
        match (policy.budget_tokens("knorm", Some(&budget), 100, 32, 4), expected) {
            (Ok(tokens), Ok(expected)) => assert_eq!(tokens, expected, "{text}"),
            (Err(error), Err(expected)) => assert!(error.to_string().starts_with(expected), "{error}"),
            (got, _) => panic!("{text}: {got:?}"),
        }
    }
}

#[test]
fn a_budget_that_the_sinks_take_is_refused() {
    let policy = Registry::default().policy("streaming-llm:sink=6").unwrap();
    let tokens =
        |tokens, context| policy.budget_tokens("streaming-llm:sink=6", Some(&Budget::Tokens(tokens)), context, 8, 1);
    let error = tokens(6, 100).unwrap_err().to_string();
    assert_eq!(error, "budget 6 is 6 tokens per KV head; 'streaming-llm:sink=6' keeps 6 sinks and needs at least 7");
    assert_eq!(tokens(7, 100), Ok(7));
    assert_eq!(tokens(6, 6), Ok(6), "a context that fits is no matter of sinks");
}

#[test]
fn scores_that_are_no_numbers_are_refused_with_their_place() {
    let shape = shape([2, 2, 2, 2, 4, 2]);
    let mut keys = vec![1.0f32; 2 * 2 * 4 * 2];
    // Squares overflow f32: the norm of slot 3 of head 1 of sequence 1 is infinite.
    keys[(3 * 4 + 3) * 2] = 1e30;
    let error = try_verdict(how("knorm", 2), shape, &with_keys(shape, &keys)).unwrap_err().to_string();
    assert_eq!(
        error,
        "policy gave the score -inf to slot 3 of KV head 1, sequence 1; scores must be numbers: are the inputs too large?"
    );
}

#[test]
fn a_judgement_that_does_not_fit_is_an_error_of_the_arena() {
    let shape = shape([1, 1, 1, 8, 100, 4]);
    let made = inputs(&problem(shape, DType::F32), 1);
    let kv = DenseKv::new(made.k.view(), made.v.view()).unwrap();
    for name in without_file() {
        let policy = Registry::default().policy(name).unwrap();
        let call = Forward { shape, params: Params::new(4, true), q: made.q.view(), kv: &kv, cpu: cpu(1) };
        let arena = Arena::with_limit(700);
        let rope = Frequencies::new(4, 10_000.0);
        let given = Given { future: Some(made.q.view()), rope: Some(&rope), ..Given::budget(50) };
        let error = retain(&policy, call, given, &arena).err().unwrap();
        assert!(matches!(error, PolicyError::Arena(_)), "{name}: {error}");
        assert_eq!(arena.live_bytes(Label::Policy), 0);
    }
}

#[test]
fn the_page_of_policies_is_the_registry() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/policies.md")).unwrap();
    let fresh = markdown(&Registry::default());
    assert!(
        page == fresh,
        "docs/policies.md is old; renew it with `kvsieve list policies --markdown > docs/policies.md`"
    );
}

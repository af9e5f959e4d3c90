//! Scorers of the latest queries and budget allocations that look at attention: against definitions in f64, and on problems
//! made so that the answer is known.

use crate::common::{Problem, cpu, exact, inputs, shape, tensor, widen};
use kvsieve::attention::{DenseKv, Forward, Inputs, Params, Shape};
use kvsieve::eviction::{Given, retain};
use kvsieve::memory::Arena;
use kvsieve::policy::{PolicyError, Registry};
use kvsieve::tensor::DType;

/// What is retained of each list, and the scores.
struct Verdict {
    kept: Vec<Vec<u32>>,
    scores: Vec<f32>,
}

fn try_verdict(
    policy: &str,
    tokens: usize,
    layers: usize,
    shape: Shape,
    made: &Inputs,
) -> Result<Verdict, PolicyError> {
    let policy = Registry::default().policy(policy)?;
    let kv = DenseKv::new(made.k.view(), made.v.view()).unwrap();
    let params = Params::new(shape.head_dim, true);
    let call = Forward { shape, params, q: made.q.view(), kv: &kv, cpu: cpu(2) };
    let arena = Arena::unlimited();
    let evicted = retain(&policy, call, Given { layers, ..Given::budget(tokens) }, &arena)?;
    let lists = shape.batch * shape.kv_heads;
    Ok(Verdict {
        kept: (0..lists).map(|list| evicted.selection.kept(list).to_vec()).collect(),
        scores: evicted.scores.as_ref().unwrap().to_vec(),
    })
}

fn verdict(policy: &str, tokens: usize, layers: usize, shape: Shape, made: &Inputs) -> Verdict {
    try_verdict(policy, tokens, layers, shape, made).unwrap()
}

fn made(shape: Shape, seed: u64) -> Inputs {
    inputs(&Problem { shape, params: Params::new(shape.head_dim, true), dtype: DType::F32 }, seed)
}

/// Softmax of the last `window` queries, `[lists][G][window][kv_len]`; over the past alone if `past`.
fn window_softmax(shape: &Shape, made: &Inputs, window: usize, past: bool) -> Vec<Vec<Vec<Vec<f64>>>> {
    let params = Params::new(shape.head_dim, true);
    let p =
        exact::probabilities(shape, &params, &widen(&made.q.to_f32()), &widen(&made.k.to_f32()), |_, _| shape.kv_len).0;
    let row = |head: usize, query: usize| {
        let mut row = p[(head * shape.q_len + query) * shape.kv_len..][..shape.kv_len].to_vec();
        if past {
            row.truncate(shape.kv_len - window);
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|p| *p /= sum);
        }
        row
    };
    let of_head = |head: usize| (shape.q_len - window..shape.q_len).map(|query| row(head, query)).collect();
    let lists = 0..shape.batch * shape.kv_heads;
    lists.map(|list| (list * shape.group()..(list + 1) * shape.group()).map(of_head).collect()).collect()
}

fn near(got: &[f32], wanted: &[f64], what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (slot, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(
            (f64::from(got) - wanted).abs() < 1e-5 * wanted.abs().max(0.1),
            "{what}, token {slot}: {got}, not {wanted}"
        );
    }
}

#[test]
fn morphkv_takes_the_best_head_of_each_query_and_fuses_over_queries() {
    let shape = shape([2, 6, 2, 20, 90, 8]);
    let made = made(shape, 3);
    let (window, past) = (6, 84);
    let p = window_softmax(&shape, &made, window, true);
    let merged =
        |list: usize, query: usize, key: usize| p[list].iter().map(|head| head[query][key]).fold(0.0, f64::max);
    for (policy, max) in [("morphkv:window=6", false), ("morphkv:window=6,fusion=max", true)] {
        let got = verdict(policy, 30, 1, shape, &made);
        for (list, scores) in got.scores.chunks_exact(90).enumerate() {
            let fused = |key: usize| -> f64 {
                let queries = (0..window).map(|query| merged(list, query, key));
                if max { queries.fold(0.0, f64::max) } else { queries.sum() }
            };
            near(&scores[..past], &(0..past).map(fused).collect::<Vec<_>>(), policy);
        }
        assert!(got.kept.iter().all(|kept| kept.len() == 30 && kept.ends_with(&[84, 85, 86, 87, 88, 89])));
    }
}

#[test]
fn max_attention_and_scissorhands_follow_their_definitions() {
    let shape = shape([1, 4, 2, 70, 70, 8]);
    let made = made(shape, 4);
    let p = window_softmax(&shape, &made, 70, false);
    let got = verdict("max-attention", 9, 1, shape, &made);
    for (list, scores) in got.scores.chunks_exact(70).enumerate() {
        let most = |key: usize| p[list].iter().flatten().map(|row| row[key]).fold(0.0, f64::max);
        near(scores, &(0..70).map(most).collect::<Vec<_>>(), "max-attention");
        assert!((scores[0] - 1.0).abs() < 1e-6, "the first query sees but itself");
    }
    let got = verdict("scissorhands:history=12,window=5", 9, 1, shape, &made);
    for (list, scores) in got.scores.chunks_exact(70).enumerate() {
        let poor = |key: usize| {
            let rows = p[list].iter().flat_map(|head| head[58..].iter().enumerate());
            let poor = rows.filter(|(query, row)| key <= query + 58 && row[key] < 1.0 / (query + 59) as f64);
            -(poor.count() as f64) / 2.0
        };
        near(&scores[..65], &(0..65).map(poor).collect::<Vec<_>>(), "scissorhands");
    }
}

#[test]
fn variants_of_snapkv_reduce_as_they_say() {
    let shape = shape([1, 6, 2, 10, 40, 8]);
    let made = made(shape, 5);
    let (window, past) = (4, 36);
    let p = window_softmax(&shape, &made, window, false);
    let sum = |rows: &Vec<Vec<f64>>, key: usize| rows.iter().map(|row| row[key]).sum::<f64>();
    type Rule = (&'static str, fn(&[f64], f64) -> f64);
    let mean: fn(&[f64], f64) -> f64 = |heads, queries| heads.iter().sum::<f64>() / 3.0 / queries;
    let rules: [Rule; 4] = [
        ("snapkv:window=4,kernel=1", mean),
        ("snapkv:window=4,kernel=1,queries=sum", |heads, _| heads.iter().sum::<f64>() / 3.0),
        ("snapkv:window=4,kernel=1,queries=sum,group=sum", |heads, _| heads.iter().sum()),
        ("snapkv:window=4,kernel=1,group=max", |heads, queries| heads.iter().copied().fold(0.0, f64::max) / queries),
    ];
    for (policy, rule) in rules {
        let got = verdict(policy, 12, 1, shape, &made);
        for (list, scores) in got.scores.chunks_exact(40).enumerate() {
            let expected = (0..past).map(|key| {
                let heads: Vec<f64> = p[list].iter().map(|rows| sum(rows, key)).collect();
                rule(&heads, 4.0)
            });
            near(&scores[..past], &expected.collect::<Vec<_>>(), policy);
        }
    }
    let got = verdict("snapkv:window=4,kernel=1,queries=max,group=max", 12, 1, shape, &made);
    for (list, scores) in got.scores.chunks_exact(40).enumerate() {
        let most = |key: usize| p[list].iter().flatten().map(|row| row[key]).fold(0.0, f64::max);
        near(&scores[..past], &(0..past).map(most).collect::<Vec<_>>(), "max over all");
    }
    // The authors' code: the same tokens as sums, whatever the scale.
    let shape = Shape { q_len: 60, kv_len: 100, ..shape };
    let made = self::made(shape, 6);
    let kept = |policy| verdict(policy, 50, 1, shape, &made).kept;
    assert_eq!(kept("snapkv@reference"), kept("snapkv:window=32"));
    assert_eq!(kept("snapkv@kvpress:window=16"), kept("snapkv:window=16"));
}

#[test]
fn r_kv_gives_up_what_later_keys_repeat() {
    // Keys 0..40 come in pairs of equal directions, (0, 20), (1, 21), ..., each otherwise on its own axis; attention is
    // even, so that redundancy decides: of a pair the later is forgiven by the earlier alone.
    let shape = shape([1, 1, 1, 8, 48, 64]);
    let mut keys = vec![0.0f32; 48 * 64];
    (0..48).for_each(|token| keys[token * 64 + if token < 40 { token % 20 } else { token }] = 1.0 + token as f32);
    let mut made = made(shape, 7);
    made.k = tensor(DType::F32, shape.kv_dims(), &keys);
    made.q = tensor(DType::F32, [1, 1, 8, 64], &[0.0; 8 * 64]);
    let got = verdict("r-kv:lambda=0", 28, 1, shape, &made);
    // Rows 20..40 forgive their twin 0..20 (their only near-duplicate), and rows 0..20 theirs in 20..40.
    let first = got.scores[0];
    assert!(got.scores[..40].iter().all(|score| (score - first).abs() < 1e-7), "{:?}", &got.scores[..40]);
    // With three of a kind, the rows of the first and second forgive the third, which thus repeats nothing.
    (0..48).for_each(|token| {
        keys[token * 64..][..64].fill(0.0);
        keys[token * 64 + if token < 39 { token % 13 } else { token }] = 1.0;
    });
    made.k = tensor(DType::F32, shape.kv_dims(), &keys);
    let got = verdict("r-kv:lambda=0", 21, 1, shape, &made);
    assert!(got.scores[26..39].iter().all(|&late| got.scores[..26].iter().all(|&early| early < late)));
    // The third of each kind and token 39, which has no twin, are alike: the later 13 of these 14 stay, and the window.
    assert_eq!(got.kept, [(27..48).collect::<Vec<u32>>()]);
}

/// Keys of one list such that queries of `[1, 0]` attend to `slots` and hardly to others, or evenly if there are none.
fn looked_at(kv_len: usize, slots: &[usize]) -> Vec<f32> {
    (0..kv_len).flat_map(|slot| [if slots.contains(&slot) { 20.0 } else { 0.0 }, 1.0]).collect()
}

/// A problem of lists with keys as [`looked_at`] makes them, and queries that all look.
fn looking(shape: Shape, lists: &[&[usize]]) -> Inputs {
    let mut made = made(shape, 8);
    let keys: Vec<f32> = lists.iter().flat_map(|slots| looked_at(shape.kv_len, slots)).collect();
    made.k = tensor(DType::F32, shape.kv_dims(), &keys);
    let queries = shape.batch * shape.q_heads * shape.q_len;
    made.q = tensor(DType::F32, [shape.batch, shape.q_heads, shape.q_len, 2], &[1.0, 0.0].repeat(queries));
    made
}

#[test]
fn duo_lets_heads_that_look_near_stream() {
    // Heads 1 and 2 look at the first token and the last; heads 0 and 3 into the middle.
    let shape = shape([1, 8, 4, 10, 100, 2]);
    let made = looking(shape, &[&[40, 41], &[0, 99], &[1, 98], &[50]]);
    let got = verdict("random+duo:sink=2,recent=6,heads=0.5", 20, 1, shape, &made);
    let near: Vec<u32> = vec![0, 1, 94, 95, 96, 97, 98, 99];
    assert_eq!((&got.kept[1], &got.kept[2]), (&near, &near));
    assert_eq!((got.kept[0].len(), got.kept[3].len()), (32, 32));
    // One head of four: the one that looks least far. Head 1 sees its own last tokens, head 2 too; the first wins a tie.
    let got = verdict("random+duo:sink=2,recent=6,heads=0.25", 20, 1, shape, &made);
    assert_eq!(got.kept.iter().map(Vec::len).filter(|&len| len == 8).count(), 1);
    // A streaming head never has more than an equal share, of which half may be sinks.
    let got = verdict("random+duo:sink=30,recent=30,heads=0.5", 8, 1, shape, &made);
    assert_eq!(got.kept[1], [0, 1, 2, 3, 96, 97, 98, 99]);
    assert_eq!(got.kept.concat().len(), 32);
    // What the others cannot hold comes back.
    let got = verdict("random+duo:sink=2,recent=6,heads=0.75", 80, 1, shape, &made);
    assert_eq!(got.kept.concat().len(), 320);
}

#[test]
fn lazy_layers_keep_what_is_near_and_the_others_share_the_rest() {
    // Three layers of one KV head; the middle one is lazy.
    let shape = shape([3, 2, 1, 10, 100, 2]);
    let made = looking(shape, &[&[40], &[0, 95], &[60, 61]]);
    let got = verdict("random+simlayer:threshold=0.5,sink=2,recent=11,last=1", 30, 3, shape, &made);
    assert_eq!(got.kept[1], [0, 1, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99]);
    assert_eq!((got.kept[0].len(), got.kept[2].len()), (39, 39));
    // Off: everyone has the same.
    let got = verdict("random+simlayer:threshold=1,sink=2,recent=11,last=1", 30, 3, shape, &made);
    assert!(got.kept.iter().all(|kept| kept.len() == 30));
    // The whole method; its sink is that of the lazy layers and of the others.
    let got = verdict("simlayerkv:threshold=0.5,sink=2,recent=11", 30, 3, shape, &made);
    assert_eq!((got.kept[1].len(), got.kept[0].len()), (12, 39));
    let streamed: Vec<u32> = [0, 1].into_iter().chain(63..100).collect();
    assert_eq!(got.kept[0], streamed);
}

#[test]
fn tables_divide_by_their_weights_and_must_fit() {
    let shape = shape([3, 4, 2, 6, 50, 4]);
    let made = made(shape, 9);
    let lens = |policy: &str, layers| -> Vec<usize> {
        verdict(policy, 10, layers, shape, &made).kept.iter().map(Vec::len).collect()
    };
    assert_eq!(lens("knorm+table:layers=3;2;1", 3), [15, 15, 10, 10, 5, 5]);
    assert_eq!(lens("knorm+table:heads=3;1", 3), [15, 5, 15, 5, 15, 5]);
    assert_eq!(lens("knorm+table:layers=3;2;1,heads=0;1", 3), [0, 30, 0, 20, 0, 10]);
    assert_eq!(lens("knorm+table:layers=1;0;0", 3), [30, 30, 0, 0, 0, 0]);
    let refused = |policy: &str, layers| try_verdict(policy, 10, layers, shape, &made).err().expect(policy).to_string();
    let said = "policy 'table:layers=3;2': it gives 2 weights, and there are 3 layers; give one for each";
    assert_eq!(refused("knorm+table:layers=3;2", 3), said);
    assert!(refused("knorm+table:heads=1;2;3", 1).contains("it gives 3 weights, and there are 2 KV heads"));
    assert!(refused("snapkv+pyramid:layer=0,layers=4", 3).contains("it evicts from one layer alone, and there are 3"));
}

#[test]
fn a_pyramid_counts_the_protected_window() {
    let shape = shape([3, 1, 1, 8, 200, 4]);
    let made = made(shape, 10);
    let lens =
        |policy: &str| -> Vec<usize> { verdict(policy, 60, 3, shape, &made).kept.iter().map(Vec::len).collect() };
    assert_eq!(lens("knorm+pyramid"), [117, 60, 3]);
    assert_eq!(lens("snapkv:window=3+pyramid"), [117, 60, 3]);
    assert_eq!(lens("snapkv:window=4+pyramid"), [60, 60, 60], "the highest layer could not hold the window");
    let alone = |layer: usize| -> usize {
        let one = self::shape([1, 1, 1, 8, 200, 4]);
        let text = format!("knorm+pyramid:layer={layer},layers=3");
        verdict(&text, 60, 1, one, &self::made(one, 10)).kept[0].len()
    };
    assert_eq!([alone(0), alone(1), alone(2)], [117, 60, 3]);
}

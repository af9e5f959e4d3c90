//! KVzip and KVgrad in models: what is retained is what a plain computation of its scores says, and what is fed to repeat the context
//! leaves nothing behind.

use crate::common::models::checkpoint;
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{Activation, Capture, Captured, Decoder, Eviction, Model, Recall, Repeat, Setup};
use kvsieve::policy::{Policy, PolicyFile, Registry, Weighing, kvzip};
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{Output, write};
use kvsieve::train::sensitivity;
use safetensors::SafeTensors;

const CONTEXT: usize = 26;
const BUDGET: usize = 10;

fn setup(max_tokens: usize) -> Setup<'static> {
    Setup { chunk_tokens: 9, ..Setup::of(max_tokens, DType::F32) }
}

fn repeat() -> Repeat {
    Repeat { first: vec![7, 11, 13], next: vec![17, 19], answer: vec![23], gradients: Some(sensitivity) }
}

/// Vectors of one kind, layer, head and token.
fn row(tensor: &Captured, layer: usize, head: usize, token: usize) -> Vec<f64> {
    let mut row = vec![0.0; tensor.view().dims()[3]];
    tensor.view().read_rows(layer, head, token, &mut row);
    row.into_iter().map(f64::from).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Scores `[layers][Hkv][tokens]`, from the equations alone.
fn scores(name: &str, tokens: &[u32], policy: &Policy) -> Vec<Vec<Vec<f64>>> {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let folder = checkpoint(name).folder;
    let model = Model::open(&folder, &arena).unwrap();
    let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&weights).unwrap();
    let config = &model.config;
    let (how, group) = (policy.reconstruction.unwrap(), config.q_heads / config.kv_heads);
    let mut scores = vec![vec![vec![0.0f64; CONTEXT]; config.kv_heads]; config.layers];
    for number in 0..CONTEXT.div_ceil(how.chunk_tokens) {
        let chunk = number * how.chunk_tokens..CONTEXT.min((number + 1) * how.chunk_tokens);
        let asks = repeat().tokens(tokens, how, number);
        let (fed, asked_tokens) = ([tokens, &asks].concat(), asks.len());
        let sensed = sensitivity(&model, DType::F32, tokens, &[asks], &cpu, &arena).unwrap().remove(0);
        let layers: Vec<usize> = (0..config.layers).collect();
        let kinds = [Activation::Q, Activation::K, Activation::V, Activation::Hidden];
        let capture = Capture::new(&arena, config, &layers, &kinds, fed.len()).unwrap();
        let mut decoder = Decoder::new(&model, setup(fed.len()), &cpu, &arena).unwrap();
        decoder.hook(&capture);
        decoder.prefill(&[&fed], |_, _, _| ()).unwrap();
        drop(decoder);
        let [q, k, v, hidden] = &capture.finish().unwrap()[..] else { unreachable!() };
        for layer in layers {
            let o = weights.tensor(&format!("model.layers.{layer}.self_attn.o_proj.weight")).unwrap();
            let o: Vec<f32> =
                o.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
            for (head, query) in
                (0..config.q_heads).flat_map(|head| (CONTEXT..fed.len()).map(move |query| (head, query)))
            {
                let kv_head = head / group;
                let sinks = 0..how.sink.min(chunk.start);
                let seen: Vec<usize> = sinks.chain(chunk.clone()).chain(CONTEXT..query + 1).collect();
                let asked = row(q, layer, head, query);
                let logit =
                    |&key: &usize| dot(&asked, &row(k, layer, kv_head, key)) * f64::from(config.attention_scale);
                let total: f64 = seen.iter().map(|key| logit(key).exp()).sum();
                for key in chunk.clone() {
                    let mut score = logit(&key).exp() / total;
                    if how.weighing != Weighing::Nothing {
                        let (value, state) = (row(v, layer, kv_head, key), row(hidden, layer, 0, query));
                        let wide = config.q_heads * config.head_dim;
                        let projected = o.chunks_exact(wide).map(|to| {
                            let own = &to[head * config.head_dim..][..config.head_dim];
                            own.iter().zip(&value).map(|(a, b)| f64::from(*a) * b).sum::<f64>()
                        });
                        score *= projected.map(|x| x * x).sum::<f64>().sqrt();
                        score *= match how.weighing {
                            Weighing::Gradients => f64::from(sensed[layer * asked_tokens + query - CONTEXT]),
                            _ => 1.0 / dot(&state, &state).sqrt(),
                        };
                    }
                    let most = &mut scores[layer][kv_head][key];
                    *most = most.max(score);
                }
            }
        }
    }
    scores
}

#[test]
fn what_stays_is_what_the_model_looks_at_while_it_repeats_its_context() {
    for (name, text) in [
        ("llama", "kvzip"),
        ("llama", "kvzip:chunk=10,sink=2"),
        ("qwen3", "kvzip:chunk=25,sink=0"),
        ("llama", "kvzip:plus=true"),
        ("qwen3", "kvzip:plus=true,chunk=7"),
        ("llama", "kvgrad"),
        ("qwen3", "kvgrad:chunk=10,sink=2"),
    ] {
        let checkpoint = checkpoint(name);
        let tokens = &checkpoint.tokens[..CONTEXT];
        let policy = Registry::default().policy(text).unwrap();
        let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
        let model = Model::open(&checkpoint.folder, &arena).unwrap();
        let how = policy.reconstruction.unwrap();
        let repeat = repeat();
        let room = CONTEXT + repeat.most_tokens(CONTEXT, how);
        let mut decoder = Decoder::new(&model, setup(room), &cpu, &arena).unwrap();
        let budget = Some(format!("{BUDGET}").parse().unwrap());
        let eviction = Eviction { policy: &policy, name: text, budget, seed: 0, repeat: Some(&repeat) };
        decoder.evict(eviction, &[CONTEXT]).unwrap();
        decoder.prefill(&[tokens], |_, _, _| ()).unwrap();

        let cache = decoder.cache();
        assert_eq!(decoder.seen(), [CONTEXT]);
        assert_eq!(cache.lens().iter().sum::<usize>(), BUDGET * cache.lens().len(), "{text}");
        let scores = scores(name, tokens, &policy);
        let of_lists = scores.iter().flatten().zip(cache.lens()).enumerate();
        let (mut lowest_kept, mut highest_lost) = (f64::INFINITY, 0.0f64);
        for (list, (scores, &len)) in of_lists {
            let kept: Vec<usize> = (0..len).map(|slot| cache.position(list, slot)).collect();
            assert!((0..how.sink).all(|sink| kept.contains(&sink)), "{name} {text}, list {list}: {kept:?}");
            for (token, &score) in scores.iter().enumerate().skip(how.sink) {
                match kept.contains(&token) {
                    true => lowest_kept = lowest_kept.min(score),
                    false => highest_lost = highest_lost.max(score),
                }
            }
        }
        assert!(lowest_kept > highest_lost * (1.0 - 1e-4), "{name} {text}: {lowest_kept} kept, {highest_lost} lost");
    }
}

#[test]
fn what_is_fed_leaves_nothing_behind() {
    let checkpoint = checkpoint("llama");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let model = Model::open(&checkpoint.folder, &arena).unwrap();
    let policy = Registry::default().policy("kvzip:chunk=10").unwrap();
    let (tokens, rest) = checkpoint.tokens.split_at(CONTEXT);
    let repeat = repeat();
    let logits = |budget: Option<&str>| {
        let mut decoder = Decoder::new(&model, setup(64), &cpu, &arena).unwrap();
        if let Some(budget) = budget {
            let budget = Some(budget.parse().unwrap());
            let eviction = Eviction { policy: &policy, name: "kvzip", budget, seed: 0, repeat: Some(&repeat) };
            decoder.evict(eviction, &[CONTEXT]).unwrap();
        }
        decoder.prefill(&[tokens], |_, _, _| ()).unwrap();
        let mut last = Vec::new();
        decoder.follow(&[rest], |_, _, row| last = row.to_vec()).unwrap();
        (last, decoder.kv_bytes())
    };
    assert_eq!(logits(Some("1.0")), logits(None));
    assert_ne!(logits(Some("8")).0, logits(None).0);
}

#[test]
fn what_cannot_be_repeated_is_refused() {
    let checkpoint = checkpoint("llama");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let model = Model::open(&checkpoint.folder, &arena).unwrap();
    let repeat = repeat();
    let error = |text: &str, max_tokens: usize, repeat: Option<&Repeat>, kv_format: &str| {
        let policy = Registry::default().policy(text).unwrap();
        let setup = Setup { kv_format: kv_format.parse().unwrap(), ..setup(max_tokens) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let eviction = Eviction { policy: &policy, name: text, budget: Some("8".parse().unwrap()), seed: 0, repeat };
        let put_to_work = decoder.evict(eviction, &[CONTEXT]);
        let run = put_to_work.and_then(|()| decoder.prefill(&[&checkpoint.tokens[..CONTEXT]], |_, _, _| ()));
        run.map_err(|error| error.to_string()).unwrap_err()
    };
    let without = Repeat { gradients: None, ..repeat.clone() };
    for (text, max_tokens, asked, format, reason) in [
        ("kvgrad", 64, Some(&without), "f32", "have a backward pass"),
        ("kvzip", 30, Some(&repeat), "f32", "takes 63 with what is fed; 30 are allowed"),
        ("kvzip", 64, None, "f32", "have the words"),
        ("kvzip+chunks:tokens=8", 64, Some(&repeat), "f32", "leave 'chunks', 'every' and 'delayed' out"),
        ("kvzip+every", 64, Some(&repeat), "f32", "leave 'chunks', 'every' and 'delayed' out"),
        ("kvzip", 64, Some(&repeat), "int8:recent=8", "leaves the cache again"),
    ] {
        let error = error(text, max_tokens, asked, format);
        assert!(error.contains(reason) && error.contains(text), "{error}");
    }
}

#[test]
fn whole_heads_go_by_the_best_score_of_their_tokens() {
    const SINK: usize = 2;
    let checkpoint = checkpoint("llama");
    let tokens = &checkpoint.tokens[..CONTEXT];
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let model = Model::open(&checkpoint.folder, &arena).unwrap();
    let (layers, kv_heads) = (model.config.layers, model.config.kv_heads);
    let pairs = Registry::default().policy("kvzip:chunk=10,sink=2").unwrap();
    let how = pairs.reconstruction.unwrap();
    let (repeat, dtype) = (repeat(), DType::F32);
    let recall = Recall { model: &model, repeat: &repeat, how, dtype, cpu: &cpu, arena: &arena };
    let heads = kvzip::of_heads(&recall.scores(tokens, None).unwrap(), CONTEXT, SINK);
    let by_hand: Vec<f64> = scores("llama", tokens, &pairs)
        .iter()
        .flatten()
        .map(|head| head[SINK..].iter().copied().fold(0.0, f64::max))
        .collect();
    assert!(heads.len() == layers * kv_heads && by_hand.len() == heads.len());
    for (got, expected) in heads.iter().zip(&by_hand) {
        assert!((f64::from(*got) - expected).abs() < 1e-5 * expected, "{heads:?} {by_hand:?}");
    }

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("heads.safetensors");
    write(&path, &[Output::f32(kvzip::HEADS, vec![layers, kv_heads], &heads)]).unwrap();
    let registry = Registry::default().with_file(PolicyFile::open(&path).unwrap());
    let policy = registry.policy("kvzip:level=head,sink=2").unwrap();
    let mut decoder = Decoder::new(&model, setup(CONTEXT), &cpu, &arena).unwrap();
    let budget = Some(format!("{BUDGET}").parse().unwrap());
    decoder.evict(Eviction { policy: &policy, name: "kvzip", budget, seed: 0, repeat: None }, &[CONTEXT]).unwrap();
    decoder.prefill(&[tokens], |_, _, _| ()).unwrap();

    // Best head first; what is left of the budget beside the sinks of all heads.
    let mut order: Vec<usize> = (0..heads.len()).collect();
    order.sort_by(|&a, &b| by_hand[b].total_cmp(&by_hand[a]));
    let mut left = (BUDGET - SINK) * heads.len();
    let mut expected = vec![Vec::new(); heads.len()];
    for list in order {
        let more = left.min(CONTEXT - SINK);
        expected[list] = (0..SINK).chain(CONTEXT - more..CONTEXT).collect::<Vec<_>>();
        left -= more;
    }
    let cache = decoder.cache();
    for (list, expected) in expected.iter().enumerate() {
        let held: Vec<usize> = (0..cache.lens()[list]).map(|slot| cache.position(list, slot)).collect();
        assert_eq!(held, *expected, "list {list}");
    }
    for wrong in ["kvzip:level=heads", "kvzip:level=head,chunk=9", "kvzip:level=head,plus=true"] {
        assert!(registry.policy(wrong).err().unwrap().to_string().contains("level"), "{wrong}");
    }
}

#[test]
fn what_the_end_of_a_pass_depends_on_is_what_torch_says() {
    let file = std::fs::read("tests/checkpoints/sensitivity.safetensors").unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let names: std::collections::BTreeSet<&str> =
        file.names().into_iter().map(|name| name.split('/').next().unwrap()).collect();
    assert!(names.len() >= 8, "{names:?}");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    for name in names {
        let checkpoint = checkpoint(name);
        let model = Model::open(&checkpoint.folder, &arena).unwrap();
        // As in `sensitivity.py`; of the texts the second and the third begin where the context began too.
        let texts = [26..40, 3..12, 0..13].map(|part| checkpoint.tokens[part].to_vec());
        let context = &checkpoint.tokens[..CONTEXT];
        for (dtype, bound) in [(DType::F32, 1e-4), (DType::Bf16, 0.1)] {
            let before = arena.usage().live_bytes;
            let found = sensitivity(&model, dtype, context, &texts, &cpu, &arena).unwrap();
            for (index, found) in found.iter().enumerate() {
                let expected = file.tensor(&format!("{name}/{index}")).unwrap();
                let expected: Vec<f32> = expected
                    .data()
                    .chunks_exact(4)
                    .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                    .collect();
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    let off = (found - expected).abs() / expected;
                    assert!(off < bound, "{name}, text {index}, {dtype}: {found}, torch has {expected}");
                }
            }
            drop(found);
            assert_eq!(arena.usage().live_bytes, before);
        }
    }
}

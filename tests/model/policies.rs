//! Eviction in models: against `transformers` with a mask, against no eviction, and in bytes.

use crate::common::models::{checkpoint, deviation, furthest};
use kvsieve::device::Cpu;
use kvsieve::memory::{Arena, Label};
use kvsieve::model::config::{Rope, RopeScaling};
use kvsieve::model::{Decoder, Eviction, Model, Repeat, Setup};
use kvsieve::policy::{POLICIES, PRESETS, Policy, Registry};
use kvsieve::tensor::DType;
use kvsieve::train::sensitivity;
use serde_json::Value;

/// What came of a run.
struct Run {
    /// Of all tokens of each sequence.
    logits: Vec<Vec<f32>>,
    /// Lengths of all lists.
    lens: Vec<usize>,
    kv_bytes: u64,
    live_kv_bytes: u64,
}

/// Prefill of the first `after` tokens, eviction, and the rest.
fn run(model: &Model, tokens: &[&[u32]], after: &[usize], policy: Option<(&Policy, &str)>) -> Run {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let columns = policy.map_or(&[][..], |(policy, _)| policy.columns());
    let setup = Setup { batch: tokens.len(), chunk_tokens: 9, all_logits: true, columns, ..Setup::of(96, DType::F32) };
    let mut decoder = Decoder::new(model, setup, &cpu, &arena).unwrap();
    let repeat = Repeat { first: vec![3, 1], next: vec![4], answer: vec![2], gradients: Some(sensitivity) };
    if let Some((policy, budget)) = policy {
        let eviction =
            Eviction { policy, name: "policy", budget: Some(budget.parse().unwrap()), seed: 5, repeat: Some(&repeat) };
        decoder.evict(eviction, after).unwrap();
    }
    let mut logits = vec![Vec::new(); tokens.len()];
    let (first, rest): (Vec<&[u32]>, Vec<&[u32]>) =
        tokens.iter().zip(after).map(|(tokens, &after)| tokens.split_at(after)).unzip();
    decoder.prefill(&first, |sequence, _, row| logits[sequence].extend_from_slice(row)).unwrap();
    decoder.follow(&rest, |sequence, _, row| logits[sequence].extend_from_slice(row)).unwrap();
    let live_kv_bytes = arena.live_bytes(Label::Kv) + arena.live_bytes(Label::KvFragmentation);
    Run { logits, lens: decoder.cache().lens().to_vec(), kv_bytes: decoder.kv_bytes(), live_kv_bytes }
}

fn policy(text: &str) -> Policy {
    Registry::default().policy(text).unwrap()
}

fn open(name: &str) -> (Model, Vec<u32>) {
    let checkpoint = checkpoint(name);
    (Model::open(&checkpoint.folder, &Arena::unlimited()).unwrap(), checkpoint.tokens)
}

#[test]
fn logits_behind_an_eviction_are_those_of_transformers_with_a_mask() {
    let streaming = policy("streaming-llm:sink=4");
    for name in ["llama", "mistral", "gemma2", "qwen3"] {
        let checkpoint = checkpoint(name);
        let model = Model::open(&checkpoint.folder, &Arena::unlimited()).unwrap();
        let expected = checkpoint.evicted.expect("a checkpoint with logits behind an eviction");
        let got = run(&model, &[&checkpoint.tokens], &[24], Some((&streaming, "12")));
        let (off, bound) = (furthest(&got.logits[0], &expected), 1e-3 * deviation(&expected));
        assert!(off < bound, "{name}: off by {off}, allowed {bound}");
        assert!(furthest(&got.logits[0], &checkpoint.logits) > 100.0 * bound, "{name}: the eviction shows");
    }
}

#[test]
fn a_policy_that_keeps_everything_changes_nothing() {
    for name in ["llama", "gemma2"] {
        let (model, tokens) = open(name);
        let dense = run(&model, &[&tokens], &[20], None);
        for text in ["full", "snapkv", "h2o", "expected-attention", "knorm", "streaming-llm", "r-kv"] {
            let got = run(&model, &[&tokens], &[20], Some((&policy(text), "1.0")));
            assert!(got.logits == dense.logits, "{name}, {text}");
            assert_eq!(got.kv_bytes, dense.kv_bytes);
        }
    }
}

#[test]
fn evicted_tokens_give_their_bytes_back_under_every_policy() {
    let (model, tokens) = open("llama");
    let dense = run(&model, &[&tokens], &[tokens.len()], None);
    let mut evicting = 0;
    for name in POLICIES.iter().map(|entry| entry.name).chain(PRESETS.iter().map(|preset| preset.name)) {
        let policy = policy(name);
        let eviction = Eviction { policy: &policy, name, budget: None, seed: 0, repeat: None };
        if policy.scorer.is_none() || eviction.check(&model.config).is_err() {
            continue;
        }
        evicting += 1;
        let got = run(&model, &[&tokens], &[tokens.len()], Some((&policy, "12")));
        assert_eq!(got.lens.iter().sum::<usize>(), 12 * got.lens.len(), "{name}: {:?}", got.lens);
        assert!(got.kv_bytes < dense.kv_bytes, "{name}: {} of {} bytes", got.kv_bytes, dense.kv_bytes);
        assert_eq!(got.live_kv_bytes, got.kv_bytes, "{name}");
    }
    assert!(evicting > 25, "{evicting} policies");
}

#[test]
fn every_schedule_holds_its_budget() {
    let (model, tokens) = open("qwen3");
    let lens = |text| run(&model, &[&tokens], &[24], Some((&policy(text), "12"))).lens;
    assert!(lens("snapkv:window=4").iter().all(|&len| len == 12 + 16));
    for text in [
        "h2o+every",
        "snapkv:window=4+every:steps=4",
        "tova+every",
        "knorm+every:steps=2",
        "streaming-llm+every+rerotate",
    ] {
        assert!(lens(text).iter().all(|&len| len == 12), "{text}: {:?}", lens(text));
    }
    for text in ["snapkv:window=4+chunks:tokens=8", "h2o+chunks:tokens=5", "expected-attention+chunks:tokens=7"] {
        assert!(lens(text).iter().all(|&len| len == 12 + 16), "{text}: {:?}", lens(text));
    }
    let delayed = lens("knorm+delayed:window=6");
    assert!(delayed.iter().all(|len| (12..12 + 16).contains(len)), "{delayed:?}");
    let pyramid = lens("pyramidkv:window=4");
    let of_layers: Vec<usize> = pyramid.chunks(2).map(|heads| heads.iter().sum()).collect();
    assert!(of_layers[0] > of_layers[1] && of_layers[1] > of_layers[2], "{pyramid:?}");
    assert_eq!(pyramid.iter().sum::<usize>(), pyramid.len() * (12 + 16));
}

#[test]
fn what_stays_is_what_the_scores_say() {
    let (model, tokens) = open("llama");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let setup = Setup { chunk_tokens: 9, all_logits: true, ..Setup::of(64, DType::F32) };
    let mut dense = Decoder::new(&model, setup, &cpu, &arena).unwrap();
    dense.prefill(&[&tokens], |_, _, _| ()).unwrap();
    let mut evicted = Decoder::new(&model, setup, &cpu, &arena).unwrap();
    let knorm = policy("knorm");
    let eviction =
        Eviction { policy: &knorm, name: "knorm", budget: Some("10".parse().unwrap()), seed: 0, repeat: None };
    evicted.evict(eviction, &[tokens.len()]).unwrap();
    evicted.prefill(&[&tokens], |_, _, _| ()).unwrap();
    for list in 0..dense.cache().lens().len() {
        // Keys of small norm stay (arXiv 2406.11430).
        let mut key = vec![0.0; model.config.head_dim];
        let mut norms: Vec<(f32, usize)> = (0..tokens.len())
            .map(|slot| {
                dense.cache().read_key(list, slot, &mut key);
                (key.iter().map(|x| x * x).sum(), slot)
            })
            .collect();
        norms.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut expected: Vec<usize> = norms[..10].iter().map(|(_, slot)| *slot).collect();
        expected.sort_unstable();
        let got: Vec<usize> = (0..10).map(|slot| evicted.cache().position(list, slot)).collect();
        assert_eq!(got, expected, "list {list}");
    }
}

#[test]
fn a_question_that_is_never_evicted_stays_beside_the_budget_and_takes_nothing_of_it() {
    let (model, tokens) = open("llama");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let (context, end) = (26, 32);
    for text in [
        "knorm",
        "snapkv:window=8",
        "snapkv:window=2+ada",
        "keydiff+global",
        "pyramidkv:window=2",
        "h2o",
        "knorm+chunks:tokens=7",
        "knorm+every",
        "keydiff+delayed:window=2",
        "streaming-llm+every+rerotate",
    ] {
        let policy = policy(text);
        let setup = Setup { columns: policy.columns(), ..Setup::of(64, DType::F32) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let eviction =
            Eviction { policy: &policy, name: text, budget: Some("10".parse().unwrap()), seed: 0, repeat: None };
        decoder.evict(eviction, &[context]).unwrap();
        decoder.never_evict(context..end);
        decoder.prefill(&[&tokens[..end]], |_, _, _| ()).unwrap();
        let check = |decoder: &Decoder<'_>| {
            let lens = decoder.cache().lens();
            for (list, &len) in lens.iter().enumerate() {
                let kept: Vec<usize> = (0..len).map(|slot| decoder.cache().origin(list, slot)).collect();
                assert!((context..end).all(|position| kept.contains(&position)), "{text}, list {list}: {kept:?}");
                assert!(kept.windows(2).all(|pair| pair[0] < pair[1]), "{text}, list {list}: {kept:?}");
            }
            lens.iter().sum::<usize>() - (end - context) * lens.len()
        };
        // What is left of the budget is the context's alone.
        assert_eq!(check(&decoder), 10 * decoder.cache().lens().len(), "{text}");
        decoder.follow(&[&tokens[end..]], |_, _, _| ()).unwrap();
        check(&decoder);
    }
}

#[test]
fn a_sequence_keeps_in_a_batch_what_it_keeps_alone() {
    for name in ["llama", "gemma2"] {
        let (model, tokens) = open(name);
        let batch: [&[u32]; 3] = [&tokens[..30], &tokens[5..], &tokens[20..39]];
        let after = [24, 11, 19];
        for text in ["snapkv:window=4", "h2o+every", "expected-attention", "h2o+cam:window=3"] {
            let policy = policy(text);
            let together = run(&model, &batch, &after, Some((&policy, "0.5")));
            for (sequence, (tokens, &after)) in batch.iter().zip(&after).enumerate() {
                let alone = run(&model, &[tokens], &[after], Some((&policy, "0.5")));
                let off = furthest(&alone.logits[0], &together.logits[sequence]);
                assert!(off < 1e-4, "{name}, {text}, sequence {sequence}: {off}");
            }
        }
    }
}

/// Where RoPE depends on the length of a sequence, keys are turned by that of their own.
#[test]
fn keys_of_a_batch_are_turned_by_the_frequencies_of_their_own_sequence() {
    for name in ["dynamic", "longrope"] {
        let (model, tokens) = open(name);
        let text = "streaming-llm+chunks:tokens=8+rerotate";
        for batch in [[&tokens[..], &tokens[..20]], [&tokens[3..20], &tokens[..]]] {
            let after = batch.map(|tokens| tokens.len() - 3);
            let together = run(&model, &batch, &after, Some((&policy(text), "12")));
            for (sequence, (tokens, &after)) in batch.iter().zip(&after).enumerate() {
                let alone = run(&model, &[tokens], &[after], Some((&policy(text), "12")));
                let off = furthest(&alone.logits[0], &together.logits[sequence]);
                assert!(off < 1e-4, "{name}, sequence {sequence} of {} tokens: {off}", tokens.len());
            }
        }
    }
}

/// Behind `rerotate` a model that was made for few tokens goes on as one that was made for more, as long as its lists are short.
#[test]
fn new_tokens_behind_rotated_keys_are_as_far_as_the_lists_are_long() {
    for name in ["dynamic", "longrope"] {
        let (model, tokens) = open(name);
        let (mut longer, _) = open(name);
        let original = match &mut longer.config.rope.scaling {
            RopeScaling::Long { original_positions, .. } => original_positions,
            _ => &mut longer.config.max_positions,
        };
        let (first, tokens) = (*original - 2, &tokens[..*original + 8]);
        *original = 1 << 10;
        let policy = policy("streaming-llm+rerotate");
        let of = |model: &Model, budget| run(model, &[tokens], &[first], budget).logits.remove(0);
        let off = furthest(&of(&model, Some((&policy, "6"))), &of(&longer, Some((&policy, "6"))));
        assert!(off < 1e-5, "{name}: {off}");
        assert!(furthest(&of(&model, None), &of(&longer, None)) > 0.1, "{name}: the dense cache is longer");
    }
    // What is behind a longer prompt is turned as that was, while the lists are no longer than it and longer than the model was made for.
    let (model, tokens) = open("dynamic");
    let (mut as_prompt, _) = open("dynamic");
    let grown: f64 = 2.0 * 32.0 / 16.0 - 1.0;
    as_prompt.config.rope = Rope { theta: 1e4 * grown.powf(8.0 / 6.0), part: 1.0, scaling: RopeScaling::None };
    let policy = policy("streaming-llm:sink=2+rerotate");
    for budget in ["20", "24"] {
        let of = |model: &Model| run(model, &[&tokens[..40]], &[32], Some((&policy, budget))).logits.remove(0);
        let off = furthest(&of(&model), &of(&as_prompt));
        assert!(off < 1e-4, "{budget}: {off}");
    }
}

/// A policy that evicts from what comes behind the context has a budget for that too, and sinks that are all of it leave no room.
#[test]
fn a_budget_beyond_the_context_is_for_what_comes_behind_it() {
    let (model, tokens) = open("llama");
    let after = |text: &str, budget: &str| run(&model, &[&tokens[..32]], &[14], Some((&policy(text), budget)));
    let dense = run(&model, &[&tokens[..32]], &[14], None);
    for (text, budget) in [("h2o+every", "64"), ("h2o", "64"), ("quest", "64")] {
        let kept = after(text, budget);
        assert_eq!(kept.lens, dense.lens, "{text}");
        assert!(furthest(&kept.logits[0], &dense.logits[0]) < 1e-4, "{text}");
    }
    let lens = after("h2o+every", "20").lens;
    assert!(lens.iter().all(|&len| (19..=21).contains(&len)), "{lens:?}");
    let sinks = policy("streaming-llm+every");
    let tokens = |budget: &str, context| sinks.budget_tokens("s", Some(&budget.parse().unwrap()), context, 8, 4);
    assert!(tokens("4", 4).is_err() && tokens("4", 3).is_err());
    assert_eq!(tokens("64", 3).unwrap(), 64);
    assert_eq!(policy("streaming-llm").budget_tokens("s", Some(&"64".parse().unwrap()), 3, 8, 4).unwrap(), 3);
}

#[test]
fn steps_read_what_is_selected_in_every_layer() {
    for name in ["llama", "qwen3"] {
        let (model, tokens) = open(name);
        // Until the second page is full: the context's 20 tokens and 12 more.
        let tokens = &tokens[..32];
        let after = |text: &str, budget: &str| run(&model, &[tokens], &[20], Some((&policy(text), budget)));
        let dense = run(&model, &[tokens], &[20], None);
        let spread = deviation(&dense.logits[0]);
        let apart = |a: &Run, b: &Run| furthest(&a.logits[0], &b.logits[0]) / spread;
        assert!(apart(&after("think", "1.0"), &dense) < 1e-5, "{name}: all channels are selected");
        // One page, the last, is what a cache holds that has lost the first.
        let page = after("quest", "16");
        assert!(apart(&page, &after("streaming-llm:sink=0", "4")) < 1e-5, "{name}: one page is selected");
        assert!(apart(&page, &dense) > 1e-3 && apart(&after("think", "0.3"), &dense) > 1e-3, "{name}: it shows");
        assert_eq!(page.lens, dense.lens, "{name}: nothing is evicted");
        // A sequence of a batch reads what it reads alone.
        for (text, budget) in [("quest", "16"), ("think", "0.3")] {
            let both = run(&model, &[&tokens[..25], tokens], &[17, 20], Some((&policy(text), budget)));
            let alone = after(text, budget);
            assert!(furthest(&both.logits[1], &alone.logits[0]) / spread < 1e-5, "{name}: {text} in a batch");
        }
    }
}

/// Channels are gone from the context whatever asks, and tokens behind it are whole.
#[test]
fn a_question_at_once_sees_the_channels_that_its_tokens_see_one_by_one() {
    let (model, tokens) = open("llama");
    let (cpu, arena, think) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited(), policy("think"));
    let logits = |together: bool| {
        let setup = Setup { all_logits: true, columns: think.columns(), ..Setup::of(64, DType::F32) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let budget = Some("0.3".parse().unwrap());
        decoder.evict(Eviction { policy: &think, name: "think", budget, seed: 0, repeat: None }, &[20]).unwrap();
        decoder.prefill(&[&tokens[..20]], |_, _, _| ()).unwrap();
        let mut logits = Vec::new();
        let mut take = |_: usize, _: usize, row: &[f32]| logits.extend_from_slice(row);
        if together {
            decoder.prefill(&[&tokens[20..]], &mut take).unwrap();
        } else {
            (20..tokens.len()).for_each(|at| decoder.follow(&[&tokens[at..at + 1]], &mut take).unwrap());
        }
        // Of a channel that went, the keys of the context hold nothing, and those behind it something.
        let width = model.config.head_dim;
        let (mut context, mut behind, mut key) = (vec![0.0f32; width], vec![0.0f32; width], vec![0.0; width]);
        for slot in 0..tokens.len() {
            decoder.cache().read_key(0, slot, &mut key);
            let most = if slot < 20 { &mut context } else { &mut behind };
            most.iter_mut().zip(&key).for_each(|(most, x)| *most = most.max(x.abs()));
        }
        assert_eq!(context.iter().filter(|&&x| x > 0.0).count(), (width as f64 * 0.3) as usize);
        assert!(behind.iter().all(|&x| x > 0.0));
        logits
    };
    let (together, apart) = (logits(true), logits(false));
    assert!(furthest(&together, &apart) < 1e-5 * deviation(&together));
    let dense = run(&model, &[&tokens], &[20], None);
    assert!(
        furthest(&together, &dense.logits[0][dense.logits[0].len() - together.len()..]) > 1e-3 * deviation(&together)
    );
}

/// Behind an earlier prompt a schedule of once asks for no more; a sequence whose tokens were taken begins anew.
#[test]
fn a_second_prompt_goes_on_and_a_freed_sequence_begins_anew() {
    let (model, tokens) = open("llama");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    for text in ["snapkv:window=4", "knorm", "snapkv:window=4+every"] {
        let policy = policy(text);
        let setup = Setup { columns: policy.columns(), ..Setup::of(64, DType::F32) };
        let begun = || {
            let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
            let budget = Some("10".parse().unwrap());
            decoder.evict(Eviction { policy: &policy, name: text, budget, seed: 0, repeat: None }, &[20]).unwrap();
            decoder
        };
        let read = |decoder: &mut Decoder<'_>, tokens: &[u32]| {
            let mut logits = Vec::new();
            decoder.prefill(&[tokens], |_, _, row| logits = row.to_vec()).unwrap();
            (logits, decoder.cache().lens().to_vec())
        };
        let mut decoder = begun();
        let first = read(&mut decoder, &tokens[..20]);
        assert!(first.1.iter().all(|&len| len == 10), "{text}: {first:?}");
        let (_, lens) = read(&mut decoder, &tokens[20..26]);
        let expected = if text.ends_with("every") { 10 } else { 16 };
        assert!(lens.iter().all(|&len| len == expected), "{text}: {lens:?}");
        decoder.free(0);
        assert_eq!(read(&mut decoder, &tokens[..20]), first, "{text}");
    }
}

#[test]
fn keys_of_a_prompt_in_chunks_are_turned_back_as_the_whole_prompt_turned_them() {
    let checkpoint = checkpoint("longrope");
    let text = std::fs::read_to_string(checkpoint.folder.join("config.json")).unwrap();
    // The prompt is longer than both original contexts, so that they are the same model; its first chunk than one of them.
    let logits = |original: usize, text: &str, eviction: &str| {
        let folder = tempfile::tempdir().unwrap();
        let mut config: Value = serde_json::from_str(text).unwrap();
        config["original_max_position_embeddings"] = original.into();
        config["rope_parameters"]["original_max_position_embeddings"] = original.into();
        config["rope_parameters"]["attention_factor"] = 1.25.into();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let weights = "model.safetensors";
        std::fs::copy(checkpoint.folder.join(weights), folder.path().join(weights)).unwrap();
        let model = Model::open(folder.path(), &Arena::unlimited()).unwrap();
        run(&model, &[&checkpoint.tokens], &[checkpoint.tokens.len()], Some((&policy(eviction), "9"))).logits.remove(0)
    };
    for eviction in ["streaming-llm+chunks:tokens=13+rerotate", "expected-attention+chunks:tokens=13"] {
        assert_eq!(logits(8, &text, eviction), logits(32, &text, eviction), "{eviction}");
    }
}

#[test]
fn what_is_refitted_answers_otherwise_and_in_a_batch_as_alone() {
    let (model, tokens) = open("llama");
    let batch: [&[u32]; 2] = [&tokens[..30], &tokens[5..]];
    let after = [24, 11];
    for (plain, text) in [
        ("snapkv:window=4", "snapkv:window=4+match:queries=8"),
        ("knorm+ada", "knorm+ada+match:of=context,queries=5,fit=bias"),
    ] {
        let [dropped, refitted] = [policy(plain), policy(text)];
        let together = run(&model, &batch, &after, Some((&refitted, "0.5")));
        for (sequence, (tokens, &after)) in batch.iter().zip(&after).enumerate() {
            let alone = run(&model, &[tokens], &[after], Some((&refitted, "0.5")));
            let off = furthest(&alone.logits[0], &together.logits[sequence]);
            assert!(off < 1e-4, "{text}, sequence {sequence}: {off}");
            let without = run(&model, &[tokens], &[after], Some((&dropped, "0.5")));
            assert_eq!((alone.lens, alone.kv_bytes), (without.lens, without.kv_bytes), "{text}");
            assert!(furthest(&alone.logits[0], &without.logits[0]) > 1e-4, "{text} changes what is read");
        }
        let dense = run(&model, &batch[..1], &after[..1], None);
        let whole = run(&model, &batch[..1], &after[..1], Some((&refitted, "1.0")));
        assert!(whole.logits == dense.logits, "{text}: where all stays, no bit changes");
    }
}

#[test]
fn a_second_prompt_goes_on_under_the_same_policy() {
    let (model, tokens) = open("llama");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    for text in ["quest", "knorm+every:steps=1"] {
        let policy = policy(text);
        let setup = Setup { chunk_tokens: 9, columns: policy.columns(), ..Setup::of(64, DType::F32) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let eviction =
            Eviction { policy: &policy, name: text, budget: Some("16".parse().unwrap()), seed: 5, repeat: None };
        decoder.evict(eviction, &[20]).unwrap();
        let mut logits = Vec::new();
        for tokens in [&tokens[..20], &tokens[20..26]] {
            decoder.prefill(&[tokens], |_, _, row| logits = row.to_vec()).unwrap();
        }
        decoder.follow(&[&tokens[26..28]], |_, _, row| logits = row.to_vec()).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()) && decoder.seen() == [28], "{text}");
    }
}

#[test]
fn what_a_model_cannot_do_is_refused_with_the_reason() {
    let cases = [
        ("mistral", "quest", "this model has sliding windows"),
        ("llama", "oracle", "it looks into the future"),
        ("llama", "snapkv+every+rerotate", "use 'once', or leave 'rerotate' out"),
        ("longrope", "streaming-llm+every+rerotate", "frequencies of other lengths"),
        ("mistral", "knorm+rerotate", "sliding windows mean nothing"),
        ("mistral", "snapkv+match", "most of which this model's sliding windows hide"),
        ("gemma2", "pyramidkv", "this model's layers have different windows"),
    ];
    for (name, text, expected) in cases {
        let (model, _) = open(name);
        let policy = policy(text);
        let error = Eviction { policy: &policy, name: text, budget: None, seed: 0, repeat: None }
            .check(&model.config)
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{text}: {error}");
    }
}

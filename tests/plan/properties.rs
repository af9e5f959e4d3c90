//! What holds for every plan: more never takes less, terms add up, the longest context fits and the next does not.

use super::{on, subject};
use kvsieve::planner::eviction::Eviction;
use kvsieve::planner::levers::{Loss, rank, siblings};
use kvsieve::planner::presets::{GPUS, MODELS, WEIGHT_FORMATS};
use kvsieve::planner::remedy::remedies;
use kvsieve::planner::scenario::{Allocation, Attention, Logits};
use kvsieve::planner::search::MOST;
use kvsieve::planner::{Phase, Scenario, Subject};
use proptest::prelude::*;

fn evicting(policy: &str, budget: &str) -> Eviction {
    Eviction::of(policy, budget.parse().unwrap()).unwrap()
}

/// Any scenario: every model, card and option.
fn scenarios() -> impl Strategy<Value = (usize, usize, u64, [u64; 2], [usize; 6], [u64; 3])> {
    let options = [0usize..3, 0..4, 0..2, 0..4, 0..3, 0..5];
    let cards = [1u64..3, 1..3, 0..12];
    (0..MODELS.len(), 0..GPUS.len(), 1u64..300_000, [1u64..5, 0..4], options, cards)
}

/// The scenario of some numbers.
fn scenario<'a>(
    subject: &'a Subject,
    card: usize,
    context: u64,
    [batch, beside]: [u64; 2],
    options: [usize; 6],
    [tensor_parallel, pipeline, offload]: [u64; 3],
) -> Scenario<'a> {
    let [attention, kv, logits, allocation, chunk, eviction] = options;
    let eviction = [
        None,
        Some(("snapkv", "0.25")),
        Some(("keydiff+chunks+every:steps=64", "512")),
        Some(("h2o", "64MiB")),
        Some(("quest", "0.25")),
    ][eviction];
    Scenario {
        weights: WEIGHT_FORMATS.get(context as usize % (WEIGHT_FORMATS.len() + 1)),
        batch,
        concurrency: batch + beside,
        attention: [Attention::Naive, Attention::Minimal, Attention::Tiled][attention],
        kv: ["bf16", "int8", "q4_0", "k=int8,v=bf16"][kv].parse().unwrap(),
        logits: [Logits::Last, Logits::All][logits],
        allocation: [Allocation::Exact, Allocation::Paged(16), Allocation::Paged(256), Allocation::Reserved(None)]
            [allocation],
        chunk: [None, Some(512), Some(2048)][chunk],
        eviction: eviction.map(|(policy, budget)| evicting(policy, budget)),
        tensor_parallel,
        pipeline: pipeline.min(subject.layers as u64),
        offload: offload.min(subject.layers as u64),
        ..on(subject, &GPUS[card].name, context)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn more_never_takes_less((model, card, context, batch, options, cards) in scenarios()) {
        let subject = subject(&MODELS[model].name);
        let asked = scenario(&subject, card, context, batch, options, cards);
        for phase in Phase::ALL {
            let bytes = |scenario: &Scenario<'_>, context| scenario.bytes_at(phase, context).map(|bytes| bytes.total());
            let (Ok(here), Ok(next)) = (bytes(&asked, context), bytes(&asked, context + 1)) else { continue };
            prop_assert!(here <= next, "{phase:?}: {here} at {context}, {next} behind it");
            let more = Scenario { batch: asked.batch + 1, concurrency: asked.concurrency + 1, ..asked.clone() };
            prop_assert!(here <= bytes(&more, context).unwrap(), "{phase:?} at a larger batch");
            let beside = Scenario { concurrency: asked.concurrency + 1, ..asked.clone() };
            prop_assert!(here <= bytes(&beside, context).unwrap(), "{phase:?} with one more held");
        }
    }

    #[test]
    fn terms_add_up_and_the_longest_context_is_the_last_that_fits((model, card, context, batch, options, cards) in scenarios()) {
        let subject = subject(&MODELS[model].name);
        let asked = scenario(&subject, card, context, batch, options, cards);
        let Ok(waterfall) = asked.waterfall() else { return Ok(()) };
        for (place, phase) in Phase::ALL.into_iter().enumerate() {
            let sum: u64 = waterfall.terms.iter().map(|term| term.bytes(phase)).sum();
            prop_assert_eq!(sum, waterfall.total_bytes[place]);
        }
        prop_assert_eq!(waterfall.peak_bytes, *waterfall.total_bytes.iter().max().unwrap());
        prop_assert_eq!(waterfall.fits, waterfall.max_context_tokens.is_some_and(|most| most >= context));
        if let Some(most) = waterfall.max_context_tokens.filter(|&most| most >= context && most < MOST) {
            prop_assert!(asked.fits(most).unwrap() && !asked.fits(most + 1).unwrap());
        }
        match asked.max_batch().unwrap() {
            Some(most) if most < MOST => {
                let with = |batch| Scenario { batch, concurrency: 1, ..asked.clone() }.fits(context);
                prop_assert!(with(most).unwrap() && !with(most + 1).unwrap());
            }
            _ => {}
        }
    }
}

/// As a model takes it: its sequences are evicted from one by one.
#[test]
fn a_budget_in_bytes_is_that_of_each_sequence() {
    // A token of Llama 3 8B takes 128 KiB in bf16, so that 64 MiB are 512 tokens.
    let subject = subject("llama-3-8b");
    for sequences in [1, 8, 600] {
        let eviction = Some(evicting("h2o", "64MiB"));
        let asked = Scenario { eviction, concurrency: sequences, ..on(&subject, "h100", 8192) };
        assert_eq!(asked.bytes_at(Phase::Decode, 8192).unwrap().kv, u128::from(sequences) * (64 << 20));
    }
}

#[test]
fn prompts_that_wait_hold_keys_and_values_and_no_scores() {
    let subject = subject("llama-3-8b");
    let one = Scenario { attention: Attention::Naive, ..on(&subject, "h100", 4096) };
    let (eight, waiting) = (Scenario { batch: 8, ..one.clone() }, Scenario { concurrency: 8, ..one.clone() });
    let at = |scenario: &Scenario<'_>, phase| scenario.bytes_at(phase, 4096).unwrap();
    assert_eq!(at(&waiting, Phase::Decode), at(&eight, Phase::Decode));
    let [single, waiting, eight] = [&one, &waiting, &eight].map(|scenario| at(scenario, Phase::Prefill));
    assert_eq!((waiting.kv, waiting.scores), (eight.kv, single.scores));
}

/// What is held while a prompt is read has been evicted from already, and may be at its last token.
#[test]
fn sequences_that_are_held_beside_a_prompt_hold_what_was_retained() {
    let subject = subject("llama-3-8b");
    let context = 32_768;
    for (policy, budget, batch, concurrency, output, reading, beside, decoding) in [
        ("snapkv", "512", 1, 64, 0, context, 512, 512),
        ("snapkv", "512", 4, 64, 0, context, 512, 512),
        ("snapkv", "512", 64, 64, 0, context, 512, 512),
        ("snapkv", "0.1", 1, 8, 100, context, 3376, 3376),
        ("h2o+every:steps=64", "512", 1, 8, 4096, context, 576, 576),
        ("snapkv+chunks:tokens=1024", "512", 2, 8, 0, 1536, 512, 512),
        ("full", "1.0", 1, 8, 100, context, context + 100, context + 100),
        ("quest", "0.1", 1, 8, 0, context, context, context),
    ] {
        let eviction = Some(evicting(policy, budget));
        let asked = Scenario { eviction, batch, concurrency, output, ..on(&subject, "h200", context) };
        let tokens = |phase| asked.bytes_at(phase, context).unwrap().kv / u128::from(asked.kv_token_bytes());
        let expected = [batch * reading + (concurrency - batch) * beside, concurrency * decoding];
        assert_eq!([Phase::Prefill, Phase::Decode].map(tokens), expected.map(u128::from), "{policy} {batch}");
    }
}

/// Passes may be shorter than the policy's chunks, behind which alone it evicts.
#[test]
fn a_list_comes_to_what_was_retained_and_a_chunk_of_the_policys() {
    let subject = subject("llama-3-8b");
    for (chunk, tokens) in [(None, 4608), (Some(8192), 4608), (Some(256), 4608)] {
        let eviction = Some(evicting("keydiff+chunks:tokens=4096", "512"));
        let asked = Scenario { eviction, chunk, ..on(&subject, "h100", 65_536) };
        assert_eq!(asked.bytes_at(Phase::Prefill, 65_536).unwrap().kv / 131_072, tokens, "{chunk:?}");
    }
}

/// Every token stays, and on top what a step selects by: two rows and three numbers of a page with `quest`, channels with `think`.
#[test]
fn a_policy_that_selects_holds_everything_and_what_it_selects_by() {
    let subject = subject("llama-3-8b");
    let lists = 32 * 8;
    for (policy, of_list) in [("quest", 2048 * (2 * 128 * 2 + 12)), ("think", 128 * 4)] {
        let plain = Scenario { batch: 2, concurrency: 5, ..on(&subject, "h200", 32_768) };
        let asked = Scenario { eviction: Some(evicting(policy, "0.1")), ..plain.clone() };
        for (phase, sequences) in [(Phase::Load, 0), (Phase::Prefill, 3), (Phase::Decode, 5)] {
            let at = |scenario: &Scenario<'_>| scenario.bytes_at(phase, 32_768).unwrap();
            assert_eq!(at(&asked).workspace, sequences * lists * of_list, "{policy} {phase:?}");
            assert_eq!(at(&asked).kv, at(&plain).kv);
        }
    }
}

#[test]
fn keys_and_values_rise_with_slope_1_and_scores_with_slope_2() {
    let subject = subject("llama-3-8b");
    let naive = Scenario { attention: Attention::Naive, ..on(&subject, "h100", 8192) };
    let [short, long] = [8192, 16_384].map(|context| naive.bytes_at(Phase::Prefill, context).unwrap());
    assert_eq!((long.kv, long.scores), (2 * short.kv, 4 * short.scores));
}

#[test]
fn a_policy_frees_the_prompt_only_where_it_evicts_while_it_reads() {
    let subject = subject("llama-3-8b");
    let with = |policy| {
        let eviction = Some(evicting(policy, "1k"));
        Scenario { eviction, chunk: Some(1024), ..on(&subject, "h100", 65_536) }
    };
    let held = |scenario: &Scenario<'_>, phase| {
        scenario.bytes_at(phase, 65_536).unwrap().kv / u128::from(scenario.kv_token_bytes())
    };
    assert_eq!([Phase::Prefill, Phase::Decode].map(|phase| held(&with("keydiff"), phase)), [65_536, 1024]);
    assert_eq!([Phase::Prefill, Phase::Decode].map(|phase| held(&with("keydiff+chunks"), phase)), [2048, 1024]);
}

#[test]
fn levers_gain_something_and_a_remedy_fits() {
    for (name, card, target) in
        [("llama-3-8b", "rtx-4090", 131_072), ("llama-2-7b", "l4", 32_768), ("llama-3-70b", "h100", 65_536)]
    {
        let subject = subject(name);
        let siblings = siblings(&subject);
        let asked = Scenario { attention: Attention::Naive, ..on(&subject, card, 8192) };
        let before = asked.max_context().unwrap();
        let ranked = rank(&asked, &siblings).unwrap();
        assert!(ranked.windows(2).all(|pair| pair[0].gain_per_price >= pair[1].gain_per_price));
        let peak = asked.peak(8192).unwrap().1.total() as u64;
        assert!(ranked.iter().all(|lever| lever.max_context_tokens > before || lever.peak_bytes < peak));
        let [remedy] = &remedies(&asked, target, &siblings).unwrap()[..] else { panic!("one sequence, one answer") };
        assert!(remedy.peak_bytes <= asked.memory.bytes() && remedy.max_context_tokens >= Some(target), "{remedy:?}");
        assert!(!remedy.levers.is_empty());
    }
}

/// No set of levers that is written down here costs less than the one that is found, whatever it halves.
#[test]
fn the_set_of_least_price_is_found() {
    let subject = subject("llama-3.1-8b");
    let plain = ["prefill in chunks of 2048", "keys and values in q8_0", "weights in q8_0"];
    for (batch, concurrency, target, halved) in [
        (1, 16, 1 << 20, &["1 sequence held at once"][..]),
        (1, 32, 1 << 19, &["2 sequences held at once"]),
        (16, 1, 1 << 20, &["prompts read 1 at a time", "1 sequence held at once"]),
    ] {
        let asked = Scenario { batch, concurrency, ..on(&subject, "a100-80gb", target) };
        let ranked = rank(&asked, &[]).unwrap();
        let price = |name: &&str| ranked.iter().find(|lever| lever.lever == **name).map(|lever| lever.price);
        let known: Option<f64> = plain.iter().chain(halved).map(price).sum();
        let found = remedies(&asked, target, &[]).unwrap();
        let cheapest = found.last().unwrap();
        assert!(cheapest.price <= known.unwrap() + 1e-9, "{cheapest:?}, {known:?}");
        assert!(!cheapest.levers.iter().any(|lever| lever.contains("on the host")), "{cheapest:?}");
        let lost = |loss: &Loss| if let Loss::Measured { kl_nats, .. } = loss { *kl_nats } else { 0.0 };
        assert!(cheapest.losses.iter().map(lost).sum::<f64>() < 0.01, "{cheapest:?}");
        assert!(cheapest.peak_bytes <= asked.memory.bytes() && cheapest.max_context_tokens >= Some(target));
    }
}

/// What was asked for is given up only beside an answer that keeps it, or where there is none.
#[test]
fn all_sequences_are_kept_where_any_set_is_enough() {
    let subject = subject("llama-3.1-8b");
    for (card, concurrency, target, kept) in [
        ("a100-80gb", 16, 1 << 17, &[true, false][..]),
        ("a100-80gb", 2, 1 << 15, &[true]),
        ("l4", 512, 1 << 20, &[false]),
    ] {
        let asked = Scenario { concurrency, ..on(&subject, card, 8192) };
        let found = remedies(&asked, target, &[]).unwrap();
        let all: Vec<bool> = found.iter().map(|remedy| remedy.sequences == concurrency).collect();
        assert_eq!(all, kept, "{found:?}");
        assert!(found.iter().all(|remedy| remedy.peak_bytes <= asked.memory.bytes()));
        assert!(found.windows(2).all(|pair| pair[1].price < pair[0].price), "{found:?}");
    }
}

#[test]
fn a_loss_is_a_records_or_not_measured() {
    use kvsieve::planner::levers::{of_kv_format, of_policy, of_weights};
    assert!(matches!(of_policy("keydiff", "0.25"), Loss::Measured { experiment: "real-text", .. }));
    assert_eq!(of_policy("keydiff", "0.26"), Loss::NotMeasured);
    assert!(matches!(of_kv_format("int8"), Loss::Measured { experiment: "real-formats", .. }));
    assert!(matches!(of_weights("q8_0"), Loss::Measured { experiment: "hybrid", .. }));
    assert_eq!(of_weights("nf4"), Loss::NotMeasured);
}

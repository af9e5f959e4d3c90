//! What holds for every plan: more never takes less, terms add up, the longest context fits and the next does not.

use super::{on, subject};
use kvsieve::planner::levers::{Loss, rank, remedy, siblings};
use kvsieve::planner::presets::{GPUS, MODELS, WEIGHT_FORMATS};
use kvsieve::planner::scenario::{Allocation, Attention, Eviction, Logits};
use kvsieve::planner::search::MOST;
use kvsieve::planner::{Phase, PlanError, Scenario, Subject};
use kvsieve::policy::{Budget, Decoding};
use proptest::prelude::*;

/// Any scenario: every model, card and option.
fn scenarios() -> impl Strategy<Value = (usize, usize, u64, u64, [usize; 6], [u64; 3])> {
    let options = [0usize..3, 0..4, 0..2, 0..4, 0..3, 0..4];
    let cards = [1u64..3, 1..3, 0..12];
    (0..MODELS.len(), 0..GPUS.len(), 1u64..300_000, 1u64..5, options, cards)
}

/// The scenario of some numbers.
fn scenario<'a>(
    subject: &'a Subject,
    card: usize,
    context: u64,
    batch: u64,
    options: [usize; 6],
    [tensor_parallel, pipeline, offload]: [u64; 3],
) -> Scenario<'a> {
    let [attention, kv, logits, allocation, chunk, eviction] = options;
    let eviction = [
        None,
        Some(("snapkv", "0.25", None)),
        Some(("keydiff+chunks+every:steps=64", "512", Some(1024))),
        Some(("h2o", "64MiB", None)),
    ][eviction];
    Scenario {
        weights: WEIGHT_FORMATS.get(context as usize % (WEIGHT_FORMATS.len() + 1)),
        batch,
        attention: [Attention::Naive, Attention::Minimal, Attention::Tiled][attention],
        kv: ["bf16", "int8", "q4_0", "k=int8,v=bf16"][kv].parse().unwrap(),
        logits: [Logits::Last, Logits::All][logits],
        allocation: [Allocation::Exact, Allocation::Paged(16), Allocation::Paged(256), Allocation::Reserved(None)]
            [allocation],
        chunk: [None, Some(512), Some(2048)][chunk],
        eviction: eviction.map(|(policy, budget, chunk_tokens)| Eviction {
            policy: policy.into(),
            budget: budget.parse::<Budget>().unwrap(),
            chunk_tokens,
            decoding: if policy.contains("every") { Decoding::EverySteps(64) } else { Decoding::Never },
            selects: false,
        }),
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
            let more = Scenario { batch: batch + 1, ..asked.clone() };
            if !matches!(asked.eviction, Some(Eviction { budget: Budget::Bytes(_), .. })) {
                prop_assert!(here <= bytes(&more, context).unwrap(), "{phase:?} at a larger batch");
            }
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
                let with = |batch| Scenario { batch, ..asked.clone() }.fits(context);
                prop_assert!(with(most).unwrap() && !with(most + 1).unwrap_or(false));
            }
            _ => {}
        }
    }
}

#[test]
fn a_budget_in_bytes_bounds_the_batch_where_memory_does_not() {
    // A token of Llama 3 8B takes 128 KiB in bf16, so that 64 MiB are 512 tokens: one for each of 512 sequences.
    let subject = subject("llama-3-8b");
    let policy = Eviction {
        policy: "h2o".into(),
        budget: "64MiB".parse().unwrap(),
        chunk_tokens: None,
        decoding: Decoding::Never,
        selects: false,
    };
    let asked = Scenario { eviction: Some(policy), ..on(&subject, "h100", 64) };
    assert_eq!(asked.max_batch().unwrap(), Some(512));
    assert!(matches!(Scenario { batch: 513, ..asked }.max_batch(), Err(PlanError::Budget(_))));
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
    let with = |chunk_tokens| {
        let budget = "1k".parse::<Budget>().unwrap();
        let eviction = Some(Eviction {
            policy: "keydiff".into(),
            budget,
            chunk_tokens,
            decoding: Decoding::Never,
            selects: false,
        });
        Scenario { eviction, chunk: Some(1024), ..on(&subject, "h100", 65_536) }
    };
    let held = |scenario: &Scenario<'_>, phase| {
        scenario.bytes_at(phase, 65_536).unwrap().kv / u128::from(scenario.kv_token_bytes())
    };
    assert_eq!([Phase::Prefill, Phase::Decode].map(|phase| held(&with(None), phase)), [65_536, 1024]);
    assert_eq!([Phase::Prefill, Phase::Decode].map(|phase| held(&with(Some(1024)), phase)), [2048, 1024]);
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
        let remedy = remedy(&asked, target, &siblings).unwrap().unwrap();
        assert!(remedy.peak_bytes <= asked.memory.bytes() && remedy.max_context_tokens >= Some(target), "{remedy:?}");
        assert!(!remedy.levers.is_empty());
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

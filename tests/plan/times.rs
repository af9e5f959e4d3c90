//! Times of a plan, where they are more than bytes over a bandwidth: passes that evict, parts of a model in other formats, stages,
//! cards and links.

use super::{on, subject};
use kvsieve::planner::eviction::Eviction;
use kvsieve::planner::presets::weight_format;
use kvsieve::planner::roofline::{Reached, Times};
use kvsieve::planner::scenario::Attention;
use kvsieve::planner::{Scenario, Subject};
use kvsieve::policy::Budget;

const WHOLE: Reached = Reached { bandwidth: 1.0, operations: 1.0 };

fn times(scenario: &Scenario<'_>) -> Times {
    scenario.times(WHOLE).unwrap().unwrap()
}

/// Pairs of each pass, added up one by one.
#[test]
fn attention_of_a_prompt_is_that_of_its_passes() {
    let subject = subject("llama-3-8b");
    let (pass, context) = (512, 16_384);
    let shape = &subject.architecture;
    let pair_flop = 4.0 * (shape.layers * shape.heads * shape.head_dim) as f64;
    for (attention, budget, chunk) in [
        (Attention::Tiled, None, 512),
        (Attention::Tiled, Some(2048), 512),
        (Attention::Tiled, Some(1024), 2048),
        (Attention::Tiled, Some(1 << 20), 512),
        (Attention::Naive, None, 512),
        (Attention::Naive, Some(2048), 512),
        (Attention::Naive, Some(1024), 2048),
        (Attention::Naive, Some(2000), 512),
    ] {
        let policy = format!("snapkv+chunks:tokens={chunk}");
        let eviction = budget.map(|budget: usize| Eviction::of(&policy, Budget::Tokens(budget)).unwrap());
        let scenario = Scenario { attention, eviction, chunk: Some(pass), ..on(&subject, "h100", context) };
        let [mut pairs, mut held] = [0u64; 2];
        for read in (1..=context / pass).map(|passes| passes * pass) {
            pairs += pass * held + if attention == Attention::Tiled { pass * pass / 2 } else { pass * pass };
            held += pass;
            // Back to the budget behind each chunk of the policy's, which may be of several passes.
            if read % chunk == 0 {
                held = held.min(budget.map_or(context, |budget| budget as u64));
            }
        }
        let none = Scenario { context: 1, ..scenario.clone() };
        let flops = 989.4e12;
        let products_s = 2.0 * subject.active_parameters as f64 * context as f64 / flops;
        let attention_s = times(&scenario).prefill_s - products_s;
        let by_hand = match attention {
            Attention::Tiled => pairs as f64 * pair_flop / flops,
            // Four passes over scores in 16 bits are slower than their products.
            _ => 8.0 * pairs as f64 * (shape.layers * shape.heads) as f64 / 3.35e12,
        };
        assert!((attention_s / by_hand - 1.0).abs() < 0.02, "{attention:?} {budget:?}: {attention_s} {by_hand}");
        assert!(times(&none).prefill_s < times(&scenario).prefill_s);
    }
}

/// Whole pages and the index that they are chosen by; rows of keys without the channels that went.
#[test]
fn a_step_reads_what_a_policy_selects() {
    let subject = subject("llama-3-8b");
    let context = 32_768;
    let (lists, row) = (32 * 8, 256);
    for (policy, budget, of_list) in [
        // 3276 tokens are 204 pages, of 2048 that have two rows each in the index.
        ("quest", "0.1", 204 * 16 * 2 * row + 2048 * 2 * row),
        ("quest", "1.0", context * 2 * row + 2048 * 2 * row),
        ("think", "0.5", context * (row / 2 + row)),
        ("think:ratio=0.25", "1.0", context * (row * 3 / 4 + row)),
        // A policy that evicts behind the prompt leaves a step less to read.
        ("snapkv", "512", 512 * 2 * row),
    ] {
        for (batch, concurrency, tensor_parallel, pipeline) in [(1, 1, 1, 1), (2, 8, 1, 1), (1, 4, 2, 2)] {
            let plain = Scenario { batch, concurrency, tensor_parallel, pipeline, ..on(&subject, "h200", context) };
            let eviction = Some(Eviction::of(policy, budget.parse().unwrap()).unwrap());
            let read = times(&Scenario { eviction, ..plain.clone() }).decode_bytes - plain.read_bytes(concurrency);
            assert_eq!(read, (concurrency * lists * of_list) as f64, "{policy}@{budget} of {concurrency}");
        }
    }
}

/// Bits of blocks and of the output matrix, and of experts those that a token meets; a table is only looked up.
#[test]
fn a_step_reads_the_parts_in_their_own_bits() {
    for (model, format, gb) in [
        ("llama-3-8b", "nf4", 4.651),
        ("qwen2.5-7b", "nf4", 4.456),
        ("llama-3-8b", "fp8", 8.030),
        ("gpt-oss-20b", "nf4", 2.720),
        ("gpt-oss-20b", "fp8", 4.184),
        // Four of 32 experts in 4.25 bits, attention and the output matrix in 16.
        ("gpt-oss-20b", "mxfp4", 3.719),
        ("deepseek-v2-lite", "nf4", 1.576),
    ] {
        let subject = subject(model);
        let weights = Some(weight_format(format).unwrap());
        let read = Scenario { weights, ..on(&subject, "h100", 1) }.read_bytes(1) / 1e9;
        assert!((read / gb - 1.0).abs() < 0.005, "{model} {format}: {read}");
    }
}

#[test]
fn stages_work_one_after_another_and_share_no_link() {
    let subject = subject("llama-3-8b");
    let at = |pipeline, offload, context| times(&Scenario { pipeline, offload, ..on(&subject, "h200", context) });
    for pipeline in [2, 5, 31] {
        let (alone, staged) = (at(1, 0, 131_072), at(pipeline, 0, 131_072));
        assert_eq!((alone.decode_bytes, alone.decode_s), (staged.decode_bytes, staged.decode_s), "{pipeline}");
        assert_eq!(at(1, 32, 1024).link_s, at(pipeline, 32, 1024).link_s, "{pipeline}");
    }
    // Without its blocks a card reads the output matrix and what it holds of the context.
    let head = (subject.vocab * subject.hidden) as f64 * 2.0;
    assert!((at(1, 32, 1).decode_bytes / head - 1.0).abs() < 0.001, "{}", at(1, 32, 1).decode_bytes);
}

/// Compressed rows are multiplied as heads of nope + rope and of v.
#[test]
fn mla_is_multiplied_as_it_is_expanded() {
    let with = |context| {
        let subject = subject("deepseek-v3");
        times(&Scenario { tensor_parallel: 8, ..on(&subject, "h200", context) }).prefill_s
    };
    let subject: Subject = subject("deepseek-v3");
    let flops = 8.0 * 989.4e12;
    let products_s = 2.0 * subject.active_parameters as f64 * 131_072.0 / flops;
    let pairs = 131_072f64.powi(2) / 2.0 * (61 * 128) as f64;
    let by_hand = products_s + 2.0 * pairs * (128 + 64 + 128) as f64 / flops;
    assert!((with(131_072) / by_hand - 1.0).abs() < 0.01, "{} {by_hand}", with(131_072));
}

#[test]
fn nothing_comes_faster_from_disk_than_a_disk_reads() {
    let subject = subject("llama-3-70b");
    let scenario = Scenario { tensor_parallel: 4, ..on(&subject, "t4", 1024) };
    for card in kvsieve::planner::cards::cards(&scenario).unwrap() {
        if let (Some(rate), Some(bytes)) = (card.disk_tokens_per_s, card.offload_bytes.filter(|&bytes| bytes > 0)) {
            assert!(rate <= 5e9 / bytes as f64, "{}: {rate} tokens/s of {bytes} bytes", card.gpu);
        }
    }
}

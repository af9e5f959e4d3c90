//! Numbers that were published, to the digit.

use super::{on, subject};
use kvsieve::experiment::store;
use kvsieve::model::{Config, Mixture};
use kvsieve::planner::kv::KvStore;
use kvsieve::planner::presets::{GPUS, LOSSES, MODELS, WEIGHT_FORMATS, gpu, network, weight_format};
use kvsieve::planner::published::published;
use kvsieve::planner::scale::Scale;
use kvsieve::planner::scenario::{Attention, Memory};
use kvsieve::planner::train::{ADAMW, Adapters, OPTIMIZERS, Offload, Recompute, Training, states};
use kvsieve::planner::{Scenario, Subject};
use std::path::Path;

/// Bytes of one sequence's keys and values in bf16.
fn kv_bytes(subject: &Subject, tokens: u64, windows: bool) -> u64 {
    let bf16: KvStore = "bf16".parse().unwrap();
    let held = |window: Option<usize>| window.filter(|_| windows).map_or(tokens, |window| tokens.min(window as u64));
    subject.groups.iter().map(|group| bf16.token_bytes(group) * held(group.window)).sum()
}

/// Model, parameters as the hub counts them, bytes of a token with every layer full, GiB of keys and values at 8K and 128K.
const MODELS_PUBLISHED: &[(&str, u64, u64, f64, f64)] = &[
    ("llama-2-7b", 6_738_415_616, 524_288, 4.000, 64.00),
    ("llama-2-13b", 13_015_864_320, 819_200, 6.250, 100.00),
    ("llama-2-70b", 68_976_648_192, 327_680, 2.500, 40.00),
    ("llama-3-8b", 8_030_261_248, 131_072, 1.000, 16.00),
    ("llama-3-70b", 70_553_706_496, 327_680, 2.500, 40.00),
    ("llama-3.1-405b", 405_853_388_800, 516_096, 3.938, 63.00),
    ("llama-3.2-1b", 1_235_814_400, 32_768, 0.250, 4.00),
    ("llama-3.2-3b", 3_212_749_824, 114_688, 0.875, 14.00),
    ("mistral-7b-v0.1", 7_241_732_096, 131_072, 0.500, 0.50),
    ("mistral-7b-v0.3", 7_248_023_552, 131_072, 1.000, 16.00),
    ("mistral-large-2407", 122_610_069_504, 360_448, 2.750, 44.00),
    ("mixtral-8x7b", 46_702_792_704, 131_072, 1.000, 16.00),
    ("mixtral-8x22b", 140_630_071_296, 229_376, 1.750, 28.00),
    ("qwen2.5-0.5b", 494_032_768, 12_288, 0.094, 1.50),
    ("qwen2.5-1.5b", 1_543_714_304, 28_672, 0.219, 3.50),
    ("qwen2.5-3b", 3_085_938_688, 36_864, 0.281, 4.50),
    ("qwen2.5-7b", 7_615_616_512, 57_344, 0.438, 7.00),
    ("qwen2.5-14b", 14_770_033_664, 196_608, 1.500, 24.00),
    ("qwen2.5-32b", 32_763_876_352, 262_144, 2.000, 32.00),
    ("qwen2.5-72b", 72_706_203_648, 327_680, 2.500, 40.00),
    ("qwen3-0.6b", 596_049_920, 114_688, 0.875, 14.00),
    ("qwen3-1.7b", 1_720_574_976, 114_688, 0.875, 14.00),
    ("qwen3-4b", 4_022_468_096, 147_456, 1.125, 18.00),
    ("qwen3-8b", 8_190_735_360, 147_456, 1.125, 18.00),
    ("qwen3-14b", 14_768_307_200, 163_840, 1.250, 20.00),
    ("qwen3-32b", 32_762_123_264, 262_144, 2.000, 32.00),
    ("qwen3-30b-a3b", 30_532_122_624, 98_304, 0.750, 12.00),
    ("qwen3-235b-a22b", 235_093_634_560, 192_512, 1.469, 23.50),
    ("gemma-2b", 2_506_172_416, 18_432, 0.141, 2.25),
    ("gemma-7b", 8_537_680_896, 458_752, 3.500, 56.00),
    ("gemma-2-2b", 2_614_341_888, 106_496, 0.609, 6.70),
    ("gemma-2-9b", 9_241_705_984, 344_064, 1.969, 21.66),
    ("gemma-2-27b", 27_227_128_320, 376_832, 2.156, 23.72),
    ("gemma-3-1b", 999_885_952, 26_624, 0.042, 0.51),
    ("gemma-3-4b", 3_880_263_168, 139_264, 0.270, 2.61),
    ("gemma-3-12b", 11_766_034_176, 393_216, 0.812, 8.31),
    ("gemma-3-27b", 27_009_346_304, 507_904, 1.031, 10.41),
    ("phi-3-mini-4k", 3_821_079_552, 393_216, 0.750, 0.75),
    ("phi-4", 14_659_507_200, 204_800, 1.562, 25.00),
    ("smollm2-135m", 134_515_008, 23_040, 0.176, 2.81),
    ("smollm2-1.7b", 1_711_376_384, 196_608, 1.500, 24.00),
];

/// Model, parameters, bytes of a token. Sources: DeepSeek's and Moonshot's hubs, OpenAI's gpt-oss, the GPT-2, OPT and
/// GPT-NeoX papers, "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1. Rounded counts are to three digits.
const OTHERS_PUBLISHED: &[(&str, f64, u64, u64)] = &[
    ("deepseek-v3", 671_026_419_200.0, 0, 70_272),
    ("deepseek-v2", 235_741_434_880.0, 0, 69_120),
    ("deepseek-v2-lite", 15_706_484_224.0, 0, 31_104),
    ("kimi-k2", 1_026_408_232_448.0, 0, 70_272),
    ("gpt-oss-120b", 116_829_156_672.0, 0, 73_728),
    ("gpt-oss-20b", 20_914_757_184.0, 0, 49_152),
    ("gpt-2", 124_439_808.0, 0, 36_864),
    ("gpt-2-medium", 354_823_168.0, 0, 98_304),
    ("gpt-2-large", 774_030_080.0, 0, 184_320),
    ("gpt-2-xl", 1_557_611_200.0, 0, 307_200),
    ("opt-13b", 12.85e9, 5_000_000, 819_200),
    ("opt-66b", 65.72e9, 5_000_000, 2_359_296),
    ("opt-175b", 174.60e9, 5_000_000, 4_718_592),
    ("gpt-neox-20b", 20.55e9, 10_000_000, 1_081_344),
    ("llama-30b", 32.5e9, 50_000_000, 1_597_440),
    ("llama-65b", 65.3e9, 50_000_000, 2_621_440),
    ("qwen3-next-80b-a3b", 79_674_391_296.0, 0, 24_576),
];

#[test]
fn parameters_and_bytes_of_a_token_are_those_that_were_published() {
    for &(name, parameters, token_bytes, at_8k, at_128k) in MODELS_PUBLISHED {
        let subject = subject(name);
        assert_eq!(subject.parameters, parameters, "{name}");
        assert_eq!(kv_bytes(&subject, 1, false), token_bytes, "{name}");
        for (tokens, gib) in [(8192, at_8k), (131_072, at_128k)] {
            let computed = kv_bytes(&subject, tokens, true) as f64 / (1u64 << 30) as f64;
            assert!((computed - gib).abs() <= 0.005, "{name} at {tokens}: {computed} GiB, published {gib}");
        }
    }
    for &(name, parameters, rounded, token_bytes) in OTHERS_PUBLISHED {
        let subject = subject(name);
        let off = (subject.parameters as f64 - parameters).abs();
        assert!(off <= rounded as f64, "{name}: {} parameters, published {parameters}", subject.parameters);
        assert_eq!(kv_bytes(&subject, 1, false), token_bytes, "{name}");
    }
    let tested = MODELS_PUBLISHED.len() + OTHERS_PUBLISHED.len();
    assert!(tested >= 57 && MODELS.len() >= 57 && GPUS.len() >= 14, "{tested} of {}", MODELS.len());
}

/// Bytes of memory, model, and the context at which eager, minimal, tiled and tiled prefill in chunks of 2048 end, with
/// bf16 weights and 0.5 GB of context.
#[test]
fn contexts_end_where_the_closed_form_says() {
    let cases = [
        ("llama-3-8b", [9_621, 13_354, 111_124, 196_341]),
        ("llama-2-7b", [9_437, 12_746, 47_020, 54_091]),
        // With a token table of 32,000; its window would keep it from ending, were it seen.
        ("mistral-7b-v0.1", [9_922, 13_779, 117_879, 208_373]),
    ];
    for (name, ends) in cases {
        let mut subject = subject(name);
        subject.groups.iter_mut().for_each(|group| group.window = None);
        let tiled = Scenario { memory: Memory::Bytes(40_536 << 20), ..on(&subject, "a100-40gb", 1024) };
        let kinds = [
            (Attention::Naive, None),
            (Attention::Minimal, None),
            (Attention::Tiled, None),
            (Attention::Tiled, Some(2048)),
        ];
        for ((attention, chunk), end) in kinds.into_iter().zip(ends) {
            let scenario = Scenario { attention, chunk, ..tiled.clone() };
            assert_eq!(scenario.max_context().unwrap(), Some(end), "{name} {attention:?} {chunk:?}");
        }
    }
}

#[test]
fn published_numbers_are_reproduced_to_their_last_digit() {
    let rows = published();
    assert!(rows.len() >= 30, "{} rows", rows.len());
    // Files of llama.cpp hold a header with the vocabulary besides, at most 0.3%.
    for row in &rows {
        let close = row.source.contains("headers") && (0.997..=1.0).contains(&(row.computed / row.value));
        assert!(
            row.agrees() || close,
            "{} {}: {} computed, {} published",
            row.source,
            row.what,
            row.computed,
            row.value
        );
    }
    assert_eq!(rows.iter().filter(|row| row.source.starts_with("FlashAttention") && row.agrees()).count(), 16);
}

/// GB of Llama-3-8B and Llama-2-7B by weight format, from the formats' bits.
#[test]
fn quantised_weights_have_their_scales_and_their_16_bit_tables() {
    let cases = [
        ("llama-3-8b", "bf16", 16.06),
        ("llama-3-8b", "nf4", 5.70),
        ("llama-3-8b", "q8_0", 8.53),
        ("llama-2-7b", "fp32", 26.95),
        ("llama-2-7b", "q8_0", 7.16),
        ("mistral-7b-v0.1", "fp32", 28.97),
        ("mistral-7b-v0.1", "q4_k_m", 4.37),
        ("llama-3-70b", "nf4", 39.52),
        ("gpt-neox-20b", "bf16", 41.11),
    ];
    for (name, format, gb) in cases {
        let bytes = subject(name).weight_bytes(Some(weight_format(format).unwrap())).total();
        assert!((bytes as f64 / 1e9 - gb).abs() < 0.006, "{name} in {format}: {bytes}");
    }
}

/// Bytes of tensors as the makers' index counts them; GiB of the files as "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925,
/// table 1, prints them.
#[test]
fn weights_are_those_of_the_published_files() {
    let held = |name| subject(name).weight_bytes(subject(name).published()).total();
    assert_eq!(held("gpt-oss-20b"), 13_761_264_768);
    for (name, printed) in [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)] {
        let gib = held(name) as f64 / (1u64 << 30) as f64;
        assert!((gib - printed).abs() < 0.05, "{name}: {gib}");
    }
    let published = |name| subject(name).published().map(|format| format.name.clone());
    assert_eq!(["deepseek-v3", "kimi-k2"].map(published), [Some("fp8".into()), Some("fp8".into())]);
    assert!(MODELS.iter().all(|model| subject(&model.name).published().is_none_or(|format| format.is_for(model))));
}

/// Every mixture that `kvsieve quantize` writes takes what the table of weight formats says, to the byte.
#[test]
fn gguf_formats_are_the_mixtures_that_are_written() {
    let llama = |[layers, hidden, heads, kv_heads, ffn]: [usize; 5]| {
        serde_json::json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
            "vocab_size": 128_256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
            "tie_word_embeddings": ffn == 1536, "hidden_act": "silu"})
    };
    let shapes = [
        [32, 4096, 32, 8, 14336],
        [32, 4096, 32, 32, 14336],
        [80, 8192, 64, 8, 28672],
        // Rows that are no whole super-blocks, as SmolLM2's and Qwen2.5-0.5B's; and no whole blocks.
        [30, 576, 9, 3, 1536],
        [24, 896, 14, 2, 4864],
        [4, 48, 3, 3, 112],
    ];
    let mut held = 0;
    for shape in shapes {
        let folder = tempfile::TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.json"), llama(shape).to_string()).unwrap();
        let subject = Subject::find(&folder.path().join("config.json")).unwrap();
        let config = Config::read(folder.path()).unwrap();
        for format in WEIGHT_FORMATS.iter() {
            let Ok(mixture) = format.name.parse::<Mixture>() else { continue };
            let written: usize = mixture.plan(&config).iter().map(|planned| planned.bytes()).sum();
            // Norms of a GGUF file are f32, those of bf16 weights are not.
            if format.name != "bf16" {
                assert_eq!(subject.weight_bytes(Some(format)).total(), written as u64, "{} of {shape:?}", format.name);
                held += 1;
            }
        }
    }
    assert_eq!(held, shapes.len() * 15, "all mixtures of blocks");
}

fn training(subject: &Subject) -> Training<'_> {
    Training {
        subject,
        optimizer: ADAMW,
        adapters: None,
        zero: 0,
        data_parallel: 1,
        tensor_parallel: 1,
        sequence_parallel: false,
        pipeline: 1,
        micro_batch: 1,
        context: 4096,
        recompute: Recompute::None,
        keeps_scores: false,
        offload: Offload::None,
        overhead_bytes: 0,
    }
}

#[test]
fn zero_divides_what_its_paper_says() {
    // Figure 1: 7.5B parameters, 64 cards; every stage to the byte.
    let stages = [0, 1, 2, 3].map(|zero| states(7_500_000_000, OPTIMIZERS[4], zero, 64).iter().sum::<u64>());
    assert_eq!(stages, [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]);
    // DeepSpeed's documents, t5-3b on 8 cards, GiB: stage 2, 16-bit gradients, with the optimizer on the host and without.
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let parameters = 2_851_000_000;
    let [parameter, ..] = states(parameters, OPTIMIZERS[4], 2, 8);
    assert!((gib(parameter) - 5.31).abs() < 0.005);
    let with_f32_gradients = states(parameters, OPTIMIZERS[5], 3, 8).iter().sum::<u64>() + 4 * 32_000_000;
    assert!((gib(with_f32_gradients) - 6.10).abs() < 0.02, "{}", gib(with_f32_gradients));
}

/// Llama-2-7B: rank 16 on all seven matrices of 32 blocks is 39,976,960 numbers, as peft counts them, of 4 + 4 + 8 bytes; below them
/// lie 6,738,415,616 in two bytes.
#[test]
fn adapters_take_sixteen_bytes_a_number_over_weights_that_stay() {
    let subject = subject("llama-2-7b");
    let adapters = |rank, base| Some(Adapters { rank, base: weight_format(base).unwrap() });
    let lora = Training { adapters: adapters(16, "bf16"), ..training(&subject) };
    let spent = lora.spent();
    let states = [spent.parameter_bytes, spent.gradient_bytes, spent.optimizer_bytes];
    assert_eq!(states, [2 * 6_738_415_616 + 4 * 39_976_960, 4 * 39_976_960, 8 * 39_976_960]);
    let eight = Training { optimizer: OPTIMIZERS[1], ..lora.clone() }.spent();
    assert_eq!(eight.optimizer_bytes, 2 * 39_976_960);
    let qlora = Training { adapters: adapters(16, "nf4"), ..lora.clone() };
    assert!(qlora.spent().total() < lora.spent().total() - 9_000_000_000);
    assert!(lora.spent().total() < training(&subject).spent().total() / 2);
    let error = |training: Training<'_>| training.check().unwrap_err().to_string();
    assert!(error(Training { adapters: adapters(0, "bf16"), ..lora.clone() }).contains("--adapters is 0; a rank is 1"));
    assert!(
        error(Training { optimizer: OPTIMIZERS[3], ..lora.clone() })
            .contains("--optimizer is sgd; adapters are kept in f32")
    );
}

#[test]
fn recomputing_sharding_and_offloading_only_ever_save() {
    for name in ["llama-2-7b", "gpt-2-xl", "mixtral-8x7b"] {
        let subject = subject(name);
        let plain = training(&subject);
        let total = |training: &Training<'_>| training.spent().total();
        let smaller = [
            Training { recompute: Recompute::Full, ..plain.clone() },
            Training { zero: 1, data_parallel: 8, ..plain.clone() },
            Training { tensor_parallel: 2, ..plain.clone() },
            Training { pipeline: 2, ..plain.clone() },
            Training { offload: Offload::Optimizer, ..plain.clone() },
        ];
        for training in &smaller {
            assert!(total(training) < total(&plain), "{name} {training:?}");
        }
        let kept = Training { keeps_scores: true, ..plain.clone() };
        assert!(total(&kept) > total(&plain), "{name}");
        let spent = smaller[4].spent();
        let held = plain.spent();
        assert_eq!(spent.host_bytes, held.gradient_bytes + held.optimizer_bytes, "nothing is lost on the way");
    }
}

/// "Speed-up of GQA", Llama-3-8B's extents on an H100 at its full bandwidth: ms of a decode step.
/// A model on cards of a node, and between nodes.
fn scale(subject: &Subject, context: u64) -> Scale<'_> {
    let (gpu, network) = (gpu("h100").unwrap(), network("infiniband-ndr").unwrap());
    Scale { subject, gpu, network, node_cards: 8, context, kv: "bf16".parse().unwrap() }
}

#[test]
fn a_ring_on_many_cards_is_its_closed_form() {
    let subject = subject("llama-3-8b");
    let on = scale(&subject, 1 << 20).on(64);
    // 2 Hq D t^2 operations, and 2 Hkv D t elements of 2 bytes, at 0.6 of 989.4 TFLOP/s and over 400 Gb/s.
    let t = 16_384.0f64;
    assert!((on.ring_compute_ns - 2.0 * 32.0 * 128.0 * t * t / (0.6 * 989.4e3)).abs() < 1.0, "{on:?}");
    assert_eq!(on.ring_send_bytes, 2 * 8 * 128 * 16_384 * 2);
    assert!((on.ring_send_ns - (22_400.0 + on.ring_send_bytes as f64 / 50.0)).abs() < 1.0, "{on:?}");
    assert!((on.ring_s - 32.0 * 64.0 * on.ring_compute_ns / 1e9).abs() < 1e-6, "computing hides the sending: {on:?}");
    // Psi = 8.03e9 parameters of 2 bytes: 2 Psi and 3 Psi, but for the card's own part.
    let psi = 2.0 * 8_030_261_248.0 * 63.0 / 64.0;
    assert!(
        on.zero_bytes.iter().zip([2.0, 3.0]).all(|(&bytes, times)| (bytes as f64 / (times * psi) - 1.0).abs() < 1e-6)
    );
    assert!((on.tree_read_ns - 131_072.0 * t / (0.67 * 3350.0)).abs() < 1.0, "{on:?}");
}

#[test]
fn communication_takes_longer_from_where_it_is_said() {
    for (model, context) in [("llama-3-8b", 1 << 20), ("llama-3-70b", 1 << 22), ("gpt-2", 1 << 20)] {
        let subject = subject(model);
        let scale = scale(&subject, context);
        let turns = scale.turns();
        let ranks = turns.ring_most_ranks[0].unwrap();
        assert!(ranks > 8, "{model}: between nodes, as the turns are");
        let [before, behind] = [ranks - 1, ranks + 2].map(|ranks| scale.on(ranks));
        assert!(before.ring_compute_ns > before.ring_send_ns, "{model}: {before:?}");
        assert!(behind.ring_compute_ns < behind.ring_send_ns, "{model}: {behind:?}");
        assert!(turns.ring_least_tokens[1] > turns.ring_least_tokens[0]);
        let ranks = turns.tree_ranks.unwrap();
        let [before, there] = [ranks / 2, ranks].map(|ranks| scale.on(ranks));
        assert!(before.tree_read_ns >= before.tree_send_ns && there.tree_read_ns < there.tree_send_ns, "{model}");
        let alone = scale.on(1);
        assert_eq!((alone.tree_send_ns, alone.zero_s, alone.ring_computing_share), (0.0, [0.0; 2], 1.0));
    }
}

#[test]
fn a_decode_step_takes_its_bytes_over_the_bandwidth() {
    let subject = subject("llama-3-8b");
    let full = kvsieve::planner::roofline::Reached { bandwidth: 1.0, operations: 1.0 };
    for (batch, context, ms) in [(1, 2048, 4.56), (1, 32_768, 5.76), (8, 8192, 7.04), (32, 8192, 14.7)] {
        let scenario = Scenario { batch, ..on(&subject, "h100", context) };
        let times = scenario.times(full).unwrap().unwrap();
        assert!((times.decode_s * 1e3 / ms - 1.0).abs() < 0.01, "{batch} x {context}: {}", times.decode_s);
    }
}

#[test]
fn the_table_of_losses_is_that_of_the_records() {
    let mut records = Vec::new();
    for experiment in ["real-text", "real-chunks", "real-formats", "hybrid"] {
        let folder = Path::new("results/reference").join(experiment);
        let (found, _) = store::read(&folder).unwrap();
        records.extend(found.into_iter().map(|record| (experiment, record)));
    }
    for loss in LOSSES.iter() {
        let found = records.iter().filter(|(experiment, record)| {
            let cell = &record.cell;
            *experiment == loss.experiment
                && cell.policy.as_deref() == Some(loss.policy.as_deref().unwrap_or("full"))
                && cell.budget == loss.budget
                && cell.kv_format.map(|format| format.to_string()) == loss.kv_format
                && cell.weights.as_ref().map(|format| format.to_string()) == loss.weights
                && cell.context_tokens == loss.context_tokens
        });
        let measured: Vec<f64> = found.filter_map(|(_, record)| Some(record.answers.as_ref()?.kl_nats.mean)).collect();
        assert!(measured.contains(&loss.kl_nats), "{loss:?}: {measured:?}");
    }
    assert!(LOSSES.len() > 100);
}

/// The linear layers that adapters are put beside are the matrices that parameters are counted by.
#[test]
fn matrices_are_those_that_are_counted() {
    for model in MODELS.iter() {
        for layer in 0..model.layers {
            let counts = model.layer(layer);
            let found: u64 =
                model.matrices(layer).into_iter().map(|[rows, columns, count]| rows * columns * count).sum();
            let convolution = model.linear.filter(|linear| layer < linear.layers).map_or(0, |linear| {
                ((2 * linear.key_heads * linear.key_dim + linear.value_heads * linear.value_dim) * linear.conv) as u64
            });
            assert_eq!(found + convolution, counts.block() - counts.vectors, "{} {layer}", model.name);
        }
    }
}

//! Numbers that were published, to the digit.

use kvsieve::planner::Subject;
use kvsieve::planner::kv::KvStore;
use kvsieve::planner::presets::{GPUS, MODELS, model};
use kvsieve::planner::source::Source;

/// The preset of a name.
fn subject(name: &str) -> Subject {
    Subject::new(model(name).unwrap().clone(), Source::Preset, None).unwrap()
}

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

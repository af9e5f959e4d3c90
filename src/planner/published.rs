//! Numbers that others measured or printed, beside what the formulas here give: the check that does not come from us.
//!
//! Every row is a value from a paper's table or a program's log. Most are reproduced to the last printed digit, since they
//! are sizes that somebody allocated; `docs/memory.md` says what the rest leaves open.

use super::architecture::Architecture;
use super::kv::KvStore;
use super::presets::{model, weight_format};
use super::source::{Source, Subject};
use super::train::{OPTIMIZERS, Recompute, gpt_bytes_per_token, states};

/// A published number.
pub struct Published {
    /// Where it stands.
    pub source: &'static str,
    /// What it is of.
    pub what: String,
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What is computed.
    pub computed: f64,
    /// Digits behind the point with which it is printed.
    pub digits: usize,
}

impl Published {
    /// Whether the computed number is printed as the published one.
    pub fn agrees(&self) -> bool {
        format!("{:.*}", self.digits, self.value) == format!("{:.*}", self.digits, self.computed)
    }
}

const MIB: f64 = 1_048_576.0;

/// Bytes of attention's forward and backward pass in fp16, with the scores held: scores, probabilities and their gradients,
/// and ten tensors like q. `[B, H, N, D]`.
pub fn naive_attention_bytes([batch, heads, tokens, head_dim]: [u64; 4]) -> u64 {
    4 * (2 * batch * heads * tokens * tokens) + 10 * (2 * batch * heads * tokens * head_dim)
}

/// The same by tiles: eleven tensors like q, two statistics a row, and beyond one block of 256 keys a gradient in f32.
pub fn tiled_attention_bytes([batch, heads, tokens, head_dim]: [u64; 4]) -> u64 {
    let rows = batch * heads * tokens;
    11 * 2 * rows * head_dim + 2 * 4 * rows + if tokens > 256 { 4 * rows * head_dim } else { 0 }
}

/// Bytes of llama.cpp's compute buffer for a model of the Llama kind: the larger of attention with its scores (without
/// flash attention) and the output, for a micro-batch of tokens (Ollama, `fs/ggml/ggml.go`).
pub fn llama_cpp_compute_bytes(model: &Architecture, context: u64, micro_batch: u64, flash: bool) -> u64 {
    let [hidden, heads, vocab] = [model.hidden, model.heads, model.vocab].map(|n| n as u64);
    let attention = 4 * micro_batch * (1 + 4 * hidden + context * (1 + heads));
    let output = 4 * micro_batch * (hidden + vocab);
    if flash { output } else { attention.max(output) }
}

/// Bytes of llama.cpp's caches in f16, of layers without a window and of layers with one: a window holds the micro-batch
/// besides, in whole 256 tokens.
pub fn llama_cpp_kv_bytes(model: &Architecture, context: u64, micro_batch: u64) -> (u64, u64) {
    let f16: KvStore = "f16".parse().expect("a format");
    let mut bytes = (0, 0);
    for group in model.kv_groups() {
        match group.window {
            None => bytes.0 += f16.token_bytes(&group) * context,
            Some(window) => {
                let held = (window as u64 + micro_batch).next_multiple_of(256).min(context);
                bytes.1 += f16.token_bytes(&group) * held;
            }
        }
    }
    bytes
}

/// Every published number.
pub fn published() -> Vec<Published> {
    let mut rows = Vec::new();
    let mut add = |source, what: String, value, unit, computed: f64, digits| {
        rows.push(Published { source, what, value, unit, computed, digits });
    };
    let preset = |name| model(name).expect("a preset");
    const FLASH: &str = "FlashAttention, arXiv 2205.14135, table 21";
    let lengths = [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536];
    for (tokens, mib) in lengths.into_iter().zip([36.0, 104.0, 336.0, 1184.0, 4416.0, 17_024.0]) {
        add(
            FLASH,
            format!("PyTorch, {tokens} tokens"),
            mib,
            "MiB",
            naive_attention_bytes([16, 8, tokens, 64]) as f64 / MIB,
            0,
        );
    }
    for (tokens, mib) in
        lengths.into_iter().zip([22.0, 44.0, 104.0, 209.0, 418.0, 836.0, 1672.0, 3344.0, 6688.0, 13_376.0])
    {
        add(
            FLASH,
            format!("FlashAttention, {tokens} tokens"),
            mib,
            "MiB",
            tiled_attention_bytes([16, 8, tokens, 64]) as f64 / MIB,
            0,
        );
    }
    const LLAMA: &str = "llama.cpp, log of Llama-3-8B";
    let llama = preset("llama-3-8b");
    for (context, mib) in [(512, 64.0), (2048, 256.0)] {
        add(
            LLAMA,
            format!("KV, context {context}"),
            mib,
            "MiB",
            llama_cpp_kv_bytes(llama, context, 512).0 as f64 / MIB,
            2,
        );
    }
    for (context, mib) in [(2048, 258.5), (8192, 560.0)] {
        let bytes = llama_cpp_compute_bytes(llama, context, 512, false);
        add(LLAMA, format!("compute buffer, context {context}"), mib, "MiB", bytes as f64 / MIB, 2);
    }
    let (full, windowed) = llama_cpp_kv_bytes(preset("gemma-3-4b"), 131_072, 512);
    for (what, mib, bytes) in [("KV", 2560.0, full), ("KV of windows", 174.0, windowed)] {
        add("llama.cpp, log of Gemma-3-4B", format!("{what}, context 131072"), mib, "MiB", bytes as f64 / MIB, 2);
    }
    const VLLM: &str = "vLLM, arXiv 2309.06180, table 1 and figure 2";
    let bf16: KvStore = "bf16".parse().expect("a format");
    let token = |name| preset(name).kv_groups().iter().map(|group| bf16.token_bytes(group)).sum::<u64>();
    let slots = |name, gib: u64| (gib << 30) / token(name);
    for (name, gib, thousands) in [("opt-13b", 12, 15.7), ("opt-175b", 264, 60.1)] {
        add(VLLM, format!("slots of {name} in {gib} GiB"), thousands, "K", slots(name, gib) as f64 / 1e3, 1);
    }
    add(VLLM, "requests of 2048 tokens, reserved".into(), 7.0, "", (slots("opt-13b", 12) / 2048) as f64, 0);
    let external = 1.0 - (7 * 2048) as f64 / slots("opt-13b", 12) as f64;
    add(VLLM, "slots outside of reservations".into(), 8.9, "%", 100.0 * external, 1);
    const ZERO: &str = "ZeRO, arXiv 1910.02054, figure 1";
    for (stage, gb) in [120.0, 31.4, 16.6, 1.9].into_iter().enumerate() {
        let bytes: u64 = states(7_500_000_000, OPTIMIZERS[4], stage as u64, 64).iter().sum();
        add(ZERO, format!("7.5B on 64 cards, stage {stage}"), gb, "GB", bytes as f64 / 1e9, 1);
    }
    const SELECTIVE: &str = "Korthikanti et al., arXiv 2205.05198, section 5";
    for (name, percent, [hidden, heads]) in [("GPT-3", 70.0, [12_288, 96]), ("MT-NLG", 65.0, [20_480, 128])] {
        let of = |recompute| gpt_bytes_per_token(hidden, heads, 2048, 1, false, recompute);
        let saved = 1.0 - of(Recompute::Selective) / of(Recompute::None);
        add(SELECTIVE, format!("{name}, saved by selective recomputation"), percent, "%", 100.0 * saved, 0);
    }
    const KB: &str = "Insights into DeepSeek-V3, arXiv 2505.09343, table 1";
    for (name, kb) in [("deepseek-v3", 70.272), ("qwen2.5-72b", 327.68), ("llama-3.1-405b", 516.096)] {
        add(KB, format!("KV of a token, {name}"), kb, "KB", token(name) as f64 / 1e3, 3);
    }
    const GGUF: &str = "files of llama.cpp, headers and vocabulary aside";
    for (name, format, gb) in
        [("llama-3-8b", "q4_k_m", 4.92), ("llama-3-8b", "q2_k", 3.18), ("llama-2-7b", "q4_k_m", 4.08)]
    {
        let subject = Subject::new(preset(name).clone(), Source::Preset, None).expect("presets are tested");
        let bytes = subject.weight_bytes(weight_format(format).ok()).total();
        add(GGUF, format!("{name} in {format}"), gb, "GB", bytes as f64 / 1e9, 2);
    }
    rows
}

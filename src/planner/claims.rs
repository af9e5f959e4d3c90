//! Claims about GPU memory that are met again and again, each beside the value that kvsieve computes.
//!
//! The claims are told in our own words; they come from introductory articles, how-tos for running out of memory, and
//! hosting providers' pages. Nothing here is looked up: every value goes through the formulas that a plan goes through.

use super::kv::KvStore;
use super::presets::{gpu, model, weight_format};
use super::scenario::{Allocation, Attention, Logits, Memory, Scenario};
use super::source::{Source, Subject};
use super::train::{OPTIMIZERS, Optimizer, Recompute, gpt_bytes_per_token, states};
use crate::units::{gb, gib, grouped};
use serde::Serialize;

/// What a computed value makes of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it is said.
    Right,
    /// Right under a condition that is not said, or by a part.
    Imprecise,
    /// Not as it is said.
    Wrong,
}

/// A claim.
pub struct Claim {
    /// Its number.
    pub id: &'static str,
    /// What is said.
    pub claim: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// What kvsieve computes, in words.
    pub computed: fn() -> String,
}

const fn claim(id: &'static str, claim: &'static str, verdict: Verdict, computed: fn() -> String) -> Claim {
    Claim { id, claim, verdict, computed }
}

fn subject(name: &str) -> Subject {
    Subject::new(model(name).expect("a preset").clone(), Source::Preset, None).expect("presets are tested")
}

/// Bytes of weights in a format.
fn weights(name: &str, format: &str) -> u128 {
    u128::from(subject(name).weight_bytes(Some(weight_format(format).expect("a format"))).total())
}

/// A preset in bf16 with tiled attention on a card.
fn on<'a>(subject: &'a Subject, card: &str, context: u64) -> Scenario<'a> {
    Scenario {
        subject,
        weights: None,
        memory: Memory::Gpu(gpu(card).expect("a card")),
        overhead_bytes: None,
        batch: 1,
        concurrency: 1,
        context,
        output: 0,
        chunk: None,
        step: None,
        attention: Attention::Tiled,
        logits: Logits::Last,
        kv: "bf16".parse::<KvStore>().expect("a format"),
        allocation: Allocation::Exact,
        eviction: None,
        tensor_parallel: 1,
        pipeline: 1,
        offload: 0,
    }
}

/// Bytes of a token's keys and values in bf16.
fn kv(name: &str) -> u64 {
    on(&subject(name), "h100", 1).kv_token_bytes()
}

fn most(scenario: &Scenario<'_>) -> String {
    scenario.max_context().ok().flatten().map_or("no".into(), |tokens| grouped(u128::from(tokens)))
}

/// Bytes of a 7B model's states.
fn trained(optimizer: Optimizer) -> u128 {
    u128::from(states(subject("llama-2-7b").parameters, optimizer, 0, 1).iter().sum::<u64>())
}

fn percent(part: f64) -> String {
    format!("{:.1}%", 100.0 * part)
}

/// Fraction of a block's activations that recomputing saves.
fn saved(hidden: u64, heads: u64, context: u64, recompute: Recompute) -> f64 {
    let kept = |recompute| gpt_bytes_per_token(hidden, heads, context, 1, false, recompute);
    1.0 - kept(recompute) / kept(Recompute::None)
}

/// Bytes of scores of a layer with 32 heads in fp16.
fn scores(tokens: u128) -> u128 {
    2 * 32 * tokens * tokens
}

use Verdict::{Imprecise, Right, Wrong};

/// Every claim, in the order of the reference.
pub const CLAIMS: &[Claim] = &[
    claim("C1", "Inference memory is weights and KV cache", Imprecise, || {
        let subject = subject("llama-3-8b");
        let waterfall = Scenario { attention: Attention::Naive, ..on(&subject, "a100-40gb", 16_384) }.waterfall();
        let terms = waterfall.map(|waterfall| waterfall.terms).unwrap_or_default();
        let named: Vec<&str> = terms.iter().map(|term| term.term).collect();
        format!("Llama-3-8B, eager, 16,384 tokens: {}", named.join(", "))
    }),
    claim("C8", "A 70B model in 16 bits is 140 GB", Right, || {
        format!("Llama-3-70B: {} GB = {} GiB", gb(weights("llama-3-70b", "bf16")), gib(weights("llama-3-70b", "bf16")))
    }),
    claim("C11", "7B in fp32 is about 28 GB", Right, || {
        format!(
            "Llama-2-7B {} GB, Mistral-7B {} GB",
            gb(weights("llama-2-7b", "fp32")),
            gb(weights("mistral-7b-v0.1", "fp32"))
        )
    }),
    claim("C13", "7B is 14 GB in fp16 and 3.5 GB in INT4", Imprecise, || {
        format!(
            "Llama-2-7B {} GB; with its scales and 16-bit tables AWQ takes {} GB",
            gb(weights("llama-2-7b", "fp16")),
            gb(weights("llama-2-7b", "awq"))
        )
    }),
    claim("C14", "Quantising to 4 bits cuts VRAM by 75%", Imprecise, || {
        let part = |name| 1.0 - weights(name, "nf4") as f64 / weights(name, "bf16") as f64;
        format!(
            "weights only, in NF4: Llama-3-8B {}, Llama-2-7B {}; the KV cache stays",
            percent(part("llama-3-8b")),
            percent(part("llama-2-7b"))
        )
    }),
    claim("C17", "7B takes 7 / 4.5 / 2.7 GB as Q8_0 / Q4_K_M / Q2_K", Right, || {
        let sizes = |name| ["q8_0", "q4_k_m", "q2_k"].map(|format| gb(weights(name, format))).join(" / ");
        format!("Llama-2-7B {}, Llama-3-8B {} GB, without KV and buffers", sizes("llama-2-7b"), sizes("llama-3-8b"))
    }),
    claim("C28", "A 20B model needs 4 bits and eviction for one A100 40GB", Wrong, || {
        let size = |format| gb(weights("gpt-neox-20b", format));
        format!(
            "GPT-NeoX-20B: bf16 {} GB does not fit; int8 {} GB and nf4 {} GB do",
            size("bf16"),
            size("int8"),
            size("nf4")
        )
    }),
    claim("C29", "70B in NF4 needs two A100 80GB", Imprecise, || {
        let subject = subject("llama-3-70b");
        let nf4 = Scenario { weights: weight_format("nf4").ok(), chunk: Some(2048), ..on(&subject, "a100-80gb", 8192) };
        format!("{} GB: one card has room for {} tokens", gb(weights("llama-3-70b", "nf4")), most(&nf4))
    }),
    claim("C30", "INT8 of [-1, 1]: scale 2/255, so 0.0234375 becomes 3 and no zero point is needed", Wrong, || {
        let (symmetric, affine) = (1.0f64 / 127.0, 2.0f64 / 255.0);
        let coded = (0.0234375f64 / symmetric).round();
        format!(
            "2/255 sends 1.0 to {:.1}, beyond 127; with 1/127 the value is {coded} x {symmetric:.7} = {:.7}",
            1.0 / affine,
            coded * symmetric
        )
    }),
    claim("C34", "AdamW's two moments take 12 bytes a parameter", Wrong, || {
        "8: two f32 values; 12 with the f32 master copy".into()
    }),
    claim("C35", "Training a 7B model can exceed one 80 GB card", Right, || {
        format!("Llama-2-7B at 16 bytes a parameter: {} GB before activations", gb(trained(OPTIMIZERS[4])))
    }),
    claim("C37", "7B with Adam: 84 GB in all", Wrong, || {
        let [lean, usual, f32] = [2, 4, 5].map(|at| gb(trained(OPTIMIZERS[at])));
        format!("{lean} GB with moments in bf16, {usual} GB as is usual, {f32} GB with f32 gradients")
    }),
    claim("C39", "Training takes 4 to 6 times the model's size", Wrong, || {
        format!("{} times its 16-bit size, and activations", OPTIMIZERS[4].bytes() / 2)
    }),
    claim("C40", "Activations in training take 10 to 50 GB", Imprecise, || {
        let of = |recompute| gb((32.0 * 4096.0 * gpt_bytes_per_token(4096, 32, 4096, 1, false, recompute)) as u128);
        format!(
            "Llama-2-7B's extents, 4,096 tokens, batch 1: {} GB, attention recomputed {}, everything {}",
            of(Recompute::None),
            of(Recompute::Selective),
            of(Recompute::Full)
        )
    }),
    claim("C41", "Gradient checkpointing saves up to 70% at 30% more time", Wrong, || {
        let selective = [saved(12_288, 96, 2048, Recompute::Selective), saved(20_480, 128, 2048, Recompute::Selective)];
        let full = saved(12_288, 96, 2048, Recompute::Full);
        format!(
            "selective: {} (GPT-3), {} (MT-NLG), at 2.7% more; full: {} at 33% more",
            percent(selective[0]),
            percent(selective[1]),
            percent(full)
        )
    }),
    claim("C47", "Standard attention holds the whole score matrix", Right, || {
        format!("32 heads, fp16, 8,192 tokens: {} GB a layer", gb(scores(8192)))
    }),
    claim("C48", "Twice the input is four times the attention matrix", Right, || {
        format!("{} times", scores(16_384) / scores(8192))
    }),
    claim("C50", "An A100 40GB ends at 8,000 tokens", Imprecise, || {
        let subject = subject("llama-3-8b");
        let tiled = on(&subject, "a100-40gb", 8192);
        let naive = Scenario { attention: Attention::Naive, ..tiled.clone() };
        let chunked = Scenario { chunk: Some(2048), ..tiled.clone() };
        format!(
            "Llama-3-8B: eager {}, tiled {}, tiled in chunks of 2,048 {} tokens",
            most(&naive),
            most(&tiled),
            most(&chunked)
        )
    }),
    claim("C51", "Activations grow linearly with the sequence", Imprecise, || {
        let part = saved(4096, 32, 4096, Recompute::Selective);
        format!("with scores held, {} of them are quadratic (Llama-2-7B's extents, 4,096 tokens)", percent(part))
    }),
    claim("C54", "FlashAttention avoids the linear memory growth of older attention", Wrong, || {
        format!("older: x{} for twice the tokens; tiled: none held", scores(2048) / scores(1024))
    }),
    claim("C55", "Leave about 1 GB for activations", Imprecise, || {
        let subject = subject("llama-3-8b");
        let bytes = |tokens| gb(on(&subject, "h100", tokens).peak(tokens).map_or(0, |(_, bytes)| bytes.activations));
        format!("Llama-3-8B, prompt in one piece: {} GB at 8K, {} GB at 32K", bytes(8192), bytes(32_768))
    }),
    claim("C57", "The KV cache grows quadratically", Wrong, || {
        format!(
            "linearly: Llama-3-8B {} GiB at 8K, {} at 16K",
            gib(u128::from(8192 * kv("llama-3-8b"))),
            gib(u128::from(16_384 * kv("llama-3-8b")))
        )
    }),
    claim("C58", "The KV cache grows exponentially", Wrong, || {
        format!("{} B for each token, the first as the last (Llama-3-8B)", grouped(u128::from(kv("llama-3-8b"))))
    }),
    claim("C59", "KV is up to 30% of memory in long contexts", Wrong, || {
        let part = |name, tokens: u64| {
            let kv = (tokens * kv(name)) as f64;
            percent(kv / (kv + weights(name, "bf16") as f64))
        };
        format!(
            "Llama-2-7B at 32K {}, Llama-3-8B at 128K {} of weights and KV",
            part("llama-2-7b", 32_768),
            part("llama-3-8b", 131_072)
        )
    }),
    claim("C60", "KV = 2 x layers x heads x head dim x tokens x bytes", Wrong, || {
        let factor = |name| {
            let subject = subject(name);
            let (shape, kv) = (&subject.architecture, kv(name));
            (4 * shape.layers * shape.heads * shape.head_dim) as f64 / kv as f64
        };
        format!(
            "KV heads, not heads: Llama-3-8B x{:.0}, 70B x{:.0}, 405B x{:.0} too much; DeepSeek-V3 keeps {} B a token",
            factor("llama-3-8b"),
            factor("llama-3-70b"),
            factor("llama-3.1-405b"),
            grouped(u128::from(kv("deepseek-v3")))
        )
    }),
    claim("C61", "GQA shrinks the KV cache", Right, || {
        "by query heads over KV heads: 4 (Llama-3-8B), 8 (70B), 16 (405B)".into()
    }),
    claim("C62", "KV takes 0.5 to 2 MB a token", Wrong, || {
        let names = ["qwen2.5-0.5b", "qwen2.5-7b", "deepseek-v3", "llama-3-8b", "llama-3.1-405b"];
        names.map(|name| format!("{name} {:.0} KB", kv(name) as f64 / 1e3)).join(", ")
    }),
    claim("C67", "Paging removes nearly all waste", Right, || {
        format!(
            "on average {} tokens of the last page of each list: {} B a sequence (Llama-3-8B, 16 tokens)",
            7.5,
            grouped(15 * u128::from(kv("llama-3-8b")) / 2)
        )
    }),
    claim("C77", "ZeRO-3 or FSDP is required from 70B on", Imprecise, || {
        format!("to train; to run, NF4 takes {} GB", gb(weights("llama-3-70b", "nf4")))
    }),
    claim("C78", "ZeRO 1, 2, 3 divide optimizer, gradients, weights", Right, || {
        let stage = |zero| states(7_500_000_000, OPTIMIZERS[4], zero, 64).iter().sum::<u64>() as f64 / 1e9;
        format!("7.5B on 64 cards: {:.1}, {:.1}, {:.1}, {:.1} GB", stage(0), stage(1), stage(2), stage(3))
    }),
    claim("C98", "70B in 4 bits needs an A100 40GB", Wrong, || {
        let there = gpu("a100-40gb").map_or(0, super::presets::Gpu::bytes);
        format!(
            "Q4_K_M {} GB, and the card has {} GB in all",
            gb(weights("llama-3-70b", "q4_k_m")),
            gb(u128::from(there))
        )
    }),
    claim("C100", "24 GB run 13B", Right, || {
        let subject = subject("llama-2-13b");
        let quantised =
            Scenario { weights: weight_format("q4_k_m").ok(), chunk: Some(512), ..on(&subject, "rtx-4090", 4096) };
        format!(
            "in Q4_K_M ({} GB) with {} tokens, without evicting any",
            gb(weights("llama-2-13b", "q4_k_m")),
            most(&quantised)
        )
    }),
];

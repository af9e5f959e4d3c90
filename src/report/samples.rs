//! Synthetic records for the tests: made by simple formulas, so that every figure has something to show.

mod training;

pub use training::{training, tuning};

use super::Run;
use crate::experiment::answers::{Answers, Estimate, Spread};
use crate::experiment::cell::Cell;
use crate::experiment::edited::Edited;
use crate::experiment::measure::Measure;
use crate::experiment::recalled::Recalled;
use crate::experiment::record::{Drift, Eviction, Latency, Memory, Record, Status, Step, Training, Work};
use crate::memories::Modes;
use crate::memory::{Label, LabelBytes};
use crate::ranks::OfRank;
use crate::serving::Usage;
use crate::tensor::DType;
use std::collections::BTreeMap;

/// Budgets of the eviction cells.
pub const BUDGETS: [f64; 5] = [0.0625, 0.125, 0.25, 0.5, 0.75];
/// Policies of the eviction cells, each with its drift at a budget of 1/16.
pub const POLICIES: [(&str, f64); 7] = [
    ("full", 3e-7),
    ("oracle", 0.06),
    ("snapkv:kernel=7,window=32", 0.14),
    ("h2o", 0.19),
    ("keydiff", 0.33),
    ("streaming-llm:sink=4", 0.52),
    ("random", 0.78),
];

const LIMIT_BYTES: u64 = 8 << 30;

/// An `ok` record without numbers.
pub fn record(measure: Measure, kernel: &str, context_tokens: usize) -> Record {
    let cell = Cell {
        measure,
        kernel: kernel.into(),
        layers: 1,
        batch: 1,
        q_heads: 8,
        kv_heads: 2,
        head_dim: 64,
        context_tokens,
        new_tokens: if measure == Measure::EVICT { 32 } else { 0 },
        dtype: DType::F32,
        causal: true,
        workload_hash: "5ee5ca1e".into(),
        ..Cell::default()
    };
    Record {
        run_id: "2031-01-02T03-04-05Z-0123abcd-4567def".into(),
        started_at: "2031-01-02T03:04:05Z".into(),
        wall_ns: 1_000_000,
        repro: "kvsieve run quickstart".into(),
        threads: 2,
        isa_path: "avx2".into(),
        ..Record::blank(cell)
    }
}

/// `record` with its cell changed and its id made again.
pub fn with_cell(mut record: Record, change: impl FnOnce(&mut Cell)) -> Record {
    change(&mut record.cell);
    record.cell_id = record.cell.id();
    record
}

/// `record` turned into a cell that failed with absurd numbers, which must appear nowhere.
pub fn failed(record: Record) -> Record {
    let mut failed = Record { status: Status::Failed, reason: Some("the output holds a NaN".into()), ..record };
    for latency in failed.latency.values_mut() {
        *latency = self::latency(7.77e15);
    }
    if let Some(memory) = &mut failed.memory {
        memory.peak_bytes = 7_777_777_777_777_777;
    }
    if let Some(drift) = &mut failed.drift {
        drift.rel_l2 = 7777.7;
    }
    failed
}

/// Every measure, several kernels, heads and policies, with cells that ran out of memory and one that failed.
pub fn run() -> Run {
    let mut records = Vec::new();
    for context in [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536] {
        for kernel in ["naive", "tiled:bc=256,br=64", "tiled:bc=128,br=32"] {
            records.push(pass(Measure::FORWARD, kernel, context));
            if context <= 16_384 {
                records.push(pass(Measure::BACKWARD, kernel, context));
            }
        }
        records.push(pass(Measure::DECODE, "naive", context));
        records.push(pass(Measure::DECODE, "decode", context));
    }
    for kv_heads in [1, 4, 8] {
        for measure in [Measure::FORWARD, Measure::DECODE] {
            let kernel = if measure == Measure::DECODE { "decode" } else { "tiled:bc=256,br=64" };
            let mut of_heads = with_cell(pass(measure, kernel, 65_536), |cell| cell.kv_heads = kv_heads);
            scale(&mut of_heads, 0.4 + 0.3 * kv_heads as f64);
            records.push(of_heads);
        }
    }
    for context in [4096, 8192, 16_384, 32_768] {
        for (policy, _) in POLICIES {
            let budgets = if policy == "full" { &[1.0][..] } else { &BUDGETS[..] };
            records.extend(budgets.iter().map(|budget| evicted(context, policy, *budget)));
        }
    }
    for page_tokens in [0, 1, 16, 256] {
        let mut paged = with_cell(pass(Measure::DECODE, "decode", 8192), |cell| cell.page_tokens = Some(page_tokens));
        scale(&mut paged, 1.0 + 0.3 / (page_tokens as f64 + 1.0));
        records.push(paged);
    }
    for trace in ["sharegpt", "file:path=own.csv"] {
        for strategy in ["max", "oracle", "paged:page=1", "paged:page=16", "paged:page=256"] {
            records.push(served(trace, strategy));
        }
    }
    for (place, count) in [16, 64, 256].into_iter().enumerate() {
        for memory in ["larimar:slots=64", "larimar:scope=list", "list:slots=128"] {
            for kind in ["write", "forget", "overwrite"] {
                records.push(recalled(memory, &format!("{kind}:count={count}"), 1.0 - 0.3 * place as f64));
            }
        }
    }
    records.push(recalled("larimar:slots=128", "write:count=64", 0.9));
    let broken = records.iter().position(|record| record.cell.measure == Measure::EVICT).unwrap_or(0) + 8;
    records[broken] = failed(records[broken].clone());
    records[0].warnings.push("the CPU's clock changed by 12% while the cell ran".into());
    Run {
        experiment: "quickstart".into(),
        description: "What attention costs at a context length, and what may be thrown away.".into(),
        is_synthetic: true,
        run_id: records[0].run_id.clone(),
        repro: "kvsieve run quickstart".into(),
        environment: serde_json::json!({
            "kvsieve": {"version": "0.1.0", "git_rev": "4567def"},
            "cpu": {"model": "Example CPU", "cores": 2, "features": ["avx2", "fma"]},
            "memory_bytes": 16_u64 << 30,
        }),
        records,
        elsewhere: 0,
    }
}

/// Evictions over layers and many steps: heads that keep different counts, prefill in chunks, a sparse method, and the
/// same bytes in another shape; and the same policies over inputs without hints.
pub fn layers() -> Run {
    let plain = ["full", "oracle", "h2o", "keydiff", "knorm", "random", "snapkv", "streaming-llm", "tova", "dms"];
    let more = ["snapkv+ada", "snapkv+global", "snapkv+chunks:tokens=512", "snapkv+chunks:tokens=1024", "quest"];
    let mut records = Vec::new();
    for (place, policy) in plain.into_iter().chain(more).enumerate() {
        let budgets = if policy == "full" { &[1.0][..] } else { &BUDGETS[1..4] };
        records.extend(budgets.iter().map(|budget| layered(policy, *budget, place)));
    }
    let unhinted = |(place, policy): (usize, &str)| {
        let knobs = serde_json::from_str("{\"hinted\": 0}").unwrap();
        with_cell(layered(policy, BUDGETS[1], 16 - place), |cell| cell.knobs = Some(knobs))
    };
    records.extend(plain[1..].iter().copied().enumerate().map(unhinted));
    let mut wide = with_cell(layered("snapkv", 0.5, 6), |cell| {
        cell.kv_heads = 4;
        cell.context_tokens = 2048;
    });
    wide.eviction.as_mut().unwrap().kept_by_position.extend(vec![vec![0.5; 64]; 8]);
    records.push(wide);
    Run { experiment: "layers".into(), records, ..run() }
}

/// A cell of a policy over 4 layers and 4K decode steps.
fn layered(policy: &str, budget: f64, place: usize) -> Record {
    let mut record = with_cell(evicted(4096, policy, budget), |cell| {
        cell.layers = 4;
        cell.new_tokens = 4096;
    });
    record.drift.as_mut().unwrap().rel_l2 *= 1.0 + place as f64 / 16.0;
    let eviction = record.eviction.as_mut().unwrap();
    let ragged = if policy.contains("ada") || policy.contains("global") { 0.5 } else { 0.0 };
    let of_layer = || vec![budget * (1.0 + ragged), budget * (1.0 - ragged)];
    eviction.kept_by_head = vec![of_layer(); 4];
    eviction.kept_by_position = (0..4).flat_map(|_| of_layer()).map(|kept| vec![kept as f32; 64]).collect();
    for bytes in [
        &mut eviction.kv_bytes_dense,
        &mut eviction.kv_bytes_live,
        &mut eviction.kv_bytes_read,
        &mut eviction.kv_bytes_padded,
    ] {
        *bytes *= 4;
    }
    eviction.kv_bytes_padded = (eviction.kv_bytes_padded as f64 * (1.0 + ragged)) as u64;
    if policy == "quest" {
        eviction.kv_bytes_read /= 4;
    }
    eviction.steps = (1..=16)
        .map(|step| Step {
            new_tokens: 256 * step,
            kv_bytes_live: eviction.kv_bytes_live + 1024 * step as u64,
            attention_mass_kept: Some(if policy == "oracle" { 0.95 } else { 0.9 - 0.01 * place as f64 }),
            drift: 0.1 + 0.01 * step as f64,
        })
        .collect();
    record
}

/// A pass of a kernel; `naive` runs out of memory where its scores pass the limit.
pub fn pass(measure: Measure, kernel: &str, context: usize) -> Record {
    let mut record = record(measure, kernel, context);
    let naive = kernel == "naive";
    let tokens = context as f64;
    let kv_bytes = 2 * 2 * 64 * 4 * context as u64;
    let inputs = kv_bytes + 2 * 8 * 64 * 4 * context as u64;
    let rows = if measure == Measure::DECODE { 1 } else { context as u64 };
    let passes = if measure == Measure::BACKWARD { 2 } else { 1 };
    let scratch = if naive { 8 * 4 * rows * context as u64 * passes } else { (1 << 20) * passes };
    let predicted_peak_bytes = inputs * passes + scratch;
    let out = predicted_peak_bytes > LIMIT_BYTES;
    record.memory = Some(Memory {
        predicted_peak_bytes,
        peak_bytes: if out { 0 } else { predicted_peak_bytes },
        peak_by_label: BTreeMap::from([(Label::Kv, kv_bytes)]),
        arena_growth_bytes: scratch,
        rss_growth_bytes: Some(scratch + 4096),
        limit_bytes: LIMIT_BYTES,
        ..Memory::default()
    });
    if out {
        record.status = Status::Oom;
        record.reason = Some(format!("predicted peak {predicted_peak_bytes} bytes, limit {LIMIT_BYTES} bytes"));
        return record;
    }
    let speed = if naive { 9.0 } else { 14.0 + kernel.len() as f64 };
    let nanoseconds = 8.0 * 64.0 * tokens * rows as f64 * 2.0 * passes as f64 / speed + 2e3;
    record.latency.insert(measure.name().into(), latency(nanoseconds));
    record.work = Some(Work { flops: 1, kv_bytes_read: kv_bytes, flops_per_s: 1e10 });
    let rel_l2 = 2e-7 * tokens.powf(0.1) * if naive { 1.3 } else { 1.0 };
    record.drift = Some(Drift { rel_l2, ci95_low: rel_l2 * 0.9, ci95_high: rel_l2 * 1.15, checked_rows: 64 });
    record
}

/// A cell of a policy at a budget.
pub fn evicted(context: usize, policy: &str, budget: f64) -> Record {
    let whole = POLICIES.iter().find(|(name, _)| *name == policy).map_or(0.5, |(_, drift)| *drift);
    let mut record = with_cell(record(Measure::EVICT, "tiled", context), |cell| {
        cell.policy = Some(policy.into());
        cell.budget = Some(budget.to_string());
    });
    let dense = 2 * 2 * 64 * 4 * context as u64;
    let live = (dense as f64 * budget) as u64;
    let tokens = context as f64;
    let lost = whole * (0.0625 / budget).powf(0.6) * (1.02 - budget);
    let rel_l2 = if policy == "full" { whole } else { lost };
    record.memory = Some(Memory {
        predicted_peak_bytes: dense * 5,
        peak_bytes: dense * 5,
        arena_growth_bytes: dense * 2,
        limit_bytes: LIMIT_BYTES,
        ..Memory::default()
    });
    record.latency.insert("prefill".into(), latency(tokens * tokens * 60.0));
    if policy != "full" {
        record.latency.insert("score".into(), latency(tokens * 900.0 * (1.0 + 40.0 * (1.0 - whole))));
        record.latency.insert("evict".into(), latency(tokens * 40.0));
    }
    record.latency.insert("decode".into(), latency(20e3 + live as f64 / 9.0 * (1.0 + whole / 8.0)));
    record.drift = Some(Drift { rel_l2, ci95_low: rel_l2 * 0.85, ci95_high: rel_l2 * 1.2, checked_rows: 256 });
    record.eviction = Some(Eviction {
        budget_tokens: (tokens * budget) as usize,
        kept_fraction: budget,
        evicted_tokens: ((1.0 - budget) * tokens * 2.0) as u64,
        kv_bytes_dense: dense,
        kv_bytes_live: live,
        kv_bytes_peak: dense,
        needle_recall: Some((1.0 - whole * (1.0 - budget)).clamp(0.0, 1.0)),
        attention_mass_kept: Some(0.9),
        tie_rate: 0.0,
        kv_bytes_read: live,
        kv_bytes_padded: live,
        kept_by_head: vec![vec![budget; 2]],
        kept_by_position: vec![vec![budget as f32; 64]; 2],
        drift_by_head: vec![vec![rel_l2; 8]],
        steps: (1..=4)
            .map(|step| Step {
                new_tokens: 8 * step,
                kv_bytes_live: live,
                attention_mass_kept: Some(0.9),
                drift: rel_l2,
            })
            .collect(),
    });
    record
}

/// A simulated trace.
pub fn served(trace: &str, strategy: &str) -> Record {
    let mut record = with_cell(record(Measure::SERVE, "", 0), |cell| {
        (cell.batch, cell.q_heads, cell.kv_heads, cell.head_dim) = (0, 0, 0, 0);
        cell.trace = Some(trace.into());
        cell.strategy = Some(strategy.into());
    });
    let token_fraction = strategy.len() as f64 / 20.0;
    record.serving = Some(Usage {
        token_fraction,
        reserved_fraction: 0.1,
        internal_fraction: 0.9 - token_fraction,
        external_fraction: 0.0,
        waste_of_held: 1.0 - token_fraction,
        mean_batch: 40.0 * token_fraction,
        finished_requests: 1000,
        preempted_requests: 0,
        counted_steps: 5000,
    });
    record
}

/// A memory of facts with what it recalled; kinds that change facts have what became of these.
pub fn recalled(memory: &str, episode: &str, kept: f64) -> Record {
    let mut record = with_cell(record(Measure::RECALL, "", 0), |cell| {
        (cell.batch, cell.q_heads, cell.kv_heads, cell.head_dim) = (0, 0, 0, 0);
        cell.memory = Some(memory.into());
        cell.episode = Some(episode.into());
        cell.samples = Some(20);
    });
    let share = |mean: f64| Estimate { mean, ci95_low: 0.9 * mean, ci95_high: mean };
    record.recall = Some(Recalled {
        samples: 20,
        held_bytes: 1024 * memory.len() as u64,
        kept: Some(share(kept)),
        changed: episode.starts_with("overwrite").then(|| share(0.8 * kept)),
        old: (!episode.starts_with("write")).then(|| share(0.01)),
        refused: None,
        unwritten: share(0.004),
        answered_kept: Some(share(1.0)),
        answered_changed: None,
        answered_unwritten: share(1.0),
        scope_auc: memory.contains("scope").then(|| share(kept)),
        likeness: Some(share(0.9)),
    });
    record
}

/// What a model answered that was told facts through a memory.
pub fn told(memory: &str, facts: usize, stem: f64) -> Record {
    let mut record = with_cell(record(Measure::EDIT, "tiled", 0), |cell| {
        cell.model = Some("builtin".into());
        cell.memory = Some(memory.into());
        cell.facts = Some(facts);
        cell.samples = Some(8);
    });
    let share = |mean: f64| Estimate { mean, ci95_low: 0.9 * mean, ci95_high: mean };
    record.edit = Some(Edited {
        episodes: 8,
        asked: 8 * facts,
        stem: share(stem),
        rephrased: share(0.9 * stem),
        replaced: share(stem),
        replaced_old: share(0.0),
        forgotten: share(0.0),
        remembered: Some(share(stem)),
        never_written: share(0.0),
        unchanged: share(1.0),
        unchanged_unscoped: Some(share(0.1)),
        held_bytes: 1024 * facts as u64,
    });
    record.latency.insert("edit".into(), latency(5e7));
    record
}

fn scale(record: &mut Record, factor: f64) {
    for latency in record.latency.values_mut() {
        *latency = self::latency(latency.median_ns * factor);
    }
    if let Some(memory) = &mut record.memory {
        memory.peak_by_label =
            BTreeMap::from([(Label::Kv, 2 * record.cell.kv_heads as u64 * 64 * 4 * record.cell.context_tokens as u64)]);
    }
}

fn latency(median_ns: f64) -> Latency {
    Latency {
        samples_ns: vec![median_ns as u64; 5],
        median_ns,
        p10_ns: median_ns * 0.95,
        p90_ns: median_ns * 1.1,
        ci95_low_ns: median_ns * 0.96,
        ci95_high_ns: median_ns * 1.05,
        warmups: 5,
        stop_reason: "interval".into(),
    }
}

/// Passes that 1, 2 and 4 ranks share.
pub fn ranks() -> Run {
    let mut records = Vec::new();
    for (method, context) in [("ring", 2048), ("ring", 8192), ("tree", 65_536)] {
        for ranks in [1u32, 2, 4] {
            let mut record = with_cell(pass(Measure::FORWARD, "tiled", context), |cell| {
                cell.measure = Measure::RANKS;
                cell.ranks = Some(format!("{method}:{ranks}"));
            });
            scale(&mut record, 1.1 / f64::from(ranks));
            let sent_bytes = u64::from(ranks - 1) << 20;
            let of_rank = OfRank {
                sent_bytes,
                sent_beside_bytes: sent_bytes,
                exposed_ns: vec![10],
                alone_ns: vec![100],
                ..OfRank::default()
            };
            record.ranks = vec![of_rank; ranks as usize];
            let alone = Latency { median_ns: 1e6 * f64::from(ranks), ..record.latency["forward"].clone() };
            record.predicted_ns = [("forward", &record.latency["forward"]), ("send_alone", &alone)]
                .map(|(phase, measured)| (phase.into(), 0.9 * measured.median_ns))
                .into();
            record.latency.insert("send_alone".into(), alone);
            records.push(record);
        }
    }
    Run { experiment: "ranks".into(), records, ..run() }
}

/// A model's answers to two tasks at two lengths, under some policies and budgets.
pub fn answers() -> Run {
    let mut records = Vec::new();
    for context in [512, 1024] {
        for task in ["passkey", "niah-single-1"] {
            for (policy, _) in POLICIES {
                let budgets = if policy == "full" { &[1.0][..] } else { &BUDGETS[..3] };
                records.extend(budgets.iter().map(|budget| answered(context, task, policy, *budget)));
            }
        }
    }
    Run { experiment: "answers".into(), records, ..run() }
}

/// What a model makes of a text with fewer tokens, in fewer bits, and both: what is lost adds up, but for one pair.
pub fn formats() -> Run {
    let mut records = Vec::new();
    for (format, part, lost) in [(None, 1, 0.0), (Some("int8"), 4, 0.001), (Some("q4_0"), 7, 0.05)] {
        for (policy, budget) in [("full", 1.0), ("snapkv", 0.5), ("snapkv", 0.25), ("random", 0.5)] {
            let of_policy = if policy == "full" { 0.0 } else { 0.1 + 0.2 * (1.0 - budget) };
            let more = if format == Some("q4_0") && budget == 0.25 { 1.5 } else { 1.0 };
            let mut record = with_cell(answered(1024, "perplexity", policy, budget), |cell| {
                cell.kv_format = format.map(|format| format.parse().expect("a format"));
            });
            let answers = record.answers.as_mut().expect("it has answers");
            (answers.accuracy, answers.accuracy_difference, answers.greedy_agreement) = (None, None, None);
            answers.sample_scores.clear();
            answers.kv_bytes_live /= part;
            answers.sample_kl_nats =
                (0..20).map(|sample| (of_policy + lost) * more * (0.9 + 0.01 * f64::from(sample))).collect();
            records.push(record);
        }
    }
    Run { experiment: "formats".into(), records, ..run() }
}

/// The full caches of [`hybrid`] in plain elements, as they are and with activations in bytes, which lose more.
pub fn activations() -> Run {
    let mut records = hybrid().records;
    records.retain(|record| record.cell.kv_format.is_none() && record.cell.policy.as_deref() == Some("full"));
    let rounded = records.clone().into_iter().map(|record| {
        let mut record = with_cell(record, |cell| cell.activations = Some("int8".parse().expect("a format")));
        let answers = record.answers.as_mut().expect("it has answers");
        answers.sample_kl_nats.iter_mut().for_each(|kl| *kl += 0.03);
        record
    });
    records.extend(rounded.collect::<Vec<_>>());
    Run { experiment: "activations".into(), records, ..run() }
}

/// What a model makes of a text through memories of several sizes and windows, beside the full cache and a policy.
pub fn memories() -> Run {
    let mut records = formats().records;
    records.retain(|record| record.cell.kv_format.is_none());
    let texts = [
        ("transformer-xl:slots=1", 0.05),
        ("camelot:slots=64,window=128", 0.2),
        ("camelot:slots=256,window=128", 0.4),
        ("camelot:slots=64,window=256", 0.35),
    ];
    let of_memory = |task: &str, memory: &str, budget: f64| {
        let mut record = with_cell(answered(1024, task, "random", budget), |cell| {
            (cell.policy, cell.budget) = (None, None);
            cell.memory = Some(memory.into());
        });
        let layer = |layer: u32| Modes {
            count: 64.0,
            tokens: 2.0 + f64::from(layer),
            most_tokens: 40.0,
            single: 0.5,
            age_tokens: 90.0,
            likeness: Some(0.91),
        };
        let answers = record.answers.as_mut().expect("it has answers");
        answers.modes_by_layer = if memory.starts_with("camelot") { (0..4).map(layer).collect() } else { Vec::new() };
        record
    };
    for (memory, budget) in texts {
        let mut record = of_memory("perplexity", memory, budget);
        let answers = record.answers.as_mut().expect("it has answers");
        (answers.accuracy, answers.accuracy_difference, answers.greedy_agreement) = (None, None, None);
        answers.sample_scores.clear();
        records.push(record);
    }
    // Tasks beside the text.
    records.push(answered(1024, "passkey", "full", 1.0));
    records.extend(texts.map(|(memory, budget)| of_memory("passkey", memory, budget)));
    for facts in [4, 64] {
        records.push(told("larimar:slots=128,scope=list", facts, 1.0 - 0.002 * facts as f64));
        records.push(told("nearest:facts=4", facts, 1.0));
    }
    Run { experiment: "memories".into(), records, ..run() }
}

/// The same with its weights in fewer bits too: what is lost adds up.
pub fn hybrid() -> Run {
    let mut records = Vec::new();
    for (weights, weights_bytes, lost) in
        [("bf16", 4000 << 20, 0.0), ("q8_0", 2125 << 20, 0.002), ("q4_0", 1125 << 20, 0.08)]
    {
        for mut record in formats().records {
            let memory = record.memory.get_or_insert_with(Memory::default);
            memory.peak_by_label = LabelBytes::from([(Label::Weights, weights_bytes)]);
            let answers = record.answers.as_mut().expect("it has answers");
            answers.sample_kl_nats.iter_mut().for_each(|kl| *kl += lost);
            records.push(with_cell(record, |cell| cell.weights = Some(weights.parse().expect("a format"))));
        }
    }
    Run { experiment: "hybrid".into(), records, ..run() }
}

/// A cell of a model that answers what the policy leaves it, 20 samples with needles everywhere.
pub fn answered(context: usize, task: &str, policy: &str, budget: f64) -> Record {
    let lost = POLICIES.iter().find(|(name, _)| *name == policy).map_or(0.5, |(_, drift)| *drift) * (1.0 - budget);
    let mut record = with_cell(record(Measure::EVAL, "tiled", context), |cell| {
        cell.model = Some("models/builtin".into());
        cell.task = Some(task.into());
        cell.samples = Some(20);
        cell.layers = 4;
        cell.policy = Some(policy.into());
        cell.budget = Some(budget.to_string()).filter(|_| policy != "full");
    });
    let estimate = |mean: f64| Estimate { mean, ci95_low: mean * 0.9, ci95_high: mean * 1.1 };
    let scores: Vec<f64> = (0..20).map(|sample| f64::from(u8::from(f64::from(sample) / 20.0 >= lost))).collect();
    let dense = 4 * 2 * 2 * 64 * 4 * context as u64;
    let accuracy = estimate(scores.iter().sum::<f64>() / 20.0);
    record.memory = Some(Memory { peak_bytes: dense * 3, predicted_peak_bytes: dense * 3, ..Memory::default() });
    record.latency.insert("first_token".into(), latency(context as f64 * 1e5));
    record.latency.insert("decode".into(), latency(1e6 + context as f64 * budget * 1e2));
    record.answers = Some(Answers {
        samples: 20,
        questions: 20,
        accuracy: Some(accuracy),
        accuracy_difference: Some(estimate(accuracy.mean - 1.0)),
        kl_nats: estimate(lost / 3.0),
        kl_of_tokens: Spread::of(&[lost / 6.0, lost / 3.0, lost]),
        top1_agreement: estimate(1.0 - lost / 2.0),
        nll_nats: estimate(0.5 + lost),
        nll_difference_nats: estimate(lost),
        greedy_agreement: Some(estimate(1.0 - lost)),
        budget_tokens: (policy != "full").then_some((budget * context as f64) as usize),
        unprotected_tokens: (policy != "full").then_some(if policy.starts_with("snapkv") && budget < 0.2 {
            0
        } else {
            100
        }),
        o_drift_by_layer: vec![estimate(lost); 4],
        kept_fraction: budget,
        context_tokens: context as f64 - 30.0,
        answer_tokens: 12.0,
        kv_bytes_dense: dense,
        kv_bytes_live: (dense as f64 * budget) as u64,
        kv_bytes_read: (dense as f64 * budget) as u64,
        weights_bytes: None,
        kv_bytes_peak: Some(dense),
        evicted_tokens: Some(((1.0 - budget) * 8.0 * context as f64) as u64),
        sample_kl_nats: scores
            .iter()
            .map(|score| if policy == "full" { 0.0 } else { 0.1 + lost - score / 10.0 })
            .collect(),
        sample_nll_nats: (0..20).map(|sample| 0.5 + lost + (f64::from(sample) - 9.5) * (1.0 + lost) / 190.0).collect(),
        sample_depths: (0..20).map(|sample| f64::from(sample * 7 % 20) / 20.0).collect(),
        sample_scores: scores,
        modes_by_layer: Vec::new(),
    });
    record
}

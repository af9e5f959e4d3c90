//! The record of a finished cell: one JSON line, every field named with its unit.

use super::answers::Answers;
use super::cell::Cell;
use super::edited::Edited;
use super::recalled::Recalled;
use crate::device::cuda::Condition;
use crate::memory::LabelBytes;
use crate::ranks::OfRank;
use crate::serving::Usage;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Name and version of the record's schema.
pub const SCHEMA: &str = "kvsieve/cell/v3";

/// How a cell ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Measured and checked.
    Ok,
    /// Its memory would exceed, or exceeded, the limit.
    Oom,
    /// Ran and is not to be trusted; `reason` says why.
    Failed,
    /// Not run; `reason` says why.
    Skipped,
}

/// One finished cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: String,
    /// The run that made it.
    pub run_id: String,
    /// Hash of `cell`.
    pub cell_id: String,
    /// How it ended.
    pub status: Status,
    /// Why, unless it is `ok`.
    pub reason: Option<String>,
    /// UTC time.
    pub started_at: String,
    /// Wall time spent on the cell, all rounds together.
    pub wall_ns: u64,
    /// A command that runs the cell's experiment again.
    pub repro: String,
    /// What a reader should know before trusting the numbers.
    pub warnings: Vec<String>,
    /// The cell itself.
    pub cell: Cell,
    /// Threads that computed; of each rank, for `ranks`.
    pub threads: usize,
    /// Instruction path that ran: `amx`, `avx512-bf16`, `avx512`, `avx2` or `portable`; of a GPU its name, architecture, and NVRTC's
    /// version.
    pub isa_path: String,
    /// The process that measured it, where several shared the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<Worker>,
    /// Whose GEMM the kernel used, where that depends on what is installed: `cuBLAS 13.0` or `fallback GEMM`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemm: Option<String>,
    /// Memory; for an `oom` cell only the prediction.
    pub memory: Option<Memory>,
    /// The allocation that was refused, where one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refused>,
    /// Clocks, temperature and power of the GPU just after the last sample, where NVML tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Condition>,
    /// Times by phase: `step`, `forward`, `backward`, `prefill`, `score`, `evict`, `decode`, `decode_evict`, `first_token`, `edit`.
    pub latency: BTreeMap<String, Latency>,
    /// Work of one pass.
    pub work: Option<Work>,
    /// Distance from the dense f64 result.
    pub drift: Option<Drift>,
    /// What a policy did.
    pub eviction: Option<Eviction>,
    /// Where the slots of a simulated pool were, for `serve`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<Usage>,
    /// What a memory of facts gave back, for `recall`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<Recalled>,
    /// What a model answered that was told facts, for `edit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edit: Option<Edited>,
    /// What each rank took, sent and waited for, for `ranks` and `train`; what the one of `tune` took.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<OfRank>,
    /// What was trained, for `train` and `tune`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
    /// Times that the cost model gives, by the phases of `latency`, for `ranks`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub predicted_ns: BTreeMap<String, f64>,
    /// What a model answered, for `eval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<Answers>,
}

/// One of the processes that share a run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Worker {
    /// `4711_3` of a Slurm array, `4711` of another job; elsewhere the number of the process.
    pub task: String,
    /// The number of the process: a task that is begun again is another one. 0 in records before there was this field.
    #[serde(default)]
    pub process: u32,
    /// Name of its machine.
    pub host: String,
    /// The machine's CPU.
    pub cpu: String,
}

impl Record {
    /// Bytes that a cell needs which is out of memory; `None` where nothing tells: what was predicted is no more than the limit.
    pub fn needed_bytes(&self) -> Option<u64> {
        let memory = self.memory.as_ref().filter(|_| self.status == Status::Oom)?;
        let requested_bytes = self.refused.as_ref().map_or(0, |refused| refused.requested_bytes);
        Some(memory.predicted_peak_bytes.max(requested_bytes)).filter(|needed| *needed > memory.limit_bytes)
    }

    /// A record of a cell, `ok` and without numbers.
    pub fn blank(cell: Cell) -> Self {
        Record {
            schema: SCHEMA.into(),
            run_id: String::new(),
            cell_id: cell.id(),
            status: Status::Ok,
            reason: None,
            started_at: String::new(),
            wall_ns: 0,
            repro: String::new(),
            warnings: Vec::new(),
            cell,
            threads: 0,
            isa_path: String::new(),
            worker: None,
            gemm: None,
            memory: None,
            refused: None,
            gpu: None,
            latency: BTreeMap::new(),
            work: None,
            drift: None,
            eviction: None,
            serving: None,
            recall: None,
            edit: None,
            ranks: Vec::new(),
            training: None,
            predicted_ns: BTreeMap::new(),
            answers: None,
        }
    }

    /// Whether its parts are of one cell: lists are as long as the cell's layers and heads, or the number of samples, say.
    /// A record that a run wrote is; one that was changed by hand, or mended after a damage, may not be.
    ///
    /// # Errors
    /// In words: the field, how long it is, and how long it must be.
    pub fn check(&self) -> Result<(), String> {
        let wrong = |field: &str, found: usize, what: &str, expected: usize| {
            Err(format!("{field} has {found} {what}; the cell needs {expected}"))
        };
        if let Some(eviction) = &self.eviction {
            let Cell { layers, q_heads, kv_heads, .. } = self.cell;
            if layers == 0 || kv_heads == 0 {
                return Err(format!(
                    "it evicts with {layers} layers and {kv_heads} KV heads; at least 1 of each is needed"
                ));
            }
            for (field, lists, heads) in [
                ("kept_by_head", &eviction.kept_by_head, kv_heads),
                ("drift_by_head", &eviction.drift_by_head, q_heads),
            ] {
                if ![0, layers].contains(&lists.len()) {
                    return wrong(field, lists.len(), "layers", layers);
                }
                if let Some(layer) = lists.iter().find(|layer| layer.len() != heads) {
                    return wrong(field, layer.len(), "heads in a layer", heads);
                }
            }
            let lists = &eviction.kept_by_position;
            if !lists.is_empty() && Some(lists.len()) != layers.checked_mul(kv_heads) {
                return Err(format!("kept_by_position has {} lists; the cell has {layers} x {kv_heads}", lists.len()));
            }
            let bins = lists.first().map_or(0, Vec::len);
            if let Some(list) = lists.iter().find(|list| list.len() != bins) {
                return wrong("kept_by_position", list.len(), "bins in a list", bins);
            }
        }
        if let Some(answers) = &self.answers {
            // What is compared in pairs has a value for every sample: a list that is not there would pass for another measure.
            let scores = if answers.accuracy.is_some() { answers.samples } else { 0 };
            for (field, values, lengths) in [
                ("sample_scores", &answers.sample_scores, [scores; 2]),
                ("sample_kl_nats", &answers.sample_kl_nats, [answers.samples; 2]),
                ("sample_nll_nats", &answers.sample_nll_nats, [answers.samples, 0]),
                ("sample_depths", &answers.sample_depths, [answers.samples, 0]),
            ] {
                if !lengths.contains(&values.len()) {
                    return wrong(field, values.len(), "samples", lengths[0]);
                }
            }
            let scores = answers.sample_scores.iter().copied().map(|score| ("a value of sample_scores", score));
            let mean = answers.accuracy.map(|share| ("accuracy", share.mean));
            if let Some((field, share)) = scores.chain(mean).find(|(_, share)| !(0.0..=1.0).contains(share)) {
                return Err(format!("{field} is {share}; a share is 0 to 1"));
            }
        }
        Ok(())
    }
}

/// Memory that was asked for and not given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// What it was for.
    pub label: String,
    /// Bytes asked for.
    pub requested_bytes: u64,
    /// Bytes that were free: of the GPU, or up to the arena's limit; `None` where the system does not tell.
    pub free_bytes: Option<u64>,
}

/// Memory of a cell, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Peak computed from the shapes before the cell ran; for `eval` that of a full cache.
    pub predicted_peak_bytes: u64,
    /// Peak that the arena saw, inputs included.
    pub peak_bytes: u64,
    /// Measured minus predicted: 0; for `eval` what a policy saves, or needs beside it.
    pub residual_bytes: i64,
    /// Peak of each label.
    pub peak_by_label: LabelBytes,
    /// Scratch memory and materialised scores of the kernel.
    pub workspace_bytes: u64,
    /// Growth of the arena over the inputs that were there before, at its peak.
    pub arena_growth_bytes: u64,
    /// Growth of the process's resident set, at its peak; `None` where the system does not tell.
    pub rss_growth_bytes: Option<u64>,
    /// Growth of the GPU's memory in use, by the driver's account, at its peak; `None` on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_growth_bytes: Option<u64>,
    /// Memory of the GPU that this process's context takes besides all of this, as NVML tells; `None` where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_bytes: Option<u64>,
    /// The limit that the cell ran under.
    pub limit_bytes: u64,
}

/// Times of one phase, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Every timed sample, in order.
    pub samples_ns: Vec<u64>,
    /// Median.
    pub median_ns: f64,
    /// 10th percentile.
    pub p10_ns: f64,
    /// 90th percentile.
    pub p90_ns: f64,
    /// Lower end of the median's 95% interval, from order statistics; of samples too few for one
    /// ([`LEAST_FOR_INTERVAL`](crate::stats::LEAST_FOR_INTERVAL)) the least.
    pub ci95_low_ns: f64,
    /// Upper end; of so few the greatest.
    pub ci95_high_ns: f64,
    /// Untimed runs before the first sample.
    pub warmups: usize,
    /// Why sampling stopped: `interval`, `time cap` or `rounds`.
    pub stop_reason: String,
}

/// Work of one pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Floating-point operations of the pass (FlashAttention-3's formula).
    pub flops: u64,
    /// Key and value bytes that one decode step must read; 0 where nothing is decoded.
    pub kv_bytes_read: u64,
    /// FLOP/s at the median.
    pub flops_per_s: f64,
}

/// What steps of training were taken on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// Numbers that are trained: with `train` all parameters of the model.
    pub parameters: u64,
    /// The loss before each step of a round; every round is the same.
    pub losses: Vec<f64>,
}

/// Distance from the dense f64 result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    /// `|o - o_ref| / |o_ref|` over the checked rows.
    pub rel_l2: f64,
    /// Lower end of the bootstrap 95% interval over queries.
    pub ci95_low: f64,
    /// Upper end.
    pub ci95_high: f64,
    /// Rows compared.
    pub checked_rows: usize,
}

impl Drift {
    /// Tokens that were compared, in every sequence and head of their cell: what the interval was drawn from.
    pub fn checked_tokens(&self, cell: &Cell) -> usize {
        self.checked_rows / (cell.shape().batch * cell.q_heads).max(1)
    }
}

/// What a policy did to the cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Eviction {
    /// Tokens that each KV head may keep.
    pub budget_tokens: usize,
    /// Tokens of the context that stayed, on average over KV heads, as a fraction of the context.
    pub kept_fraction: f64,
    /// Tokens that were evicted, summed over KV heads, prefill and decode together.
    pub evicted_tokens: u64,
    /// KV bytes of the context without eviction.
    pub kv_bytes_dense: u64,
    /// KV bytes of whole pages in use after the eviction that follows prefill.
    pub kv_bytes_live: u64,
    /// Most KV bytes in use at one moment.
    pub kv_bytes_peak: u64,
    /// Needles whose value a late query still retrieves, as a fraction; `None` without planted needles.
    pub needle_recall: Option<f64>,
    /// Fraction of the dense attention mass of late queries that falls on tokens that stayed; `None` where keys are codes, whose
    /// own attention is not the dense one.
    pub attention_mass_kept: Option<f64>,
    /// Fraction of scores that equal another score of the same head, so that the tie rule decides.
    pub tie_rate: f64,
    /// KV bytes that a decode step read, on average over the steps.
    pub kv_bytes_read: u64,
    /// KV bytes of a cache in which every head of a layer has room for as much as the fullest one keeps: what heads
    /// that keep different counts need without page lists of their own.
    pub kv_bytes_padded: u64,
    /// Fraction of the context that stayed after prefill, `[layers][Hkv]`, on average over sequences.
    pub kept_by_head: Vec<Vec<f64>>,
    /// Fraction that stayed of each of 64 equal bins of the context, `[layers * Hkv][64]`, of the first sequence.
    pub kept_by_position: Vec<Vec<f32>>,
    /// Drift of each query head, `[layers][Hq]`.
    pub drift_by_head: Vec<Vec<f64>>,
    /// What was seen along the decode steps.
    pub steps: Vec<Step>,
}

/// A moment of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Tokens decoded so far.
    pub new_tokens: usize,
    /// KV bytes of pages in use.
    pub kv_bytes_live: u64,
    /// Fraction of the dense attention mass that fell on tokens that are there, over all heads; as
    /// [`Eviction::attention_mass_kept`].
    pub attention_mass_kept: Option<f64>,
    /// Drift over all heads.
    pub drift: f64,
}

#[cfg(test)]
mod tests {
    use super::Record;
    use serde_json::{Value, json};

    #[test]
    fn answers_whose_samples_do_not_fit_are_refused() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/results/reference/eval-builtin/cells.jsonl");
        let lines = std::fs::read_to_string(path).unwrap();
        let mut records = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let whole = records.find(|record| record["answers"]["accuracy"].is_object()).unwrap();
        let samples = whole["answers"]["samples"].as_u64().unwrap();
        let needs = |what: &str| Err(format!("{what}; the cell needs {samples}"));
        for (field, value, expected) in [
            ("sample_scores", whole["answers"]["sample_scores"].clone(), Ok(())),
            (
                "sample_scores",
                json!(vec![1.5; samples as usize]),
                Err("a value of sample_scores is 1.5; a share is 0 to 1".into()),
            ),
            ("sample_scores", json!([]), needs("sample_scores has 0 samples")),
            ("sample_kl_nats", json!([]), needs("sample_kl_nats has 0 samples")),
            ("sample_nll_nats", json!([0.5]), needs("sample_nll_nats has 1 samples")),
            // Records of earlier programs have none.
            ("sample_nll_nats", json!([]), Ok(())),
            // Scores of what has no score.
            ("accuracy", Value::Null, Err(format!("sample_scores has {samples} samples; the cell needs 0"))),
        ] {
            let mut record = whole.clone();
            record["answers"][field] = value;
            let record: Record = serde_json::from_value(record).unwrap();
            assert_eq!(record.check(), expected, "{field}");
        }
    }
}

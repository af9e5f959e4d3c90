//! The options that make a scenario: model, memory, load.

use crate::cli::failure::Failure;
use crate::device::cuda::Device;
use crate::memory::os;
use crate::model::{BUILTIN, locate};
use crate::planner::kv::KvStore;
use crate::planner::presets::{gpu, weight_format};
use crate::planner::scenario::{Allocation, Attention, DEFAULT_OVERHEAD, Eviction, Logits, Memory, Scenario};
use crate::planner::{PlanError, Subject};
use crate::policy::{Budget, Registry};
use crate::units;
use std::path::{Path, PathBuf};

/// The options of every question about a model at work.
#[derive(clap::Args, Clone)]
pub struct ScenarioArgs {
    /// Preset (see `kvsieve list models`), Hugging Face folder, config.json, GGUF file, or 'builtin'
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Card (see `kvsieve list gpus`), bytes as 40536MiB, or 'here' for the device at hand
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// Tokens of each sequence's prompt
    #[arg(long, value_name = "N", default_value = "8k", value_parser = tokens, allow_negative_numbers = true)]
    pub context: u64,
    /// Tokens that each sequence is given behind its prompt
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    output_tokens: u64,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    batch: u64,
    /// Scores: naive (8 bytes each, as 'eager' of transformers), minimal (4 bytes) or tiled (none)
    #[arg(long, value_name = "KIND", default_value = "tiled", value_parser = attention)]
    attention: Attention,
    /// Tokens of a sequence that go through the model together [default: the whole prompt]
    #[arg(long, value_name = "N", value_parser = tokens, allow_negative_numbers = true)]
    prefill_chunk: Option<u64>,
    /// Logits of the prompt: last or all of its tokens
    #[arg(long, value_name = "WHICH", default_value = "last", value_parser = logits)]
    logits: Logits,
    /// How keys and values are kept: a format (see `kvsieve list formats`), or fp8 or q5_0 of other engines
    #[arg(long, value_name = "FORMAT", default_value = "bf16")]
    kv_format: String,
    /// How weights are kept (see `kvsieve list weights`) [default: as in the model's files, else bf16]
    #[arg(long, value_name = "FORMAT")]
    weights: Option<String>,
    /// Room for keys and values: exact, paged[:N tokens], or reserved:N tokens for each sequence
    #[arg(long, value_name = "HOW", default_value = "exact", value_parser = allocation)]
    allocation: Allocation,
    /// Eviction policy (see `kvsieve list policies`)
    #[arg(long, value_name = "POLICY", requires = "budget")]
    policy: Option<String>,
    /// What may stay: a fraction (0.25), tokens per KV head (512) or bytes of all layers (64MiB)
    #[arg(long, value_name = "BUDGET", requires = "policy", allow_negative_numbers = true)]
    budget: Option<String>,
    /// Cards that share each layer
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    tensor_parallel: u64,
    /// Cards that share the layers
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pipeline: u64,
    /// Layers whose weights lie in the host's memory
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    offload_layers: u64,
    /// Context, libraries and other processes on the card, as 0.5GB
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes, allow_negative_numbers = true)]
    overhead: Option<u64>,
}

pub fn tokens(text: &str) -> Result<u64, String> {
    units::parse_tokens(text).map(|tokens| tokens as u64)
}

fn attention(text: &str) -> Result<Attention, String> {
    match text {
        "naive" | "eager" => Ok(Attention::Naive),
        "minimal" => Ok(Attention::Minimal),
        "tiled" => Ok(Attention::Tiled),
        _ => Err("it is naive, minimal or tiled".into()),
    }
}

fn logits(text: &str) -> Result<Logits, String> {
    match text {
        "last" => Ok(Logits::Last),
        "all" => Ok(Logits::All),
        _ => Err("it is last or all".into()),
    }
}

fn allocation(text: &str) -> Result<Allocation, String> {
    match text.split_once(':') {
        None if text == "exact" => Ok(Allocation::Exact),
        None if text == "paged" => Ok(Allocation::Paged(16)),
        Some(("paged", page)) => tokens(page).map(Allocation::Paged),
        Some(("reserved", most)) => tokens(most).map(Allocation::Reserved),
        _ => Err("it is exact, paged, paged:16 or reserved:8k".into()),
    }
}

/// The model that a text names.
pub fn subject(model: &Path) -> Result<Subject, Failure> {
    let path = if model == Path::new(BUILTIN) { locate(model)? } else { model.into() };
    Ok(Subject::find(&path)?)
}

/// The memory that a text names.
pub fn memory(text: &str) -> Result<Memory, Failure> {
    if text == "here" {
        let gpu = Device::open(0).ok().map(|device| device.total_bytes());
        let bytes = gpu.or_else(|| os::machine().map(|machine| machine.total_bytes));
        let unknown = || Failure::usage("--gpu here: the system does not tell its memory; give bytes as 16GiB".into());
        return bytes.map(Memory::Bytes).ok_or_else(unknown);
    }
    match gpu(text) {
        Ok(gpu) => Ok(Memory::Gpu(gpu)),
        Err(error) => match units::parse_bytes(text) {
            Ok(bytes) => Ok(Memory::Bytes(bytes)),
            Err(reason) if text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c)) => {
                Err(Failure::usage(format!("--gpu {reason}")))
            }
            Err(_) => Err(error.into()),
        },
    }
}

impl ScenarioArgs {
    /// The model.
    pub fn subject(&self) -> Result<Subject, Failure> {
        let missing =
            || Failure::usage("--model is missing; give a preset such as llama-3-8b, a folder or a file".into());
        subject(self.model.as_deref().ok_or_else(missing)?)
    }

    /// The memory.
    pub fn memory(&self) -> Result<Memory, Failure> {
        let missing =
            || Failure::usage("--gpu is missing; give a card such as rtx-4090, bytes as 24GiB, or here".into());
        memory(self.gpu.as_deref().ok_or_else(missing)?)
    }

    /// The memory, or this where none is named.
    pub fn memory_or(&self, other: Memory) -> Result<Memory, Failure> {
        self.gpu.as_deref().map_or(Ok(other), memory)
    }

    /// The scenario of a model, checked.
    pub fn scenario<'a>(&self, subject: &'a Subject) -> Result<Scenario<'a>, Failure> {
        self.scenario_in(subject, self.memory()?)
    }

    /// The same in some memory.
    pub fn scenario_in<'a>(&self, subject: &'a Subject, memory: Memory) -> Result<Scenario<'a>, Failure> {
        let eviction = match (&self.policy, &self.budget) {
            (Some(policy), Some(budget)) => Some(eviction(policy, budget.parse()?)?),
            _ => None,
        };
        let scenario = Scenario {
            subject,
            weights: self.weights.as_deref().map(weight_format).transpose()?,
            memory,
            overhead_bytes: self.overhead.unwrap_or(DEFAULT_OVERHEAD),
            batch: self.batch,
            context: self.context,
            output: self.output_tokens,
            chunk: self.prefill_chunk,
            attention: self.attention,
            logits: self.logits,
            kv: self.kv_format.parse::<KvStore>()?,
            allocation: self.allocation,
            eviction,
            tensor_parallel: self.tensor_parallel,
            pipeline: self.pipeline,
            offload: self.offload_layers,
        };
        scenario.check()?;
        Ok(scenario)
    }
}

/// A policy as the planner sees it.
fn eviction(text: &str, budget: Budget) -> Result<Eviction, PlanError> {
    let policy = Registry::default().policy(text)?;
    Ok(Eviction {
        policy: text.into(),
        budget,
        chunk_tokens: policy.schedule.chunk_tokens.map(|tokens| tokens as u64),
        selects: policy.selection.is_some() || policy.scorer.is_none(),
    })
}

//! The options that make a scenario: model, memory, load.

use crate::cli::failure::Failure;
use crate::device::cuda::Device;
use crate::memory::os;
use crate::model::{BUILTIN, locate};
use crate::planner::Subject;
use crate::planner::eviction::Eviction;
use crate::planner::kv::KvStore;
use crate::planner::presets::{gpu, weight_format};
use crate::planner::scenario::{Allocation, Attention, Logits, Memory, Scenario};
use crate::policy::{Registry, Statistic};
use crate::units;
use std::path::{Path, PathBuf};

/// The options of every question about a model at work.
#[derive(clap::Args, Clone)]
pub struct ScenarioArgs {
    /// Preset (see `kvsieve list models`), Hugging Face folder, config.json, GGUF file, 'builtin', or the keys of a config.json as
    /// LlamaForCausalLM:hidden_size=4096,num_hidden_layers=32,...
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Card (see `kvsieve list gpus`), bytes as 40536MiB, or 'here' for the device at hand
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// Tokens of each sequence's prompt [default: 8k]
    #[arg(long, value_name = "N", value_parser = tokens)]
    context: Option<u64>,
    /// Tokens that each sequence is given behind its prompt
    #[arg(long, value_name = "N", default_value = "0", value_parser = tokens_or_none)]
    output_tokens: u64,
    /// Sequences whose prompts are read together
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: u64,
    /// Sequences that are held and decoded together [default: the batch]
    #[arg(long, value_name = "N")]
    concurrency: Option<u64>,
    /// What runs it, where the options below say nothing else: eager or sdpa (transformers), vllm or llama.cpp
    #[arg(long, value_name = "NAME", default_value = "sdpa", value_parser = profile)]
    profile: Profile,
    /// Scores: naive (8 bytes each, as 'eager' of transformers), minimal (4 bytes) or tiled (none) [default: tiled]
    #[arg(long, value_name = "KIND", value_parser = attention)]
    attention: Option<Attention>,
    /// Tokens of a sequence that go through the model together [default: the whole prompt]
    #[arg(long, value_name = "N", value_parser = tokens)]
    prefill_chunk: Option<u64>,
    /// Logits of the prompt: last or all of its tokens
    #[arg(long, value_name = "WHICH", default_value = "last", value_parser = logits)]
    logits: Logits,
    /// How keys and values are kept: a format (see `kvsieve list formats`), or fp8 of other engines
    /// [default: bf16]
    #[arg(long, value_name = "FORMAT")]
    kv_format: Option<String>,
    /// How weights are kept (see `kvsieve list weights`) [default: as in the model's files, of a
    /// preset as published]
    #[arg(long, value_name = "FORMAT")]
    weights: Option<String>,
    /// Room for keys and values: exact, paged[:N tokens], or reserved[:N tokens] for each sequence, its context and
    /// output where no number is given [default: exact]
    #[arg(long, value_name = "HOW", value_parser = allocation)]
    allocation: Option<Allocation>,
    /// Eviction policy (see `kvsieve list policies`)
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// What may stay: a fraction (0.25), tokens per KV head (512) or bytes of all layers of a sequence (64MiB)
    #[arg(long, value_name = "BUDGET", requires = "policy")]
    budget: Option<String>,
    /// Cards that share each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    tensor_parallel: u64,
    /// Cards that share the layers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pipeline: u64,
    /// Layers whose weights lie in the host's memory
    #[arg(long, value_name = "N", default_value_t = 0)]
    offload_layers: u64,
    /// Context, libraries and other processes on the card, as 0.5GB [default: 0.5GB; with --gpu here, what is taken now]
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, allow_hyphen_values = true)]
    overhead: Option<u64>,
}

/// Tokens of a prompt where nothing is said.
const CONTEXT: u64 = 8192;

/// Refuses an option that would change nothing of an answer.
fn unused(given: bool, option: &str, question: &str) -> Result<(), Failure> {
    match given {
        true => Err(Failure::usage(format!("{option} has no meaning for {question}; leave it out"))),
        false => Ok(()),
    }
}

pub fn tokens(text: &str) -> Result<u64, String> {
    units::parse_tokens(text).map(|tokens| tokens as u64)
}

fn tokens_or_none(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { tokens(text) }
}

pub fn bytes_or_none(text: &str) -> Result<u64, String> {
    // No memory is of no bytes, but here none may be asked for, in any unit.
    let is_unit = |unit: &str| unit.starts_with(char::is_alphabetic) && units::parse_bytes(&format!("1{unit}")).is_ok();
    let is_none = text == "0" || text.strip_prefix('0').is_some_and(is_unit);
    if is_none { Ok(0) } else { units::parse_bytes(text) }
}

/// How a program runs a model.
#[derive(Clone, Copy)]
enum Profile {
    Eager,
    Sdpa,
    Vllm,
    LlamaCpp,
}

fn profile(text: &str) -> Result<Profile, String> {
    match text {
        "eager" => Ok(Profile::Eager),
        "sdpa" => Ok(Profile::Sdpa),
        "vllm" => Ok(Profile::Vllm),
        "llama.cpp" => Ok(Profile::LlamaCpp),
        _ => Err("it is eager, sdpa, vllm or llama.cpp".into()),
    }
}

impl Profile {
    /// Attention, format of keys and values, room for them, tokens of a pass of all sequences.
    fn options(self) -> (Attention, &'static str, Allocation, Option<u64>) {
        match self {
            Profile::Eager => (Attention::Naive, "bf16", Allocation::Exact, None),
            Profile::Sdpa => (Attention::Tiled, "bf16", Allocation::Exact, None),
            // Its defaults: blocks of 16 tokens, 2048 tokens of a step, whichever sequences they are of.
            Profile::Vllm => (Attention::Tiled, "bf16", Allocation::Paged(16), Some(2048)),
            // Its defaults without flash attention: a cache of the whole context, scores in f32, micro-batches of 512 tokens,
            // whichever sequences they are of.
            Profile::LlamaCpp => (Attention::Minimal, "f16", Allocation::Reserved(None), Some(512)),
        }
    }
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
        None if text == "reserved" => Ok(Allocation::Reserved(None)),
        Some(("reserved", most)) => tokens(most).map(|most| Allocation::Reserved(Some(most))),
        _ => Err("it is exact, paged, paged:16, reserved or reserved:8k".into()),
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
        let host = || os::machine().map(|machine| Memory::Host(machine.total_bytes));
        let unknown = || Failure::usage("--gpu here: the system does not tell its memory; give bytes as 16GiB".into());
        return gpu.map(Memory::Bytes).or_else(host).ok_or_else(unknown);
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
    /// What is read, with its option, for checks of what is written.
    pub fn read(&self) -> Option<(&'static str, &Path)> {
        self.model.as_deref().map(|model| ("--model", model))
    }

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

    /// Bytes that others hold of the memory at hand; `None` where it is some card's.
    fn taken(&self) -> Option<u64> {
        self.gpu.as_deref().filter(|gpu| *gpu == "here")?;
        let gpu = Device::open(0).ok().map(|device| device.total_bytes() - device.free_bytes());
        gpu.or_else(|| os::machine().map(|machine| machine.total_bytes.saturating_sub(machine.available_bytes)))
    }

    /// Refuses what a table of every card and every weight format answers by itself.
    pub fn check_for_all_cards(&self) -> Result<(), Failure> {
        unused(self.gpu.is_some(), "--gpu", "plan gpus, which asks of every card")?;
        unused(self.weights.is_some(), "--weights", "plan gpus, which asks of every weight format")
    }

    /// Refuses what `plan max-context` finds by itself.
    pub fn check_for_max_context(&self) -> Result<(), Failure> {
        unused(self.context.is_some(), "--context", "plan max-context, which finds it")
    }

    /// Refuses what `plan max-batch` finds by itself.
    pub fn check_for_max_batch(&self) -> Result<(), Failure> {
        unused(self.batch != 1, "--batch", "plan max-batch, which finds it")?;
        unused(self.concurrency.is_some(), "--concurrency", "plan max-batch, which reads and holds all together")
    }

    /// Refuses what a run of kvsieve on this CPU does not have.
    pub fn check_for_measure(&self) -> Result<(), Failure> {
        let run = "plan measure, which runs the model here";
        unused(self.gpu.is_some(), "--gpu", run)?;
        unused(self.overhead.is_some(), "--overhead", run)?;
        let attention = self.attention.unwrap_or(self.profile.options().0);
        unused(attention == Attention::Minimal, "minimal attention", &format!("{run}, naive or tiled"))?;
        unused(self.allocation.is_some(), "--allocation", run)
    }

    /// Options that are given and of which a term may know nothing, each with the arguments without it. What is taken of a card is as it
    /// was found to be, `overhead_bytes`, in all but one.
    pub fn without_each(&self, overhead_bytes: Option<u64>) -> Vec<(&'static str, ScenarioArgs)> {
        let as_found = ScenarioArgs { overhead: overhead_bytes, ..self.clone() };
        let all = [
            (self.logits != Logits::Last, "--logits", ScenarioArgs { logits: Logits::Last, ..as_found.clone() }),
            (self.allocation.is_some(), "--allocation", ScenarioArgs { allocation: None, ..as_found.clone() }),
            (self.offload_layers > 0, "--offload-layers", ScenarioArgs { offload_layers: 0, ..as_found.clone() }),
            (self.overhead.is_some(), "--overhead", ScenarioArgs { overhead: None, ..as_found }),
        ];
        all.into_iter().filter(|(is_given, ..)| *is_given).map(|(_, option, without)| (option, without)).collect()
    }

    /// The scenario of a model, checked.
    pub fn scenario<'a>(&self, subject: &'a Subject) -> Result<Scenario<'a>, Failure> {
        self.scenario_in(subject, self.memory()?)
    }

    /// The same in some memory.
    pub fn scenario_in<'a>(&self, subject: &'a Subject, memory: Memory) -> Result<Scenario<'a>, Failure> {
        let eviction = match &self.policy {
            Some(policy) => eviction(policy, self.budget.as_deref())?,
            None => None,
        };
        if let Some(concurrency) = self.concurrency.filter(|&concurrency| concurrency < self.batch) {
            return Err(Failure::usage(format!(
                "--concurrency is {concurrency} and --batch {}; what is read together is held together, so that it is at least as \
                 many",
                self.batch
            )));
        }
        let (attention, kv_format, allocation, step) = self.profile.options();
        let scenario = Scenario {
            subject,
            weights: self.weights.as_deref().map_or(Ok(subject.published()), |name| weight_format(name).map(Some))?,
            memory,
            overhead_bytes: self.overhead.or_else(|| self.taken()),
            batch: self.batch,
            concurrency: self.concurrency.unwrap_or(1),
            context: self.context.unwrap_or(CONTEXT),
            output: self.output_tokens,
            chunk: self.prefill_chunk,
            step: step.filter(|_| self.prefill_chunk.is_none()),
            attention: self.attention.unwrap_or(attention),
            logits: self.logits,
            kv: self.kv_format.as_deref().unwrap_or(kv_format).parse::<KvStore>()?,
            allocation: self.allocation.unwrap_or(allocation),
            eviction,
            tensor_parallel: self.tensor_parallel,
            pipeline: self.pipeline,
            offload: self.offload_layers,
        };
        scenario.check()?;
        Ok(scenario)
    }
}

/// A policy as the planner sees it; none that evicts nothing.
fn eviction(text: &str, budget: Option<&str>) -> Result<Option<Eviction>, Failure> {
    let policy = Registry::default().policy(text)?;
    unused(policy.keeps_all() && budget.is_some(), "--budget", &format!("the policy '{text}', which evicts nothing"))?;
    if policy.keeps_all() {
        return Ok(None);
    }
    let Some(budget) = budget else {
        return Err(Failure::usage(format!("policy '{text}' needs --budget: what may stay, as 0.25, 512 or 64MiB")));
    };
    if policy.looks_at(Statistic::FutureAttention) {
        return Err(Failure::usage(format!(
            "policy '{text}': it looks into the future, which a model has yet to write"
        )));
    }
    Ok(Some(Eviction::of(text, budget.parse()?)?))
}

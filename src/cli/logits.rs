//! `kvsieve logits`: what a model expects next at every token of given sequences, with a full or an evicted cache.

mod cuda;

use super::failure::Failure;
use super::hardware::Hardware;
use super::model::{ModelArgs, Opened};
use super::output;
use super::policy::Used;
use crate::format::RowFormat;
use crate::memory::{Arena, Buffer, Label};
use crate::model::{Model, ModelError, Setup, sequences};
use crate::policy::{Policy, Registry};
use crate::tensor::file::{self, Output};
use crate::units;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Tokens: a JSON object {\"tokens\": [[...], ...]} of sequences, which may differ in length. The output holds logits F32 \
[B, L, vocab], L being the longest; where sequences differ, rows past the end of a shorter one are zero and len I64 [B] \
tells how many there are.\n\n\
With --policy, --evict-after N feeds N tokens of each sequence, lets the policy evict, and feeds the rest as given: the \
logits behind the N-th token show what the eviction did. The budget counts those N tokens. A policy with '+chunks' evicts \
while it reads, and needs no --evict-after.\n\n\
With --memory attention reads a memory in place of the cache, on the CPU; docs/memories.md says what each holds.\n\n\
With --device cuda sequences run one after another, and memory is the GPU's; kv_bytes_live is the largest of a sequence. \
Policies are those of `kvsieve evict --device cuda` and those by gates of hidden states, in models without sliding windows.\n\n\
Examples:
  kvsieve logits --model DIR --tokens tokens.json --output logits.safetensors
  kvsieve logits --model DIR --tokens tokens.json --output evicted.safetensors \\
      --policy snapkv --budget 0.25 --evict-after 1000
  kvsieve logits --model DIR --tokens tokens.json --output remembered.safetensors \\
      --memory camelot:slots=512";

/// Logits of a model at every token of given sequences
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// JSON file with the sequences
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// Safetensors file to write: logits
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Tokens of each sequence after which the policy evicts
    #[arg(long, value_name = "N", requires = "policy", conflicts_with = "memory", help_heading = "What is evicted")]
    evict_after: Option<usize>,
    #[command(flatten)]
    model: ModelArgs,
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    architecture: &'static str,
    policy: Option<String>,
    #[serde(flatten)]
    policy_file: Option<Used>,
    budget: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    evict_after_tokens: Option<usize>,
    batch: usize,
    tokens: usize,
    kernel: String,
    chunk_tokens: usize,
    weights_format: String,
    dtype: String,
    kv_format: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<RowFormat>,
    seed: u64,
    #[serde(flatten)]
    hardware: Hardware,
    run_ns: u64,
    evicted_tokens: u64,
    weights_bytes: u64,
    kv_bytes_live: u64,
    peak_bytes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    let model_args = &args.model;
    let mut writes = vec![("--output", args.output.as_path())];
    writes.extend(model_args.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path)));
    let reads: Vec<_> = [("--tokens", args.tokens.as_path())].into_iter().chain(model_args.reads()).collect();
    output::check_files(&reads, &writes)?;
    let sequences = sequences(&args.tokens)?;
    if let Some(index) = model_args.compute.cuda() {
        return cuda::run(args, registry, index, &sequences);
    }
    let opened = model_args.open(registry)?;
    check_eviction(args, &opened, &sequences)?;
    let lens: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    let setup = model_args.setup(&opened, sequences.len(), longest, true)?;
    let (arena, cpu) = (&opened.arena, &opened.cpu);
    let mut logits = Logits::new(arena, &opened.model, sequences.len(), longest)?;
    let mut decoder = model_args.decoder(&opened, setup)?;
    let after = |len: usize| args.evict_after.unwrap_or(len);
    if let Some(eviction) = model_args.eviction(&opened) {
        decoder.evict(eviction, &lens.iter().map(|&len| after(len)).collect::<Vec<_>>())?;
    }
    let start = Instant::now();
    let (first, rest): (Vec<&[u32]>, Vec<&[u32]>) =
        sequences.iter().map(|tokens| tokens.split_at(after(tokens.len()))).unzip();
    decoder.prefill(&first, |sequence, place, row| logits.store(sequence, place, row))?;
    decoder.follow(&rest, |sequence, place, row| logits.store(sequence, first[sequence].len() + place, row))?;
    let ran = Ran {
        hardware: Hardware::cpu(cpu),
        run_ns: start.elapsed().as_nanos() as u64,
        evicted_tokens: decoder.evicted_tokens(),
        weights_bytes: opened.model.weights.bytes(),
        kv_bytes_live: decoder.kv_bytes(),
        peak_bytes: arena.usage().peak_bytes,
    };
    args.finish(&opened, &setup, &sequences, &logits, ran)
}

/// Logits of all sequences, `[B, L, vocab]`.
struct Logits {
    values: Buffer<f32>,
    longest: usize,
    vocab: usize,
    /// The first that is no number.
    wrong: Option<(f32, u32)>,
}

impl Logits {
    fn new(arena: &Arena, model: &Model, sequences: usize, longest: usize) -> Result<Self, Failure> {
        let vocab = model.config.vocab;
        let values = arena.alloc(Label::Activations, sequences * longest * vocab)?;
        Ok(Logits { values, longest, vocab, wrong: None })
    }

    fn store(&mut self, sequence: usize, place: usize, row: &[f32]) {
        if let Some(token) = row.iter().position(|logit| !logit.is_finite()) {
            self.wrong.get_or_insert((row[token], token as u32));
        }
        self.values[(sequence * self.longest + place) * self.vocab..][..self.vocab].copy_from_slice(row);
    }
}

/// What was measured.
struct Ran {
    hardware: Hardware,
    run_ns: u64,
    evicted_tokens: u64,
    weights_bytes: u64,
    kv_bytes_live: u64,
    peak_bytes: u64,
}

impl Args {
    /// Writes the output file and what is reported.
    fn finish(
        &self,
        opened: &Opened,
        setup: &Setup<'_>,
        sequences: &[Vec<u32>],
        logits: &Logits,
        ran: Ran,
    ) -> Result<(), Failure> {
        if let Some((logit, token)) = logits.wrong {
            return Err(ModelError::Logit { logit, token }.into());
        }
        let lens: Vec<i64> = sequences.iter().map(|tokens| tokens.len() as i64).collect();
        let longest = logits.longest;
        let mut outputs = vec![Output::f32("logits", vec![sequences.len(), longest, logits.vocab], &logits.values)];
        if lens.iter().any(|&len| len != longest as i64) {
            outputs.push(Output::i64("len", vec![lens.len()], &lens));
        }
        file::write(&self.output, &outputs)?;
        let contexts: Vec<usize> = sequences.iter().map(|tokens| self.evict_after.unwrap_or(tokens.len())).collect();
        let warnings = self.model.warnings(opened, setup, &contexts);
        let report = Report {
            model: self.model.model.clone(),
            architecture: opened.model.config.family.architecture(),
            policy: self.model.policy.clone(),
            policy_file: opened.policy_file.clone(),
            budget: opened.budget.map(|budget| budget.to_string()),
            memory: self.model.memory.clone(),
            evict_after_tokens: self.evict_after,
            batch: sequences.len(),
            tokens: sequences.iter().map(Vec::len).sum(),
            kernel: setup.kernel.into(),
            chunk_tokens: setup.chunk_tokens,
            weights_format: opened.model.weights.format().to_string(),
            dtype: setup.dtype.to_string(),
            kv_format: setup.kv_format.to_string(),
            activations: setup.activations,
            seed: self.model.seed,
            hardware: ran.hardware,
            run_ns: ran.run_ns,
            evicted_tokens: ran.evicted_tokens,
            weights_bytes: ran.weights_bytes,
            kv_bytes_live: ran.kv_bytes_live,
            peak_bytes: ran.peak_bytes,
            warnings,
        };
        match &self.model.json {
            Some(target) => output::json(target, &report),
            None => output::print(&summary(&report)),
        }
    }
}

/// Whether logits of a context do not show what the policy does: it sets in behind it.
fn is_behind_context(policy: &Policy) -> bool {
    policy.selection.is_some() || policy.scorer.is_some() && policy.schedule.chunk_tokens.is_none()
}

/// Refuses an eviction that no logits would see, or that comes after the end of a sequence.
fn check_eviction(args: &Args, opened: &Opened, sequences: &[Vec<u32>]) -> Result<(), Failure> {
    let shortest = sequences.iter().map(Vec::len).min().unwrap_or(0);
    // What acts while the context is read is seen in its own logits.
    let is_behind = opened.policy.as_ref().is_some_and(is_behind_context);
    let most = shortest.saturating_sub(usize::from(is_behind));
    if let Some(after) = args.evict_after.filter(|after| !(1..=most).contains(after)) {
        let follows = if is_behind { ", and one must follow" } else { "" };
        return Err(Failure::usage(format!(
            "--evict-after is {after}; the shortest sequence has {shortest} tokens{follows}, so it must be 1 to {most}"
        )));
    }
    if is_behind && args.evict_after.is_none() {
        return Err(Failure::usage(
            "the policy would evict after the last token, where no logits see it; give --evict-after N, or '+chunks'"
                .into(),
        ));
    }
    Ok(())
}

fn summary(report: &Report) -> String {
    let bytes = |bytes: u64| units::bytes(bytes);
    let seconds = report.run_ns as f64 / 1e9;
    let mut text = format!(
        "{}, {} weights, {}: {} tokens in {} sequences, {:.0} tokens/s on {}\n",
        report.architecture,
        report.weights_format,
        report.memory.clone().unwrap_or_else(|| format!("{} cache", report.kv_format)),
        report.tokens,
        report.batch,
        report.tokens as f64 / seconds,
        report.hardware,
    );
    if let (Some(policy), Some(budget)) = (&report.policy, &report.budget) {
        text += &format!("{policy} at {budget}: {} tokens of all heads evicted\n", report.evicted_tokens);
    }
    text += &format!(
        "weights {}, keys and values {}, peak {}\n",
        bytes(report.weights_bytes),
        bytes(report.kv_bytes_live),
        bytes(report.peak_bytes)
    );
    text
}

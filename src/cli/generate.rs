//! `kvsieve generate`: text that follows a prompt, with a full or an evicted cache.

mod cuda;
mod questions;

use super::failure::Failure;
use super::hardware::Hardware;
use super::model::{ModelArgs, Opened};
use super::output;
use super::policy::Used;
use crate::eval::Protocol;
use crate::format::RowFormat;
use crate::model::{ChatTemplate, Generated, Model, OneSequence, Sampler, Sampling, Setup, Text, generate, locate};
use crate::policy::Registry;
use crate::stats::quantile;
use crate::units;
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
The prompt goes through the model, the policy evicts from it (its budget counts the prompt), and tokens follow one by one until \
the model ends the text or --max-new-tokens is reached. A policy with '+every:steps=N' goes on evicting. With --context and \
--question the context is evicted, and every question is answered from the full cache and from what is left of it, side by \
side.\n\n\
With --device cuda memory is the GPU's. Policies are those of `kvsieve evict --device cuda` and those by gates of hidden states, in models without sliding \
windows.\n\n\
Examples:
  kvsieve generate --model DIR --prompt 'Once upon a time'
  kvsieve generate --model DIR --prompt \"$(cat long.txt)\" --policy snapkv --budget 0.25
  kvsieve generate --model DIR --prompt \"$(cat long.txt)\" --memory camelot:slots=512,window=128
  kvsieve generate --model DIR --context notes.txt --question 'Who wrote the letter?' --policy snapkv --budget 0.25
  kvsieve generate --model FILE.gguf --chat --prompt 'What is the capital of France?'
  kvsieve generate --model DIR --prompt 'Dear diary' --temperature 0.8 --top-p 0.95 --seed 7 --json -";

/// Let a model continue a text
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "context")]
    #[arg(required_unless_present_any = ["context", "question"])]
    prompt: Option<String>,
    /// Text that questions are about; it is answered with the full cache and with the evicted one
    #[arg(long, value_name = "FILE", requires = "question")]
    context: Option<PathBuf>,
    /// What is asked of the context; may be given several times, each is asked by itself
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, requires = "context")]
    #[arg(conflicts_with = "prompt")]
    question: Vec<String>,
    /// What a policy sees of a question when it evicts: agnostic, aware, aware-kept or aware-whole, as in `kvsieve eval`
    /// [default: agnostic]
    #[arg(long, value_name = "PROTOCOL", requires = "context", conflicts_with = "prompt")]
    protocol: Option<Protocol>,
    /// Write the prompt, or context and question, as the model's own chat template has what a user says
    #[arg(long)]
    chat: bool,
    /// Most tokens that follow
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_new_tokens: usize,
    /// What logits are divided by before a token is drawn; 0 takes the likeliest
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
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
    kernel: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    chat: bool,
    prompt_tokens: usize,
    new_tokens: usize,
    weights_format: String,
    dtype: String,
    kv_format: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<RowFormat>,
    temperature: f32,
    top_p: f32,
    seed: u64,
    #[serde(flatten)]
    hardware: Hardware,
    first_token_ns: u64,
    /// Median time of a decode step.
    #[serde(skip_serializing_if = "Option::is_none")]
    step_ns: Option<u64>,
    evicted_tokens: u64,
    weights_bytes: u64,
    /// Once the prompt was evicted.
    prompt_kv_bytes: u64,
    kv_bytes_live: u64,
    peak_bytes: u64,
    tokens: Vec<u32>,
    text: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    let model_args = &args.model;
    let sampling = sampling(args)?;
    let writes = model_args.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path));
    let reads = args.context.as_deref().map(|path| ("--context", path)).into_iter().chain(model_args.reads());
    output::check_files(&reads.collect::<Vec<_>>(), writes.as_slice())?;
    let text = model_args.text()?;
    if let Some(context) = &args.context {
        return questions::run(args, registry, context, sampling, &text);
    }
    if let Some(index) = model_args.compute.cuda() {
        return cuda::run(args, registry, index, sampling, &text);
    }
    let opened = model_args.open(registry)?;
    let prompt = args.prompt_tokens(&text)?;
    let most_tokens = prompt.len().saturating_add(args.max_new_tokens);
    let setup = model_args.setup(&opened, 1, most_tokens, false)?;
    let mut decoder = model_args.decoder(&opened, setup)?;
    if let Some(eviction) = model_args.eviction(&opened) {
        decoder.evict(eviction, &[prompt.len()])?;
    }
    let generated = args.write(&mut decoder, &opened.model, sampling, &text, &prompt)?;
    let ran = Ran {
        hardware: Hardware::cpu(&opened.cpu),
        generated,
        evicted_tokens: decoder.evicted_tokens(),
        weights_bytes: opened.model.weights.bytes(),
        kv_bytes_live: decoder.kv_bytes(),
        peak_bytes: opened.arena.usage().peak_bytes,
    };
    args.finish(&opened, &setup, &text, &prompt, ran)
}

/// What came of it.
struct Ran {
    hardware: Hardware,
    generated: Generated,
    evicted_tokens: u64,
    weights_bytes: u64,
    kv_bytes_live: u64,
    peak_bytes: u64,
}

impl Args {
    /// The prompt, in the model's chat template if that is asked for.
    fn prompt_tokens(&self, text: &Text) -> Result<Vec<u32>, Failure> {
        let prompt = self.prompt.as_deref().unwrap_or_default();
        Ok(match self.chat {
            true => ChatTemplate::open(&locate(&self.model.model)?)?.prompt(prompt, text)?,
            false => text.tokens(prompt)?,
        })
    }

    /// Lets the model continue the prompt. Text appears as it is written; what a reader of a pipe no longer wants is no
    /// error.
    fn write(
        &self,
        sequence: &mut impl OneSequence,
        model: &Model,
        sampling: Sampling,
        text: &Text,
        prompt: &[u32],
    ) -> Result<Generated, Failure> {
        let mut sampler = Sampler::new(sampling);
        let (mut shown, mut failed) = (String::new(), Ok(()));
        let generated = generate(sequence, prompt, &mut sampler, &model.config.eos, self.max_new_tokens, |tokens| {
            let Ok(all) = text.text(tokens) else { return };
            // A character may need several tokens; until it is whole its text ends in a replacement character.
            if self.model.json.is_none() && failed.is_ok() && !all.ends_with('\u{fffd}') {
                if let Some(more) = all.strip_prefix(&shown) {
                    failed = output::print(more);
                }
                shown = all;
            }
        })?;
        failed.map(|()| generated)
    }

    /// Prints what is reported.
    fn finish(&self, opened: &Opened, setup: &Setup<'_>, text: &Text, prompt: &[u32], ran: Ran) -> Result<(), Failure> {
        if self.model.json.is_none() {
            output::print("\n")?;
        }
        let report = Report {
            model: self.model.model.clone(),
            architecture: opened.model.config.family.architecture(),
            policy: self.model.policy.clone(),
            policy_file: opened.policy_file.clone(),
            budget: opened.budget.map(|budget| budget.to_string()),
            memory: self.model.memory.clone(),
            kernel: setup.kernel.into(),
            chat: self.chat,
            prompt_tokens: prompt.len(),
            new_tokens: ran.generated.tokens.len(),
            weights_format: opened.model.weights.format().to_string(),
            dtype: setup.dtype.to_string(),
            kv_format: setup.kv_format.to_string(),
            activations: setup.activations,
            temperature: self.temperature,
            top_p: self.top_p,
            seed: self.model.seed,
            hardware: ran.hardware,
            first_token_ns: ran.generated.first_token_ns,
            step_ns: median_ns(&ran.generated.step_ns).map(|ns| ns.round() as u64),
            evicted_tokens: ran.evicted_tokens,
            weights_bytes: ran.weights_bytes,
            prompt_kv_bytes: ran.generated.prompt_kv_bytes,
            kv_bytes_live: ran.kv_bytes_live,
            peak_bytes: ran.peak_bytes,
            text: text.text(&ran.generated.tokens)?,
            tokens: ran.generated.tokens,
            warnings: self.model.warnings(opened, setup, &[prompt.len()]),
        };
        match &self.model.json {
            Some(target) => output::json(target, &report),
            None => {
                eprintln!("{}", summary(&report));
                Ok(())
            }
        }
    }
}

/// Median of times; nothing where there are none.
fn median_ns(times_ns: &[u64]) -> Option<f64> {
    let times: Vec<f64> = times_ns.iter().map(|&ns| ns as f64).collect();
    (!times.is_empty()).then(|| quantile(&times, 0.5))
}

fn sampling(args: &Args) -> Result<Sampling, Failure> {
    let Args { temperature, top_p, max_new_tokens, .. } = *args;
    if !(temperature.is_finite() && temperature >= 0.0) {
        return Err(Failure::usage(format!("--temperature is {temperature}; it must be finite and 0 or more")));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(Failure::usage(format!("--top-p is {top_p}; it must be above 0 and at most 1")));
    }
    if temperature == 0.0 && top_p < 1.0 {
        return Err(Failure::usage(format!(
            "--top-p is {top_p} and --temperature 0, which takes the likeliest token; give a temperature above 0"
        )));
    }
    if max_new_tokens == 0 {
        return Err(Failure::usage("--max-new-tokens is 0; at least one token follows".into()));
    }
    Ok(Sampling { temperature, top_p, seed: args.model.seed })
}

fn summary(report: &Report) -> String {
    let bytes = |bytes: u64| units::bytes(bytes);
    let ms = |ns: u64| ns as f64 / 1e6;
    let step = report.step_ns.map_or(String::new(), |ns| format!(", {:.2} ms per token", ms(ns)));
    format!(
        "{} + {} tokens; first token after {:.1} ms{step}; keys and values {}, peak {}",
        report.prompt_tokens,
        report.new_tokens,
        ms(report.first_token_ns),
        bytes(report.kv_bytes_live),
        bytes(report.peak_bytes)
    )
}

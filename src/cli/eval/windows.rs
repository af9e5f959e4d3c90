//! `eval --protocol wikitext` and `llama-perplexity`: the perplexity of a text as published numbers are computed.

use super::Args;
use crate::attention;
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::cli::read_text;
use crate::eval::{Perplexity, Stage, Windows, perplexity};
use crate::experiment::weights::{OtherWeights, WeightsText};
use crate::format::{KvFormat, RowFormat};
use crate::memory::Arena;
use crate::model::{Text, locate};
use crate::tensor::DType;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::path::Path;

/// Tokens that go through the model together.
const CHUNK_TOKENS: usize = 512;

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    text: &'a Path,
    protocol: Windows,
    window_tokens: usize,
    predicted_tokens: usize,
    #[serde(flatten)]
    found: Perplexity,
    kernel: &'a str,
    dtype: DType,
    weights: RowFormat,
    /// The file or folder of other weights than the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    weights_of: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<RowFormat>,
    kv_format: KvFormat,
    threads: usize,
    peak_bytes: u64,
}

/// Every model by every convention, kernel and cache format.
pub fn run(args: &Args, conventions: &[Windows]) -> Result<(), Failure> {
    let path = args.text.as_deref().ok_or_else(|| {
        Failure::usage(format!("--protocol {} is the perplexity of a text; give --text FILE", conventions[0]))
    })?;
    let strange = [
        ("--policy", !args.policy.is_empty()),
        ("--budget", !args.budget.is_empty()),
        ("--memory", !args.memory.is_empty()),
        ("--policy-file", args.policy_file.is_some()),
        ("--evict-after", args.evict_after.is_some()),
        ("--new-tokens", args.new_tokens.is_some()),
        ("--alone-samples", args.alone_samples.is_some()),
        ("--context", !args.context.is_empty()),
        ("--dry-run", args.dry_run),
        ("--resume", args.resume),
        ("--out", args.out != Path::new("results")),
        ("--seed", args.seed != 0),
    ];
    if let Some((option, _)) = strange.iter().find(|(_, given)| *given) {
        let reason = "reads windows of a text with a full cache";
        return Err(Failure::usage(format!("--protocol {} {reason}; leave {option} out", conventions[0])));
    }
    let most = args.samples.unwrap_or(usize::MAX);
    if most == 0 {
        return Err(Failure::usage("--samples is 0; at least one window is read".into()));
    }
    let content = read_text(path)?;
    let kernels = Args::names(&args.kernel, &["tiled"]);
    kernels.iter().try_for_each(|kernel| attention::kernel(kernel).map(drop))?;
    let (weights, rounded) = (args.weights()?, args.activations()?);
    let weights = if weights.is_empty() { vec![WeightsText(None)] } else { weights };
    let rounded = match &rounded[..] {
        [] => vec![None],
        formats => formats.iter().map(|format| format.rounding()).collect(),
    };
    let cpu = args.compute.cpu()?;
    for name in &args.model {
        let folder = locate(Path::new(name))?;
        let text = Text::open(&folder)?;
        let arena = Arena::with_limit(args.compute.limit_bytes());
        for (&convention, WeightsText(weights)) in
            conventions.iter().flat_map(|one| weights.iter().map(move |of| (one, of)))
        {
            let model = OtherWeights::open(weights.as_ref(), &folder, &arena)?;
            let dtype = args.dtype.unwrap_or(model.weights.dtype());
            let formats = if args.kv_format.is_empty() { vec![dtype.into()] } else { args.kv_format.clone() };
            if !args.beyond_limit {
                model.check_length(convention.tokens())?;
            }
            let windows = convention.of(&text, (path, &content), most)?;
            let passes = formats.iter().flat_map(|format| rounded.iter().map(move |rounded| (format, rounded)));
            for (kernel, (&kv_format, &activations)) in
                kernels.iter().flat_map(|kernel| passes.clone().map(move |of| (kernel, of)))
            {
                arena.reset_peak();
                let stage = Stage {
                    model: &model,
                    cpu: &cpu,
                    arena: &arena,
                    kernel,
                    dtype,
                    kv_format,
                    activations,
                    max_tokens: convention.tokens(),
                    chunk_tokens: CHUNK_TOKENS,
                };
                let bar = ProgressBar::new(windows.len() as u64);
                let style =
                    ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} windows  {wide_msg}");
                bar.set_style(style.expect("the template is right").progress_chars("=> "));
                let found = perplexity(&stage, convention, &windows, |so_far| {
                    bar.inc(1);
                    bar.set_message(format!("perplexity {:.2}", so_far.perplexity));
                })?;
                bar.finish_and_clear();
                let report = Report {
                    model: name,
                    text: path,
                    protocol: convention,
                    window_tokens: convention.tokens(),
                    predicted_tokens: found.windows * convention.predicted(),
                    found,
                    kernel,
                    dtype,
                    weights: model.weights.format(),
                    weights_of: match weights {
                        Some(OtherWeights::Model(name)) => Some(name),
                        _ => None,
                    },
                    activations,
                    kv_format,
                    threads: cpu.threads(),
                    peak_bytes: arena.usage().peak_bytes,
                };
                match args.json {
                    Some(_) => {
                        let line = serde_json::to_string(&report).expect("a report is plain data");
                        output::print(&format!("{line}\n"))?;
                    }
                    None => output::print(&words(&report))?,
                }
            }
        }
    }
    Ok(())
}

fn words(report: &Report<'_>) -> String {
    let Perplexity { windows, perplexity, standard_error, .. } = report.found;
    let error = standard_error.map_or(String::new(), |error| format!(" +- {error:.2}"));
    format!(
        "{}: perplexity {perplexity:.4}{error} ({}, {windows} windows of {} tokens, {} predicted; {}, {}, weights {}in {}{}, cache in {})\n",
        report.model,
        report.protocol,
        report.window_tokens,
        report.predicted_tokens,
        report.kernel,
        report.dtype,
        report.weights_of.map_or(String::new(), |path| format!("of {path} ")),
        report.weights,
        report.activations.map_or(String::new(), |format| format!(", activations in {format}")),
        report.kv_format
    )
}

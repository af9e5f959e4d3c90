//! `kvsieve quantize`: a model's weights in fewer bits, as a GGUF file.

use super::failure::Failure;
use super::{Compute, output};
use crate::memory::Arena;
use crate::model::{Mixture, Quantised, locate, quantise};
use crate::units;
use indicatif::ProgressBar;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const EXAMPLES: &str = "\
Which tensor gets which type is llama.cpp's choice: more bits for the output matrix, in _m also for values and the MLP's second half in \
half of the layers, and a wider type where rows are no whole super-blocks. Norms and biases stay f32. The tokenizer and \
the configuration go into the file. The error of a tensor is the relative L2 distance from what the source held.\n\n\
Examples:
  kvsieve quantize --model DIR --format q4_k_m --output model-q4_k_m.gguf
  kvsieve quantize --model model-f16.gguf --format q8_0 --output model-q8_0.gguf --json -
  kvsieve eval --model model-f16.gguf,model-q4_k_m.gguf --text book.txt --protocol llama-perplexity --policy full";

/// A model's weights in fewer bits, as a GGUF file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Hugging Face folder, a GGUF file of any type, or 'builtin'
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// q8_0, q6_k, q5_k_m, q4_k_m, q3_k_m, q2_k and others that GGUF has; a wrong one lists them
    #[arg(long, value_name = "FORMAT")]
    format: String,
    /// GGUF file to write
    #[arg(long, alias = "out", value_name = "FILE.gguf")]
    output: PathBuf,
    #[command(flatten)]
    compute: Compute,
    /// Write the table as JSON, tensor by tensor, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    format: &'static str,
    parameters: usize,
    output_bytes: u64,
    weights_bytes: usize,
    bits_per_weight: f64,
    wall_ns: u64,
    threads: usize,
    tensors: Vec<Tensor>,
}

#[derive(Serialize)]
struct Tensor {
    tensor: String,
    shape: Vec<usize>,
    from: String,
    format: String,
    bytes: usize,
    bits_per_weight: f64,
    rel_l2: f64,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    let mixture: Mixture = args.format.parse().map_err(Failure::usage)?;
    if !args.output.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        let shown = args.output.display();
        return Err(Failure::usage(format!("--output is '{shown}'; what is written is a GGUF file, name it .gguf")));
    }
    let source = locate(&args.model)?;
    let mut writes = vec![("--output", args.output.as_path())];
    writes.extend(args.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path)));
    output::check_files(&[("--model", &source)], &writes)?;
    let (cpu, arena) = (args.compute.cpu()?, Arena::with_limit(args.compute.limit_bytes()));
    let (start, bar) = (Instant::now(), ProgressBar::new(0));
    let done = quantise(&source, mixture, &args.output, &cpu, &arena, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let tensors: Vec<Tensor> = done.iter().map(Tensor::of).collect();
    let parameters = done.iter().map(|one| one.planned.elements()).sum();
    let weights_bytes = done.iter().map(|one| one.planned.bytes()).sum();
    let report = Report {
        model: args.model.clone(),
        format: mixture.name(),
        parameters,
        output_bytes: args.output.metadata().map_or(0, |found| found.len()),
        weights_bytes,
        bits_per_weight: bits(weights_bytes, parameters),
        wall_ns: start.elapsed().as_nanos() as u64,
        threads: cpu.threads(),
        tensors,
    };
    match &args.json {
        Some(target) => output::json(target, &report),
        None => output::print(&table(&report, &args.output)),
    }
}

fn bits(bytes: usize, elements: usize) -> f64 {
    8.0 * bytes as f64 / elements as f64
}

impl Tensor {
    fn of(one: &Quantised) -> Self {
        Tensor {
            tensor: one.planned.own.clone(),
            shape: one.planned.shape.clone(),
            from: one.from.to_string(),
            format: one.planned.format.to_string(),
            bytes: one.planned.bytes(),
            bits_per_weight: bits(one.planned.bytes(), one.planned.elements()),
            rel_l2: one.rel_l2,
        }
    }
}

/// Tensors of all layers in one line where they have one type.
fn table(report: &Report, output: &Path) -> String {
    let mut lines: BTreeMap<(String, &str, &str), Vec<&Tensor>> = BTreeMap::new();
    for tensor in &report.tensors {
        let part = match tensor.tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((_, part)) => format!("blk.*.{part}"),
            None => tensor.tensor.clone(),
        };
        lines.entry((part, &tensor.from, &tensor.format)).or_default().push(tensor);
    }
    let head = ["tensor", "count", "from", "format", "bits", "error", "largest"];
    let mut text = format!(
        "{:<28} {:>5} {:<6} {:<6} {:>7} {:>9} {:>9}\n",
        head[0], head[1], head[2], head[3], head[4], head[5], head[6]
    );
    for ((part, from, format), tensors) in &lines {
        let most = tensors.iter().fold(0.0f64, |most, tensor| most.max(tensor.rel_l2));
        let mean = tensors.iter().map(|tensor| tensor.rel_l2).sum::<f64>() / tensors.len() as f64;
        let (count, bits) = (tensors.len(), tensors[0].bits_per_weight);
        let _ = writeln!(text, "{part:<28} {count:>5} {from:<6} {format:<6} {bits:>7.4} {mean:>9.6} {most:>9.6}");
    }
    let _ = writeln!(
        text,
        "{}: {} of {} parameters, {:.4} bits per weight, in {:.1} s",
        output.display(),
        units::bytes(report.weights_bytes as u64),
        report.parameters,
        report.bits_per_weight,
        report.wall_ns as f64 / 1e9
    );
    text
}

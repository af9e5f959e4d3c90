//! `kvsieve quantize`: a model's weights in fewer bits, as a GGUF file or a folder of packed codes.

use super::failure::Failure;
use super::{Compute, output, read_text};
use crate::memory::Arena;
use crate::model::{Calibration, Importance, Mixture, Quantised, Recipe, Scaled, Text, locate};
use crate::model::{quantise, quantise_folder, quantise_scaled};
use crate::named::NamedError;
use crate::units;
use indicatif::ProgressBar;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const EXAMPLES: &str = "\
GGUF files: which tensor gets which type is llama.cpp's choice: more bits for the output matrix, in _m also for values and the MLP's \
second half in half of the layers, and a wider type where rows are no whole super-blocks. Norms and biases stay f32. With an importance matrix llama.cpp gives some \
matrices of the lowest layers another type (q4_0, q5_0, iq4_nl, iq4_xs); here types are the same.\n\n\
With --text errors count by the mean square of what each weight is multiplied with while the model reads it (llama.cpp's importance \
matrix); with --imatrix they are those of a file that llama.cpp's imatrix wrote (imatrix.gguf, or the older imatrix.dat).\n\n\
Folders: codes with an f16 scale for each group of inputs, as others read them: gptq, int4 and int8 in GPTQ's layout, awq in AWQ's. \
int4 and int8 round each weight to its nearest code; gptq and awq choose codes by what matrices are multiplied with while the model \
reads --text. All take group=128; all but awq symmetric=true; gptq bits=4, order=inputs|act and damp=0.01. nf4 is as bitsandbytes \
has it, with an f32 scale for each block=64 inputs, or with nested=true one of 8 bits; fp8 is E4M3 with an f32 scale for each output \
(compressed-tensors), or with block=128 for so many outputs and inputs (as DeepSeek's), and w8a8 bytes with one for each output, to be run with --activations int8: each token has a scale of its own, or with activations=static each layer one by \
what it reads of --text; with smoothing=0.5 weights take half of the outliers of their inputs over (SmoothQuant). \
Embedding, output matrix and norms stay as the source's embedding is.\n\n\
The tokenizer and the configuration go along. The error of a tensor is the relative L2 distance from what the source held (of \
awq and smoothing: from that times their factors), that of \
outputs the same of what the matrix makes of the text.\n\n\
Examples:
  kvsieve quantize --model DIR --format q4_k_m --output model-q4_k_m.gguf
  kvsieve quantize --model model-f16.gguf --format q8_0 --output model-q8_0.gguf --json -
  kvsieve quantize --model DIR --format q3_k_m --text book.txt --output model-q3_k_m.gguf
  kvsieve quantize --model DIR --format q3_k_m --imatrix imatrix.gguf --output model-q3_k_m.gguf
  kvsieve quantize --model DIR --format gptq:group=64 --text book.txt --output model-gptq
  kvsieve quantize --model DIR --format awq --text book.txt --samples 64 --output model-awq
  kvsieve quantize --model DIR --format nf4 --output model-nf4
  kvsieve quantize --model DIR --format w8a8:activations=static --text book.txt --output model-w8a8
  kvsieve eval --model model-f16.gguf,model-gptq --text book.txt --protocol llama-perplexity";

/// A model's weights in fewer bits, as a GGUF file or a folder of packed codes
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Hugging Face folder, a GGUF file of any type, or 'builtin'
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// For a GGUF file q8_0, q6_k, q5_k_m, q4_k_m, q3_k_m, q2_k and others that it has, for a folder gptq, awq, int4, int8, nf4, fp8
    /// or w8a8; a wrong one lists them
    #[arg(long, value_name = "FORMAT")]
    format: String,
    /// GGUF file or folder to write
    #[arg(long, alias = "out", value_name = "FILE.gguf|DIR")]
    output: PathBuf,
    /// Text by which gptq and awq choose codes, GGUF types weigh errors, and scales of static or smoothed activations are found
    #[arg(long, value_name = "FILE", help_heading = "Calibration")]
    text: Option<PathBuf>,
    /// Importance matrix that llama.cpp's imatrix wrote, in place of a text for GGUF types
    #[arg(long, value_name = "FILE", conflicts_with = "text", help_heading = "Calibration")]
    imatrix: Option<PathBuf>,
    /// Pieces of the text, spread evenly
    #[arg(long, value_name = "N", default_value_t = 32, requires = "text", help_heading = "Calibration")]
    samples: usize,
    /// Tokens of a piece
    #[arg(long, value_name = "N", default_value = "512", value_parser = units::parse_tokens,
        requires = "text", help_heading = "Calibration")]
    length: usize,
    #[command(flatten)]
    compute: Compute,
    /// Write the table as JSON, tensor by tensor, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

/// What is written.
enum Target {
    Gguf(Mixture),
    Folder(Recipe),
    Scaled(Scaled),
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    format: String,
    /// Tokens that codes were chosen by.
    #[serde(skip_serializing_if = "Option::is_none")]
    text_tokens: Option<usize>,
    /// File that says by which mean squares errors count.
    #[serde(skip_serializing_if = "Option::is_none")]
    imatrix: Option<PathBuf>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    output_rel_l2: Option<f64>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    let target = args.target()?;
    let source = locate(&args.model)?;
    let mut writes = vec![("--output", args.output.as_path())];
    writes.extend(args.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path)));
    let mut reads = vec![("--model", source.as_path())];
    reads.extend(args.text.as_deref().map(|path| ("--text", path)));
    reads.extend(args.imatrix.as_deref().map(|path| ("--imatrix", path)));
    output::check_files(&reads, &writes)?;
    let tokens = args.text.as_deref().map(|path| args.tokens(path, &source)).transpose()?;
    let (cpu, arena) = (args.compute.cpu()?, Arena::with_limit(args.compute.limit_bytes()));
    let (start, bar) = (Instant::now(), ProgressBar::new(0));
    let wrote = |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    };
    let text = tokens.as_deref().map(|tokens| Calibration { tokens, length: args.length });
    let (done, format) = match target {
        Target::Gguf(mixture) => {
            let importance = text.map(Importance::Text).or(args.imatrix.as_deref().map(Importance::File));
            let done = quantise(&source, mixture, importance, &args.output, (&cpu, &arena), wrote)?;
            (done, mixture.name().to_string())
        }
        Target::Folder(recipe) => {
            let done = quantise_folder(&source, recipe, text, &args.output, (&cpu, &arena), wrote)?;
            (done, recipe.to_string())
        }
        Target::Scaled(scaled) => {
            let done = quantise_scaled(&source, scaled, text, &args.output, (&cpu, &arena), wrote)?;
            (done, scaled.to_string())
        }
    };
    bar.finish_and_clear();
    let tensors: Vec<Tensor> = done.iter().map(Tensor::of).collect();
    let parameters = done.iter().map(Quantised::elements).sum();
    let weights_bytes = done.iter().map(|one| one.bytes).sum();
    let report = Report {
        model: args.model.clone(),
        format,
        text_tokens: tokens.map(|tokens| tokens.len()),
        imatrix: args.imatrix.clone(),
        parameters,
        output_bytes: bytes_of(&args.output),
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

impl Args {
    /// What is to be written, where all that it needs is there.
    fn target(&self) -> Result<Target, Failure> {
        let name = self.format.split(':').next().unwrap_or_default();
        let wrong = |error: NamedError| Failure::usage(error.to_string());
        let target = match name {
            name if Recipe::names().contains(&name) => Target::Folder(self.format.parse().map_err(wrong)?),
            name if Scaled::names().contains(&name) => Target::Scaled(self.format.parse().map_err(wrong)?),
            _ => {
                let folders = [&Recipe::names()[..], &Scaled::names()].concat().join(", ");
                let known = |error: String| Failure::usage(format!("{error}; as a folder: {folders}"));
                Target::Gguf(self.format.parse().map_err(known)?)
            }
        };
        // Whether it needs a text, and whether it can do with one.
        let (is_folder, needs_text, takes_text) = match &target {
            Target::Gguf(mixture) => (false, false, mixture.is_fitted()),
            Target::Folder(recipe) => (true, recipe.reads_text(), recipe.reads_text()),
            Target::Scaled(scaled) => (true, scaled.reads_text(), scaled.reads_text()),
        };
        let is_gguf = self.output.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        let shown = self.output.display();
        let wrong = match (is_folder, needs_text, &self.text) {
            (false, ..) if !is_gguf => {
                format!("--output is '{shown}'; {name} is written as a GGUF file, name it .gguf")
            }
            (true, ..) if is_gguf || self.output.is_file() => {
                format!("--output is '{shown}'; {name} is written as a folder, name one")
            }
            (true, ..) if self.output.is_dir() => {
                format!("--output '{shown}' is there already; {name} is written as a folder of its own, name a new one")
            }
            (_, true, None) => format!("{} reads a text; give one with --text FILE", self.format),
            (_, _, Some(_)) if !takes_text => format!(
                "--text is for gptq, awq, static or smoothed w8a8 and GGUF types of six bits or fewer; {} reads none, leave it out",
                self.format
            ),
            _ if self.imatrix.is_some() && (is_folder || !takes_text) => {
                format!("--imatrix is for GGUF types of six bits or fewer; {} takes none, leave it out", self.format)
            }
            _ => return Ok(target),
        };
        Err(Failure::usage(wrong))
    }

    /// Pieces of the text, behind each other.
    fn tokens(&self, path: &Path, source: &Path) -> Result<Vec<u32>, Failure> {
        let (samples, length) = (self.samples, self.length);
        if samples == 0 || length == 0 {
            return Err(Failure::usage(format!(
                "--samples is {samples} and --length {length}; both must be at least 1"
            )));
        }
        let tokens = Text::open(source)?.tokens(&read_text(path)?)?;
        let each = tokens.len() / samples;
        if each < length {
            return Err(Failure::usage(format!(
                "'{}' has {} tokens; --samples {samples} of --length {length} need {}",
                path.display(),
                tokens.len(),
                samples.saturating_mul(length)
            )));
        }
        Ok((0..samples).flat_map(|sample| &tokens[sample * each..][..length]).copied().collect())
    }
}

/// Bytes of a file, or of all files of a folder.
fn bytes_of(path: &Path) -> u64 {
    let bytes = |path: &Path| path.metadata().map_or(0, |found| found.len());
    match std::fs::read_dir(path) {
        Err(_) => bytes(path),
        Ok(files) => files.flatten().map(|file| bytes(&file.path())).sum(),
    }
}

fn bits(bytes: usize, elements: usize) -> f64 {
    8.0 * bytes as f64 / elements as f64
}

impl Tensor {
    fn of(one: &Quantised) -> Self {
        Tensor {
            tensor: one.name.clone(),
            shape: one.shape.clone(),
            from: one.from.to_string(),
            format: one.format.clone(),
            bytes: one.bytes,
            bits_per_weight: bits(one.bytes, one.elements()),
            rel_l2: one.rel_l2,
            output_rel_l2: one.output_rel_l2,
        }
    }

    /// Its name with that of all layers in place of its own.
    fn part(&self) -> String {
        let numbered = ["blk.", "model.layers."].into_iter().find_map(|before| {
            let (_, part) = self.tensor.strip_prefix(before)?.split_once('.')?;
            Some(format!("{before}*.{part}"))
        });
        numbered.unwrap_or_else(|| self.tensor.clone())
    }
}

/// Tensors of all layers in one line where they have one type.
fn table(report: &Report, output: &Path) -> String {
    let mut lines: BTreeMap<(String, &str, &str), Vec<&Tensor>> = BTreeMap::new();
    for tensor in &report.tensors {
        lines.entry((tensor.part(), &tensor.from, &tensor.format)).or_default().push(tensor);
    }
    let wide = |of: &dyn Fn(&(String, &str, &str)) -> usize| lines.keys().map(of).max().unwrap_or(0).max(6);
    let (name, from, to) = (wide(&|key| key.0.len()), wide(&|key| key.1.len()), wide(&|key| key.2.len()));
    let mut text = format!(
        "{:<name$} {:>5} {:<from$} {:<to$} {:>7} {:>9} {:>9}",
        "tensor", "count", "from", "format", "bits", "error", "largest"
    );
    let has_outputs = report.tensors.iter().any(|tensor| tensor.output_rel_l2.is_some());
    text.push_str(if has_outputs { "   outputs\n" } else { "\n" });
    for ((part, own, format), tensors) in &lines {
        let mean =
            |of: &dyn Fn(&Tensor) -> f64| tensors.iter().map(|tensor| of(tensor)).sum::<f64>() / tensors.len() as f64;
        let most = tensors.iter().fold(0.0f64, |most, tensor| most.max(tensor.rel_l2));
        let (count, bits, error) = (tensors.len(), tensors[0].bits_per_weight, mean(&|tensor| tensor.rel_l2));
        let _ =
            write!(text, "{part:<name$} {count:>5} {own:<from$} {format:<to$} {bits:>7.4} {error:>9.6} {most:>9.6}");
        if tensors[0].output_rel_l2.is_some() {
            let _ = write!(text, " {:>9.6}", mean(&|tensor| tensor.output_rel_l2.unwrap_or(0.0)));
        }
        text.push('\n');
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

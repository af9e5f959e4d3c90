//! `kvsieve capture`: queries, keys and values of a model's layers over a text, as tensors that the other commands read.

use super::failure::Failure;
use super::{Compute, output, read_text};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::config::RopeScaling;
use crate::model::{Activation, Capture, Captured, Config, Decoder, Model, Setup, Text, locate};
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use crate::units;
use serde::Serialize;
use std::collections::HashMap;
use std::path::PathBuf;

const EXAMPLES: &str = "\
The output holds, with the chosen layers in place of sequences, q, o [layers, Hq, L, D] and k, v [layers, Hkv, L, D] after \
RoPE, q_pre, k_pre before it, and the hidden states that they are projected from, hidden [layers, 1, L, hidden], all F32; \
o is what attention gave in the model, with nothing evicted. Its metadata name the layers and, where RoPE is not scaled and turns whole heads, rope_theta.\n\n\
Examples:
  kvsieve capture --model DIR --text novel.txt --layers 0,3 --output qkv.safetensors
  kvsieve attend --input qkv.safetensors --output o.safetensors --kernel tiled --causal
  kvsieve evict --input qkv.safetensors --output kept.safetensors \\
      --policy expected-attention --budget 0.25
In an experiment: [file] path = \"qkv.safetensors\", and layers in its grids.";

/// A model and a text that it reads.
#[derive(clap::Args)]
pub struct ReadingArgs {
    /// Hugging Face folder, a GGUF file, or 'builtin'
    #[arg(long, value_name = "DIR", default_value = "builtin")]
    pub model: PathBuf,
    /// File with the text
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Most tokens of the text [default: all]
    #[arg(long, value_name = "N", value_parser = units::parse_tokens)]
    tokens: Option<usize>,
    /// Tokens that go through the model together
    #[arg(long, value_name = "N", default_value_t = 512)]
    chunk: usize,
    /// Run a text that is longer than the model was made for
    #[arg(long)]
    beyond_limit: bool,
    /// Safetensors file to write
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    #[command(flatten)]
    compute: Compute,
    /// Write what was done as JSON instead of a line, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    pub json: Option<PathBuf>,
}

/// Queries, keys and values of a model's layers over a text
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Layers, the lowest being 0 [default: all]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    layers: Vec<usize>,
    #[command(flatten)]
    reading: ReadingArgs,
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    layers: Vec<usize>,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    rope_theta: Option<f64>,
    output_bytes: u64,
    threads: usize,
}

/// What is captured, and the tensors' names.
const NAMES: [(Activation, &str); 7] = [
    (Activation::Q, "q"),
    (Activation::K, "k"),
    (Activation::V, "v"),
    (Activation::QBeforeRope, "q_pre"),
    (Activation::KBeforeRope, "k_pre"),
    (Activation::O, "o"),
    (Activation::Hidden, "hidden"),
];

pub fn run(args: &Args) -> Result<(), Failure> {
    let reading = &args.reading;
    let kinds = NAMES.map(|(kind, _)| kind);
    let Run { config, layers, tensors, cpu, .. } = reading.capture(&args.layers, &kinds)?;
    let is_plain = config.rope.scaling == RopeScaling::None && config.rope.part == 1.0;
    let rope_theta = is_plain.then_some(config.rope.theta);
    let listed = layers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut metadata = HashMap::from([("layers".to_string(), listed)]);
    metadata.extend(rope_theta.map(|theta| ("rope_theta".to_string(), theta.to_string())));
    let outputs: Vec<Output<'_>> = tensors.iter().zip(NAMES).map(|(tensor, (_, name))| tensor.output(name)).collect();
    let output_bytes = outputs.iter().map(|output| output.bytes.len() as u64).sum();
    file::write_with(&reading.output, &outputs, Some(metadata))?;
    let report = Report {
        model: reading.model.clone(),
        layers,
        q_heads: config.q_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        tokens: tensors[0].view().dims()[2],
        rope_theta,
        output_bytes,
        threads: cpu.threads(),
    };
    let windows =
        report.layers.iter().filter_map(|&layer| config.windows[layer]).filter(|&window| window < report.tokens);
    let mut differs: Vec<String> =
        windows.max().map(|window| format!("windows of up to {window} tokens")).into_iter().collect();
    differs.extend(config.attention_softcap.map(|cap| format!("a soft-cap of {cap}")));
    let scale = config.attention_scale;
    if (scale * (config.head_dim as f32).sqrt() - 1.0).abs() > 1e-5 {
        differs.push(format!("a scale of {scale}"));
    }
    if !differs.is_empty() {
        let differs = differs.join(" and ");
        output::warn(&[format!(
            "the model attends with {differs}, which the tensors do not carry: attend has options for them, evict and \
             experiments over files compute without"
        )]);
    }
    match &reading.json {
        Some(target) => output::json(target, &report),
        None => output::print(&format!(
            "{} tokens of {} layers, {}/{} heads of {}: {}\n",
            report.tokens,
            report.layers.len(),
            report.q_heads,
            report.kv_heads,
            report.head_dim,
            units::bytes(report.output_bytes)
        )),
    }
}

/// What a model computed over a text.
pub struct Run {
    pub config: Config,
    /// The layers, lowest first.
    pub layers: Vec<usize>,
    /// One for each kind that was asked for.
    pub tensors: Vec<Captured>,
    pub cpu: Cpu,
    pub arena: Arena,
}

/// A model's folder and the tokens of a text, before the model is opened.
pub struct Reading {
    pub folder: PathBuf,
    pub config: Config,
    pub tokens: Vec<u32>,
    pub cpu: Cpu,
    pub arena: Arena,
}

impl ReadingArgs {
    /// Checks the arguments and reads the text.
    pub fn read(&self) -> Result<Reading, Failure> {
        self.compute.refuse_cuda()?;
        let mut writes = vec![("--output", self.output.as_path())];
        writes.extend(self.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path)));
        output::check_files(&[("--text", self.text.as_path()), ("--model", self.model.as_path())], &writes)?;
        for (option, count) in [("--chunk", Some(self.chunk)), ("--tokens", self.tokens)] {
            if count == Some(0) {
                return Err(Failure::usage(format!("{option} is 0; it must be at least 1")));
            }
        }
        let folder = locate(&self.model)?;
        let config = Config::read(&folder)?;
        let mut tokens = Text::open(&folder)?.tokens(&read_text(&self.text)?)?;
        tokens.truncate(self.tokens.unwrap_or(usize::MAX));
        let arena = Arena::with_limit(self.compute.limit_bytes());
        Ok(Reading { folder, config, tokens, cpu: self.compute.cpu()?, arena })
    }

    /// Opens the model, which is to read `tokens` tokens.
    pub fn open(&self, reading: &Reading, tokens: usize) -> Result<Model, Failure> {
        let model = Model::open(&reading.folder, &reading.arena)?;
        if !self.beyond_limit {
            model.check_length(tokens)?;
        }
        Ok(model)
    }

    /// Runs the text through the model and keeps activations of some layers, or of all where none are named.
    pub fn capture(&self, layers: &[usize], kinds: &[Activation]) -> Result<Run, Failure> {
        self.capture_of(self.read()?, layers, kinds)
    }

    /// The same, of a text that was read.
    pub fn capture_of(&self, reading: Reading, layers: &[usize], kinds: &[Activation]) -> Result<Run, Failure> {
        let layers = wanted_layers(layers, &reading.config)?;
        let model = self.open(&reading, reading.tokens.len())?;
        let Reading { config, tokens, cpu, arena, .. } = reading;
        // Unrounded, as what is written.
        let setup = Setup { chunk_tokens: self.chunk.min(tokens.len()), ..Setup::of(tokens.len(), DType::F32) };
        let capture = Capture::new(&arena, &config, &layers, kinds, tokens.len())?;
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena)?;
        decoder.hook(&capture);
        decoder.prefill(&[&tokens], |_, _, _| ())?;
        drop(decoder);
        let tensors = capture.finish()?;
        drop(model);
        Ok(Run { config, layers, tensors, cpu, arena })
    }
}

/// The layers that are wanted, each once, lowest first.
fn wanted_layers(wanted: &[usize], config: &Config) -> Result<Vec<usize>, Failure> {
    if let Some(layer) = wanted.iter().find(|&&layer| layer >= config.layers) {
        return Err(Failure::usage(format!("--layers names {layer}; the model has layers 0 to {}", config.layers - 1)));
    }
    let all = 0..config.layers;
    Ok(if wanted.is_empty() { all.collect() } else { all.filter(|layer| wanted.contains(layer)).collect() })
}

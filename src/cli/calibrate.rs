//! `kvsieve calibrate`: a policy file from a model and a text.

use super::capture::{Reading, ReadingArgs};
use super::failure::Failure;
use super::output;
use crate::model::{Activation, Recall, Repeat, Text};
use crate::policy::{Reconstruction, Weighing, kvzip, qfilters, triattention};
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
qfilters: writes qfilters.filters F32 [layers, Hkv, D], minus the principal direction of each KV head's queries after RoPE, \
as the authors of Q-Filters and kvpress have it.
triattention: writes triattention.centres F32 [layers, Hq, D], the mean of each query head's queries before RoPE, and \
triattention.norms F32 [layers, Hq, D/2], the mean of their norms in each pair of channels that RoPE turns.
kvzip-heads: has the model repeat the text as under the policy kvzip and writes kvzip.heads F32 [layers, Hkv], the most \
attention that a token of each KV head got.\n\n\
Examples:
  kvsieve calibrate --model DIR --method qfilters --text novel.txt --tokens 4k --output policy.safetensors
  kvsieve generate --model DIR --prompt \"$(cat long.txt)\" --policy qfilters --budget 0.25 \\
      --policy-file policy.safetensors
  kvsieve calibrate --model DIR --method triattention --text novel.txt --output centres.safetensors
  kvsieve generate --model DIR --prompt TEXT --policy triattention+every:steps=128 --budget 1024 \\
      --policy-file centres.safetensors
  kvsieve calibrate --model DIR --method kvzip-heads --text novel.txt --tokens 2k --output heads.safetensors
  kvsieve eval --model DIR --policy full,kvzip:level=head --budget 0.6 --policy-file heads.safetensors
  kvsieve calibrate --model DIR --method qfilters,triattention --text novel.txt --output both.safetensors";

/// Parameters of a policy from a model and a text, as a file for --policy-file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// What is calibrated, into one file
    #[arg(long, required = true, value_delimiter = ',')]
    method: Vec<Method>,
    #[command(flatten)]
    reading: ReadingArgs,
}

/// What can be calibrated.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Method {
    /// Filters of the policy qfilters
    Qfilters,
    /// Centres and norms of the policy triattention
    Triattention,
    /// Scores of whole heads, of the policy kvzip:level=head
    KvzipHeads,
}

impl Method {
    /// What is captured of the model, unless it repeats the text.
    fn looks_at(self) -> Option<Activation> {
        match self {
            Method::Qfilters => Some(Activation::Q),
            Method::Triattention => Some(Activation::QBeforeRope),
            Method::KvzipHeads => None,
        }
    }
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    layers: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    threads: usize,
}

/// A tensor of the file: its name, shape and elements.
type Made = (&'static str, Vec<usize>, Vec<f32>);

pub fn run(args: &Args) -> Result<(), Failure> {
    let reading = &args.reading;
    let read = reading.read()?;
    let report = Report {
        model: reading.model.clone(),
        layers: read.config.layers,
        q_heads: read.config.q_heads,
        kv_heads: read.config.kv_heads,
        head_dim: read.config.head_dim,
        tokens: read.tokens.len(),
        threads: read.cpu.threads(),
    };
    let pairs = read.config.rope.pairs(report.head_dim);
    let has = |method| args.method.contains(&method);
    let mut made = if has(Method::KvzipHeads) { vec![heads(reading, &read)?] } else { Vec::new() };
    let mut kinds: Vec<Activation> = Vec::new();
    for kind in args.method.iter().filter_map(|method| method.looks_at()) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    if !kinds.is_empty() {
        let run = reading.capture_of(read, &[], &kinds)?;
        for (kind, tensor) in kinds.iter().zip(&run.tensors) {
            match kind {
                Activation::Q => {
                    let filters = qfilters::filters(&tensor.view(), report.kv_heads, &run.cpu, &run.arena)?;
                    made.push((qfilters::FILTERS, vec![report.layers, report.kv_heads, report.head_dim], filters));
                }
                _ => {
                    let (centres, norms) = triattention::calibrate(&tensor.view(), pairs);
                    made.push((triattention::CENTRES, vec![report.layers, report.q_heads, report.head_dim], centres));
                    made.push((triattention::NORMS, vec![report.layers, report.q_heads, pairs], norms));
                }
            }
        }
    }
    let outputs: Vec<Output<'_>> =
        made.iter().map(|(name, shape, values)| Output::f32(name, shape.clone(), values)).collect();
    file::write(&reading.output, &outputs)?;
    match &reading.json {
        Some(target) => output::json(target, &report),
        None => {
            let Report { layers, q_heads, kv_heads, head_dim, tokens, .. } = report;
            let names: Vec<&str> = made.iter().map(|(name, ..)| *name).collect();
            output::print(&format!(
                "{} of {layers} layers, {q_heads}/{kv_heads} heads of {head_dim}, from {tokens} tokens: {}\n",
                names.join(", "),
                reading.output.display()
            ))
        }
    }
}

/// Scores of whole heads: the model repeats the text.
fn heads(args: &ReadingArgs, reading: &Reading) -> Result<Made, Failure> {
    let repeat = Repeat::new(&reading.folder, &Text::open(&reading.folder)?)?;
    let how = Reconstruction { chunk_tokens: kvzip::CHUNK, sink: kvzip::SINK, weighing: Weighing::Nothing };
    let tokens = reading.tokens.len();
    let model = args.open(reading, tokens + repeat.most_tokens(tokens, how))?;
    let (cpu, arena) = (&reading.cpu, &reading.arena);
    let recall = Recall { model: &model, repeat: &repeat, how, dtype: DType::F32, cpu, arena };
    let heads = kvzip::of_heads(&recall.scores(&reading.tokens, None)?, tokens, how.sink);
    Ok((kvzip::HEADS, vec![reading.config.layers, reading.config.kv_heads], heads))
}

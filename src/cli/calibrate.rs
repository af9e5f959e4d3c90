//! `kvsieve calibrate`: a policy file from a model and a text.

use super::capture::{ReadingArgs, Run};
use super::failure::Failure;
use super::output;
use crate::model::Activation;
use crate::policy::qfilters;
use crate::tensor::file::{self, Output};
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
qfilters: writes qfilters.filters F32 [layers, Hkv, D], minus the principal direction of each KV head's queries after RoPE, \
as the authors of Q-Filters and kvpress have it.\n\n\
Examples:
  kvsieve calibrate --model DIR --method qfilters --text novel.txt --tokens 4k --output policy.safetensors
  kvsieve generate --model DIR --prompt \"$(cat long.txt)\" --policy qfilters --budget 0.25 \\
      --policy-file policy.safetensors";

/// Parameters of a policy from a model and a text, as a file for --policy-file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// What is calibrated
    #[arg(long)]
    method: Method,
    #[command(flatten)]
    reading: ReadingArgs,
}

/// What can be calibrated.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Method {
    /// Filters of the policy qfilters
    Qfilters,
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    threads: usize,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let Method::Qfilters = args.method;
    let Run { config, layers, tensors, cpu, arena } = args.reading.capture(&[], &[Activation::Q])?;
    let q = tensors[0].view();
    let filters = qfilters::filters(&q, config.kv_heads, &cpu, &arena)?;
    let (layers, kv_heads, head_dim) = (layers.len(), config.kv_heads, config.head_dim);
    file::write(&args.reading.output, &[Output::f32(qfilters::FILTERS, vec![layers, kv_heads, head_dim], &filters)])?;
    let (model, tokens, threads) = (args.reading.model.clone(), q.dims()[2], cpu.threads());
    match &args.reading.json {
        Some(target) => output::json(target, &Report { model, layers, kv_heads, head_dim, tokens, threads }),
        None => output::print(&format!(
            "filters of {layers} layers, {kv_heads} KV heads of {head_dim}, from {tokens} tokens: {}\n",
            args.reading.output.display()
        )),
    }
}

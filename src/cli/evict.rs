//! `kvsieve evict`: a policy applied once to the tensors of a file.

use super::failure::Failure;
use super::{Compute, output};
use kvsieve::attention::{DenseKv, Forward, Params, Shape};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::{Budget, Judged, Needs, Registry, judge};
use kvsieve::tensor::Tensor;
use kvsieve::tensor::file::{self, Output, TensorFile};
use kvsieve::units;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Tensors: the input holds q [B, Hq, Lq, D] and k, v [B, Hkv, Lk, D] after RoPE (F32, F16 or BF16), and for the policy \
'oracle' q_future [B, Hq, Lf, D]. The output holds kept I64 [B, Hkv, max_kept] (positions, ascending, padded with -1 \
where heads keep different counts), kept_len I64 [B, Hkv], and scores F32 [B, Hkv, Lk] where the policy has scores \
(protected tokens above all others).\n\n\
Ties: of equal scores the later token stays; tie_rate says how many scores have an equal.\n\n\
Examples:
  kvsieve evict --input in.safetensors --output kept.safetensors --policy snapkv --budget 0.25
  kvsieve evict --input in.safetensors --output kept.safetensors --policy h2o --budget 512
  kvsieve evict --input in.safetensors --output kept.safetensors --policy dms --budget 8MiB";

/// Apply an eviction policy once to your own tensors: which tokens stay, and why
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Safetensors file with q, k and v
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Safetensors file to write: kept, kept_len and scores
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Policy, perhaps with parameters: NAME[:key=value,...] (see `kvsieve list policies`)
    #[arg(long, value_name = "POLICY")]
    policy: String,
    /// What may stay: a fraction (0.25), tokens per KV head (512) or bytes (64MiB)
    #[arg(long, value_name = "BUDGET", allow_negative_numbers = true)]
    budget: String,
    /// Seed of policies that draw numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    compute: Compute,
    /// Write the measurements as JSON instead of the summary, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    policy: String,
    budget: String,
    budget_tokens: usize,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    dtype: String,
    seed: u64,
    threads: usize,
    judge_ns: u64,
    kept_fraction: f64,
    evicted_tokens: usize,
    kv_bytes_dense: u64,
    kv_bytes_kept: u64,
    tie_rate: f64,
    peak_bytes: u64,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let policy = Registry::default().policy(&args.policy)?;
    let budget: Budget = args.budget.parse()?;
    let cpu = args.compute.cpu()?;
    let mut writes = vec![("--output", args.output.as_path())];
    writes.extend(args.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path)));
    output::check_files(&[("--input", args.input.as_path())], &writes)?;
    let file = TensorFile::open(&args.input)?;
    let arena = Arena::with_limit(args.compute.limit_bytes());
    let load = |name: &str| file.load(name, &arena, Label::Input);
    let (q, k, v) = (load("q")?, load("k")?, load("v")?);
    let shape = Shape::of(q.dims(), k.dims(), v.dims())?;
    let kv = DenseKv::new(k.view(), v.view())?;
    let future = future_queries(&file, &arena, policy.needs(), &shape)?;
    let token_bytes = (2 * shape.head_dim * k.dtype().bytes()) as u64;
    let lists = shape.batch * shape.kv_heads;
    let budget_tokens = policy.budget_tokens(&args.policy, Some(&budget), shape.kv_len, token_bytes, lists)?;
    let call = Forward { shape, params: Params::new(shape.head_dim, true), q: q.view(), kv: &kv, cpu: &cpu };
    let start = Instant::now();
    let judged = judge(&policy, call, future.as_ref().map(Tensor::view), budget_tokens, args.seed, &arena)?;
    let judge_ns = start.elapsed().as_nanos() as u64;

    let kept: usize = (0..lists).map(|list| judged.selection.kept(list).len()).sum();
    write(args, &shape, &judged)?;
    let report = Report {
        policy: args.policy.clone(),
        budget: budget.to_string(),
        budget_tokens,
        batch: shape.batch,
        q_heads: shape.q_heads,
        kv_heads: shape.kv_heads,
        q_len: shape.q_len,
        kv_len: shape.kv_len,
        head_dim: shape.head_dim,
        dtype: k.dtype().to_string(),
        seed: args.seed,
        threads: cpu.threads(),
        judge_ns,
        kept_fraction: kept as f64 / (lists * shape.kv_len) as f64,
        evicted_tokens: lists * shape.kv_len - kept,
        kv_bytes_dense: (lists * shape.kv_len) as u64 * token_bytes,
        kv_bytes_kept: kept as u64 * token_bytes,
        tie_rate: judged.selection.tie_rate,
        peak_bytes: arena.usage().peak_bytes,
    };
    match &args.json {
        Some(target) => output::json(target, &report),
        None => output::print(&summary(&report)),
    }
}

/// The queries after the context, where the policy needs them.
fn future_queries(
    file: &TensorFile,
    arena: &Arena,
    needs: Option<Needs>,
    shape: &Shape,
) -> Result<Option<Tensor>, Failure> {
    if needs != Some(Needs::FutureQueries) {
        return Ok(None);
    }
    let future = file.load("q_future", arena, Label::Input)?;
    let dims = future.dims();
    if [dims[0], dims[1], dims[3]] != [shape.batch, shape.q_heads, shape.head_dim] {
        let (batch, heads, width) = (shape.batch, shape.q_heads, shape.head_dim);
        return Err(Failure::usage(format!(
            "q_future is {dims:?}; it must be [{batch}, {heads}, any, {width}] like q"
        )));
    }
    Ok(Some(future))
}

fn write(args: &Args, shape: &Shape, judged: &Judged) -> Result<(), Failure> {
    let lists = shape.batch * shape.kv_heads;
    let kept_len: Vec<i64> = (0..lists).map(|list| judged.selection.kept(list).len() as i64).collect();
    let columns = kept_len.iter().copied().max().unwrap_or(0) as usize;
    let mut kept = vec![-1i64; lists * columns];
    for (list, row) in kept.chunks_mut(columns.max(1)).enumerate().take(lists) {
        row.iter_mut().zip(judged.selection.kept(list)).for_each(|(target, &slot)| *target = i64::from(slot));
    }
    let heads = vec![shape.batch, shape.kv_heads];
    let with = |extent: usize| [heads.clone(), vec![extent]].concat();
    let mut outputs =
        vec![Output::i64("kept", with(columns), &kept), Output::i64("kept_len", heads.clone(), &kept_len)];
    if let Some(scores) = &judged.scores {
        outputs.push(Output::f32("scores", with(shape.kv_len), scores));
    }
    Ok(file::write(&args.output, &outputs)?)
}

fn summary(report: &Report) -> String {
    let said =
        if report.evicted_tokens == 0 { "\nnothing was evicted: the budget holds the whole context" } else { "" };
    format!(
        "{} at {}: {} of {} tokens per KV head stay on average ({:.1}%)\n\
         KV {} -> {}, ties {:.1}%, judged in {}{said}\n",
        report.policy,
        report.budget,
        units::three_digits(report.kept_fraction * report.kv_len as f64),
        report.kv_len,
        100.0 * report.kept_fraction,
        units::bytes(report.kv_bytes_dense),
        units::bytes(report.kv_bytes_kept),
        100.0 * report.tie_rate,
        units::nanoseconds(report.judge_ns as f64),
    )
}

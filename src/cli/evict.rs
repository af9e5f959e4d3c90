//! `kvsieve evict`: a policy applied once to the tensors of a file.
//!
//! Where the policy merges evicted tokens or rotates keys, a cache is filled with the tensors and shrunk as an experiment does it,
//! and what it holds then is written; where it chooses what a step reads, it is asked with the last query.

mod cuda;
mod extra;
mod held;
mod ranks;

use super::failure::Failure;
use super::policy::{self, FileArg, Used};
use super::{Compute, output};
use crate::attention::rope::{Frequencies, RopeBase};
use crate::attention::{DenseKv, Forward, KvRows, Params, Shape};
use crate::device::Cpu;
use crate::eviction::{Asked, Given, Loss, Own, loss, retain};
use crate::format::KvFormat;
use crate::memory::{Arena, Label};
use crate::policy::{Averages, Axis, Budget, Policy, Registry, Schedule, Statistic};
use crate::tensor::file::{self, Output, TensorFile};
use crate::tensor::{Tensor, TensorView};
use crate::units;
use crate::workload::looks_swapped;
use extra::Extra;
use held::{Held, Read, filled};
use ranks::OverRanks;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

const EXAMPLES: &str = "\
Tensors: the input holds q [B, Hq, Lq, D] and k, v [B, Hkv, Lk, D] after RoPE (F32, F16 or BF16); for the policy \
'oracle' q_future [B, Hq, Lf, D]; for policies that look behind RoPE the metadata rope_theta (its base, or none where nothing was rotated), and \
q_pre and k_pre if they were recorded (else they are rotated back); for those that weigh values by the output projection w_o [1, Hq, D, hidden]; for \
those that look at hidden states hidden [B, 1, Lk, hidden], and the metadata layers if the sequences are not all layers of \
the model that --policy-file is for. The output holds kept I64 [B, Hkv, max_kept] (positions, ascending, padded with -1 \
where heads keep different counts), kept_len I64 [B, Hkv], and scores F32 [B, Hkv, Lk] where the policy has scores \
(protected tokens above all others). An action that changes what is retained adds values F32 [B, Hkv, max_kept, D], and keys \
where it changes them (padded with zeros), and --kv-format both as the cache holds them; '+cam' takes its draws from draws [1, 1, Lk, 1] if that is there, '+rerotate' \
needs rope_theta. Policies that evict nothing write what the last query reads: 'quest' pages, 'think' channels, I64 \
[B, Hkv, n].\n\n\
Ties: of equal scores the later token is retained, where heads share a budget that of the last head; tie_rate says how many \
scores have an equal.\n\n\
With --device cuda q, k and v are of one type, and a cache on the GPU is filled and evicted from; policies are those \
of positions, keys, values and attention (an error names them), with no action, and rerotate if wanted. Memory is the GPU's, and \
evict_ns the GPU's own time.\n\n\
Examples:
  kvsieve evict --input in.safetensors --output kept.safetensors --policy snapkv --budget 0.25
  kvsieve evict --input in.safetensors --output kept.safetensors --policy h2o --budget 512
  kvsieve evict --input in.safetensors --output kept.safetensors --policy delayed-keydiff --budget 8MiB
  kvsieve evict --input in.safetensors --output kept.safetensors --policy knorm --budget 0.25 --ranks tree:4";

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
    #[command(flatten)]
    file: FileArg,
    /// What may stay: a fraction (0.25), tokens per KV head (512) or bytes (64MiB)
    #[arg(long, value_name = "BUDGET")]
    budget: Option<String>,
    /// Keep keys and values in a cache of this format while they are scored and evicted: a format, or k=FORMAT,v=FORMAT
    /// (see `kvsieve list formats`) [default: as the tensors are]
    #[arg(long, value_name = "FORMAT")]
    kv_format: Option<KvFormat>,
    /// Share the cache out: tree:N over N threads of this process, each with its own memory; tree over the processes that mpirun
    /// started (docs/ranks.md). --threads are those of each rank [default: all cores, shared]
    #[arg(long, value_name = "tree[:N]", conflicts_with = "kv_format")]
    ranks: Option<crate::ranks::Asked>,
    /// Seed of policies that draw numbers; it changes nothing of others
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
    #[serde(flatten)]
    policy_file: Option<Used>,
    budget: Option<String>,
    budget_tokens: usize,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_format: Option<KvFormat>,
    seed: u64,
    /// As `--device` names it.
    device: String,
    threads: Option<usize>,
    evict_ns: u64,
    kept_fraction: f64,
    /// Tokens that stay of a (sequence, KV head): fewest, mean and most.
    kept_tokens: [f64; 3],
    /// Queries that the next two numbers are of: the last ones of the file, or q_future.
    asked: &'static str,
    asked_queries: usize,
    /// Of policies that evict.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_mass_kept: Option<f64>,
    /// Relative L2 distance from the output of the full cache; not where positions change (rerotate).
    #[serde(skip_serializing_if = "Option::is_none")]
    output_error: Option<f64>,
    evicted_tokens: usize,
    /// As [`Policy::keeps_all`].
    #[serde(skip)]
    keeps_all: bool,
    kv_bytes_dense: u64,
    kv_bytes_kept: u64,
    /// Of a policy that chooses what a step reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_bytes_read: Option<u64>,
    tie_rate: f64,
    /// Over ranks that of the rank that takes most.
    peak_bytes: u64,
    #[serde(flatten)]
    over_ranks: Option<OverRanks>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    let (policy, used) = args.file.policy(&args.policy, registry)?;
    let budget = policy::budget(&policy, &args.policy, args.budget.as_deref())?;
    let budget = budget.as_ref();
    match (args.compute.cuda(), args.ranks) {
        (Some(index), None) => return cuda::run(args, index, &policy, budget),
        (None, Some(asked)) => return ranks::run(args, asked, &policy, budget),
        (None, None) => {}
        (Some(_), Some(_)) => {
            return Err(Failure::usage("--ranks is not available with --device cuda; leave one of them out".into()));
        }
    }
    let cpu = args.compute.cpu()?;
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    let arena = Arena::with_limit(args.compute.limit_bytes());
    let load = |name: &str| file.load(name, &arena, Label::Input);
    let (q, k, v) = (load("q")?, load("k")?, load("v")?);
    let shape = Shape::of(q.dims(), k.dims(), v.dims())?;
    output::warn(looks_swapped(shape.kv_heads, shape.kv_len).as_slice());
    let dense = DenseKv::new(k.view(), v.view())?;
    let format = args.kv_format.unwrap_or(k.dtype().into()).in_pass(k.dtype());
    format.check(shape.head_dim, shape.kv_len)?;
    policy.check_format(&args.policy, budget, format)?;
    let rope = args.rope(&file, &policy, &shape)?;
    let extra = Extra::load(&file, &arena, &policy, &shape, rope)?;
    extra.check_parameters(&policy, &args.policy, &shape)?;
    let token_bytes = format.token_bytes(shape.head_dim);
    let lists = shape.batch * shape.kv_heads;
    let budget_tokens = policy.budget_tokens(&args.policy, budget, shape.kv_len, token_bytes, lists)?;
    let cache = args.kv_format.map(|_| filled(&arena, [&k, &v], format, &[])).transpose()?;
    let kv = cache.as_ref().map_or(&dense as &dyn KvRows, |cache| cache);
    let call = Forward { shape, params: Params::new(shape.head_dim, true), q: q.view(), kv, cpu: &cpu };
    let start = Instant::now();
    let retained = retain(&policy, call, Given { budget_tokens, seed: args.seed, ..extra.given() }, &arena)?;
    let held =
        Held { policy: &policy, call: &call, k: &k, v: &v, format: args.kv_format.map(|_| format), arena: &arena };
    let read = held.read(budget_tokens)?;
    let shrunk = held.shrink(&retained, &extra, args.seed)?;
    let evict_ns = start.elapsed().as_nanos() as u64;

    let result = Outcome {
        kept: (0..lists).map(|list| retained.selection.kept(list)).collect(),
        scores: retained.scores.as_deref(),
        rows: shrunk.as_ref().map_or(Vec::new(), |cache| held.rows(cache)),
        read,
        kv_bytes_kept: shrunk.map(|cache| (0..lists).map(|list| cache.held_bytes(list)).sum()),
        device: "cpu".into(),
        threads: Some(cpu.threads()),
        evict_ns,
        tie_rate: retained.tie_rate,
        peak_bytes: arena.usage().peak_bytes,
        over_ranks: None,
        used,
    };
    let tensors = Tensors { q: q.view(), k: k.view(), v: v.view(), shape, cpu: &cpu };
    args.finish(&policy, (budget, budget_tokens), &file, &tensors, &result)
}

/// The most queries, of the file's last ones, that an eviction's loss is told of.
const ASKED: usize = 16;

/// How many of a file's queries an eviction's loss is told of.
fn asked(shape: &Shape) -> usize {
    ASKED.min(shape.q_len).min(shape.kv_len)
}

/// The file's `q`, `k` and `v`, in the host's memory.
struct Tensors<'a> {
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    shape: Shape,
    cpu: &'a Cpu,
}

impl Tensors<'_> {
    /// What is lost for the queries of `future` or else for the last ones.
    fn loss(&self, future: Option<&Tensor>, outcome: &Outcome<'_>) -> Loss {
        let Shape { q_len, kv_len, .. } = self.shape;
        let (q, first) = match future {
            Some(future) => (future.view(), kv_len),
            // A query that stands before the first key sees nothing.
            None => {
                let asked = asked(&self.shape);
                (self.q.tokens(q_len - asked..q_len), kv_len - asked)
            }
        };
        let own = |wanted| outcome.rows.iter().find(|(name, _)| *name == wanted).map(|(_, rows)| &rows[..]);
        let own = Own { keys: own("keys"), values: own("values"), biases: own("biases") };
        loss(Asked { q, first, k: self.k, v: self.v }, &outcome.kept, own, self.cpu)
    }
}

/// What a device found.
struct Outcome<'a> {
    /// Positions that stay of each list, ascending.
    kept: Vec<&'a [u32]>,
    scores: Option<&'a [f32]>,
    /// Keys and values `[B, Hkv, max_kept, D]` by name, where the policy changes them, and biases `[B, Hkv, max_kept]`.
    rows: Vec<(&'static str, Vec<f32>)>,
    read: Option<Read>,
    /// KV bytes of what stays, where it was put into a cache.
    kv_bytes_kept: Option<u64>,
    device: String,
    threads: Option<usize>,
    evict_ns: u64,
    tie_rate: f64,
    peak_bytes: u64,
    over_ranks: Option<OverRanks>,
    used: Option<Used>,
}

impl Outcome<'_> {
    /// Refuses a cache that could not hold its numbers: nothing is written of one.
    fn check(&self, loss: Option<&Loss>) -> Result<(), Failure> {
        let wrong = self.rows.iter().find(|(_, rows)| !rows.iter().all(|x| x.is_finite())).map(|(name, _)| *name);
        let error =
            loss.and_then(|loss| loss.output_error).filter(|error| !error.is_finite()).map(|_| "attention over it");
        match wrong.or(error) {
            Some(what) => Err(Failure::work(format!(
                "the cache does not hold what it was given: {what} has NaN or infinity, and nothing was written; take a format \
                 with a wider range"
            ))),
            None => Ok(()),
        }
    }
}

impl Args {
    fn check_files(&self) -> Result<(), Failure> {
        let mut writes = vec![("--output", self.output.as_path())];
        writes.extend(self.json.as_deref().filter(|path| !output::is_stdout(path)).map(|path| ("--json", path)));
        let reads: Vec<_> = [("--input", self.input.as_path())].into_iter().chain(self.file.read()).collect();
        output::check_files(&reads, &writes)
    }

    /// RoPE's frequencies by the file's metadata, where the policy needs them.
    fn rope(&self, file: &TensorFile, policy: &Policy, shape: &Shape) -> Result<Option<Frequencies>, Failure> {
        let stated = file.metadata("rope_theta").filter(|_| policy.needs_rope()).map(|text| {
            RopeBase::parse(&text).ok_or_else(|| {
                let expected = "it must be a number from 1 to 1e12, or none";
                Failure::usage(format!("rope_theta in the file's metadata is '{text}'; {expected}"))
            })
        });
        Ok(policy.rope(&self.policy, stated.transpose()?, shape.head_dim)?)
    }

    /// Writes the output file and what is reported.
    fn finish(
        &self,
        policy: &Policy,
        (budget, budget_tokens): (Option<&Budget>, usize),
        file: &TensorFile,
        tensors: &Tensors<'_>,
        outcome: &Outcome<'_>,
    ) -> Result<(), Failure> {
        let (shape, dtype) = (&tensors.shape, tensors.k.dtype());
        // These queries are not part of what is measured.
        let has_future = file.has("q_future");
        let future = has_future.then(|| extra::future(file, &Arena::unlimited(), shape)).transpose()?;
        let evicts = policy.selection.is_none();
        let loss = evicts.then(|| tensors.loss(future.as_ref(), outcome));
        outcome.check(loss.as_ref())?;
        write(self, shape, outcome)?;
        let lens = || outcome.kept.iter().map(|kept| kept.len());
        let kept: usize = lens().sum();
        let mut warnings = policy.warnings(budget_tokens, shape.kv_len, 0, (1, shape.kv_heads));
        warnings.extend(budget.and_then(|budget| policy.holds_all(budget, budget_tokens, shape.kv_len)));
        if policy.looks_at(Statistic::OutputProjection) && !file.has("w_o") {
            let told = "the input holds no w_o: values are weighed by their own norm, not by that of their projection";
            warnings.push(told.into());
        }
        if policy.scorer.is_some() && policy.schedule != Schedule::default() {
            let told = "the file's context is there as a whole: a schedule (chunks, every, delayed) plays no part in one eviction";
            warnings.push(told.into());
        }
        let averages = policy.scorer.as_ref().map_or(Averages::Nothing, |scorer| scorer.averages());
        let is_of_layers = file.metadata("layers").is_some() || policy.parameters.extent(Axis::Layers).is_some();
        if is_of_layers && shape.batch > 1 && (!policy.layers.is_even() || averages == Averages::Layers) {
            let told =
                "each of the file's layers is a problem of its own here: nothing is divided, or averaged, over layers";
            warnings.push(told.into());
        }
        if let Some(missing) = missing_queries(policy, shape) {
            warnings.push(missing);
        }
        if let empty @ 1.. = lens().filter(|&len| len == 0).count() {
            warnings.push(format!("nothing is retained of {empty} of {} lists", outcome.kept.len()));
        }
        let given_bytes = KvFormat::from(dtype).token_bytes(shape.head_dim);
        let token_bytes = self.kv_format.unwrap_or(dtype.into()).token_bytes(shape.head_dim);
        let tokens = shape.batch * shape.kv_heads * shape.kv_len;
        let report = Report {
            policy: self.policy.clone(),
            policy_file: outcome.used.clone(),
            budget: budget.map(Budget::to_string),
            budget_tokens,
            batch: shape.batch,
            q_heads: shape.q_heads,
            kv_heads: shape.kv_heads,
            q_len: shape.q_len,
            kv_len: shape.kv_len,
            head_dim: shape.head_dim,
            dtype: dtype.to_string(),
            kv_format: self.kv_format,
            seed: self.seed,
            device: outcome.device.clone(),
            threads: outcome.threads,
            evict_ns: outcome.evict_ns,
            kept_fraction: kept as f64 / tokens as f64,
            kept_tokens: [
                lens().min().unwrap_or(0) as f64,
                kept as f64 / outcome.kept.len().max(1) as f64,
                lens().max().unwrap_or(0) as f64,
            ],
            asked: if future.is_some() { "q_future" } else { "last queries" },
            asked_queries: future.as_ref().map_or(asked(shape), |q| q.dims()[2]),
            attention_mass_kept: loss.map(|loss| loss.attention_mass_kept),
            output_error: loss.filter(|_| !policy.rerotates).and_then(|loss| loss.output_error),
            evicted_tokens: tokens - kept,
            keeps_all: policy.keeps_all(),
            kv_bytes_dense: tokens as u64 * given_bytes,
            kv_bytes_kept: outcome.kv_bytes_kept.unwrap_or(kept as u64 * token_bytes),
            kv_bytes_read: outcome.read.as_ref().map(|read| read.bytes),
            tie_rate: outcome.tie_rate,
            peak_bytes: outcome.peak_bytes,
            over_ranks: outcome.over_ranks.clone(),
            warnings,
        };
        output::warn(&report.warnings);
        match &self.json {
            Some(target) => output::json(target, &report),
            None => output::print(&summary(&report, &self.output)),
        }
    }
}

/// Tells where a file holds fewer queries than a policy looks at in a context.
fn missing_queries(policy: &Policy, shape: &Shape) -> Option<String> {
    let looks_at = |statistic| policy.looks_at(statistic);
    let (all, wanted) = match &policy.selection {
        Some(selection) => (false, selection.recent_queries().min(shape.kv_len)),
        _ if looks_at(Statistic::Queries) || looks_at(Statistic::AccumulatedAttention) => (true, shape.kv_len),
        _ if looks_at(Statistic::RecentAttention) => (false, policy.recent_queries().min(shape.kv_len)),
        // An action may look at them whatever the scorer does.
        _ => {
            let of_action = policy.action.as_ref().map_or(0, |action| action.recent_queries());
            (false, of_action.min(shape.kv_len))
        }
    };
    let which = if all || wanted == shape.kv_len { "all" } else { "the latest" };
    let told = format!("the policy looks at {which} {wanted} queries, and the input holds {}", shape.q_len);
    (wanted > shape.q_len).then_some(told)
}

fn write(args: &Args, shape: &Shape, outcome: &Outcome<'_>) -> Result<(), Failure> {
    let lists = shape.batch * shape.kv_heads;
    let kept_len: Vec<i64> = outcome.kept.iter().map(|kept| kept.len() as i64).collect();
    let columns = kept_len.iter().copied().max().unwrap_or(0) as usize;
    let mut kept = vec![-1i64; lists * columns];
    for (row, kept) in kept.chunks_mut(columns.max(1)).zip(&outcome.kept) {
        row.iter_mut().zip(*kept).for_each(|(target, &slot)| *target = i64::from(slot));
    }
    let heads = vec![shape.batch, shape.kv_heads];
    let with = |extent: usize| [heads.clone(), vec![extent]].concat();
    let mut outputs =
        vec![Output::i64("kept", with(columns), &kept), Output::i64("kept_len", heads.clone(), &kept_len)];
    if let Some(scores) = outcome.scores {
        outputs.push(Output::f32("scores", with(shape.kv_len), scores));
    }
    for (name, rows) in &outcome.rows {
        let dims = if *name == "biases" { with(columns) } else { [with(columns), vec![shape.head_dim]].concat() };
        outputs.push(Output::f32(name, dims, rows));
    }
    let chosen = outcome.read.as_ref().map_or(Vec::new(), |read| read.chosen.concat());
    if let Some(read) = &outcome.read {
        outputs.push(Output::i64(read.name, with(chosen.len() / lists), &chosen));
    }
    Ok(file::write(&args.output, &outputs)?)
}

fn summary(report: &Report, output: &Path) -> String {
    let Report { batch, q_heads, kv_heads, q_len, kv_len, head_dim, .. } = report;
    let [fewest, mean, most] = report.kept_tokens.map(units::three_digits);
    let percent = |fraction: f64| format!("{:.1}%", 100.0 * fraction);
    let mut lines = vec![
        (
            "input",
            format!("q [{batch}, {q_heads}, {q_len}, {head_dim}], k and v [{batch}, {kv_heads}, {kv_len}, {head_dim}]"),
        ),
        (
            "retained",
            format!("{mean} of {kv_len} tokens ({}); by head {fewest} to {most}", percent(report.kept_fraction)),
        ),
    ];
    let asked = format!("of {} {}", report.asked_queries, report.asked);
    lines.extend(report.attention_mass_kept.map(|kept| ("attention", format!("{} kept, {asked}", percent(kept)))));
    let error = |error| format!("{error:.2e} relative L2 from the full cache's, {asked}");
    lines.extend(report.output_error.map(|found| ("output error", error(found))));
    let bytes = [report.kv_bytes_dense, report.kv_bytes_kept].map(units::bytes);
    let kept_in = report.kv_format.map_or(String::new(), |format| format!(" in {format}"));
    lines.push(("KV bytes", format!("{} -> {}{kept_in}", bytes[0], bytes[1])));
    lines.extend(
        report.kv_bytes_read.map(|bytes| {
            ("read", format!("{} by a step with the last query; nothing is evicted", units::bytes(bytes)))
        }),
    );
    if report.evicted_tokens == 0 && report.kv_bytes_read.is_none() {
        let why = match report.keeps_all {
            true => "the policy keeps everything",
            false => "the budget holds the whole context",
        };
        lines.push(("evicted", format!("nothing: {why}")));
    }
    lines.push(("time", format!("{} to score and evict", units::nanoseconds(report.evict_ns as f64))));
    lines.push(("ties", percent(report.tie_rate)));
    lines.extend(report.over_ranks.iter().flat_map(OverRanks::lines));
    lines.push(("written to", output.display().to_string()));
    let lines = lines.iter().map(|(name, text)| format!("  {name:12}  {text}\n")).collect::<String>();
    let budget = report.budget.as_ref().map_or(String::new(), |budget| format!(" at {budget}"));
    format!("{}{budget}\n{lines}", report.policy)
}

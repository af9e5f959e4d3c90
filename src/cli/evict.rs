//! `kvsieve evict`: a policy applied once to the tensors of a file.
//!
//! Where the policy merges evicted tokens or rotates keys, a cache is filled with the tensors and shrunk as an experiment does it,
//! and what it holds then is written; where it chooses what a step reads, it is asked with the last query.

mod cuda;

use super::failure::Failure;
use super::policy::{FileArg, Used};
use super::{Compute, output};
use kvsieve::attention::rope::{Frequencies, RopeBase};
use kvsieve::attention::{DenseKv, Forward, Params, Shape};
use kvsieve::cache::{CacheShape, PAGE_TOKENS, PagedCache};
use kvsieve::device::Cpu;
use kvsieve::eviction::{Given, Retained, retain};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::action::Fold;
use kvsieve::policy::sparse::{Lists, Start};
use kvsieve::policy::{Axis, Budget, Policy, Statistic};
use kvsieve::tensor::file::{self, Output, TensorFile};
use kvsieve::tensor::{DType, Tensor};
use kvsieve::units;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Tensors: the input holds q [B, Hq, Lq, D] and k, v [B, Hkv, Lk, D] after RoPE (F32, F16 or BF16); for the policy \
'oracle' q_future [B, Hq, Lf, D]; for policies that look behind RoPE the metadata rope_theta (its base, or none where nothing was rotated), and \
q_pre and k_pre if they were recorded (else they are rotated back); for those that weigh values by the output projection w_o [1, Hq, D, hidden]; for \
those that look at hidden states hidden [B, 1, Lk, hidden], and the metadata layers if the sequences are not all layers of \
the model that --policy-file is for. The output holds kept I64 [B, Hkv, max_kept] (positions, ascending, padded with -1 \
where heads keep different counts), kept_len I64 [B, Hkv], and scores F32 [B, Hkv, Lk] where the policy has scores \
(protected tokens above all others). An action that changes what is retained adds values F32 [B, Hkv, max_kept, D], and keys \
where it changes them (padded with zeros); '+cam' takes its draws from draws [1, 1, Lk, 1] if that is there, '+rerotate' \
needs rope_theta. Policies that evict nothing write what the last query reads: 'quest' pages, 'think' channels, I64 \
[B, Hkv, n].\n\n\
Ties: of equal scores the later token is retained; tie_rate says how many scores have an equal.\n\n\
With --device cuda q, k and v are of one type, and a cache on the GPU is filled and evicted from; policies are those \
of positions, keys, values and attention (an error names them), with no action but rerotate. Memory is the GPU's, and \
evict_ns the GPU's own time.\n\n\
Examples:
  kvsieve evict --input in.safetensors --output kept.safetensors --policy snapkv --budget 0.25
  kvsieve evict --input in.safetensors --output kept.safetensors --policy h2o --budget 512
  kvsieve evict --input in.safetensors --output kept.safetensors --policy delayed-keydiff --budget 8MiB";

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
    #[serde(flatten)]
    policy_file: Option<Used>,
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
    /// As `--device` names it.
    device: String,
    threads: Option<usize>,
    evict_ns: u64,
    kept_fraction: f64,
    evicted_tokens: usize,
    kv_bytes_dense: u64,
    kv_bytes_kept: u64,
    /// Of a policy that chooses what a step reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_bytes_read: Option<u64>,
    tie_rate: f64,
    peak_bytes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let (policy, used) = args.file.policy(&args.policy)?;
    let budget: Budget = args.budget.parse()?;
    if let Some(index) = args.compute.cuda() {
        return cuda::run(args, index, &policy, &budget);
    }
    let cpu = args.compute.cpu()?;
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    let arena = Arena::with_limit(args.compute.limit_bytes());
    let load = |name: &str| file.load(name, &arena, Label::Input);
    let (q, k, v) = (load("q")?, load("k")?, load("v")?);
    let shape = Shape::of(q.dims(), k.dims(), v.dims())?;
    let kv = DenseKv::new(k.view(), v.view())?;
    let rope = args.rope(&file, &policy, &shape)?;
    let extra = Extra::load(&file, &arena, &policy, &shape, rope)?;
    extra.check_parameters(&policy, &args.policy, &shape)?;
    let token_bytes = (2 * shape.head_dim * k.dtype().bytes()) as u64;
    let lists = shape.batch * shape.kv_heads;
    let budget_tokens = policy.budget_tokens(&args.policy, Some(&budget), shape.kv_len, token_bytes, lists)?;
    let call = Forward { shape, params: Params::new(shape.head_dim, true), q: q.view(), kv: &kv, cpu: &cpu };
    let start = Instant::now();
    let retained = retain(&policy, call, Given { budget_tokens, seed: args.seed, ..extra.given() }, &arena)?;
    let held = Held { policy: &policy, call: &call, k: &k, v: &v, arena: &arena };
    let read = held.read(budget_tokens)?;
    let shrunk = held.shrink(&retained, &extra, args.seed)?;
    let evict_ns = start.elapsed().as_nanos() as u64;

    let result = Outcome {
        kept: (0..lists).map(|list| retained.selection.kept(list)).collect(),
        scores: retained.scores.as_deref(),
        rows: shrunk.map_or(Vec::new(), |cache| rows(&policy, &cache)),
        read,
        device: "cpu".into(),
        threads: Some(cpu.threads()),
        evict_ns,
        tie_rate: retained.tie_rate,
        peak_bytes: arena.usage().peak_bytes,
        used,
    };
    args.finish(&policy, (&budget, budget_tokens), &shape, k.dtype(), &result)
}

/// What a device found.
struct Outcome<'a> {
    /// Positions that stay of each list, ascending.
    kept: Vec<&'a [u32]>,
    scores: Option<&'a [f32]>,
    /// Keys and values `[B, Hkv, max_kept, D]` by name, where the policy changes them.
    rows: Vec<(&'static str, Vec<f32>)>,
    read: Option<Read>,
    device: String,
    threads: Option<usize>,
    evict_ns: u64,
    tie_rate: f64,
    peak_bytes: u64,
    used: Option<Used>,
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
        (budget, budget_tokens): (&Budget, usize),
        shape: &Shape,
        dtype: DType,
        outcome: &Outcome<'_>,
    ) -> Result<(), Failure> {
        write(self, shape, outcome)?;
        let kept: usize = outcome.kept.iter().map(|kept| kept.len()).sum();
        let token_bytes = (2 * shape.head_dim * dtype.bytes()) as u64;
        let tokens = shape.batch * shape.kv_heads * shape.kv_len;
        let report = Report {
            policy: self.policy.clone(),
            policy_file: outcome.used.clone(),
            budget: budget.to_string(),
            budget_tokens,
            batch: shape.batch,
            q_heads: shape.q_heads,
            kv_heads: shape.kv_heads,
            q_len: shape.q_len,
            kv_len: shape.kv_len,
            head_dim: shape.head_dim,
            dtype: dtype.to_string(),
            seed: self.seed,
            device: outcome.device.clone(),
            threads: outcome.threads,
            evict_ns: outcome.evict_ns,
            kept_fraction: kept as f64 / tokens as f64,
            evicted_tokens: tokens - kept,
            kv_bytes_dense: tokens as u64 * token_bytes,
            kv_bytes_kept: kept as u64 * token_bytes,
            kv_bytes_read: outcome.read.as_ref().map(|read| read.bytes),
            tie_rate: outcome.tie_rate,
            peak_bytes: outcome.peak_bytes,
            warnings: policy.warnings(budget_tokens, shape.kv_len, 0, 1),
        };
        output::warn(&report.warnings);
        match &self.json {
            Some(target) => output::json(target, &report),
            None => output::print(&summary(&report)),
        }
    }
}

/// What a file may hold besides q, k and v, loaded where the policy looks at it.
struct Extra {
    future: Option<Tensor>,
    rope: Option<Frequencies>,
    q_pre: Option<Tensor>,
    k_pre: Option<Tensor>,
    w_o: Option<Tensor>,
    hidden: Option<Tensor>,
    /// The model's number of the layer that each sequence is; all of its layers in order where the file does not tell.
    layer_numbers: Vec<usize>,
    has_all_layers: bool,
    /// Numbers that an action uses in place of drawn ones, by position.
    draws: Option<Vec<f32>>,
}

impl Extra {
    fn load(
        file: &TensorFile,
        arena: &Arena,
        policy: &Policy,
        shape: &Shape,
        rope: Option<Frequencies>,
    ) -> Result<Self, Failure> {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
        let rotated = policy.looks_at(Statistic::BeforeRope);
        let load = |name: &str, wanted: bool, expected: [Option<usize>; 4]| -> Result<Option<Tensor>, Failure> {
            if !wanted {
                return Ok(None);
            }
            let tensor = file.load(name, arena, Label::Input)?;
            let fits = tensor.dims().iter().zip(expected).all(|(&found, expected)| expected.is_none_or(|e| e == found));
            if !fits {
                let expected = expected.map(|extent| extent.map_or("any".into(), |extent| extent.to_string()));
                let (found, expected) = (tensor.dims(), expected.join(", "));
                return Err(Failure::usage(format!("{name} is {found:?}; it must be [{expected}]")));
            }
            Ok(Some(tensor))
        };
        let future = [Some(batch), Some(q_heads), None, Some(head_dim)];
        let q = [Some(batch), Some(q_heads), Some(q_len), Some(head_dim)];
        let k = [Some(batch), Some(kv_heads), Some(kv_len), Some(head_dim)];
        let draws = policy.action.as_ref().is_some_and(|action| action.draws()) && file.has("draws");
        let draws = load("draws", draws, [Some(1), Some(1), Some(kv_len), Some(1)])?;
        let w_o = [Some(1), Some(q_heads), Some(head_dim), None];
        let hidden = [Some(batch), Some(1), Some(kv_len), None];
        let wants_layers = policy.parameters.extent(Axis::Layers).is_some();
        let listed = file.metadata("layers").filter(|_| wants_layers).map(|text| layer_numbers(&text, batch));
        let listed = listed.transpose()?;
        Ok(Extra {
            future: load("q_future", policy.looks_at(Statistic::FutureAttention), future)?,
            rope,
            q_pre: load("q_pre", rotated && file.has("q_pre"), q)?,
            k_pre: load("k_pre", rotated && file.has("k_pre"), k)?,
            w_o: load("w_o", policy.looks_at(Statistic::Values) && file.has("w_o"), w_o)?,
            hidden: load("hidden", policy.looks_at(Statistic::HiddenStates), hidden)?,
            has_all_layers: listed.is_none(),
            layer_numbers: listed.unwrap_or_else(|| (0..batch).collect()),
            draws: draws.map(|tensor| tensor.to_f32()),
        })
    }

    /// Refuses parameters of another model than the tensors are of.
    fn check_parameters(&self, policy: &Policy, name: &str, shape: &Shape) -> Result<(), Failure> {
        let mut extents = vec![(Axis::KvHeads, shape.kv_heads), (Axis::HeadDim, shape.head_dim)];
        extents.extend(self.hidden.as_ref().map(|hidden| (Axis::Hidden, hidden.dims()[3])));
        extents.extend(self.has_all_layers.then_some((Axis::Layers, shape.batch)));
        policy.check_parameters(name, &extents)?;
        let layers = policy.parameters.extent(Axis::Layers).unwrap_or(usize::MAX);
        match self.layer_numbers.iter().find(|&&number| number >= layers) {
            Some(number) => Err(Failure::usage(format!(
                "the policy file is of a model of {layers} layers; by the input's metadata it holds layer {number}"
            ))),
            None => Ok(()),
        }
    }

    fn given(&self) -> Given<'_> {
        Given {
            future: self.future.as_ref().map(Tensor::view),
            rope: self.rope.as_ref(),
            q_pre: self.q_pre.as_ref().map(Tensor::view),
            k_pre: self.k_pre.as_ref().map(Tensor::view),
            w_o: self.w_o.as_ref().map(Tensor::view),
            hidden: self.hidden.as_ref().map(Tensor::view),
            layer_numbers: &self.layer_numbers,
            ..Given::budget(0)
        }
    }
}

/// Reads `layers` of a file's metadata, one number for each of `batch` sequences.
fn layer_numbers(text: &str, batch: usize) -> Result<Vec<usize>, Failure> {
    let numbers: Option<Vec<usize>> = text.split(',').map(|layer| layer.trim().parse().ok()).collect();
    numbers.filter(|numbers| numbers.len() == batch).ok_or_else(|| {
        let expected = format!("it must be {batch} numbers with commas, one for each sequence");
        Failure::usage(format!("layers in the file's metadata is '{text}'; {expected}"))
    })
}

/// What a step reads: what was chosen, for each list, and KV bytes.
struct Read {
    name: &'static str,
    chosen: Vec<Vec<i64>>,
    bytes: u64,
}

/// Queries, keys and values, and the policy that is to shrink or read them.
struct Held<'a> {
    policy: &'a Policy,
    call: &'a Forward<'a>,
    k: &'a Tensor,
    v: &'a Tensor,
    arena: &'a Arena,
}

impl Held<'_> {
    /// A cache of the keys and values.
    fn cache(&self) -> Result<PagedCache, Failure> {
        let Shape { batch, kv_heads, kv_len, head_dim, .. } = self.call.shape;
        let (columns, dtype) = (self.policy.columns(), self.k.dtype());
        let shape = CacheShape {
            batch,
            kv_heads,
            head_dim,
            format: dtype.into(),
            max_tokens: kv_len,
            page_tokens: PAGE_TOKENS,
            columns,
        };
        let mut cache = PagedCache::new(self.arena, shape)?;
        cache.append(self.k.view(), self.v.view(), 0..kv_len)?;
        Ok(cache)
    }

    /// What is retained, where the policy changes it.
    fn shrink(&self, retained: &Retained, extra: &Extra, seed: u64) -> Result<Option<PagedCache>, Failure> {
        if self.policy.action.is_none() && !self.policy.rerotates {
            return Ok(None);
        }
        let mut cache = self.cache()?;
        let (draws, rope) = (extra.draws.as_deref(), extra.rope.as_ref());
        let fold = Fold { arena: self.arena, cpu: self.call.cpu, seed, draws, rope };
        for list in 0..cache.shape().lists() {
            if let Some(received) = &retained.accumulated {
                let kv_len = self.call.shape.kv_len;
                cache.add_attention(list, &received[list * kv_len..][..kv_len])?;
            }
            self.policy.shrink(&fold, &mut cache, list, retained.selection.kept(list))?;
        }
        Ok(Some(cache))
    }

    /// What a step with the last query reads, where the policy chooses that, and its bytes.
    fn read(&self, budget_tokens: usize) -> Result<Option<Read>, Failure> {
        let Some(selection) = &self.policy.selection else { return Ok(None) };
        let (cache, cpu): (_, &Cpu) = (self.cache()?, self.call.cpu);
        let (q, q_len) = (self.call.q, self.call.shape.q_len);
        let recent = q.tokens(q_len.saturating_sub(selection.recent_queries())..q_len);
        let mut selector =
            selection.open(&Start { cache: Lists::all(&cache), q: recent, budget_tokens, cpu, arena: self.arena })?;
        selector.step(q.tokens(q_len - 1..q_len), Lists::all(&cache), cpu);
        let (name, chosen) = selector.choice();
        Ok(Some(Read { name, chosen, bytes: selector.read_bytes(Lists::all(&cache)) }))
    }
}

/// Values of a cache, and keys if the policy changes them, padded to the longest list.
fn rows(policy: &Policy, cache: &PagedCache) -> Vec<(&'static str, Vec<f32>)> {
    let (width, lists, columns) = (cache.shape().head_dim, cache.shape().lists(), cache.max_len());
    let all = |read: &dyn Fn(usize, usize, &mut [f32])| {
        let mut rows = vec![0.0; lists * columns * width];
        for list in 0..lists {
            let rows = rows[list * columns * width..].chunks_exact_mut(width).take(cache.lens()[list]);
            rows.enumerate().for_each(|(slot, row)| read(list, slot, row));
        }
        rows
    };
    let mut named = vec![("values", all(&|list, slot, row| cache.read_value(list, slot, row)))];
    if policy.rerotates || policy.action.as_ref().is_some_and(|action| action.changes_keys()) {
        named.push(("keys", all(&|list, slot, row| cache.read_key(list, slot, row))));
    }
    named
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
        outputs.push(Output::f32(name, [heads.clone(), vec![columns, shape.head_dim]].concat(), rows));
    }
    let chosen = outcome.read.as_ref().map_or(Vec::new(), |read| read.chosen.concat());
    if let Some(read) = &outcome.read {
        outputs.push(Output::i64(read.name, with(chosen.len() / lists), &chosen));
    }
    Ok(file::write(&args.output, &outputs)?)
}

fn summary(report: &Report) -> String {
    let said = match report.kv_bytes_read {
        Some(bytes) => format!("\nnothing is evicted; a step with the last query reads {}", units::bytes(bytes)),
        None if report.evicted_tokens == 0 => "\nnothing was evicted: the budget holds the whole context".into(),
        None => String::new(),
    };
    format!(
        "{} at {}: {} of {} tokens per KV head stay on average ({:.1}%)\n\
         KV {} -> {}, ties {:.1}%, evicted in {}{said}\n",
        report.policy,
        report.budget,
        units::three_digits(report.kept_fraction * report.kv_len as f64),
        report.kv_len,
        100.0 * report.kept_fraction,
        units::bytes(report.kv_bytes_dense),
        units::bytes(report.kv_bytes_kept),
        100.0 * report.tie_rate,
        units::nanoseconds(report.evict_ns as f64),
    )
}

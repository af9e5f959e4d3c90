//! Attention that is shared out over ranks: threads of this process, or the processes that `mpirun` started.
//!
//! Every rank reads its own tokens from the file, and computes, sends and counts as [`Shared`] says. Behind what is measured, rank 0
//! gathers the result, checks it against the f64 reference and writes it.

use super::pass::Problem;
use super::report::{median, per_second};
use super::{Args, write_forward};
use crate::attention::{self, Outputs, Shape};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::cli::ranks::{self, Spelled, settle};
use crate::device::Cpu;
use crate::memory::{Arena, Label};
use crate::ranks::{Asked, Comm, Method, OfRank, Rank, Shared, scatter};
use crate::tensor::file::TensorFile;
use crate::units;
use serde::Serialize;
use std::ops::Range;
use std::path::Path;

/// The object that `--json` writes.
#[derive(Serialize)]
struct Report {
    method: String,
    transport: &'static str,
    kernel: &'static str,
    threads: usize,
    isa_path: String,
    dtype: crate::tensor::DType,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    causal: bool,
    /// Of each pass, that of the slowest rank.
    samples_ns: Vec<u64>,
    median_ns: f64,
    flops: u64,
    rel_l2: f64,
    checked_rows: usize,
    ranks: Vec<OfRank>,
    hidden_share: Vec<Option<f64>>,
}

/// Runs `attend` on the ranks that were asked for.
pub fn run(args: &Args, asked: Asked) -> Result<(), Failure> {
    let Asked { method, threads } = asked;
    let threads_of = |ranks: usize| format!("--ranks {method}:{ranks}");
    let spelled = Spelled { threads: threads_of(threads.unwrap_or(4)), mpi: format!("--ranks {method}") };
    ranks::run(&args.compute, threads, &spelled, |comm, cpu, limit_bytes| {
        args.on_rank(method, comm, cpu, &Arena::with_limit(limit_bytes))
    })
}

impl Args {
    /// What one rank does.
    fn on_rank(&self, method: Method, comm: &Comm, cpu: &Cpu, arena: &Arena) -> Result<(), Failure> {
        let prepare = || {
            self.check_files()?;
            let file = TensorFile::open(&self.input)?;
            let problem = self.problem(&file)?;
            let shared = Shared::new(method, problem.shape, problem.params, problem.dtype, comm.size())?;
            Ok::<_, Failure>((file, problem, shared))
        };
        let (file, problem, shared) = settle(comm, prepare())?;
        let Problem { shape, params, dtype, .. } = problem;
        let text = format!("{method} {shape:?} {params:?} {dtype} {} {}", self.repeat, self.output.display());
        comm.agree("its arguments or its input", &text, "the same arguments and input file")?;
        // As many queries as a rank has decide which kernel fits.
        let kernel = attention::kernel(match method {
            Method::Ring => "tiled",
            Method::Tree => attention::fitting(&shape, false),
        })?;
        let on = Rank { comm, cpu, arena, kernel: &*kernel };

        let [q_of, kv_of] = shared.tokens_of(comm.rank());
        let load = |name, ranges: &[Range<usize>]| file.load_tokens(name, ranges, arena, Label::Input);
        let (q, k, v) = (load("q", &q_of)?, load("k", &kv_of)?, load("v", &kv_of)?);
        let mut seen = OfRank::default();
        let mut outputs = None;
        if self.repeat > 1 {
            shared.sample(on, q.view(), [&k, &v], &mut OfRank::default())?;
        }
        for _ in 0..self.repeat {
            drop(outputs.take());
            outputs = Some(shared.sample(on, q.view(), [&k, &v], &mut seen)?);
        }
        let outputs = outputs.expect("at least one pass");
        drop((q, k, v));

        let ranks = gather_seen(comm, seen)?;
        let whole = match method {
            Method::Tree => Some(outputs).filter(|_| comm.rank() == 0),
            Method::Ring => gather_outputs(on, &shared, &shape, outputs)?,
        };
        let Some(outputs) = whole else { return Ok(()) };
        let inputs = problem.load_all(&file, arena)?;
        let (rel_l2, checked_rows) = problem.check_forward(&inputs, &outputs, cpu)?;
        write_forward(&self.output, &shape, &outputs)?;
        let samples_ns: Vec<u64> = (0..self.repeat as usize)
            .map(|pass| ranks.iter().map(|of_rank| of_rank.samples_ns[pass]).max().unwrap_or(0))
            .collect();
        let report = Report {
            method: method.to_string(),
            transport: comm.transport(),
            kernel: kernel.name(),
            threads: cpu.threads(),
            isa_path: cpu.isa().name().into(),
            dtype,
            batch: shape.batch,
            q_heads: shape.q_heads,
            kv_heads: shape.kv_heads,
            q_len: shape.q_len,
            kv_len: shape.kv_len,
            head_dim: shape.head_dim,
            causal: params.causal,
            median_ns: median(&samples_ns),
            samples_ns,
            flops: shape.flops(&params),
            rel_l2,
            checked_rows,
            hidden_share: ranks.iter().map(OfRank::hidden_share).collect(),
            ranks,
        };
        match &self.json {
            Some(target) => output::json(target, &report),
            None => output::print(&report.summary(&self.output)),
        }
    }
}

/// What all ranks measured, on every rank.
fn gather_seen(comm: &Comm, seen: OfRank) -> Result<Vec<OfRank>, Failure> {
    let texts = comm.gather_texts(serde_json::to_vec(&seen).expect("numbers are plain data"))?;
    Ok(texts.iter().map(|text| serde_json::from_slice(text).expect("written by the same build")).collect())
}

/// The whole result on rank 0, put together from the queries of each rank.
fn gather_outputs(on: Rank<'_>, shared: &Shared, shape: &Shape, own: Outputs) -> Result<Option<Outputs>, Failure> {
    let (comm, dtype) = (on.comm, own.o.dtype());
    if comm.rank() > 0 {
        let lse = bytemuck::cast_slice(&own.lse);
        comm.transfer(&[(0, own.o.bytes()), (0, lse)], &mut [])?;
        return Ok(None);
    }
    let mut whole = Outputs::allocate(on.arena, shape, dtype)?;
    let mut part = Some(own);
    for rank in 0..comm.size() {
        let [tokens, _] = shared.tokens_of(rank);
        let count: usize = tokens.iter().map(Range::len).sum();
        let part = match part.take() {
            Some(own) => own,
            None => {
                let mut part = Outputs::allocate(on.arena, &Shape { q_len: count, ..*shape }, dtype)?;
                let lse = bytemuck::cast_slice_mut(&mut part.lse);
                comm.transfer(&[], &mut [(rank, part.o.bytes_mut()), (rank, lse)])?;
                part
            }
        };
        scatter(&mut whole, &part, &tokens);
    }
    Ok(Some(whole))
}

impl Report {
    /// A few lines for people.
    fn summary(&self, output: &Path) -> String {
        let Report { method, transport, kernel, threads, batch, q_heads, kv_heads, q_len, kv_len, head_dim, .. } = self;
        let ranks = self.ranks.len();
        let mask = if self.causal { ", causal" } else { "" };
        let gflops = units::three_digits(per_second(self.flops, self.median_ns) / 1e9);
        let passes = match self.samples_ns.len() {
            1 => "1 pass, not warmed up".into(),
            count => format!("median of {count} passes"),
        };
        let mut lines = vec![
            (
                "method",
                format!(
                    "{method} of {ranks} ranks ({transport}), {kernel}, threads of each: {threads} ({})",
                    self.isa_path
                ),
            ),
            (
                "shape",
                format!(
                    "B={batch} Hq={q_heads} Hkv={kv_heads} Lq={q_len} Lk={kv_len} D={head_dim}, {}{mask}",
                    self.dtype
                ),
            ),
            (
                "forward",
                format!("{} ({passes}, of the slowest rank), {gflops} GFLOP/s", units::nanoseconds(self.median_ns)),
            ),
        ];
        for (of_rank, hidden) in self.ranks.iter().zip(&self.hidden_share) {
            let agrees = |measured: u64, predicted: u64| match measured == predicted {
                true => format!("{} as predicted", units::bytes(measured)),
                false => format!("{}, {} predicted", units::bytes(measured), units::bytes(predicted)),
            };
            let hidden =
                hidden.map_or(String::new(), |share| format!(", {:.0}% of it hidden by computing", 100.0 * share));
            lines.push((
                "rank",
                format!(
                    "peak {}; sent {} in {} messages{hidden}",
                    agrees(of_rank.peak_bytes, of_rank.predicted_peak_bytes),
                    agrees(of_rank.sent_bytes, of_rank.predicted_sent_bytes),
                    of_rank.messages
                ),
            ));
        }
        lines.extend([
            (
                "drift",
                format!("{:.1e} relative L2 from the f64 reference, {} rows checked", self.rel_l2, self.checked_rows),
            ),
            ("written", output.display().to_string()),
        ]);
        lines.iter().map(|(name, value)| format!("{name:8}  {value}\n")).collect()
    }
}

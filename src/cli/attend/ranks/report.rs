//! What `attend --ranks` measured, as JSON and as a summary for people.

use crate::attention::Shape;
use crate::cli::attend::pass::Problem;
use crate::cli::attend::report::{median, per_second};
use crate::device::Cpu;
use crate::ranks::OfRank;
use crate::tensor::DType;
use crate::units;
use serde::Serialize;
use std::path::Path;

/// The object that `--json` writes.
#[derive(Serialize)]
pub struct Report {
    method: String,
    transport: String,
    kernel: String,
    threads: usize,
    isa_path: String,
    dtype: DType,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    causal: bool,
    flops: u64,
    rel_l2: f64,
    checked_rows: usize,
    #[serde(flatten)]
    forward: Passes,
    #[serde(flatten)]
    backward: Option<Backward>,
}

/// What all ranks showed in a pass.
#[derive(Serialize)]
pub struct Passes {
    /// Of each pass, that of the slowest rank.
    samples_ns: Vec<u64>,
    median_ns: f64,
    ranks: Vec<OfRank>,
    hidden_share: Vec<Option<f64>>,
}

/// The backward pass alone.
#[derive(Serialize)]
struct Backward {
    backward_samples_ns: Vec<u64>,
    backward_median_ns: f64,
    backward_flops: u64,
    backward_ranks: Vec<OfRank>,
    backward_hidden_share: Vec<Option<f64>>,
}

impl Passes {
    pub fn new(ranks: Vec<OfRank>) -> Self {
        let passes = ranks.first().map_or(0, |rank| rank.samples_ns.len());
        let slowest = |pass: usize| ranks.iter().map(|rank| rank.samples_ns[pass]).max().unwrap_or(0);
        let samples_ns: Vec<u64> = (0..passes).map(slowest).collect();
        Passes {
            median_ns: median(&samples_ns),
            samples_ns,
            hidden_share: ranks.iter().map(OfRank::hidden_share).collect(),
            ranks,
        }
    }
}

impl Report {
    /// The names are of method, transport and kernel; the drift has the rows that it is of.
    pub fn new(
        [method, transport, kernel]: [String; 3],
        cpu: &Cpu,
        problem: &Problem,
        forward: Passes,
        backward: Option<Passes>,
        (rel_l2, checked_rows): (f64, usize),
    ) -> Self {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = problem.shape;
        let flops = problem.shape.flops(&problem.params);
        Report {
            method,
            transport,
            kernel,
            threads: cpu.threads(),
            isa_path: cpu.isa().name().into(),
            dtype: problem.dtype,
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            causal: problem.params.causal,
            flops,
            rel_l2,
            checked_rows,
            forward,
            backward: backward.map(|Passes { samples_ns, median_ns, ranks, hidden_share }| Backward {
                backward_samples_ns: samples_ns,
                backward_median_ns: median_ns,
                backward_flops: flops / 2 * 5,
                backward_ranks: ranks,
                backward_hidden_share: hidden_share,
            }),
        }
    }

    /// A few lines for people.
    pub fn summary(&self, output: &Path) -> String {
        let Report { method, transport, kernel, threads, batch, q_heads, kv_heads, q_len, kv_len, head_dim, .. } = self;
        let ranks = self.forward.ranks.len();
        let mask = if self.causal { ", causal" } else { "" };
        let shape =
            format!("B={batch} Hq={q_heads} Hkv={kv_heads} Lq={q_len} Lk={kv_len} D={head_dim}, {}{mask}", self.dtype);
        let isa = &self.isa_path;
        let mut lines = vec![
            (
                "method",
                format!("{method} of {ranks} ranks ({transport}), {kernel}, threads of each: {threads} ({isa})"),
            ),
            ("shape", shape),
            ("forward", time(&self.forward.samples_ns, self.forward.median_ns, self.flops)),
        ];
        lines.extend(of_ranks(&self.forward.ranks, &self.forward.hidden_share));
        if let Some(pass) = &self.backward {
            lines.push(("backward", time(&pass.backward_samples_ns, pass.backward_median_ns, pass.backward_flops)));
            lines.extend(of_ranks(&pass.backward_ranks, &pass.backward_hidden_share));
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

fn time(samples_ns: &[u64], median_ns: f64, flops: u64) -> String {
    let passes = match samples_ns.len() {
        1 => String::from("1 pass, not warmed up"),
        count => format!("median of {count} passes"),
    };
    let gflops = units::three_digits(per_second(flops, median_ns) / 1e9);
    format!("{} ({passes}, of the slowest rank), {gflops} GFLOP/s", units::nanoseconds(median_ns))
}

/// A line for each rank: what it took and sent, and whether that is what the shapes say.
fn of_ranks(ranks: &[OfRank], hidden_share: &[Option<f64>]) -> Vec<(&'static str, String)> {
    let agrees = |measured: u64, predicted: u64| match measured == predicted {
        true => format!("{} as predicted", units::bytes(measured)),
        false => format!("{}, {} predicted", units::bytes(measured), units::bytes(predicted)),
    };
    let line = |(of_rank, hidden): (&OfRank, &Option<f64>)| {
        let hidden = hidden.map_or(String::new(), |share| format!(", {:.0}% of it hidden by computing", 100.0 * share));
        let (peak, sent) = (
            agrees(of_rank.peak_bytes, of_rank.predicted_peak_bytes),
            agrees(of_rank.sent_bytes, of_rank.predicted_sent_bytes),
        );
        ("rank", format!("peak {peak}; sent {sent} in {} messages{hidden}", of_rank.messages))
    };
    ranks.iter().zip(hidden_share).map(line).collect()
}

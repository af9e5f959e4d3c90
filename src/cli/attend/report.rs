//! What `attend` measured, as JSON and as a summary for people.

use super::pass::{Problem, Sizes, Solution};
use crate::attention::Shape;
use crate::cli::hardware::Hardware;
use crate::format::KvFormat;
use crate::memory::{LabelBytes, Usage};
use crate::stats::quantile;
use crate::tensor::{DType, Tensor};
use crate::units;
use serde::Serialize;
use std::path::Path;

/// The object that `--json` writes.
#[derive(Serialize)]
pub struct Report {
    kernel: String,
    #[serde(flatten)]
    hardware: Hardware,
    dtype: DType,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    #[serde(flatten)]
    kept: Option<Kept>,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    scale: f32,
    warmups: u32,
    samples_ns: Vec<u64>,
    median_ns: f64,
    flops: u64,
    flops_per_s: f64,
    workspace_bytes: u64,
    predicted_peak_bytes: u64,
    peak_bytes: u64,
    peak_by_label: LabelBytes,
    limit_bytes: u64,
    drift: Drift,
    #[serde(flatten)]
    backward: Option<Backward>,
}

/// The cache that keys and values were read from.
#[derive(Serialize)]
struct Kept {
    kv_format: KvFormat,
    /// Of its tokens, and of the input's.
    kv_bytes: u64,
    kv_bytes_given: u64,
}

#[derive(Serialize)]
struct Drift {
    rel_l2: f64,
    checked_rows: usize,
}

/// The backward pass alone.
#[derive(Serialize)]
struct Backward {
    backward_samples_ns: Vec<u64>,
    backward_median_ns: f64,
    backward_flops: u64,
    backward_flops_per_s: f64,
    backward_workspace_bytes: u64,
}

impl Report {
    pub fn new(
        kernel: String,
        problem: &Problem,
        sizes: &Sizes,
        solution: &Solution,
        usage: Usage,
        hardware: Hardware,
        limit_bytes: u64,
    ) -> Self {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = problem.shape;
        let flops = problem.shape.flops(&problem.params);
        let median_ns = median(&solution.samples_ns);
        let backward = solution.backward.as_ref().zip(sizes.backward).map(|(backward, workspace)| {
            let (backward_flops, median_ns) = (flops / 2 * 5, median(&backward.samples_ns));
            Backward {
                backward_samples_ns: backward.samples_ns.clone(),
                backward_median_ns: median_ns,
                backward_flops,
                backward_flops_per_s: per_second(backward_flops, median_ns),
                backward_workspace_bytes: workspace.bytes(),
            }
        });
        Report {
            kernel,
            hardware,
            dtype: problem.dtype,
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            kept: problem.kv_format.map(|kv_format| {
                let bytes = |format: KvFormat| {
                    (batch * kv_heads) as u64 * format.in_pass(problem.dtype).list_bytes(head_dim, kv_len)
                };
                let of_file = problem.stored.iter().filter(|(name, ..)| ["k", "v"].contains(name));
                let kv_bytes_given = of_file.map(|&(_, dims, dtype)| Tensor::bytes_of(dtype, dims)).sum();
                Kept { kv_format, kv_bytes: bytes(kv_format), kv_bytes_given }
            }),
            causal: problem.params.causal,
            window: problem.params.window,
            softcap: problem.params.softcap,
            scale: problem.params.scale,
            warmups: solution.warmups,
            samples_ns: solution.samples_ns.clone(),
            median_ns,
            flops,
            flops_per_s: per_second(flops, median_ns),
            workspace_bytes: sizes.forward.bytes(),
            predicted_peak_bytes: sizes.peak_bytes,
            peak_bytes: usage.peak_bytes,
            peak_by_label: usage.peak,
            limit_bytes,
            drift: Drift { rel_l2: solution.rel_l2, checked_rows: solution.checked_rows },
            backward,
        }
    }

    /// A few lines for people.
    pub fn summary(&self, output: &Path) -> String {
        let mut shape = format!(
            "B={} Hq={} Hkv={} Lq={} Lk={} D={}, {}",
            self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, self.dtype
        );
        shape += if self.causal { ", causal" } else { "" };
        shape += &self.window.map_or(String::new(), |window| format!(", window {window}"));
        shape += &self.softcap.map_or(String::new(), |cap| format!(", soft-cap {cap}"));
        let passes = match self.samples_ns.len() {
            1 => "1 pass, not warmed up".into(),
            count => format!("median of {count} passes"),
        };
        let time = |median_ns: f64, flops_per_s: f64| {
            let speed = units::three_digits(flops_per_s / 1e9);
            format!("{} ({passes}), {speed} GFLOP/s", units::nanoseconds(median_ns))
        };
        let labels: Vec<_> = self
            .peak_by_label
            .iter()
            .map(|(label, &bytes)| format!("{} {}", label.name(), units::bytes(bytes)))
            .collect();
        let agree = match self.predicted_peak_bytes == self.peak_bytes {
            true => "as predicted".into(),
            false => format!("{} predicted", units::bytes(self.predicted_peak_bytes)),
        };
        let Drift { rel_l2, checked_rows } = self.drift;
        let mut lines = vec![
            ("kernel", format!("{} on {}", self.kernel, self.hardware)),
            ("shape", shape),
            ("forward", time(self.median_ns, self.flops_per_s)),
        ];
        if let Some(Kept { kv_format, kv_bytes, kv_bytes_given }) = &self.kept {
            let [kept, given] = [*kv_bytes, *kv_bytes_given].map(units::bytes);
            lines.push(("keys, values", format!("{kept} in {kv_format}, {given} as given")));
        }
        if let Some(backward) = &self.backward {
            lines.push(("backward", time(backward.backward_median_ns, backward.backward_flops_per_s)));
        }
        lines.extend([
            ("peak", format!("{}, {agree} (most of each: {})", units::bytes(self.peak_bytes), labels.join(", "))),
            ("drift", format!("{rel_l2:.1e} relative L2 from the f64 reference, {checked_rows} rows checked")),
            ("written", output.display().to_string()),
        ]);
        lines.iter().map(|(name, value)| format!("{name:8}  {value}\n")).collect()
    }
}

/// Median of at least one sample.
pub fn median(samples_ns: &[u64]) -> f64 {
    quantile(&samples_ns.iter().map(|&ns| ns as f64).collect::<Vec<_>>(), 0.5)
}

/// A clock too coarse to see the pass gives 0 ns; the rate stays a number.
pub fn per_second(flops: u64, median_ns: f64) -> f64 {
    flops as f64 / median_ns.max(1.0) * 1e9
}

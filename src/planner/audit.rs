//! Predictions held against every record of a folder: the arena to the byte, the process or the GPU, the longest context
//! that ran, and how far two calibrated constants explain the times.
//!
//! A policy that leaves lists of different lengths is predicted by a bound, and a cell of `eval` is predicted with a full
//! cache: what stays below is no error there, and cells of `eval` under a policy say what it saves and are not held at all.

use super::PlanError;
use crate::experiment::max_context::MaxContext;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Memory, Record, Status};
use crate::experiment::store::{self, MAX_CONTEXTS};
use crate::policy::Registry;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Least difference between the system's account and the arena's that counts.
const SYSTEM_BYTES: u64 = 32 << 20;

/// A question that is asked of records.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// What is compared.
    pub question: &'static str,
    /// Records that answer it.
    pub records: usize,
    /// Those beyond the tolerance.
    pub beyond: usize,
    /// Measured minus predicted, of the record that is furthest from its tolerance: bytes, tokens or a fraction.
    pub worst: f64,
    /// The unit of `worst`.
    pub unit: &'static str,
    /// What is allowed, in words.
    pub tolerance: &'static str,
    /// The record that is furthest: cell id and what it is.
    pub at: String,
    /// Whether going beyond ends the audit with status 1; times are reported only.
    pub binding: bool,
}

/// What an audit found.
#[derive(Debug, Clone, Serialize)]
pub struct Audit {
    /// The runs.
    pub folders: Vec<PathBuf>,
    /// Records of all of them.
    pub records: usize,
    /// Questions that records answer.
    pub findings: Vec<Finding>,
    /// Whether every binding one holds.
    pub holds: bool,
}

/// Holds the predictions of every run in a folder, or below it, against its records.
///
/// # Errors
/// When there is no run, or its records are damaged.
pub fn audit(folder: &Path) -> Result<Audit, PlanError> {
    let wrong = |reason: String| PlanError::File { path: folder.into(), reason };
    let mut folders = runs(folder, 0);
    folders.sort();
    if folders.is_empty() {
        return Err(wrong("there is no run in it; name a folder with a cells.jsonl or a max-context.jsonl".into()));
    }
    let (mut records, mut limits) = (Vec::new(), Vec::new());
    for run in &folders {
        if run.join("cells.jsonl").exists() {
            records.extend(store::read(run).map_err(|error| wrong(error.to_string()))?.0);
        }
        if let Ok(text) = fs::read_to_string(run.join(MAX_CONTEXTS)) {
            // A last line that a kill tore is left out.
            let whole = text.rfind('\n').map_or("", |last| &text[..last]);
            for line in whole.lines() {
                let limit: MaxContext =
                    serde_json::from_str(line).map_err(|error| wrong(format!("{MAX_CONTEXTS}: {error}")))?;
                limits.push(limit);
            }
        }
    }
    if records.is_empty() && limits.is_empty() {
        return Err(wrong("its runs have no records".into()));
    }
    let findings: Vec<Finding> = [
        arena(&records),
        system(&records),
        limit(&limits, "naive"),
        limit(&limits, "tiled"),
        times(&records, "naive"),
        times(&records, "tiled"),
    ]
    .into_iter()
    .flatten()
    .collect();
    let holds = findings.iter().all(|finding| finding.beyond == 0 || !finding.binding);
    Ok(Audit { records: records.len() + limits.len(), folders, findings, holds })
}

/// Folders with records, at most four levels down.
fn runs(folder: &Path, depth: usize) -> Vec<PathBuf> {
    if folder.join("cells.jsonl").exists() || folder.join(MAX_CONTEXTS).exists() {
        return vec![folder.into()];
    }
    let Ok(entries) = folder.read_dir() else { return Vec::new() };
    let below = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir() && depth < 4);
    below.flat_map(|path| runs(&path, depth + 1)).collect()
}

/// Collects what a question finds: each answer is how far off a record is, in its unit and in tolerances.
struct Tally {
    finding: Finding,
    furthest: f64,
}

impl Tally {
    fn new(question: &'static str, unit: &'static str, tolerance: &'static str, binding: bool) -> Self {
        let finding =
            Finding { question, records: 0, beyond: 0, worst: 0.0, unit, tolerance, at: String::new(), binding };
        Tally { finding, furthest: -1.0 }
    }

    fn add(&mut self, off: f64, tolerances: f64, at: impl FnOnce() -> String) {
        self.finding.records += 1;
        self.finding.beyond += usize::from(tolerances > 1.0);
        if tolerances > self.furthest {
            (self.furthest, self.finding.worst, self.finding.at) = (tolerances, off, at());
        }
    }

    fn done(self) -> Option<Finding> {
        (self.finding.records > 0).then_some(self.finding)
    }
}

fn measured(records: &[Record]) -> impl Iterator<Item = (&Record, &Memory)> {
    records
        .iter()
        .filter(|record| record.status == Status::Ok)
        .filter_map(|record| Some((record, record.memory.as_ref()?)))
}

fn name(record: &Record) -> String {
    let cell = &record.cell;
    let policy = cell.policy.as_ref().map_or(String::new(), |policy| format!(" {policy}"));
    format!("{} ({} {}{policy}, {} tokens)", record.cell_id, cell.measure.name(), cell.kernel, cell.context_tokens)
}

fn arena(records: &[Record]) -> Option<Finding> {
    let mut tally = Tally::new("peak of the arena", "bytes", "0 bytes", true);
    for (record, memory) in measured(records) {
        let policy = record.cell.policy.as_deref().filter(|policy| *policy != "full");
        if record.cell.measure == Measure::EVAL && policy.is_some() {
            continue;
        }
        // A policy that this build does not know is one that keeps lists of different lengths, for all that is known.
        let is_bound =
            policy.is_some_and(|policy| !Registry::default().policy(policy).is_ok_and(|policy| policy.is_even()));
        let off = memory.peak_bytes as f64 - memory.predicted_peak_bytes as f64;
        let beyond = if is_bound { off > 0.0 } else { off != 0.0 };
        tally.add(off, if beyond { 1.0 + off.abs() } else { 0.0 }, || name(record));
    }
    tally.done()
}

fn system(records: &[Record]) -> Option<Finding> {
    let mut tally = Tally::new("growth of the process or the GPU", "bytes", "the larger of 1% and 32 MiB", true);
    for (record, memory) in measured(records) {
        let Some(grown) = memory.gpu_growth_bytes.or(memory.rss_growth_bytes) else { continue };
        let off = grown as f64 - memory.arena_growth_bytes as f64;
        let allowed = (memory.arena_growth_bytes as f64 / 100.0).max(SYSTEM_BYTES as f64);
        tally.add(off, off.abs() / allowed, || name(record));
    }
    tally.done()
}

fn limit(limits: &[MaxContext], kernel: &str) -> Option<Finding> {
    let (question, tolerance, allowed) = match kernel {
        "naive" => ("longest context, naive", "1%", 0.01),
        _ => ("longest context, tiled", "2%", 0.02),
    };
    let mut tally = Tally::new(question, "of the prediction", tolerance, true);
    for limit in limits.iter().filter(|limit| limit.cell.kernel.split(':').next() == Some(kernel)) {
        let at = || format!("{} tokens found, {} predicted", limit.found_tokens, limit.predicted_tokens);
        tally.add(limit.apart, limit.apart.abs() / allowed, at);
    }
    tally.done()
}

/// Contexts below this are bound by other things than the roofline.
const LEAST_CONTEXT: usize = 2048;

/// Forward passes of a kernel against one constant, the median rate: bytes of scores for `naive`, operations for `tiled`. Of a
/// pass's samples the quickest tenth counts: a roofline says what a machine can do, and other work only ever adds to it.
fn times(records: &[Record], kernel: &str) -> Option<Finding> {
    let (question, tolerance, allowed) = match kernel {
        "naive" => ("time of naive passes", "10% with one constant", 0.10),
        _ => ("time of tiled passes", "15% with one constant", 0.15),
    };
    let passes: Vec<(&Record, f64, f64)> = measured(records)
        .filter(|(record, _)| record.cell.measure == Measure::FORWARD && record.cell.context_tokens >= LEAST_CONTEXT)
        .filter(|(record, _)| record.cell.kernel.split(':').next() == Some(kernel))
        .filter_map(|(record, _)| {
            let shape = record.cell.shape();
            let pairs = (shape.batch * shape.q_heads * shape.q_len) as f64 * shape.kv_len as f64;
            let work = if kernel == "naive" { pairs } else { record.work.as_ref()?.flops as f64 };
            Some((record, work, record.latency.get("forward")?.p10_ns))
        })
        .collect();
    let mut tally = Tally::new(question, "of the prediction", tolerance, false);
    // One constant for passes of one run that differ in their lengths only.
    let key = |record: &Record| {
        let cell = &record.cell;
        (
            record.run_id.clone(),
            cell.q_heads,
            cell.kv_heads,
            cell.head_dim,
            cell.dtype.name(),
            cell.causal,
            record.threads,
        )
    };
    let mut groups: BTreeMap<_, Vec<(&Record, f64, f64)>> = BTreeMap::new();
    passes.into_iter().for_each(|pass| groups.entry(key(pass.0)).or_default().push(pass));
    for passes in groups.into_values().filter(|passes| passes.len() > 1) {
        let mut rates: Vec<f64> = passes.iter().map(|(_, work, ns)| work / ns).collect();
        rates.sort_by(f64::total_cmp);
        let rate = rates[rates.len() / 2];
        for (record, work, ns) in passes {
            let off = ns / (work / rate) - 1.0;
            tally.add(off, off.abs() / allowed, || name(record));
        }
    }
    tally.done()
}

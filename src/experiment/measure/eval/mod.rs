//! `eval`: what a model answers under policies and budgets (`docs/evaluation.md`).
//!
//! Cells that differ only in policy, budget and formats are one comparison, whose contexts are read once for each pair of
//! formats and evicted by all of its policies.
//! What each sample gives is on disk at once, in a journal.

mod estimate;
mod grid;
mod group;
mod journal;
mod tally;
mod together;

use super::{Choice, Comparisons, Measurement, Runs, Scope, Stage};
use crate::experiment::cell::{Cell, Device};
use crate::experiment::engine::MODELS_ON_CPU;
use crate::experiment::record::{Record, Status};
use crate::experiment::runner::latency;
use crate::experiment::spec::Grid;
pub(super) use grid::with_random;
use journal::Journal;
use std::io;
use std::path::Path;

/// The policy that every evaluation has beside those that it names.
pub const RANDOM: &str = "random";

/// The task of going on with a text of the user's.
pub const PERPLEXITY: &str = "perplexity";

/// Models by contexts by tasks by policies by budgets by seeds.
pub(super) struct Eval;

impl Measurement for Eval {
    fn name(&self) -> &'static str {
        "eval"
    }

    fn about(&self) -> &'static str {
        "a model's answers to tasks, with its cache evicted by policies"
    }

    fn fields(&self) -> &'static [&'static str] {
        &[
            "model",
            "task",
            "text",
            "samples",
            "alone_samples",
            "protocol",
            "chat",
            "beyond_limit",
            "kernel",
            "context_tokens",
            "dtype",
            "kv_format",
            "weights",
            "activations",
            "policy",
            "budget",
            "policy_file",
            "memory",
            "new_tokens",
        ]
    }

    fn compares(&self) -> Choice {
        Choice::Policy
    }

    fn phase(&self) -> &'static str {
        "decode"
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        let cells = grid::expand(grid, scope.registry)?;
        Ok(cells.into_iter().map(|cell| Cell { device: scope.device, ..cell }).collect())
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

impl Comparisons for Eval {
    fn refusal(&self, device: Device) -> Option<String> {
        (device == Device::Cuda).then(|| MODELS_ON_CPU.into())
    }

    fn seconds(&self, comparisons: &[Vec<&Cell>], stage: &Stage<'_>) -> Vec<Option<f64>> {
        estimate::seconds(comparisons, stage)
    }

    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let cells: Vec<&Cell> = records.iter().map(|record| &record.cell).collect();
        let run = |cpu| {
            let mut journal = Journal::open(stage.folder, cells[0])?;
            together::run(&cells, stage.registry, cpu, stage.limit_bytes, &mut journal, each)
        };
        let ended = match stage.engine.for_models() {
            Ok(cpu) => run(cpu).map_err(|error| together::status_of(&error)),
            Err(reason) => Err((Status::Skipped, reason)),
        };
        let ended = ended.unwrap_or_else(|(status, reason)| {
            let all = |_| together::Ended { result: Err((status, reason.clone())), warnings: Vec::new() };
            cells.iter().map(all).collect()
        });
        let has_no_room = |ended: &together::Ended| matches!(ended.result, Err((Status::Oom, _)));
        let beside = if ended.iter().any(has_no_room) { group::models_at_once(&cells) } else { None };
        records.into_iter().zip(ended).map(|(record, ended)| filled(record, ended, beside.as_deref())).collect()
    }

    fn finish(&self, folder: &Path, cell: &Cell) -> io::Result<()> {
        Journal::remove(folder, cell)
    }
}

/// A record with what its cell measured, or why it did not; where it had no room, with what is held `beside` it.
fn filled(record: Record, ended: together::Ended, beside: Option<&str>) -> Record {
    let record = Record { warnings: ended.warnings, ..record };
    match ended.result {
        Err((status, reason)) => {
            let beside = beside.filter(|_| status == Status::Oom).map_or(String::new(), |words| format!("; {words}"));
            Record { status, reason: Some(reason + &beside), ..record }
        }
        Ok(numbers) => {
            let phase = |(phase, samples): (&str, Vec<u64>)| (phase.to_string(), latency(samples, 0, "samples"));
            let latency = numbers.samples_ns.into_iter().map(phase).collect();
            Record { memory: numbers.memory, latency, answers: Some(numbers.answers), ..record }
        }
    }
}

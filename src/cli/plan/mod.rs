//! `kvsieve plan`: where memory goes, what fits, and what to change first.

mod questions;
mod scale;
mod scenario;
pub(super) mod text;
mod train;

use super::failure::Failure;
use super::output;
use crate::device::Cpu;
use crate::model::BUILTIN;
use crate::planner::levers::{Ranked, rank, siblings, together};
use crate::planner::own_peak_bytes;
use crate::planner::remedy::{Remedy, remedies};
use crate::planner::roofline::{REACHED, Times};
use crate::planner::waterfall::Waterfall;
use crate::report;
use crate::units;
use scenario::ScenarioArgs;
use serde::Serialize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Nothing is run: every number is a formula over the model's shape, with how it is known (docs/memory.md has them all).

Examples:
  kvsieve plan --model llama-3-8b --gpu a100-40gb --context 16384 --attention naive
                                    where memory goes, whether it fits, at which context it dies
  kvsieve plan --model llama-3-8b --gpu rtx-4090 --target-context 128k
                                    the cheapest set of changes with which 128K tokens fit
  kvsieve plan max-context --model qwen3-8b --gpu rtx-4090 --prefill-chunk 2k --kv-format int8
  kvsieve plan compare llama-2-7b mistral-7b-v0.3 --gpu l4 --context 16k
  kvsieve plan gpus --model qwen2.5-14b --context 32k
  kvsieve plan train --model llama-3-8b --gpu h100 --zero 3 --data-parallel 8
  kvsieve plan scale --model llama-3-8b --gpu h100 --ranks 8,64,512 --context 1m
                                    many cards: what they compute and send, and where sending takes longer
  kvsieve plan explain kv --model deepseek-v3 --context 128k
  kvsieve plan claims               what is said about GPU memory, beside what is computed
  kvsieve plan measure --model builtin --context 2k --attention naive
                                    the same sizes predicted, and then measured by running the model here
  kvsieve plan audit results/reference
                                    predictions against every record of a folder";

/// Where memory goes, what fits, and what to change first
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    question: Option<Question>,
    #[command(flatten)]
    scenario: ScenarioArgs,
    /// Search the cheapest set of changes with which so many tokens fit
    #[arg(long, value_name = "N", value_parser = scenario::tokens)]
    target_context: Option<u64>,
    /// Folder to draw into: memory against context, KV heads and levers, as SVG and CSV, and on a page, report.html
    #[arg(long, value_name = "DIR", help_heading = "What is reported")]
    output: Option<PathBuf>,
    #[command(flatten)]
    report: Reported,
}

/// Where the answer goes.
#[derive(clap::Args)]
struct Reported {
    /// Write the numbers as JSON instead of the text, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Question {
    /// The largest context that fits
    MaxContext(questions::Asked),
    /// The largest batch that fits at a context
    MaxBatch(questions::Asked),
    /// Two models in the same place
    Compare(questions::Compare),
    /// A term: its formula, the numbers put in, and how it grows
    Explain(questions::Explain),
    /// Memory of training: parameters, gradients, optimizer, activations
    Train(train::Args),
    /// A model on many cards: what they compute and send, and where sending takes longer
    Scale(scale::Args),
    /// A model on every card: to run, to fine-tune, with layers on the host
    Gpus(questions::Gpus),
    /// What is said about GPU memory, beside what is computed
    Claims(questions::Claims),
    /// What others measured and printed, beside what is computed
    Published(questions::PublishedArgs),
    /// Predictions against every record of a folder; exit status 1 beyond the tolerance
    Audit(questions::AuditArgs),
    /// A model at hand, run by kvsieve: each predicted size beside the arena's account and the process's growth
    Measure(questions::MeasureArgs),
    /// A timeline of allocations (`kvsieve attend --timeline`) through several allocators
    Allocator(questions::Allocator),
}

impl Reported {
    /// Refuses a file for JSON that cannot be written, or that is one of these or of a model in their folders: what is read, and its option.
    fn check(&self, reads: &[(&str, &Path)]) -> Result<(), Failure> {
        // A preset is no file.
        let reads: Vec<_> =
            reads.iter().filter(|(_, path)| path.exists() || *path == Path::new(BUILTIN)).copied().collect();
        output::check_files(&reads, output::json_file(self.json.as_deref()).as_slice())
    }

    /// Writes JSON where it is asked for, else text.
    fn give(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<(), Failure> {
        match &self.json {
            None => output::print(&text()),
            Some(target) => output::json(target, value),
        }
    }
}

pub fn run(args: &Args) -> Result<(), Failure> {
    match &args.question {
        None => plan(args),
        Some(Question::MaxContext(asked)) => questions::most(asked, true),
        Some(Question::MaxBatch(asked)) => questions::most(asked, false),
        Some(Question::Compare(args)) => questions::compare(args),
        Some(Question::Explain(args)) => questions::explain(args),
        Some(Question::Train(args)) => train::run(args),
        Some(Question::Scale(args)) => scale::run(args),
        Some(Question::Gpus(args)) => questions::gpus(args),
        Some(Question::Claims(args)) => questions::claims(args),
        Some(Question::Published(args)) => questions::published(args),
        Some(Question::Audit(args)) => questions::audit(args),
        Some(Question::Measure(args)) => questions::measure(args),
        Some(Question::Allocator(args)) => questions::allocator(args),
    }
}

/// A scenario, its waterfall and its levers, as JSON.
#[derive(Serialize)]
struct Plan<'a> {
    model: &'a str,
    parameters: u64,
    kv_bytes_per_token: u64,
    batch: u64,
    context_tokens: u64,
    #[serde(flatten)]
    waterfall: &'a Waterfall,
    times: Option<Times>,
    /// Peak of the arena when kvsieve itself runs it on this CPU; `None` where it cannot.
    own_peak_bytes: Option<u64>,
    levers: &'a [Ranked],
    /// With all sequences that were asked for, if any set of levers is enough for them, else with fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<&'a Remedy>,
    /// With fewer, where both are enough and this is cheaper.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy_of_fewer_sequences: Option<&'a Remedy>,
}

fn plan(args: &Args) -> Result<(), Failure> {
    args.report.check(args.scenario.read().as_slice())?;
    args.output.as_deref().map_or(Ok(()), |folder| output::check_folder("--output", folder))?;
    let subject = args.scenario.subject()?;
    let scenario = args.scenario.scenario(&subject)?;
    let siblings = siblings(&subject);
    let threads = Cpu::new(None)?.threads();
    let own = own_peak_bytes(&scenario, threads)?;
    let (waterfall, times, levers) = (scenario.waterfall()?, scenario.times(REACHED)?, rank(&scenario, &siblings)?);
    let remedies = args.target_context.map_or(Ok(Vec::new()), |target| remedies(&scenario, target, &siblings))?;
    if let Some(target) = args.target_context.filter(|_| remedies.is_empty()) {
        let target = units::grouped(u128::from(target));
        return Err(Failure::work(format!(
            "no set of levers makes {target} tokens fit; take a larger card or more of them"
        )));
    }
    let plan = Plan {
        model: &subject.name,
        parameters: subject.parameters,
        kv_bytes_per_token: scenario.kv_token_bytes(),
        batch: scenario.batch,
        context_tokens: scenario.context,
        waterfall: &waterfall,
        times,
        own_peak_bytes: own,
        levers: &levers,
        remedy: remedies.first(),
        remedy_of_fewer_sequences: remedies.get(1),
    };
    let mut said = text::waterfall(&scenario, &waterfall);
    said.push_str(&text::times(times));
    said.push_str(&own.map_or(String::new(), |bytes| text::own(bytes, &scenario, threads)));
    said.push_str(&text::levers(&scenario, &levers));
    said.push_str(&text::remedies(scenario.held(), &remedies));
    if let Some(folder) = &args.output {
        report::planner::write(folder, &scenario, &waterfall, &levers, &together(&scenario, &siblings)?, &said)?;
        said.push_str(&text::page(folder));
    }
    args.report.give(&plan, || said)
}

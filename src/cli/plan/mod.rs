//! `kvsieve plan`: where memory goes, what fits, and what to change first.

mod scenario;
mod text;

use super::failure::Failure;
use super::output;
use scenario::ScenarioArgs;
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Nothing is run: every number is a formula over the model's shape, with how it is known (docs/memory.md has them all).

Examples:
  kvsieve plan --model llama-3-8b --gpu a100-40gb --context 16384 --attention naive
                                    where memory goes, whether it fits, at which context it dies
  kvsieve plan max-context --model qwen3-8b --gpu rtx-4090 --prefill-chunk 2k --kv-format int8
  kvsieve plan max-batch --model llama-3-8b --gpu h100 --context 8k";

/// Where memory goes, what fits, and what to change first
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    question: Option<Question>,
    #[command(flatten)]
    scenario: ScenarioArgs,
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
    MaxContext(Asked),
    /// The largest batch that fits at a context
    MaxBatch(Asked),
}

/// A question about one scenario.
#[derive(clap::Args)]
struct Asked {
    #[command(flatten)]
    scenario: ScenarioArgs,
    #[command(flatten)]
    report: Reported,
}

impl Reported {
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
        None => waterfall(args),
        Some(Question::MaxContext(asked)) => most(asked, true),
        Some(Question::MaxBatch(asked)) => most(asked, false),
    }
}

/// A scenario and its waterfall, as JSON.
#[derive(Serialize)]
struct Plan<'a, T: Serialize> {
    model: &'a str,
    parameters: u64,
    kv_bytes_per_token: u64,
    batch: u64,
    context_tokens: u64,
    #[serde(flatten)]
    answer: T,
}

fn waterfall(args: &Args) -> Result<(), Failure> {
    let subject = args.scenario.subject()?;
    let scenario = args.scenario.scenario(&subject)?;
    let waterfall = scenario.waterfall()?;
    let plan = Plan {
        model: &subject.name,
        parameters: subject.parameters,
        kv_bytes_per_token: scenario.kv_token_bytes(),
        batch: scenario.batch,
        context_tokens: scenario.context,
        answer: &waterfall,
    };
    args.report.give(&plan, || text::waterfall(&scenario, &waterfall))
}

/// The largest context or batch.
#[derive(Serialize)]
struct Most {
    max_context_tokens: Option<u64>,
    max_batch: Option<u64>,
}

fn most(asked: &Asked, of_context: bool) -> Result<(), Failure> {
    let subject = asked.scenario.subject()?;
    let scenario = asked.scenario.scenario(&subject)?;
    let (what, most) = match of_context {
        true => ("tokens", Most { max_context_tokens: scenario.max_context()?, max_batch: None }),
        false => ("sequences", Most { max_context_tokens: None, max_batch: scenario.max_batch()? }),
    };
    let number = most.max_context_tokens.or(most.max_batch);
    let plan = Plan {
        model: &subject.name,
        parameters: subject.parameters,
        kv_bytes_per_token: scenario.kv_token_bytes(),
        batch: scenario.batch,
        context_tokens: scenario.context,
        answer: most,
    };
    asked.report.give(&plan, || text::most(&scenario, what, number))
}

//! `kvsieve train`: a small model from a recipe, or what `--method` trains on a model that is there (`loaded.rs`).

mod loaded;

use super::failure::Failure;
use super::ranks::{self, Spelled, launched, settle};
use super::{Compute, command_line, output};
use crate::device::Cpu;
use crate::experiment::environment;
use crate::ranks::{Comm, MOST_THREADS};
use crate::report::training;
use crate::train::log::Line;
use crate::train::recipe::{BUILTIN, Recipe};
use crate::train::run::{self, Options, Place, RECORD, TrainError};
use crate::units;
use indicatif::{ProgressBar, ProgressStyle};
use loaded::{Gates, Loaded, Tuning};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::str::FromStr;

const EXAMPLES: &str = "\
A recipe is a TOML file; without one it is that of the model that ships with kvsieve. The folder becomes one that \
Hugging Face's transformers and kvsieve load (config.json, model.safetensors, tokenizer.json), with a checkpoint, the \
log (training.jsonl), its figures (loss.svg, accuracy-2048.svg) and a record (training.json).\n\n\
With --method dms a model stays as it is, and gates learn which tokens its cache can do without; the folder gets \
policy.safetensors, which the policy 'dms' reads, a checkpoint, the log, figures and a record. With --method dmc tokens are \
accumulated into the one behind them instead of being dropped, for the policy 'dmc'.\n\n\
With --method kvzap gates are fitted that foretell KVzip+'s scores, for the policies 'kvzap' and 'gate'; the model repeats --steps \
sequences of the text for that. The folder gets policy.safetensors, a checkpoint, the log, a figure and a record.\n\n\
With --method larimar maps are trained by which a model writes facts into a memory and answers from it (docs/larimar.md); the \
folder gets maps.safetensors, a checkpoint, the log, a figure, and a record of what the edited model answers.\n\n\
With --method lora, qlora or full a model is fine-tuned on a text: adapters beside matrices that stay as they are, in bf16 or as a \
GGUF file has them packed, or all of it. The folder of an adapter (adapter_model.safetensors and adapter_config.json, as peft \
writes them) is a --model of every command. Nine tenths of the text are learned from, the last is judged.\n\n\
Examples:
  kvsieve train --out model                     the built-in model; half an hour to an hour on two cores
  kvsieve train my.toml --out model             your own recipe
  kvsieve train my.toml --out model --resume    go on where a run was stopped or killed, with the same bits
  kvsieve train my.toml --out model --steps 20  only the first 20 steps, to see how fast it is
  kvsieve train my.toml --out model --ranks 4 --zero 3   4 threads, each with a quarter of all that is trained
  kvsieve train --method dms --model builtin --ratio 4 --window 32 --steps 300 --out gates
  kvsieve train --method dms --model SmolLM2.gguf --ratio 4 --window 256 --text book.txt --steps 500 --out gates
  kvsieve train --method dmc --model builtin --ratio 2 --out slots
  kvsieve train --method kvzap --model SmolLM2.gguf --text book.txt --steps 200 --out surrogate
  kvsieve train --method larimar --model builtin --out editor
  kvsieve train --method lora --model SmolLM2.gguf --text book.txt --learning-rate 5e-4 --steps 200 --out adapter
  kvsieve train --method full --model builtin --text book.txt --optimizer adafactor --recompute full --out tuned";

/// Train a small model, fine-tune any, or train gates of evicted tokens on it
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Recipe [default: the built-in model's]
    #[arg(value_name = "RECIPE", conflicts_with = "method")]
    recipe: Option<PathBuf>,
    /// Folder for the model and all that belongs to it
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Go on with the run in the folder
    #[arg(long)]
    resume: bool,
    /// Stop after this step of the recipe, --resume goes on from there; with --method all steps that there are, for kvzap
    /// sequences [default: 500; kvzap: 100; larimar: 300]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    loaded: Loaded,
    #[command(flatten)]
    gates: Gates,
    #[command(flatten)]
    tuning: Tuning,
    #[command(flatten)]
    compute: Compute,
}

/// Where and how a recipe's training is shared out.
#[derive(clap::Args)]
#[command(next_help_heading = "Training over ranks")]
struct Ranks {
    /// Deals sequences to N ranks that are threads of this process, or with mpi to the processes that mpirun started
    /// (docs/training.md). --threads are those of each rank [default: all cores, shared]
    #[arg(long, value_name = "N|mpi", conflicts_with = "method")]
    ranks: Option<Asked>,
    /// Stage of ZeRO: a rank holds its part of nothing (0), the optimizer's averages (1), gradients too (2), parameters too (3)
    #[arg(long, value_name = "0-3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3), conflicts_with = "method")]
    zero: u8,
    /// Ranks that share each block, its heads and the MLP's inner elements; the others read other sequences
    #[arg(long, value_name = "N", default_value_t = 1, requires = "ranks", conflicts_with = "method")]
    tensor_parallel: usize,
    /// What lies in a file beside the run, of which a bucket at a time is in memory: optimizer
    #[arg(long, value_name = "WHAT", conflicts_with = "method")]
    offload: Option<Offload>,
}

/// Ranks that are threads; `None` for those of MPI.
#[derive(Debug, Clone, Copy)]
struct Asked(Option<usize>);

impl FromStr for Asked {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let threads = text.parse().ok().filter(|ranks| (1..=MOST_THREADS).contains(ranks));
        match (text, threads) {
            ("mpi", _) => Ok(Asked(None)),
            (_, Some(threads)) => Ok(Asked(Some(threads))),
            _ => Err(format!("write 1 to {MOST_THREADS} (threads of this process), or under mpirun mpi")),
        }
    }
}

/// What does not lie in memory.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Offload {
    /// The optimizer's averages.
    Optimizer,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    output::check_folder("--out", &args.out)?;
    if args.ranks.zero > 0 && args.ranks.ranks.is_none() {
        return Err(Failure::usage(format!("--zero {} shares things out to ranks; give --ranks N", args.ranks.zero)));
    }
    if let Some(asked) = args.on_loaded()? {
        return asked.run(args);
    }
    if args.steps == Some(0) {
        return Err(Failure::usage("--steps is 0; it must be at least 1".into()));
    }
    let spelled = Spelled { threads: "--ranks 4".into(), mpi: "--ranks mpi".into() };
    match (&args.ranks.ranks, launched()) {
        (Some(Asked(threads)), _) => {
            ranks::run(&args.compute, *threads, &spelled, |comm, cpu, limit_bytes| args.on_rank(comm, cpu, limit_bytes))
        }
        (None, None) => args.on_rank(&Comm::alone(), &args.compute.cpu()?, args.compute.limit_bytes()),
        (None, Some(processes)) => Err(Failure::usage(format!(
            "mpirun started {processes} processes, and each would train alone; write {}",
            spelled.mpi
        ))),
    }
}

impl Args {
    fn recipe(&self) -> Result<Recipe, Failure> {
        let recipe = match &self.recipe {
            Some(path) => Recipe::load(path),
            None => Recipe::parse(BUILTIN, Path::new("experiments/train-builtin.toml")),
        };
        Ok(recipe.map_err(TrainError::from)?)
    }

    /// What one rank does.
    fn on_rank(&self, comm: &Comm, cpu: &Cpu, limit_bytes: u64) -> Result<(), Failure> {
        let recipe = settle(comm, self.recipe())?;
        let Ranks { zero: stage, offload, tensor_parallel, .. } = self.ranks;
        let text = format!(
            "{} {} {stage} {offload:?} {tensor_parallel} {} {:?} {}",
            recipe.digest(),
            self.out.display(),
            self.resume,
            self.steps,
            cpu.isa().name()
        );
        comm.agree("its recipe, arguments or vector instructions", &text, "the same of all three")?;
        let options = Options {
            out: self.out.clone(),
            resume: self.resume,
            stop_after: self.steps,
            limit_bytes,
            environment: environment::probe(cpu.into(), &command_line()?),
        };
        let bar = if comm.rank() == 0 { ProgressBar::new(recipe.steps() as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} steps  {wide_msg}");
        bar.set_style(style.expect("the template is right").progress_chars("=> "));
        let mut drawn = Ok(());
        let place = Place { comm, cpu, stage, tensor_parallel, offload: offload.is_some() };
        run::run(&recipe, &place, &options, &mut |line| match line {
            Line::Step { step, length_tokens, loss, tokens_per_second, gflop_per_second, .. } => {
                bar.set_position(*step as u64);
                bar.set_message(format!(
                    "length {length_tokens}  loss {loss:.3}  {tokens_per_second:.0} tokens/s  {gflop_per_second:.0} GFLOP/s"
                ));
            }
            Line::Evaluation { .. } if drawn.is_ok() => drawn = training::draw(&self.out).map(|_| ()),
            _ => (),
        })?;
        bar.finish_and_clear();
        drawn?;
        if comm.rank() > 0 {
            return Ok(());
        }
        let (figures, record) = (training::draw(&self.out)?, self.out.join(RECORD));
        let of_ranks = if comm.size() > 1 { of_ranks(&record)? } else { String::new() };
        output::print(&format!("{}{of_ranks}record: {}\n", figures.summary, record.display()))
    }
}

/// A line for each rank of a record: what it took and sent in a step of the last length, beside the formulas.
fn of_ranks(record: &Path) -> Result<String, Failure> {
    let unreadable = |reason: String| Failure::work(format!("cannot read '{}': {reason}", record.display()));
    let text = std::fs::read_to_string(record).map_err(|error| unreadable(error.to_string()))?;
    let record: Value = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
    let notes = record["memory"].as_array().map(Vec::as_slice).unwrap_or_default();
    let last = notes.last().map(|note| &note["length_tokens"]);
    let lines = notes.iter().filter(|note| Some(&note["length_tokens"]) == last).map(|note| {
        let bytes = |name: &str| note[name].as_object().into_iter().flatten();
        let labels = bytes("peak_bytes").map(|(label, bytes)| format!("{label} {}", shown(bytes)));
        let agrees = |measured: &str, predicted: &str| match note[measured] == note[predicted] {
            true => "as predicted",
            false => "not as predicted",
        };
        format!(
            "rank {}: {}, {}; sent in a step {}, {}\n",
            note["rank"],
            labels.collect::<Vec<_>>().join(", "),
            agrees("peak_bytes", "predicted_bytes"),
            shown(&note["sent_bytes"]),
            agrees("sent_bytes", "predicted_sent_bytes"),
        )
    });
    Ok(lines.collect())
}

fn shown(bytes: &Value) -> String {
    units::bytes(bytes.as_u64().unwrap_or(0))
}

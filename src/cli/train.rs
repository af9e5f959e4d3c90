//! `kvsieve train`: a small model from a recipe, or gates that learn what a model's cache can do without.

use super::failure::Failure;
use super::ranks::{self, Spelled, launched, settle};
use super::{Compute, output};
use crate::device::Cpu;
use crate::experiment::environment;
use crate::ranks::{Comm, MOST_THREADS};
use crate::report::training;
use crate::tensor::DType;
use crate::train::Recompute;
use crate::train::dms::{self, Settings};
use crate::train::kvzap;
use crate::train::log::Line;
use crate::train::lora::Asked as Adapters;
use crate::train::optimizer::Kind;
use crate::train::recipe::{BUILTIN, Recipe};
use crate::train::run::{self, Options, Place, RECORD, TrainError};
use crate::train::tune::{self, Method};
use crate::units;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::str::FromStr;

const EXAMPLES: &str = "\
A recipe is a TOML file; without one it is that of the model that ships with kvsieve. The folder becomes one that \
Hugging Face's transformers and kvsieve load (config.json, model.safetensors, tokenizer.json), with a checkpoint, the \
log (training.jsonl), its figures (loss.svg, accuracy-2048.svg) and a record (training.json).\n\n\
With --method dms a model stays as it is, and gates learn which tokens its cache can do without; the folder gets \
policy.safetensors, which the policy 'dms' reads, a checkpoint, the log, figures and a record.\n\n\
With --method kvzap gates are fitted that foretell KVzip+'s scores, for the policies 'kvzap' and 'gate'; the model repeats --steps \
sequences of the text for that. The folder gets policy.safetensors, a checkpoint, the log, a figure and a record.\n\n\
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
  kvsieve train --method kvzap --model SmolLM2.gguf --text book.txt --steps 200 --out surrogate
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
    /// sequences [default: 500; kvzap: 100]
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
    #[arg(long, value_name = "0-3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    zero: u8,
    /// Ranks that share each block, its heads and the MLP's inner elements; the others read other sequences
    #[arg(long, value_name = "N", default_value_t = 1, requires = "ranks")]
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

/// What every `--method` is asked.
#[derive(clap::Args)]
#[command(next_help_heading = "Training on a loaded model")]
struct Loaded {
    /// What is trained in place of a recipe's model: gates that evict (dms) or foretell scores (kvzap), adapters (lora; qlora beside packed matrices) or all
    /// parameters (full)
    #[arg(long, value_name = "NAME", value_parser = ["dms", "kvzap", "lora", "qlora", "full"], requires = "model")]
    method: Option<String>,
    /// Model to train on: a folder, a GGUF file, or builtin
    #[arg(long, value_name = "DIR|FILE.gguf", requires = "method")]
    model: Option<PathBuf>,
    /// Text to learn from [default: for dms generated text and tasks]
    #[arg(long, value_name = "FILE", requires = "method")]
    text: Option<PathBuf>,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "method")]
    length: usize,
    /// Sequences that go through the model together
    #[arg(long, value_name = "N", default_value_t = 1, requires = "method")]
    batch: usize,
    /// First number of everything random
    #[arg(long, value_name = "N", default_value_t = 0, requires = "method")]
    seed: u64,
    /// Largest learning rate [default: 0.0001]
    #[arg(long, value_name = "X", requires = "method")]
    learning_rate: Option<f32>,
    /// Type in which matrices are multiplied and, but for qlora, kept: f32, or bf16, which takes half the memory and less time
    /// [default: bf16 for lora and qlora, else f32]
    #[arg(long, value_name = "TYPE", value_parser = weights, requires = "method")]
    weights: Option<DType>,
}

/// What is asked of `--method dms`.
#[derive(clap::Args)]
#[command(next_help_heading = "Gates of evicted tokens")]
struct Gates {
    /// Tokens for each that stays, behind the window; of several, as 2,4,8, each is reached in turn and leaves its gates [default: 4]
    #[arg(long, value_name = "R", value_delimiter = ',', requires = "method")]
    ratio: Vec<f64>,
    /// Recent tokens that are not evicted yet [default: 256]
    #[arg(long, value_name = "N", requires = "method")]
    window: Option<usize>,
    /// Weight of the term of the loss that asks for eviction [default: 1]
    #[arg(long, value_name = "X", requires = "method")]
    pressure: Option<f64>,
}

/// What is asked of `--method lora`, `qlora` and `full`.
#[derive(clap::Args)]
#[command(next_help_heading = "Fine-tuning")]
struct Tuning {
    /// Rank of adapters [default: 8]
    #[arg(long, value_name = "R", requires = "method")]
    rank: Option<usize>,
    /// Adapters' outputs have the factor alpha / rank [default: 16]
    #[arg(long, value_name = "X", requires = "method")]
    alpha: Option<f32>,
    /// Matrices of each block that get an adapter, as q,v or q_proj, or all-linear [default: q,v]
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "method")]
    target: Vec<String>,
    /// Batches whose gradients are added up for a step [default: 1]
    #[arg(long, value_name = "N", requires = "method")]
    accumulate: Option<usize>,
    /// What the backward pass computes again: none, selective or full [default: as little as there is memory for]
    #[arg(long, value_name = "MODE", value_parser = recompute, requires = "method")]
    recompute: Option<Recompute>,
    /// adamw, adamw-8bit or adafactor [default: adamw]
    #[arg(long, value_name = "NAME", requires = "method")]
    optimizer: Option<Kind>,
}

/// What `--weights` says.
fn weights(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::Bf16)) => Ok(dtype),
        _ => Err(format!("'{text}' is neither f32 nor bf16")),
    }
}

/// What `--recompute` says.
fn recompute(text: &str) -> Result<Recompute, String> {
    let known = ["none", "selective", "full"].into_iter().zip(Recompute::ALL);
    let found = known.into_iter().find(|(name, _)| *name == text);
    found.map(|(_, mode)| mode).ok_or_else(|| format!("'{text}' is neither none nor selective nor full"))
}

/// What `--method` asks for.
enum OnLoaded {
    Gates(Settings),
    Surrogate(kvzap::Settings),
    Tuning(tune::Settings),
}

impl Args {
    /// What is trained on a loaded model, if that is asked for.
    fn on_loaded(&self) -> Result<Option<OnLoaded>, Failure> {
        let Loaded { length, batch, seed, .. } = self.loaded;
        let learning_rate = self.loaded.learning_rate.unwrap_or(1e-4);
        let (Some(name), Some(model)) = (&self.loaded.method, self.loaded.model.clone()) else { return Ok(None) };
        let (text, steps) = (self.loaded.text.clone(), self.steps.unwrap_or(500));
        let needed = |text: Option<PathBuf>| {
            text.ok_or_else(|| Failure::usage(format!("--method {name} learns from a text; give --text FILE")))
        };
        let method = match name.as_str() {
            "kvzap" => {
                let given =
                    [("--batch", batch != 1, false), ("--learning-rate", self.loaded.learning_rate.is_some(), false)];
                self.refuse(name, &[&given[..], &self.gates.given(), &self.tuning.given()].concat())?;
                let (text, dtype) = (needed(text)?, self.loaded.weights.unwrap_or(DType::F32));
                let steps = self.steps.unwrap_or(100);
                return Ok(Some(OnLoaded::Surrogate(kvzap::Settings { model, text, steps, length, seed, dtype })));
            }
            "lora" => Method::Lora,
            "qlora" => Method::Qlora,
            "full" => Method::Full,
            _ => {
                let Gates { window, pressure, .. } = self.gates;
                self.refuse(name, &self.tuning.given())?;
                let ratios = if self.gates.ratio.is_empty() { vec![4.0] } else { self.gates.ratio.clone() };
                let (window, pressure) = (window.unwrap_or(256), pressure.unwrap_or(1.0));
                let weights = self.loaded.weights.unwrap_or(DType::F32);
                let settings = Settings {
                    model,
                    ratios,
                    window,
                    text,
                    steps,
                    length,
                    batch,
                    seed,
                    learning_rate,
                    pressure,
                    weights,
                };
                return Ok(Some(OnLoaded::Gates(settings)));
            }
        };
        let Tuning { rank, alpha, accumulate, recompute, optimizer, .. } = self.tuning;
        self.refuse(name, &self.gates.given())?;
        let text = needed(text)?;
        let mut adapters = None;
        if method == Method::Full {
            self.refuse(name, &self.tuning.given().into_iter().filter(|given| given.2).collect::<Vec<_>>())?;
        } else {
            let targets = &self.tuning.target;
            let targets = if targets.is_empty() { vec!["q".into(), "v".into()] } else { targets.clone() };
            adapters = Some(Adapters { rank: rank.unwrap_or(8), alpha: alpha.unwrap_or(16.0), targets });
        }
        let default = if method == Method::Full { DType::F32 } else { DType::Bf16 };
        Ok(Some(OnLoaded::Tuning(tune::Settings {
            method,
            model,
            text,
            steps,
            length,
            batch,
            accumulate: accumulate.unwrap_or(1),
            seed,
            learning_rate,
            weights: self.loaded.weights.unwrap_or(default),
            recompute,
            optimizer: optimizer.unwrap_or(Kind::Adamw),
            adapters,
        })))
    }

    /// Refuses what was given of options that a method does not read.
    fn refuse(&self, method: &str, given: &[(&str, bool, bool)]) -> Result<(), Failure> {
        match given.iter().find(|(_, given, _)| *given) {
            Some((option, ..)) => {
                Err(Failure::usage(format!("{option} is nothing to --method {method}; leave it out")))
            }
            None => Ok(()),
        }
    }
}

impl Gates {
    /// Options, whether each was given, and whether it is of adapters.
    fn given(&self) -> [(&'static str, bool, bool); 3] {
        [
            ("--ratio", !self.ratio.is_empty(), false),
            ("--window", self.window.is_some(), false),
            ("--pressure", self.pressure.is_some(), false),
        ]
    }
}

impl Tuning {
    /// Likewise.
    fn given(&self) -> [(&'static str, bool, bool); 6] {
        [
            ("--rank", self.rank.is_some(), true),
            ("--alpha", self.alpha.is_some(), true),
            ("--target", !self.target.is_empty(), true),
            ("--accumulate", self.accumulate.is_some(), false),
            ("--recompute", self.recompute.is_some(), false),
            ("--optimizer", self.optimizer.is_some(), false),
        ]
    }
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    output::check_folder("--out", &args.out)?;
    match args.on_loaded()? {
        Some(OnLoaded::Gates(settings)) => return run_gates(args, &settings),
        Some(OnLoaded::Surrogate(settings)) => return run_surrogate(args, &settings),
        Some(OnLoaded::Tuning(settings)) => return run_tuning(args, &settings),
        None => (),
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
        let shown = self.recipe.as_ref().map(|path| format!(" {}", path.display())).unwrap_or_default();
        let options = Options {
            out: self.out.clone(),
            resume: self.resume,
            stop_after: self.steps,
            limit_bytes,
            environment: environment::probe(cpu.into(), &format!("kvsieve train{shown} --out {}", self.out.display())),
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

/// Where `--method` trains, and a bar of its steps.
fn options(args: &Args, cpu: &Cpu, method: &str, model: &Path, steps: usize) -> (Options, ProgressBar) {
    let command = format!("kvsieve train --method {method} --model {}", model.display());
    let options = Options {
        out: args.out.clone(),
        resume: args.resume,
        stop_after: None,
        limit_bytes: args.compute.limit_bytes(),
        environment: environment::probe(cpu.into(), &command),
    };
    let bar = ProgressBar::new(steps as u64);
    let style = "{elapsed_precise} [{bar:30}] {pos}/{len} steps, {eta} left  {wide_msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("the template is right").progress_chars("=> "));
    (options, bar)
}

/// `--method lora`, `qlora` and `full`.
fn run_tuning(args: &Args, settings: &tune::Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, settings.method.name(), &settings.model, settings.steps);
    let mut drawn = Ok(());
    tune::run(settings, &cpu, &options, &mut |line| match line {
        Line::Step { step, loss, tokens_per_second, .. } => {
            bar.set_position(*step as u64);
            bar.set_message(format!("loss {loss:.3}  {tokens_per_second:.0} tokens/s"));
        }
        Line::HeldOut { .. } if drawn.is_ok() => drawn = training::draw(&args.out).map(|_| ()),
        _ => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    output::print(&format!(
        "{}model: {}\nrecord: {}\n",
        figures.summary,
        args.out.display(),
        args.out.join(RECORD).display()
    ))
}

/// `--method kvzap`.
fn run_surrogate(args: &Args, settings: &kvzap::Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, "kvzap", &settings.model, settings.steps);
    let mut found = None;
    kvzap::run(settings, &cpu, &options, &mut |line| match line {
        Line::Repeated { step, .. } => bar.set_position(*step as u64),
        Line::Fitted { held_out, .. } => {
            bar.set_message(format!("explains {:.1}% of held-out scores", 100.0 * held_out));
            found = Some(*held_out);
        }
        _ => (),
    })?;
    bar.finish_and_clear();
    training::draw(&args.out)?;
    let summary = found.map_or(String::new(), |held_out| {
        format!("explains {:.1}% of the variance of held-out scores\n", 100.0 * held_out)
    });
    let (policy, record) = (args.out.join(kvzap::POLICY), args.out.join(RECORD));
    output::print(&format!("{summary}gates: {}\nrecord: {}\n", policy.display(), record.display()))
}

/// `--method dms`.
fn run_gates(args: &Args, settings: &Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, "dms", &settings.model, settings.steps);
    let mut drawn = Ok(());
    dms::run(settings, &cpu, &options, &mut |line| match line {
        Line::Gates { step, kl, evicted, target, tokens_per_second, .. } => {
            bar.set_position(*step as u64);
            let (evicted, target) = (100.0 * evicted, 100.0 * target);
            bar.set_message(format!(
                "KL {kl:.4}  {evicted:.1}% of {target:.1}% evicted  {tokens_per_second:.0} tokens/s"
            ));
        }
        Line::HeldOutGates { .. } if drawn.is_ok() => drawn = training::draw(&args.out).map(|_| ()),
        _ => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    let (policy, record) = (args.out.join(dms::POLICY), args.out.join(RECORD));
    output::print(&format!("{}gates: {}\nrecord: {}\n", figures.summary, policy.display(), record.display()))
}

//! `kvsieve train`: a small model from a recipe, or gates that learn what a model's cache can do without.

use super::failure::Failure;
use super::{Compute, output};
use crate::experiment::environment;
use crate::report::training;
use crate::tensor::DType;
use crate::train::dms::{self, Settings};
use crate::train::log::Line;
use crate::train::recipe::{BUILTIN, Recipe};
use crate::train::run::{self, Options, RECORD, TrainError};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
A recipe is a TOML file; without one it is that of the model that ships with kvsieve. The folder becomes one that \
Hugging Face's transformers and kvsieve load (config.json, model.safetensors, tokenizer.json), with a checkpoint, the \
log (training.jsonl), its figures (loss.svg, accuracy-2048.svg) and a record (training.json).\n\n\
With --method dms a model stays as it is, and gates learn which tokens its cache can do without; the folder gets \
policy.safetensors, which the policy 'dms' reads, a checkpoint, the log, figures and a record.\n\n\
Examples:
  kvsieve train --out model                     the built-in model; half an hour to an hour on two cores
  kvsieve train my.toml --out model             your own recipe
  kvsieve train my.toml --out model --resume    go on where a run was stopped or killed, with the same bits
  kvsieve train my.toml --out model --steps 20  only the first 20 steps, to see how fast it is
  kvsieve train --method dms --model builtin --ratio 4 --window 32 --steps 300 --out gates
  kvsieve train --method dms --model SmolLM2.gguf --ratio 4 --window 256 --text book.txt --steps 500 --out gates";

/// Train a small model, or gates of evicted tokens on any
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
    /// Stop after this step of the recipe, --resume goes on from there; with --method all steps that there are [default: 500]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    #[command(flatten)]
    gates: Gates,
    #[command(flatten)]
    compute: Compute,
}

/// What is asked of `--method`.
#[derive(clap::Args)]
#[command(next_help_heading = "Gates of evicted tokens")]
struct Gates {
    /// What is trained in place of a recipe's model: gates that evict (dms)
    #[arg(long, value_name = "NAME", value_parser = ["dms"], requires = "model")]
    method: Option<String>,
    /// Model that stays as it is: a folder, a GGUF file, or builtin
    #[arg(long, value_name = "DIR|FILE.gguf", requires = "method")]
    model: Option<PathBuf>,
    /// Tokens for each that stays, behind the window; of several, as 2,4,8, each is reached in turn and leaves its gates
    #[arg(long, value_name = "R", default_value = "4", value_delimiter = ',', requires = "method")]
    ratio: Vec<f64>,
    /// Recent tokens that are not evicted yet
    #[arg(long, value_name = "N", default_value_t = 256, requires = "method")]
    window: usize,
    /// Text to learn from [default: generated text and tasks]
    #[arg(long, value_name = "FILE", requires = "method")]
    text: Option<PathBuf>,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "method")]
    length: usize,
    /// Sequences of a step
    #[arg(long, value_name = "N", default_value_t = 1, requires = "method")]
    batch: usize,
    /// First number of everything random
    #[arg(long, value_name = "N", default_value_t = 0, requires = "method")]
    seed: u64,
    /// Largest learning rate
    #[arg(long, value_name = "X", default_value_t = 1e-4, requires = "method")]
    learning_rate: f32,
    /// Weight of the term of the loss that asks for eviction
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "method")]
    pressure: f64,
    /// Type of the model's matrices: f32, or bf16, which takes half the memory and less time
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = weights, requires = "method")]
    weights: DType,
}

/// What `--weights` says.
fn weights(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::Bf16)) => Ok(dtype),
        _ => Err(format!("'{text}' is neither f32 nor bf16")),
    }
}

impl Gates {
    fn settings(&self, steps: Option<usize>) -> Option<Settings> {
        let Gates { window, length, batch, seed, learning_rate, pressure, weights, .. } = *self;
        let (model, text) = (self.model.clone()?, self.text.clone());
        let (ratios, steps) = (self.ratio.clone(), steps.unwrap_or(500));
        Some(Settings { model, ratios, window, text, steps, length, batch, seed, learning_rate, pressure, weights })
    }
}

pub fn run(args: &Args) -> Result<(), Failure> {
    if let Some(settings) = args.gates.settings(args.steps) {
        return run_gates(args, &settings);
    }
    let recipe = match &args.recipe {
        Some(path) => Recipe::load(path).map_err(TrainError::from)?,
        None => Recipe::parse(BUILTIN, Path::new("experiments/train-builtin.toml")).map_err(TrainError::from)?,
    };
    args.compute.refuse_cuda()?;
    output::check_folder("--out", &args.out)?;
    let cpu = args.compute.cpu()?;
    let shown = args.recipe.as_ref().map(|path| format!(" {}", path.display())).unwrap_or_default();
    let options = Options {
        out: args.out.clone(),
        resume: args.resume,
        stop_after: args.steps,
        limit_bytes: args.compute.limit_bytes(),
        environment: environment::probe((&cpu).into(), &format!("kvsieve train{shown} --out {}", args.out.display())),
    };
    let bar = ProgressBar::new(recipe.steps() as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} steps  {wide_msg}");
    bar.set_style(style.expect("the template is right").progress_chars("=> "));
    let mut drawn = Ok(());
    run::run(&recipe, &cpu, &options, &mut |line| match line {
        Line::Step { step, length_tokens, loss, tokens_per_second, gflop_per_second, .. } => {
            bar.set_position(*step as u64);
            bar.set_message(format!(
                "length {length_tokens}  loss {loss:.3}  {tokens_per_second:.0} tokens/s  {gflop_per_second:.0} GFLOP/s"
            ));
        }
        Line::Evaluation { .. } if drawn.is_ok() => drawn = training::draw(&args.out).map(|_| ()),
        Line::Evaluation { .. } | Line::Gates { .. } | Line::HeldOutGates { .. } => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    output::print(&format!("{}record: {}\n", figures.summary, args.out.join(RECORD).display()))
}

/// `--method dms`.
fn run_gates(args: &Args, settings: &Settings) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    output::check_folder("--out", &args.out)?;
    let cpu = args.compute.cpu()?;
    let command = format!("kvsieve train --method dms --model {}", settings.model.display());
    let options = Options {
        out: args.out.clone(),
        resume: args.resume,
        stop_after: None,
        limit_bytes: args.compute.limit_bytes(),
        environment: environment::probe((&cpu).into(), &command),
    };
    let bar = ProgressBar::new(settings.steps as u64);
    let style = "{elapsed_precise} [{bar:30}] {pos}/{len} steps, {eta} left  {wide_msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("the template is right").progress_chars("=> "));
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

//! `kvsieve train`: a small model from a recipe.

use super::failure::Failure;
use super::{Compute, output};
use crate::experiment::environment;
use crate::report::training;
use crate::train::log::Line;
use crate::train::recipe::{BUILTIN, Recipe};
use crate::train::run::{self, Options, RECORD, TrainError};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
A recipe is a TOML file; without one it is that of the model that ships with kvsieve. The folder becomes one that \
Hugging Face's transformers and kvsieve load (config.json, model.safetensors, tokenizer.json), with a checkpoint, the \
log (training.jsonl), its figures (loss.svg, accuracy-2048.svg) and a record (training.json).\n\n\
Examples:
  kvsieve train --out model                     the built-in model; half an hour to an hour on two cores
  kvsieve train my.toml --out model             your own recipe
  kvsieve train my.toml --out model --resume    go on where a run was stopped or killed, with the same bits
  kvsieve train my.toml --out model --steps 20  only the first 20 steps, to see how fast it is";

/// Train a small model on generated tasks and text
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Recipe [default: the built-in model's]
    #[arg(value_name = "RECIPE")]
    recipe: Option<PathBuf>,
    /// Folder for the model and all that belongs to it
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Go on with the run in the folder
    #[arg(long)]
    resume: bool,
    /// Stop after this step of the recipe; --resume goes on from there
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    #[command(flatten)]
    compute: Compute,
}

pub fn run(args: &Args) -> Result<(), Failure> {
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
        Line::Evaluation { .. } => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    output::print(&format!("{}record: {}\n", figures.summary, args.out.join(RECORD).display()))
}

//! The command line: one file per subcommand, each of which parses, calls the library and prints.
//!
//! It is part of the library, so that a program of a few lines is a whole `kvsieve` with a policy of its own
//! ([`main_with`]).
//!
//! A new command is one file with `Args` and `run`, one line in `Command` and one in `Command::run`. What several
//! commands share is here: where work runs (`Compute`) and how results leave the program (`output`). Every error
//! of the library is classed once, in `failure`, so that `?` is all a command needs.

mod attend;
mod calibrate;
mod capture;
mod completions;
mod doctor;
mod eval;
mod evict;
mod failure;
mod generate;
mod hardware;
mod inspect;
mod kernels;
mod list;
mod logits;
mod memory;
mod model;
mod names;
mod output;
mod plan;
mod policy;
mod progress;
mod quantize;
mod ranks;
mod report;
mod run;
mod slurm;
mod train;

use crate::device::Cpu;
use crate::experiment::engine::MODELS_ON_CPU;
use crate::memory::os;
use crate::policy::Registry;
use crate::units;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use failure::Failure;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  kvsieve run                       the first figures: memory, latency and drift against context
  kvsieve run eviction-catalogue    every eviction policy at several budgets
  kvsieve slurm my.toml --tasks 16  an experiment on a cluster
  kvsieve doctor                    what this machine offers
  kvsieve plan --model llama-3-8b --gpu rtx-4090 --context 32k
                                    where memory goes, what fits, what to change first
  kvsieve list policies             the eviction policies and their parameters
  kvsieve attend --input qkv.safetensors --output o.safetensors --kernel tiled --causal
                                    attention over your own tensors: time, memory, drift
  kvsieve evict --input qkv.safetensors --output kept.safetensors --policy snapkv --budget 0.25
                                    which tokens a policy keeps of your own tensors
  kvsieve generate --model DIR --prompt 'Once upon a time' --policy snapkv --budget 0.25
                                    a model of your own, with a policy at work in its cache
  kvsieve eval                      what a model still answers, by policy and budget
  kvsieve quantize --model DIR --format q4_k_m --output model.gguf
                                    a model's weights in fewer bits, and what each tensor lost
  kvsieve memory write --memory larimar --input facts.safetensors --output memory.safetensors
                                    a memory of facts: vectors written, read and forgotten
  kvsieve train --out model         a small model, from nothing, that finds what its context hides
  kvsieve kernels build --arch sm_90a
                                    the CUDA kernels, compiled before there is a GPU
  kvsieve completions bash          completions for your shell

Exit status: 0 done, 1 failed while working, 2 the input or the arguments are wrong.
Every command has examples of its own: kvsieve COMMAND --help";

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("KVSIEVE_GIT_REV"), ")");

/// Measures what attention costs at a context length, and what may be thrown away
#[derive(Parser)]
#[command(name = "kvsieve", version = VERSION, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Run(run::Args),
    Report(report::Args),
    Slurm(slurm::Args),
    Plan(plan::Args),
    Attend(attend::Args),
    Evict(evict::Args),
    Logits(logits::Args),
    Generate(generate::Args),
    Eval(eval::Args),
    Capture(capture::Args),
    Calibrate(calibrate::Args),
    Inspect(inspect::Args),
    Train(train::Args),
    Quantize(quantize::Args),
    Memory(memory::Args),
    List(list::Args),
    Doctor(doctor::Args),
    Kernels(kernels::Args),
    Completions(completions::Args),
}

impl Command {
    fn run(self, registry: &Registry) -> Result<(), Failure> {
        match self {
            Command::Run(args) => run::run(&args, registry),
            Command::Report(args) => report::run(&args),
            Command::Slurm(args) => slurm::run(&args, registry),
            Command::Plan(args) => plan::run(&args),
            Command::Attend(args) => attend::run(&args),
            Command::Evict(args) => evict::run(&args, registry),
            Command::Logits(args) => logits::run(&args, registry),
            Command::Generate(args) => generate::run(&args, registry),
            Command::Eval(args) => eval::run(&args, registry),
            Command::Capture(args) => capture::run(&args),
            Command::Calibrate(args) => calibrate::run(&args),
            Command::Inspect(args) => inspect::run(&args, registry),
            Command::Train(args) => train::run(&args),
            Command::Quantize(args) => quantize::run(&args),
            Command::Memory(args) => memory::run(&args),
            Command::List(args) => list::run(&args, registry),
            Command::Doctor(args) => doctor::run(&args),
            Command::Kernels(args) => kernels::run(&args),
            Command::Completions(args) => completions::run(&args),
        }
    }
}

/// Commands that run on the CPU alone: they refuse a GPU in words, and their help does not offer one.
const ON_CPU: [&str; 7] = ["eval", "capture", "calibrate", "inspect", "train", "quantize", "memory"];

fn command() -> clap::Command {
    let hide = |command: clap::Command| {
        ["device", "nvrtc"].into_iter().fold(command, |command, name| command.mut_arg(name, |arg| arg.hide(true)))
    };
    take_negative_numbers(ON_CPU.into_iter().fold(Cli::command(), |whole, name| whole.mut_subcommand(name, hide)))
}

/// Lets `-1` be the value of any option, so that it is refused as a value and not as an option of that name.
fn take_negative_numbers(command: clap::Command) -> clap::Command {
    let of_option = |arg: clap::Arg| {
        let is_option = !arg.is_positional() && arg.get_action().takes_values();
        if is_option { arg.allow_negative_numbers(true) } else { arg }
    };
    command.mut_args(of_option).mut_subcommands(take_negative_numbers)
}

/// The `kvsieve` command with the policies of a registry: does what the arguments of the process say, turns an error into
/// one line and an exit status. Help and version texts are printed and end the process here.
///
/// ```no_run
/// kvsieve::cli::main_with(kvsieve::policy::Registry::default());
/// ```
pub fn main_with(registry: Registry) -> ExitCode {
    match run(&registry) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody reads a closed stderr; that must not turn an error into a panic.
            let _ = writeln!(std::io::stderr(), "error: {failure}");
            failure.exit_code()
        }
    }
}

fn run(registry: &Registry) -> Result<(), Failure> {
    let matches = command().try_get_matches().map_err(wrong_arguments)?;
    Cli::from_arg_matches(&matches).map_err(wrong_arguments)?.command.run(registry)
}

/// clap's account of wrong arguments in one line: what was wrong and its tips, without the usage text.
fn wrong_arguments(error: clap::Error) -> Failure {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand) {
        error.exit();
    }
    let text = error.to_string();
    let paragraphs = text.strip_prefix("error: ").unwrap_or(&text).split("\n\n");
    let said = paragraphs.filter(|text| !text.starts_with("Usage:") && !text.starts_with("For more information"));
    let said = said.map(str::trim).collect::<Vec<_>>().join("; ");
    let said = said.replace("invalid digit found in string", "a whole number without a sign is needed");
    Failure::usage(said.replace("number would be zero for non-zero type", "at least 1 is needed"))
}

/// The command that this process was started with, as a shell reads it: records tell it.
///
/// # Errors
/// When a word of it is no text.
fn command_line() -> Result<String, Failure> {
    let quoted = |word: OsString| match word.into_string() {
        Ok(word) => Ok(shell_word(&word)),
        Err(word) => Err(Failure::usage(format!(
            "'{}' is not UTF-8, and records tell commands and files as text; give it another name",
            word.display()
        ))),
    };
    let words = std::env::args_os().skip(1).map(quoted).collect::<Result<Vec<_>, _>>()?;
    Ok(std::iter::once("kvsieve".to_string()).chain(words).collect::<Vec<_>>().join(" "))
}

/// A word as a shell reads it back.
fn shell_word(word: &str) -> String {
    match word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=,+@".contains(c)) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// What a text file that `--text` names says.
fn read_text(path: &Path) -> Result<String, Failure> {
    let wrong = |why: String| Failure::usage(format!("cannot read --text '{}': {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    if text.is_empty() { Err(wrong("it is empty".into())) } else { Ok(text) }
}

/// Where a command computes: the options of every command that does.
#[derive(clap::Args)]
#[command(next_help_heading = "Where it runs")]
struct Compute {
    /// Device that computes
    #[arg(long, value_name = "cpu|cuda[:N]", default_value = "cpu")]
    device: String,
    /// Threads that compute [default: RAYON_NUM_THREADS, else every core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// NVRTC for --device cuda [default: KVSIEVE_NVRTC, else the first that doctor lists]
    #[arg(long, value_name = "libnvrtc.so")]
    nvrtc: Option<PathBuf>,
    /// Most memory that tensors may take, as 8GiB or 512MiB; ranks of a machine share it [default: 80% of what is available; a GPU's
    /// free memory]
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes)]
    limit_memory: Option<u64>,
}

impl Compute {
    /// The number of the GPU that was asked for; `None` for anything else, which [`Compute::cpu`] checks: every command
    /// asks this first.
    fn cuda(&self) -> Option<usize> {
        match self.device.strip_prefix("cuda")? {
            "" => Some(0),
            rest => rest.strip_prefix(':')?.parse::<u16>().ok().map(usize::from),
        }
    }

    /// The CPU, with as many threads as were asked for.
    fn cpu(&self) -> Result<Cpu, Failure> {
        match self.device.as_str() {
            "cpu" if self.nvrtc.is_some() => {
                Err(Failure::usage("--nvrtc compiles kernels of --device cuda; leave it out".into()))
            }
            "cpu" => Ok(Cpu::new(self.threads)?),
            device => Err(Failure::usage(format!("unknown device '{device}'; use cpu or cuda[:N]"))),
        }
    }

    /// Refuses a GPU where a model is to run in a way that none does yet.
    fn refuse_cuda(&self) -> Result<(), Failure> {
        match self.cuda() {
            None => Ok(()),
            Some(_) => Err(Failure::usage(format!("--device {}: {MODELS_ON_CPU} here; leave it out", self.device))),
        }
    }

    /// The limit that was asked for, or the default one.
    fn limit_bytes(&self) -> u64 {
        self.limit_memory.or_else(os::default_limit_bytes).unwrap_or(u64::MAX)
    }
}

//! `kvsieve run`: experiments, from their files to a report.

use super::failure::Failure;
use super::{Compute, output, progress, report};
use crate::device::Cpu;
use crate::experiment::SHIPPED;
use crate::experiment::cell::Cell;
use crate::experiment::max_context::{self, MaxContext};
use crate::experiment::record::Status;
use crate::experiment::store::ENVIRONMENT;
use crate::experiment::{Engine, Experiment, Gpu, Options, Outcome, Spec, estimate, runner};
use crate::policy::Registry;
use crate::report::Detail;
use crate::units;
use crate::workload::FileSource;
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Results go to OUT/<experiment>/<time>-<hash>-<revision>/: records as cells.jsonl, figures as SVG and CSV, summary.md and \
report.html.\n\n\
Examples:
  kvsieve run                                   quickstart: the first figures, in a few minutes
  kvsieve run eviction-catalogue --dry-run      the cells, what memory and time each will take
  kvsieve run my.toml --out results             your own experiment
  kvsieve run my.toml --resume                  go on where a run was stopped or killed
  kvsieve run my.toml --join                    one more process on the same run
  kvsieve run my.toml --shard 1/4               a quarter of the cells
  kvsieve run my.toml --limit-memory 8GiB       cells that would need more are recorded as oom
  kvsieve run --device cuda                     on an NVIDIA GPU; what has no kernel there is skipped
  kvsieve run memory-vs-context --find-max-context --limit-memory 64MiB
                                                the longest context that really runs, beside the predicted one";

/// Run experiments and draw their figures
#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// Experiment files, or names of shipped experiments
    #[arg(value_name = "EXPERIMENT", default_value = "experiments/quickstart.toml")]
    experiments: Vec<PathBuf>,
    /// Folder for results
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Go on with the latest run of the same configuration: only missing cells run
    #[arg(long)]
    resume: bool,
    /// Share the latest run of the same configuration with every other process that joins it, or begin one: each claims
    /// whole comparisons until none is left
    #[arg(long, conflicts_with_all = ["resume", "shard", "find_max_context"])]
    join: bool,
    /// List the cells with predicted memory and time, and run nothing but the samples that tell the time of evaluations
    #[arg(long, conflicts_with_all = ["resume", "join", "json", "shard"])]
    dry_run: bool,
    /// Instead of measuring, find for each kernel and shape the longest context that really runs: predicted from the
    /// formula, then tried and bisected
    #[arg(long, conflicts_with_all = ["dry_run", "resume", "shard"])]
    find_max_context: bool,
    /// Run only shard I of N; shards cost about the same
    #[arg(long, value_name = "I/N", value_parser = parse_shard)]
    shard: Option<(usize, usize)>,
    #[command(flatten)]
    compute: Compute,
    /// Print each record as a line of JSON to standard output (-) instead of the summary
    #[arg(long, value_name = "-", value_parser = ["-"], help_heading = "What is reported")]
    json: Option<String>,
}

fn after_help() -> String {
    let names = SHIPPED.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    format!("An experiment is a TOML file, or the name of one that comes with kvsieve: {names}. {EXAMPLES}")
}

fn parse_shard(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("'{text}' is not a shard; write I/N with 1 <= I <= N, such as 1/4");
    let (index, count) = text.split_once('/').ok_or_else(wrong)?;
    let (index, count) = (index.parse().map_err(|_| wrong())?, count.parse().map_err(|_| wrong())?);
    if index >= 1 && index <= count { Ok((index, count)) } else { Err(wrong()) }
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    let named = &args.experiments;
    if let Some(at) = (1..named.len()).find(|&at| named[..at].contains(&named[at])) {
        return Err(Failure::usage(format!("'{}' is named twice; name each experiment once", named[at].display())));
    }
    let load = |path: &PathBuf| Ok((Spec::load(path)?, path.display().to_string(), args.repro(path)));
    let specs = named.iter().map(load).collect::<Result<Vec<_>, Failure>>()?;
    let way = Way {
        registry,
        out: &args.out,
        resume: args.resume,
        join: args.join,
        dry_run: args.dry_run,
        find_max_context: args.find_max_context,
        shard: args.shard,
        compute: &args.compute,
        json: args.json.is_some(),
    };
    way.go(&specs)
}

/// How experiments are run.
pub struct Way<'a> {
    /// Policies that may be named.
    pub registry: &'a Registry,
    /// Folder for results.
    pub out: &'a Path,
    pub resume: bool,
    pub join: bool,
    pub dry_run: bool,
    pub find_max_context: bool,
    pub shard: Option<(usize, usize)>,
    pub compute: &'a Compute,
    /// Whether records go to standard output instead of the summary.
    pub json: bool,
}

impl Way<'_> {
    /// Runs experiments, each with where it comes from and the command that runs it again.
    pub fn go(&self, specs: &[(Spec, String, String)]) -> Result<(), Failure> {
        if !self.dry_run {
            specs.iter().try_for_each(|(spec, ..)| output::check_folder("--out", &self.out.join(&spec.name)))?;
        }
        match self.compute.cuda() {
            None => self.go_on(specs, Engine::Cpu(&self.compute.cpu()?)),
            Some(index) => {
                let cpu = Cpu::new(self.compute.threads)?;
                self.go_on(specs, Engine::Cuda(&Gpu::open(index, self.compute.nvrtc.as_deref(), cpu)?))
            }
        }
    }

    fn go_on(&self, specs: &[(Spec, String, String)], engine: Engine<'_>) -> Result<(), Failure> {
        // Every experiment is read and checked before the first one runs.
        let mut experiments = Vec::new();
        for (spec, origin, repro) in specs {
            let experiment = Experiment::new(spec.clone(), origin, self.registry, engine.device())?;
            runner::prepare(&experiment, self.registry, engine)?;
            output::warn(experiment.file.as_ref().and_then(FileSource::warning).as_slice());
            experiments.push((repro, experiment));
        }
        let mut failed = Vec::new();
        for &(repro, ref experiment) in &experiments {
            if self.find_max_context {
                self.find_max_contexts(repro, experiment, self.registry, engine)?;
                continue;
            }
            let limit_bytes = self.limit_bytes(experiment, engine)?;
            if self.dry_run {
                let cells = runner::prepare(experiment, self.registry, engine)?;
                let others: Vec<_> = experiment.in_comparisons().collect();
                let timing = &experiment.spec.timing;
                output::print(&estimate::table(&cells, &others, self.registry, timing, engine, limit_bytes))?;
                continue;
            }
            let seconds = self.announce(experiment, engine, limit_bytes);
            let options = Options {
                out: self.out.into(),
                resume: self.resume,
                join: self.join,
                shard: self.shard,
                limit_bytes,
                repro: repro.clone(),
            };
            if self.resume {
                self.say_what_is_there(experiment, &options);
            }
            let outcome = progress::with(self.json, seconds, |progress| {
                runner::run(experiment, self.registry, engine, &options, progress).map_err(Failure::from)
            })?;
            failed.extend(outcome.failed.iter().cloned());
            if outcome.missing > 0 {
                output::note(&left(&outcome));
                continue;
            }
            if outcome.records.is_empty() {
                output::note(
                    "no cell is this shard's: comparisons are dealt whole, and there are fewer of them than shards",
                );
                continue;
            }
            let drawn = report::draw(&outcome.folder, std::slice::from_ref(&outcome.folder), Detail::Layers)?;
            if !self.json {
                output::print(&ending(&outcome, &drawn.html))?;
            }
        }
        match failed.first() {
            None => Ok(()),
            Some(first) => Err(Failure::work(format!(
                "{} of the cells failed; the first is '{}': {}",
                failed.len(),
                first.cell.label(),
                first.reason.as_deref().unwrap_or("no reason given")
            ))),
        }
    }

    /// Tells where there is nothing to go on with, or not what says where it was begun.
    fn say_what_is_there(&self, experiment: &Experiment, options: &Options) {
        match runner::earlier(experiment, options) {
            None => output::note(&format!(
                "no run of this configuration in '{}' to go on with; a new one begins",
                self.out.join(&experiment.spec.name).display()
            )),
            Some(folder) if !folder.join(ENVIRONMENT).exists() => output::warn(&[format!(
                "'{}' has no {ENVIRONMENT}: where its first records were measured is not known; each record from now on says its own",
                folder.display()
            )]),
            Some(_) => {}
        }
    }

    /// Says what evaluations will run and how long they will take, and returns that of each cell by its id; what an earlier
    /// run did of them is not known yet.
    fn announce(&self, experiment: &Experiment, engine: Engine<'_>, limit_bytes: u64) -> BTreeMap<String, f64> {
        if self.resume || self.join || self.shard.is_some() {
            return BTreeMap::new();
        }
        let cells: Vec<&Cell> = experiment.in_comparisons().collect();
        let seconds = estimate::of_comparisons(&cells, self.registry, engine, limit_bytes);
        if !seconds.is_empty() {
            eprintln!(
                "{}: {} cells, about {}",
                experiment.spec.name,
                experiment.cells.len(),
                estimate::minutes(seconds.values().sum())
            );
        }
        seconds
    }

    /// The limits of an experiment's kernels and shapes, found.
    fn find_max_contexts(
        &self,
        repro: &str,
        experiment: &Experiment,
        registry: &Registry,
        engine: Engine<'_>,
    ) -> Result<(), Failure> {
        let options = max_context::Options {
            out: self.out.into(),
            limit_bytes: self.asked_limit_bytes(experiment)?,
            repro: format!("{repro} --find-max-context"),
        };
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(std::time::Duration::from_millis(200));
        let mut printed = Ok(());
        let found = max_context::find(experiment, registry, engine, &options, &mut |family,
                                                                                    max_context: Option<
            &MaxContext,
        >| match max_context {
            None => bar.set_message(family.label()),
            Some(max_context) if self.json && printed.is_ok() => printed = print_line(max_context),
            Some(_) => {}
        })?;
        bar.finish_and_clear();
        printed?;
        if self.json {
            return Ok(());
        }
        output::print(&format!("{}records: {}\n", max_context::table(&found.max_contexts), found.folder.display()))
    }

    /// `--limit-memory`, else the experiment's limit.
    fn asked_limit_bytes(&self, experiment: &Experiment) -> Result<Option<u64>, Failure> {
        let of_experiment = || experiment.spec.limit_memory.as_deref().map(units::parse_bytes).transpose();
        match self.compute.limit_memory {
            Some(bytes) => Ok(Some(bytes)),
            None => of_experiment()
                .map_err(|error| Failure::usage(format!("{}: limit_memory: {error}", experiment.spec.name))),
        }
    }

    /// The limit that was asked for, else the device's own.
    fn limit_bytes(&self, experiment: &Experiment, engine: Engine<'_>) -> Result<u64, Failure> {
        let asked = self.asked_limit_bytes(experiment)?;
        Ok(asked.or_else(|| engine.default_limit_bytes()).unwrap_or(u64::MAX))
    }
}

impl Args {
    /// The command that runs the experiment again.
    fn repro(&self, path: &Path) -> String {
        let mut command = format!("kvsieve run {}", super::shell_word(&path.display().to_string()));
        if self.compute.device != "cpu" {
            let _ = write!(command, " --device {}", self.compute.device);
        }
        if let Some(threads) = self.compute.threads {
            let _ = write!(command, " --threads {threads}");
        }
        if let Some(bytes) = self.compute.limit_memory {
            let _ = write!(command, " --limit-memory {bytes}B");
        }
        command
    }
}

/// Prints a value as a line of JSON.
pub fn print_line(record: &impl serde::Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(record).expect("a record is plain data");
    output::print(&format!("{line}\n"))
}

/// What a process that others share the run with says when it finds nothing more to do and cells are missing.
fn left(outcome: &Outcome) -> String {
    format!(
        "{} cells have records and {} have none yet: other processes are at them, or died at them, and then the same command \
         runs them; kvsieve report {} shows how far it is",
        outcome.records.len(),
        outcome.missing,
        outcome.folder.display()
    )
}

/// The table and where everything is.
fn ending(outcome: &Outcome, html: &Path) -> String {
    let count = |status| outcome.records.iter().filter(|record| record.status == status).count();
    let findings = crate::report::findings(&outcome.records);
    format!(
        "{}\n{}\n{}: {} ok, {} oom, {} skipped, {} failed\nreport: {}\n",
        crate::report::summary_table(&outcome.records),
        findings.iter().map(|finding| format!("- {finding}\n")).collect::<String>(),
        units::counted(outcome.records.len() as u64, "cell"),
        count(Status::Ok),
        count(Status::Oom),
        count(Status::Skipped),
        count(Status::Failed),
        html.display(),
    )
}

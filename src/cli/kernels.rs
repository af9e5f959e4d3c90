//! `kvsieve kernels build`: the CUDA kernels compiled before there is a GPU, so that its time is not spent on it.
//!
//! NVRTC compiles one program at a time in a process, so the work is shared by processes of this same command: each is told
//! the number of a variant on its standard input, compiles it into the cache and answers with a line of JSON. All of them
//! have the same list ([`kernels::programs`]).

use super::failure::Failure;
use super::output;
use crate::device::cuda::{Cache, Limits, Nvrtc, Program};
use crate::experiment::kernels;
use crate::units;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::num::NonZero;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const EXAMPLES: &str = "\
Compiling needs NVRTC and no GPU: pip install nvidia-cuda-nvrtc. On the machine with the GPU, KVSIEVE_CACHE names the \
folder; what fits is this build of kvsieve with the same version of NVRTC, and 'kvsieve doctor' says whether it does.\n\n\
Examples:
  kvsieve kernels build --arch sm_90a                   for an H100 or H200, into the cache of this machine
  kvsieve kernels build --arch sm_80 --cache kernels    for an A100, into a folder to be carried there";

/// Compile the CUDA kernels before there is a GPU
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Build(BuildArgs),
}

/// Compile every kernel that the shipped experiments and common models use, into the cache
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
struct BuildArgs {
    /// Architecture of the GPU, as sm_80 (A100), sm_90a (H100, H200) or sm_100 (B200)
    #[arg(long, value_name = "sm_NN", value_parser = parse_architecture)]
    arch: Limits,
    /// Folder for the machine code [default: KVSIEVE_CACHE, else kvsieve in the user's cache]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// NVRTC to compile with [default: KVSIEVE_NVRTC, else the first that doctor lists]
    #[arg(long, value_name = "libnvrtc.so")]
    nvrtc: Option<PathBuf>,
    /// Processes that compile [default: every core]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZero<usize>>,
    /// Compile the variants whose numbers come on standard input: what the command starts itself as
    #[arg(long, hide = true)]
    worker: bool,
}

fn parse_architecture(text: &str) -> Result<Limits, String> {
    let known = || Limits::known().map(|limits| limits.architecture()).collect::<Vec<_>>().join(", ");
    let found = Limits::known().find(|limits| limits.architecture() == text);
    found.ok_or_else(|| format!("kernels are compiled for {}", known()))
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let What::Build(args) = &args.what;
    let nvrtc = Nvrtc::load(args.nvrtc.as_deref())?;
    nvrtc.check(&args.arch.architecture())?;
    let cache = args.cache.clone().map_or_else(Cache::default, Cache::at);
    let Some(folder) = cache.folder() else {
        return Err(Failure::usage("there is no folder for the cache: give --cache DIR".into()));
    };
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::work(format!("{} cannot be made: {error}", folder.display())))?;
    let build = Build { args, nvrtc: &nvrtc, cache: &cache, programs: kernels::programs(&args.arch) };
    if args.worker { build.answer() } else { build.share_out() }
}

/// What became of a variant.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Answer {
    Kept { seconds: f64, bytes: u64 },
    Wrong { error: String },
}

struct Build<'a> {
    args: &'a BuildArgs,
    nvrtc: &'a Nvrtc,
    cache: &'a Cache,
    programs: Vec<Program>,
}

impl Build<'_> {
    /// Compiles what is asked for, one by one.
    fn answer(&self) -> Result<(), Failure> {
        for line in std::io::stdin().lines() {
            let number = line.ok().and_then(|line| line.parse::<usize>().ok());
            let program = number.and_then(|number| self.programs.get(number));
            let program = program.ok_or_else(|| Failure::usage("--worker reads numbers of variants".into()))?;
            let line = serde_json::to_string(&self.compile(program)).expect("an answer is plain data");
            output::print(&format!("{line}\n"))?;
        }
        Ok(())
    }

    fn compile(&self, program: &Program) -> Answer {
        let start = Instant::now();
        match self.cache.build(self.nvrtc, program, &self.args.arch.architecture()) {
            Err(error) => Answer::Wrong { error: error.to_string() },
            Ok(built) => match built.unkept {
                Some(error) => Answer::Wrong { error: format!("the machine code cannot be kept: {error}") },
                None => Answer::Kept { seconds: start.elapsed().as_secs_f64(), bytes: built.code.len() as u64 },
            },
        }
    }

    /// Has the variants that are not there compiled by processes, and says what came of each.
    fn share_out(&self) -> Result<(), Failure> {
        let (start, architecture) = (Instant::now(), self.args.arch.architecture());
        let held = |program| self.cache.holds(&self.nvrtc.version(), program, &architecture);
        let there: Vec<Option<u64>> = self.programs.iter().map(held).collect();
        let missing: Vec<usize> = (0..there.len()).filter(|&number| there[number].is_none()).collect();
        let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
        let jobs = self.args.jobs.map_or_else(cores, NonZero::get).min(missing.len());

        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        let told = Mutex::new((there.iter().flatten().sum::<u64>(), Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    let take = || missing.get(next.fetch_add(1, Ordering::Relaxed)).copied();
                    let each = |number: usize, answer: Answer| {
                        let mut told = told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                        let name = variant(&self.programs[number]);
                        match answer {
                            Answer::Kept { seconds, bytes } => {
                                told.0 += bytes;
                                output::print(&format!("{seconds:7.1} s  {:>9}  {name}\n", units::bytes(bytes)))
                            }
                            Answer::Wrong { error } => {
                                told.1.push(format!("{name}: {error}"));
                                Ok(())
                            }
                        }
                    };
                    if let Err(error) = self.feed(take, each) {
                        *failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                    }
                });
            }
        });
        if let Some(failure) = failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            return Err(failure);
        }
        let (bytes, wrong) = told.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        output::print(&format!(
            "{} variants for {architecture} by NVRTC {}: {} compiled in {:.0} s by {jobs} processes, {} were there; {} in \
             {}\n",
            self.programs.len(),
            self.nvrtc.version(),
            missing.len() - wrong.len(),
            start.elapsed().as_secs_f64(),
            self.programs.len() - missing.len(),
            units::bytes(bytes),
            self.cache.folder().unwrap_or("".as_ref()).display(),
        ))?;
        match wrong.first() {
            None => Ok(()),
            Some(first) => {
                Err(Failure::work(format!("{} variants were not compiled; the first is {first}", wrong.len())))
            }
        }
    }

    /// Gives a process of its own one variant after another. One that ends is another variant's failure, not all of theirs.
    fn feed(
        &self,
        take: impl Fn() -> Option<usize>,
        mut each: impl FnMut(usize, Answer) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut worker = None;
        while let Some(number) = take() {
            let (process, lines) = match &mut worker {
                Some(worker) => worker,
                none => none.insert(self.start()?),
            };
            let mut line = String::new();
            let asked = process.stdin.as_mut().is_some_and(|stdin| writeln!(stdin, "{number}").is_ok());
            let answered = asked && lines.read_line(&mut line).is_ok_and(|bytes| bytes > 0);
            match serde_json::from_str(&line) {
                Ok(answer) if answered => each(number, answer)?,
                _ => {
                    let _ = process.kill();
                    let ended = process.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
                    worker = None;
                    each(number, Answer::Wrong { error: format!("the process that compiled it ended: {ended}") })?;
                }
            }
        }
        if let Some((mut process, _)) = worker {
            drop(process.stdin.take());
            let _ = process.wait();
        }
        Ok(())
    }

    fn start(&self) -> Result<(Child, BufReader<std::process::ChildStdout>), Failure> {
        let failed =
            |error: std::io::Error| Failure::work(format!("a process that compiles cannot be started: {error}"));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["kernels", "build", "--worker", "--arch", &self.args.arch.architecture()]);
        command.arg("--nvrtc").arg(self.nvrtc.path());
        if let Some(folder) = self.cache.folder() {
            command.arg("--cache").arg(folder);
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let lines = BufReader::new(process.stdout.take().expect("it was asked for"));
        Ok((process, lines))
    }
}

/// A variant's name with its macros.
fn variant(program: &Program) -> String {
    let macros = program.macros.iter().map(|(name, value)| format!(" {name}={value}"));
    format!("{program}{}", macros.collect::<String>())
}

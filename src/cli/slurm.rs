//! `kvsieve slurm`: an experiment as an array of Slurm, whose tasks share one run.

use super::failure::Failure;
use super::output;
use crate::device::Cpu;
use crate::experiment::cell::{Cell, Device};
use crate::experiment::{Experiment, Spec, runner};
use crate::policy::Registry;
use crate::units;
use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const EXAMPLES: &str = "\
Writes OUT/<experiment>.sbatch. Each task of the array is `kvsieve run --join`: it claims whole comparisons in OUT, which all \
nodes must see, until none is left. What is recorded stays, whatever ends a task: a minute before its time limit it goes back \
into the queue, as Slurm puts it there when it is preempted. Logs are OUT/<experiment>-<job>_<task>.log.\n\n\
Examples:
  kvsieve slurm my.toml --tasks 16                           write the script, and look at it
  kvsieve slurm my.toml --tasks 16 --cpus 8 --time 2:00:00 --partition short --submit
  kvsieve slurm my.toml --tasks 4 --device cuda              a GPU for each task
  kvsieve report results/my/*                                how far each task is, and figures";

/// Seconds before its time limit at which a task goes back into the queue.
const NOTICE_S: u32 = 60;

/// Run an experiment as an array of Slurm
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Experiment file, or name of a shipped experiment
    #[arg(value_name = "EXPERIMENT")]
    experiment: PathBuf,
    /// Tasks of the array
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tasks: u32,
    /// Give the script to sbatch
    #[arg(long)]
    submit: bool,
    /// Folder for results, seen by all nodes
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Device that computes; with cuda Slurm is asked for a GPU for each task
    #[arg(long, value_name = "cpu|cuda", default_value = "cpu", value_parser = device)]
    device: Device,
    /// Cores of a task, each a thread that computes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    cpus: u32,
    /// Time limit of a task, as Slurm writes it: minutes, or [days-]hours:minutes:seconds [default: the partition's]
    #[arg(long, value_name = "TIME", value_parser = time)]
    time: Option<String>,
    /// Partition [default: the cluster's]
    #[arg(long, value_name = "NAME", value_parser = word)]
    partition: Option<String>,
    /// Most memory that tensors of a task may take, as 8GiB; Slurm is asked for an eighth and 1 GiB more
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes)]
    limit_memory: Option<u64>,
}

/// A value that stands in a line of the script as it is.
fn word(text: &str) -> Result<String, String> {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_:.,".contains(letter);
    match !text.is_empty() && text.chars().all(plain) {
        true => Ok(text.into()),
        false => Err(format!("'{text}' is not a word; letters, digits and -_:., are allowed")),
    }
}

/// A time limit as sbatch takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
fn time(text: &str) -> Result<String, String> {
    let (days, clock) = text.split_once('-').map_or((None, text), |(days, clock)| (Some(days), clock));
    let parts: Vec<&str> = days.into_iter().chain(clock.split(':')).collect();
    let is_number = |part: &&str| !part.is_empty() && part.chars().all(|digit| digit.is_ascii_digit());
    match parts.iter().all(is_number) && clock.split(':').count() <= 3 {
        true => Ok(text.into()),
        false => Err(format!("'{text}' is no time limit; write minutes, or [days-]hours:minutes:seconds, as 2:00:00")),
    }
}

fn device(text: &str) -> Result<Device, String> {
    match text {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(Device::Cuda),
        _ => Err("it is cpu or cuda; of GPUs a task sees its own alone, as number 0".into()),
    }
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    let spec = Spec::load(&args.experiment)?;
    let name = spec.name.clone();
    let experiment = Experiment::new(spec, &args.experiment.display().to_string(), registry, args.device)?;
    match args.device {
        // Everything is checked here, once, rather than by each task.
        Device::Cpu => runner::prepare(&experiment, registry, &Cpu::new(Some(1))?).map(drop)?,
        // What kernels a GPU has, the tasks will see: where this runs there may be none.
        Device::Cuda => refuse_without_gpu(&experiment)?,
    }
    let comparisons = experiment.cells.iter().map(|cell| cell.without_choice().id()).collect::<HashSet<_>>().len();
    if args.tasks as usize > comparisons {
        output::warn(&[format!(
            "{comparisons} comparisons are dealt to {} tasks; {} of them will find nothing to do",
            args.tasks,
            args.tasks as usize - comparisons
        )]);
    }
    let folder = std::env::current_dir().map_err(|error| Failure::work(format!("no working folder: {error}")))?;
    let program = std::env::current_exe().map_err(|error| Failure::work(format!("no path of kvsieve: {error}")))?;
    let text = args.script(&name, &folder, &program)?;
    output::check_folder("--out", &args.out)?;
    let path = args.out.join(format!("{name}.sbatch"));
    std::fs::create_dir_all(&args.out)
        .and_then(|()| std::fs::write(&path, text))
        .map_err(|error| Failure::work(format!("cannot write '{}': {error}", path.display())))?;
    let [cells, comparisons, tasks] =
        [(experiment.cells.len(), "cell"), (comparisons, "comparison"), (args.tasks as usize, "task")]
            .map(|(count, what)| units::counted(count as u64, what));
    let what = format!("{cells} in {comparisons}, {tasks}");
    match args.submit {
        true => output::print(&format!("{what}\njob: {}\n", submit(&path)?)),
        false => output::print(&format!("{what}\nsubmit with: sbatch {}\n", quoted(&path)?)),
    }
}

/// Refuses an experiment of which nothing runs on a GPU.
fn refuse_without_gpu(experiment: &Experiment) -> Result<(), Failure> {
    let refused = |cell: &Cell| cell.measure.comparisons()?.refusal(Device::Cuda);
    let reasons: Option<Vec<String>> = experiment.cells.iter().map(refused).collect();
    match reasons.as_deref() {
        Some([reason, ..]) => Err(Failure::usage(format!(
            "--device cuda: none of the cells of '{}' runs on a GPU: {reason}; leave it out",
            experiment.spec.name
        ))),
        _ => Ok(()),
    }
}

impl Args {
    /// The script of every task.
    fn script(&self, name: &str, folder: &Path, program: &Path) -> Result<String, Failure> {
        let mut text = String::from("#!/bin/bash\n");
        let mut option =
            |option: &str, value: &str| writeln!(text, "#SBATCH --{option}={value}").expect("it is a string");
        option("job-name", &format!("kvsieve-{name}"));
        option("array", &format!("1-{}", self.tasks));
        option("ntasks", "1");
        option("cpus-per-task", &self.cpus.to_string());
        if self.device == Device::Cuda {
            option("gpus-per-task", "1");
        }
        if let Some(time) = &self.time {
            option("time", time);
        }
        if let Some(partition) = &self.partition {
            option("partition", partition);
        }
        if let Some(bytes) = self.limit_memory {
            option("mem", &format!("{}M", (bytes + bytes / 8).div_ceil(1 << 20) + 1024));
        }
        option("chdir", &quoted(folder)?);
        // %A is the array, %a the task.
        option("output", &quoted(&self.out.join(format!("{name}-%A_%a.log")))?);
        option("open-mode", "append");
        option("signal", &format!("B:USR1@{NOTICE_S}"));
        text += "#SBATCH --requeue\n\n";
        let (program, experiment, out) = (quoted(program)?, quoted(&self.experiment)?, quoted(&self.out)?);
        let limit = self.limit_memory.map_or(String::new(), |bytes| format!(" --limit-memory {bytes}B"));
        let device = if self.device == Device::Cuda { " --device cuda" } else { "" };
        let cpus = self.cpus;
        let records = quoted(&self.out.join(name))?;
        write!(
            text,
            "# What is recorded stays when this is killed, and the next task takes over what was claimed.\n\
             {program} run {experiment} --out {out} --join{device} --threads {cpus}{limit} &\n\
             child=$!\n\
             begin=$(date +%s)\n\
             task=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}\n\
             # The time limit is near: back into the queue, unless this task recorded nothing, which would go on for ever.\n\
             recorded() {{\n\
             \x20   find {records} -name '*.jsonl' -size +0 -newermt \"@$begin\" \\\n\
             \x20       \\( -name 'samples*' -o -exec grep -qF \"\\\"task\\\":\\\"$task\\\"\" {{}} \\; \\) -print -quit\n\
             }}\n\
             requeue() {{\n\
             \x20   kill -TERM \"$child\"\n\
             \x20   wait \"$child\"\n\
             \x20   if [ -z \"$(recorded)\" ]; then\n\
             \x20       echo 'error: this task recorded nothing within the time limit; allow more with --time' >&2\n\
             \x20       exit 1\n\
             \x20   fi\n\
             \x20   scontrol requeue \"$task\" && sleep {NOTICE_S}\n\
             \x20   exit 1\n\
             }}\n\
             trap requeue USR1\n\
             wait \"$child\"\n"
        )
        .expect("it is a string");
        Ok(text)
    }
}

/// A path as the shell and sbatch read it back.
fn quoted(path: &Path) -> Result<String, Failure> {
    let wrong = || Failure::usage(format!("'{}' cannot stand in a script; name another path", path.display()));
    let text = path.to_str().filter(|text| !text.contains(['\'', '\n'])).ok_or_else(wrong)?;
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./%+=:,".contains(letter);
    Ok(if !text.is_empty() && text.chars().all(plain) { text.into() } else { format!("'{text}'") })
}

/// Gives a script to Slurm; the number of the job.
fn submit(script: &Path) -> Result<String, Failure> {
    let output = Command::new("sbatch").arg("--parsable").arg(script).output().map_err(|error| {
        Failure::usage(format!(
            "cannot run sbatch: {error}; use --submit where Slurm is installed, or take '{}' there",
            script.display()
        ))
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).replace("sbatch: error: ", "");
        return Err(Failure::work(format!("sbatch: {}", said.trim())));
    }
    // With several clusters the name of one follows.
    let printed = String::from_utf8_lossy(&output.stdout);
    Ok(printed.trim().split(';').next().unwrap_or_default().into())
}

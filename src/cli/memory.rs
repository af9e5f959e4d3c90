//! `kvsieve memory`: a memory of facts over the user's own vectors, or over texts that a model encodes (`text.rs`), written, read
//! and forgotten, kept in a file.

mod text;

use super::failure::Failure;
use super::{Compute, output};
use crate::episodic::matrix::Matrix;
use crate::episodic::{FactMemory, FactShape, Facts, MOST_FACTS, Scope, read_vectors};
use crate::memory::{Arena, Label, Usage};
use crate::named::Named;
use crate::tensor::file::{self, Output};
use crate::units;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::Serialize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Vectors are the tensor z [N, C] of a safetensors file, F32 or F64: encodings of facts to write or to take out, or of cues to read \
with. A memory is a file of its own, which says how it was made. read writes z [N, C], what the memory has for each cue, and \
answered [N], whether its scope detector lets the cue pass. docs/larimar.md has the equations; kvsieve run larimar measures them.

\
With --model and --maps, which kvsieve train --method larimar writes, the input is text: a fact a line, what is asked, a tab, and \
the answer of one token, both with the space before them; to read, a question a line. read writes each question, a tab, the \
model's answer, a tab, and whether the memory had something for it (memory) or the model answered alone (model). In an answer a \
line's end, a tab and a backslash are \\n, \\r, \\t and \\\\.

Examples:
  kvsieve memory write --memory larimar:slots=64 --input facts.safetensors --output memory.safetensors
  kvsieve memory write --from memory.safetensors --input more.safetensors --output memory.safetensors
  kvsieve memory forget --from memory.safetensors --input some.safetensors --output memory.safetensors
  kvsieve memory read --from memory.safetensors --input cues.safetensors --output read.safetensors
  kvsieve memory write --model builtin --maps maps.safetensors --input facts.txt --output facts.mem
  kvsieve memory read --model builtin --maps maps.safetensors --from facts.mem --input asked.txt --output told.txt";

/// Write facts, vectors or texts, into a memory; read and forget them
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// What to do
    #[arg(value_enum)]
    action: Action,
    /// A new memory: larimar or list, as larimar:slots=64,scope=list
    #[arg(long, value_name = "NAME", required_unless_present_any = ["from", "model"], conflicts_with_all = ["from", "model"])]
    memory: Option<String>,
    /// A memory that was written before
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Model that encodes texts and answers them: a folder, a GGUF file, or builtin
    #[arg(long, value_name = "DIR|FILE.gguf", requires = "maps")]
    model: Option<PathBuf>,
    /// Maps between the model and the memory, from kvsieve train --method larimar
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with = "memory")]
    maps: Option<PathBuf>,
    /// Safetensors file with the vectors, or with --model a text
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// File to write: the memory, or what was read
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Facts that scope=list has room for, the latest ones [default: those of the input; with --model at least 128]
    #[arg(long, value_name = "N", conflicts_with = "from")]
    most_facts: Option<usize>,
    /// Seed of the memory's noise
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    compute: Compute,
    /// Write what was done as JSON instead of a line, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    /// Add facts
    Write,
    /// Take facts out
    Forget,
    /// What the memory has for each cue
    Read,
}

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    action: Action,
    memory: String,
    vectors: usize,
    width: usize,
    held_bytes: u64,
    peak_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    answered: Option<usize>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    let mut read = vec![("--input", args.input.as_path())];
    read.extend(args.maps.as_deref().map(|maps| ("--maps", maps)));
    read.extend(args.model.as_deref().map(|model| ("--model", model)));
    let (from, json) = (args.from.as_deref().map(|from| ("--from", from)), output::json_file(args.json.as_deref()));
    // A memory may be written where it was read; what is read from it may not.
    read.extend(from.filter(|_| args.action == Action::Read));
    let output = [("--output", args.output.as_path())];
    output::check_files(&read, &output.into_iter().chain(json).collect::<Vec<_>>())?;
    output::check_files(from.as_slice(), json.as_slice())?;
    let cpu = args.compute.cpu()?;
    let arena = Arena::with_limit(args.compute.limit_bytes());
    if let (Some(model), Some(maps)) = (&args.model, &args.maps) {
        let (memory, vectors, width, answered, usage) = text::run(args, model, maps, &cpu, &arena)?;
        return args.tell(usage, memory, [vectors, width], answered);
    }
    let vectors = read_vectors(&args.input, &arena)?;
    let (text, shape, mut facts) = match (&args.memory, &args.from) {
        (Some(text), _) if args.action == Action::Write => {
            let most_facts = args.most_facts()?.unwrap_or(vectors.rows()).max(1);
            let shape = FactShape { width: vectors.columns(), most_facts };
            let memory = FactMemory::parse(text)?;
            if args.most_facts.is_some() && !matches!(memory.scope, Scope::List(_)) {
                return Err(Failure::usage(format!(
                    "--most-facts is nothing to '{text}', which lists no facts for a scope detector; leave it out, or write scope=list"
                )));
            }
            (text.clone(), shape, cpu.install(|| memory.open(&shape, &arena))?)
        }
        (_, Some(path)) => {
            let (text, shape, facts) = cpu.install(|| Facts::load(path, &arena))?;
            let is_episode = text.parse::<Named>().is_ok_and(|named| named.text("write") == Some("episode"));
            if args.action == Action::Write && is_episode {
                return Err(Failure::usage(format!(
                    "'{}' was written at once (write=episode), and another episode would take its place; write all facts \
                     together, or make a memory with write=sequential",
                    path.display()
                )));
            }
            (text, shape, facts)
        }
        _ => {
            return Err(Failure::usage(
                "--memory makes an empty memory, which there is only something to write to; use --from".into(),
            ));
        }
    };
    let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
    let answered = cpu.install(|| {
        let mut noise = || StandardNormal.sample(&mut rng);
        match args.action {
            Action::Write => facts.write(&vectors, &mut noise)?,
            Action::Forget => (0..vectors.rows()).try_for_each(|index| facts.forget(vectors.row(index)))?,
            Action::Read => {
                let mut read = Matrix::zeros(&arena, Label::Activations, vectors.rows(), vectors.columns())?;
                facts.read(&vectors, &mut noise, &mut read)?;
                return Ok(Some(answers(&facts, &vectors, &read, &args.output)?));
            }
        }
        facts.save(&args.output, &text, &shape)?;
        output::warn(&lost(&facts, &shape));
        Ok::<_, Failure>(None)
    })?;
    args.tell(arena.usage(), text, [vectors.rows(), shape.width], answered)
}

/// What is said of facts that a list has lost, if there are some.
fn lost(facts: &Facts, shape: &FactShape) -> Vec<String> {
    let (lost, most, unfound) = (facts.unlisted, shape.most_facts, facts.unfound);
    let why = "cues of these are not answered any more; write them into a new memory with a larger --most-facts";
    let lost =
        (lost > 0).then(|| format!("scope=list lists the latest {most} facts, and {lost} older ones went: {why}"));
    let why = "it has lost older ones, and cannot tell whether these were among them or never written";
    let unfound = (unfound > 0).then(|| format!("the list of the latest facts did not have {unfound} of these: {why}"));
    lost.into_iter().chain(unfound).collect()
}

impl Args {
    /// Facts that are listed, if they were told.
    fn most_facts(&self) -> Result<Option<usize>, Failure> {
        match self.most_facts {
            Some(most) if most == 0 || most > MOST_FACTS => {
                Err(Failure::usage(format!("--most-facts is {most}; it must be 1 to {MOST_FACTS}")))
            }
            most => Ok(most),
        }
    }

    /// Says what was done.
    fn tell(
        &self,
        usage: Usage,
        memory: String,
        [vectors, width]: [usize; 2],
        answered: Option<usize>,
    ) -> Result<(), Failure> {
        let report = Report {
            action: self.action,
            memory,
            vectors,
            width,
            held_bytes: usage.live.get(&Label::Facts).copied().unwrap_or(0),
            peak_bytes: usage.peak_bytes,
            answered,
        };
        match &self.json {
            Some(target) => output::json(target, &report),
            None => output::print(&report.line()),
        }
    }
}

/// Writes what was read; how many cues are answered.
fn answers(facts: &Facts, cues: &Matrix, read: &Matrix, path: &Path) -> Result<usize, Failure> {
    let values: Vec<f32> = read.iter().map(|&value| value as f32).collect();
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        let (row, value) = (at / read.columns(), read[at]);
        return Err(Failure::usage(format!(
            "what the memory has for cue {row} holds {value:e}, and --output is F32; write facts of smaller numbers"
        )));
    }
    let is_answered = |index: usize| facts.answers(facts.distance(cues.row(index), read.row(index)));
    let answered: Vec<i64> = (0..cues.rows()).map(|index| i64::from(is_answered(index))).collect();
    let outputs = [
        Output::f32("z", vec![read.rows(), read.columns()], &values),
        Output::i64("answered", vec![cues.rows()], &answered),
    ];
    file::write(path, &outputs)?;
    Ok(answered.iter().filter(|&&answered| answered == 1).count())
}

impl Report {
    fn line(&self) -> String {
        let Report { memory, vectors, width, held_bytes, peak_bytes, .. } = self;
        let done = match (self.action, self.answered) {
            (Action::Write, _) => {
                format!("{} of {width} numbers written into", units::counted(*vectors as u64, "fact"))
            }
            // A list has let the oldest go by itself.
            (Action::Forget, _) => {
                let are = if *vectors == 1 { "is" } else { "are" };
                format!("{} {are} now not in", units::counted(*vectors as u64, "fact"))
            }
            (Action::Read, answered) => {
                format!("{} of {} answered by", answered.unwrap_or(0), units::counted(*vectors as u64, "cue"))
            }
        };
        format!("{done} {memory}; it holds {}, the peak was {}\n", units::bytes(*held_bytes), units::bytes(*peak_bytes))
    }
}

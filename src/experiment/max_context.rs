//! `--find-max-context`: the longest context at which a pass really allocates and runs, beside the one that the formula allows.
//!
//! The cells of an experiment that differ only in their context, seed and knobs are one question. Inputs are blank: they take
//! the memory, cost no time to make, and have a known result, which is compared. The search begins where the formula says
//! and widens from there, so that a formula which is right is confirmed by two probes: one that runs, and one a step
//! longer that is refused. Where it is wrong the limit is bracketed and bisected.

use super::cell::Cell;
use super::engine::Engine;
use super::grid::Experiment;
use super::measure::{Choice, Implementation, Prepared, TrialError, Truth};
use super::record::Refused;
use super::runner::RunError;
use super::store::{MAX_CONTEXTS, Store};
use crate::device::cuda::Condition;
use crate::policy::Registry;
use crate::tensor::DType;
use crate::units;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Name and version of the schema of a line.
pub const SCHEMA: &str = "kvsieve/max-context/v2";
/// A step is this part of the predicted context, at least one token: how exact the answer is.
const STEPS: usize = 400;
/// Longest context that is looked at.
const MOST_TOKENS: usize = 1 << 28;
/// The byte that values are made of: a number near 1 in every element type.
const VALUE_BYTE: u8 = 0x3f;

/// The limit of one kernel on one shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MaxContext {
    /// [`SCHEMA`].
    pub schema: String,
    /// The run that found it.
    pub run_id: String,
    /// The cell, with the longest context that ran (0 if none did).
    pub cell: Cell,
    /// Longest context that the formula allows within `limit_bytes`.
    pub predicted_tokens: usize,
    /// Longest context that ran, to within `step_tokens`.
    pub found_tokens: usize,
    /// Shortest context that did not; `None` where the search ended without one.
    pub refused_tokens: Option<usize>,
    /// How exact both are.
    pub step_tokens: usize,
    /// `found_tokens / predicted_tokens - 1`.
    pub apart: f64,
    /// Memory that the prediction was made for: `--limit-memory`, or what was free on the device.
    pub limit_bytes: u64,
    /// Peak of the longest pass that ran, by the arena.
    pub peak_bytes: u64,
    /// The allocation that was refused beyond it.
    pub refused: Option<Refused>,
    /// Why it was refused, in words.
    pub reason: Option<String>,
    /// Whose GEMM ran, where that depends on what is installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemm: Option<String>,
    /// Contexts that were tried, in order.
    pub probed_tokens: Vec<usize>,
    /// What ran: the instruction path, or the GPU.
    pub isa_path: String,
    /// State of the GPU afterwards, where NVML tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Condition>,
    /// Time of the search.
    pub wall_ns: u64,
    /// A command that searches again.
    pub repro: String,
}

/// How a search is made.
pub struct Options {
    /// Folder in which `<experiment>/<run id>/` is made.
    pub out: PathBuf,
    /// Limit of the arena; without it a GPU's own memory is the limit, and 80% of what is available on the host.
    pub limit_bytes: Option<u64>,
    /// The command that searches again.
    pub repro: String,
}

/// What a search left behind.
pub struct Found {
    /// The run's folder.
    pub folder: PathBuf,
    /// The limits.
    pub max_contexts: Vec<MaxContext>,
}

/// Searches for the limit of every kernel and shape of an experiment's forward, backward and decode cells; each is told
/// to `progress` before and after.
///
/// # Errors
/// When there is no such cell, a pass fails for another reason than memory, or results cannot be written.
pub fn find<'e>(
    experiment: &Experiment,
    registry: &Registry,
    engine: impl Into<Engine<'e>>,
    options: &Options,
    progress: &mut dyn FnMut(&Cell, Option<&MaxContext>),
) -> Result<Found, RunError> {
    let engine = engine.into();
    let families = families(experiment, registry, engine)?;
    let config = toml::to_string_pretty(&experiment.spec).expect("a spec is plain data");
    let environment = super::environment::probe(engine, &options.repro);
    let base = options.out.join(&experiment.spec.name);
    let hash = experiment.config_hash();
    let mut store = Store::create(&base, &hash, "-max-context", &config, &environment, MAX_CONTEXTS)?;
    let mut max_contexts = Vec::new();
    for family in families {
        progress(&family, None);
        let search = Search { family: &family, registry, engine, options, run_id: &store.run_id };
        let max_context = search.run()?;
        store.append(&max_context)?;
        progress(&family, Some(&max_context));
        max_contexts.push(max_context);
    }
    Ok(Found { folder: store.folder, max_contexts })
}

/// The cells whose limit is asked for, each once.
fn families(experiment: &Experiment, registry: &Registry, engine: Engine<'_>) -> Result<Vec<Cell>, RunError> {
    let mut families: Vec<Cell> = Vec::new();
    let mut refusal = "it has no forward, backward or decode cells".to_string();
    for cell in &experiment.cells {
        if cell.measure.compares() != Choice::Kernel {
            continue;
        }
        let family = Cell { seed: 0, knobs: None, workload_hash: "blank".into(), ..cell.clone() };
        let prepared = Prepared::new(family.clone(), registry, engine).map_err(RunError::Cell)?;
        if let Implementation::Missing(reason) = prepared.implementation {
            refusal = reason;
            continue;
        }
        let family = Cell { context_tokens: 0, ..family };
        if !families.contains(&family) {
            families.push(family);
        }
    }
    match families.is_empty() {
        true => Err(RunError::Cell(format!("there is no limit to find: {refusal}"))),
        false => Ok(families),
    }
}

/// What a context turned out to be.
enum Probe {
    Runs { peak_bytes: u64 },
    Refused { refused: Option<Refused>, reason: String },
}

struct Search<'a> {
    family: &'a Cell,
    registry: &'a Registry,
    engine: Engine<'a>,
    options: &'a Options,
    run_id: &'a str,
}

/// How far a search has come: contexts below run, contexts above do not.
#[derive(Default)]
struct Bracket {
    /// Of all of its passes: what is available changes while it is searched.
    limit_bytes: u64,
    runs: usize,
    peak_bytes: u64,
    refused_tokens: Option<usize>,
    refused: Option<Refused>,
    reason: Option<String>,
    probed_tokens: Vec<usize>,
}

impl Search<'_> {
    fn run(&self) -> Result<MaxContext, RunError> {
        let start = Instant::now();
        let gemm = self.warm_up()?;
        let limit_bytes = self.limit_bytes();
        let predicted_tokens = self.predict(limit_bytes)?;
        let step_tokens = (predicted_tokens / STEPS).max(1);
        let bracket = self.bracket(predicted_tokens, step_tokens, limit_bytes)?;
        Ok(MaxContext {
            schema: SCHEMA.into(),
            run_id: self.run_id.into(),
            cell: Cell { context_tokens: bracket.runs, ..self.family.clone() },
            predicted_tokens,
            found_tokens: bracket.runs,
            refused_tokens: bracket.refused_tokens,
            step_tokens,
            apart: if predicted_tokens == 0 { 0.0 } else { bracket.runs as f64 / predicted_tokens as f64 - 1.0 },
            limit_bytes,
            peak_bytes: bracket.peak_bytes,
            refused: bracket.refused,
            reason: bracket.reason,
            gemm,
            probed_tokens: bracket.probed_tokens,
            isa_path: self.engine.path(),
            gpu: self.engine.condition(),
            wall_ns: start.elapsed().as_nanos() as u64,
            repro: self.options.repro.clone(),
        })
    }

    /// Whose GEMM the pass uses. On a GPU the shortest pass runs once: the kernels are loaded and cuBLAS has its
    /// handle before anybody asks how much memory is free, as both take some of it.
    fn warm_up(&self) -> Result<Option<String>, RunError> {
        if let Engine::Cuda(_) = self.engine {
            self.try_out(1, self.limit_bytes())?;
        }
        Ok(self.prepared(1)?.gemm(self.engine))
    }

    /// The limit that the formula is asked about.
    fn limit_bytes(&self) -> u64 {
        self.options.limit_bytes.or_else(|| self.engine.default_limit_bytes()).unwrap_or(u64::MAX)
    }

    fn prepared(&self, tokens: usize) -> Result<Prepared, RunError> {
        let cell = Cell { context_tokens: tokens, ..self.family.clone() };
        Prepared::new(cell, self.registry, self.engine).map_err(RunError::Cell)
    }

    /// Whether the formula allows a context.
    fn allows(&self, tokens: usize, limit_bytes: u64) -> Result<bool, RunError> {
        // Beyond this the score matrix cannot be counted in 64 bits.
        let heads = (self.family.batch * self.family.q_heads) as u128;
        if tokens > MOST_TOKENS || heads * (tokens as u128).pow(2) > 1 << 58 {
            return Ok(false);
        }
        let prepared = self.prepared(tokens)?;
        Ok(!matches!(prepared.implementation, Implementation::Missing(_))
            && prepared.predict(self.engine) <= limit_bytes)
    }

    /// The longest context that the formula allows.
    fn predict(&self, limit_bytes: u64) -> Result<usize, RunError> {
        let (mut below, mut above) = (0, 1);
        while self.allows(above, limit_bytes)? {
            (below, above) = (above, above * 2);
        }
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            if self.allows(middle, limit_bytes)? { below = middle } else { above = middle }
        }
        Ok(below)
    }

    /// Brackets the limit around `from` and bisects it to within `step`.
    fn bracket(&self, from: usize, step: usize, limit_bytes: u64) -> Result<Bracket, RunError> {
        let mut bracket = Bracket { limit_bytes, ..Bracket::default() };
        let (mut at, mut gap) = (from.max(1), step);
        let up = self.probe(at, &mut bracket)?;
        while bracket.refused_tokens.is_none() && bracket.runs < MOST_TOKENS {
            at = bracket.runs + gap;
            gap *= 2;
            self.probe(at, &mut bracket)?;
        }
        while !up && bracket.runs == 0 && at > 1 {
            at = at.saturating_sub(gap).max(1);
            gap *= 2;
            self.probe(at, &mut bracket)?;
        }
        while let Some(refused) = bracket.refused_tokens.filter(|&refused| refused - bracket.runs > step) {
            self.probe(bracket.runs + (refused - bracket.runs) / 2, &mut bracket)?;
        }
        Ok(bracket)
    }

    /// Tries a context and notes what came of it; whether it runs.
    fn probe(&self, tokens: usize, bracket: &mut Bracket) -> Result<bool, RunError> {
        bracket.probed_tokens.push(tokens);
        match self.try_out(tokens, bracket.limit_bytes)? {
            Probe::Runs { peak_bytes } => {
                (bracket.runs, bracket.peak_bytes) = (tokens, peak_bytes);
                Ok(true)
            }
            Probe::Refused { refused, reason } => {
                bracket.refused_tokens = Some(tokens);
                (bracket.refused, bracket.reason) = (refused, Some(reason));
                Ok(false)
            }
        }
    }

    fn try_out(&self, tokens: usize, limit_bytes: u64) -> Result<Probe, RunError> {
        let prepared = self.prepared(tokens)?;
        if let Implementation::Missing(reason) = prepared.implementation {
            return Ok(Probe::Refused { refused: None, reason });
        }
        // On a GPU its own memory is the limit, unless another is asked for.
        let arena_bytes = match self.engine {
            Engine::Cpu(_) => limit_bytes,
            Engine::Cuda(_) => self.options.limit_bytes.unwrap_or(u64::MAX),
        };
        let trial = match self.engine.blank(&prepared.extents(), arena_bytes, VALUE_BYTE) {
            Err(error) => Err(TrialError::from(error)),
            Ok(inputs) => {
                let truth = Truth::blank(&prepared.cell, value(prepared.cell.dtype));
                prepared.trial(self.engine, &inputs, Some(&truth)).map(|_| inputs.arena.usage().peak_bytes)
            }
        };
        match trial {
            Ok(peak_bytes) => Ok(Probe::Runs { peak_bytes }),
            Err(error) if error.is_memory() => {
                Ok(Probe::Refused { refused: error.refused(), reason: error.to_string() })
            }
            Err(TrialError::Cuda(error)) => Err(RunError::Gpu { label: prepared.cell.label(), error }),
            Err(error) => Err(RunError::Cell(format!("{}: {error}", prepared.cell.label()))),
        }
    }
}

/// The number that values are.
fn value(dtype: DType) -> f64 {
    let mut value = [0.0];
    dtype.decode(&[VALUE_BYTE; 4][..dtype.bytes()], &mut value);
    value[0].into()
}

/// The limits as a table: predicted and found, and how far they are apart.
pub fn table(max_contexts: &[MaxContext]) -> String {
    let name = |max_context: &MaxContext| {
        let Cell { measure, kernel, dtype, head_dim, batch, .. } = &max_context.cell;
        let batch = if *batch == 1 { String::new() } else { format!(" B {batch}") };
        format!("{} {kernel} {} D {head_dim} {dtype}{batch}", measure.name(), max_context.cell.heads())
    };
    let width = max_contexts.iter().map(|max_context| name(max_context).chars().count()).max().unwrap_or(0);
    let mut text =
        format!("{:width$}  {:>10}  {:>10}  {:>7}  {:>9}\n", "limit of", "predicted", "found", "apart", "memory");
    for max_context in max_contexts {
        let apart = format!("{:+.2}%", 100.0 * max_context.apart);
        let memory = units::bytes(max_context.limit_bytes);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:width$}  {:>10}  {:>10}  {apart:>7}  {memory:>9}",
            name(max_context),
            max_context.predicted_tokens,
            max_context.found_tokens
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;
    use crate::experiment::cell::Device;
    use crate::experiment::spec::Spec;

    #[test]
    fn a_shape_is_one_question_whatever_its_inputs() {
        let text = "name = \"x\"\n[[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\nheads = \"2/1\"\n\
                    head_dim = 16\ncontext_tokens = [64, 128]\nseed = [0, 1]\nknobs = [{}, { hinted = 0 }]\n";
        let (spec, registry) = (Spec::parse(text, "x.toml").unwrap(), Registry::default());
        let experiment = Experiment::new(spec, "x.toml", &registry, Device::Cpu).unwrap();
        let cpu = Cpu::new(Some(1)).unwrap();
        let families = families(&experiment, &registry, (&cpu).into()).unwrap();
        let kernels: Vec<&str> = families.iter().map(|cell| cell.kernel.as_str()).collect();
        assert_eq!((experiment.cells.len(), kernels), (16, vec!["naive", "tiled"]));
    }
}

//! How long evaluations will take, told before they begin.
//!
//! Of each model and task one sample of at most [`PROBE_TOKENS`] is run under a few of the cells. That gives what reading
//! a context takes, what each cell adds to it, and what a run alone takes; longer contexts take as much longer as the
//! model and its attention have more to multiply.

use super::group::{Group, alone_samples};
use crate::device::Cpu;
use crate::eval::{EvalError, Evaluator, Watch, reads_alone};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Stage;
use crate::model::{Config, locate};
use crate::policy::Registry;
use std::path::Path;
use std::time::Instant;

/// Most tokens of the context that is tried.
const PROBE_TOKENS: usize = 1024;

/// Most cells of a comparison that are tried.
const PROBED_CELLS: usize = 8;

/// What one sample took.
struct Probe {
    context_tokens: usize,
    /// Reading the model, once for a comparison.
    open_s: f64,
    /// Reading a context, as every run alone does.
    read_s: f64,
    /// What each cell, and the full cache, adds to that: its eviction, the questions and the answers.
    cell_s: f64,
    /// A run alone.
    alone_s: f64,
    /// Samples, and prompts of all of them together.
    samples: usize,
    prompts: usize,
}

/// Seconds of each comparison; nothing of those that cannot be tried: they fail when they run, or have no room.
pub fn seconds(comparisons: &[Vec<&Cell>], stage: &Stage<'_>) -> Vec<Option<f64>> {
    let (registry, limit_bytes) = (stage.registry, stage.limit_bytes);
    let Ok(cpu) = stage.engine.for_models() else { return vec![None; comparisons.len()] };
    let mut probes: Vec<(Cell, Option<Probe>)> = Vec::new();
    let mut one = |cells: &Vec<&Cell>| {
        // What others of the same task took is known. Of a text, the length decides how many pieces there are.
        let context_tokens = if cells[0].text.is_some() { cells[0].context_tokens } else { 0 };
        let like = Cell { context_tokens, seed: 0, ..cells[0].without_choice() };
        let at = probes.iter().position(|(known, _)| *known == like).unwrap_or_else(|| {
            probes.push((like, probe(cells, registry, cpu, limit_bytes).ok()));
            probes.len() - 1
        });
        probes[at].1.as_ref().map(|probe| of(probe, cells, registry))
    };
    comparisons.iter().map(&mut one).collect()
}

fn of(probe: &Probe, cells: &[&Cell], registry: &Registry) -> f64 {
    let (cell, count) = (cells[0], cells.len() as f64);
    let readings = readings(cells, registry) as f64;
    let (tokens, probed) = (cell.context_tokens as f64, probe.context_tokens as f64);
    let read_s = probe.read_s * tokens * token_work(cell, tokens) / (probed * token_work(cell, probed));
    // Questions and answers are a few tokens behind the context, whatever its length.
    let later = token_work(cell, 2.0 * tokens) / token_work(cell, 2.0 * probed);
    let together = probe.prompts as f64 * (readings * read_s + (count + 1.0) * probe.cell_s * later);
    let alone = alone_samples(cells).min(probe.samples) as f64 * count;
    probe.open_s + together + alone * (read_s + (probe.alone_s - probe.read_s).max(0.0) * later)
}

/// How often a context is read: for the full cache, for each other pair of formats, and by cells that do so themselves.
fn readings(cells: &[&Cell], registry: &Registry) -> usize {
    let by_itself = |cell: &&&Cell| {
        let policy = cell.build_policy(registry).ok().flatten();
        cell.memory.is_some() || policy.is_some_and(|policy| reads_alone(&policy))
    };
    let mut formats = vec![(None, None, None)];
    for cell in cells {
        let own = (cell.weights.as_ref(), cell.activations, cell.kv_format);
        if !formats.contains(&own) {
            formats.push(own);
        }
    }
    cells.iter().filter(by_itself).count() + formats.len()
}

/// Multiplications of a token on its way through a cell's model, on average over `tokens`, up to a factor: linear layers, and
/// causal attention.
fn token_work(cell: &Cell, tokens: f64) -> f64 {
    let config = locate(Path::new(cell.model.as_deref().unwrap_or_default())).and_then(|folder| Config::read(&folder));
    let Ok(config) = config else { return 1.0 };
    let linear = config.hidden * (config.qkv_width() + config.q_width() + 3 * config.ffn);
    linear as f64 + tokens * config.q_width() as f64
}

/// Runs a sample; some tasks need more room than [`PROBE_TOKENS`].
fn probe(cells: &[&Cell], registry: &Registry, cpu: &Cpu, limit_bytes: u64) -> Result<Probe, EvalError> {
    let start = Instant::now();
    // Of a task every sample has as many prompts, and one is written; of a text there are as many as it has pieces.
    let count = cells[0].samples.filter(|_| cells[0].text.is_none()).unwrap_or(1);
    let written: Vec<Cell> =
        cells.iter().map(|&cell| Cell { samples: cell.text.as_ref().and(cell.samples), ..cell.clone() }).collect();
    let written: Vec<&Cell> = written.iter().collect();
    let Group { samples, .. } = Group::open(&written, registry, limit_bytes)?;
    let open_s = start.elapsed().as_secs_f64();
    let context_tokens = cells[0].context_tokens;
    let of = |tokens| probe_of(tokens, cells, registry, cpu, limit_bytes);
    let tried = of(context_tokens.min(PROBE_TOKENS)).or_else(|_| of(context_tokens))?;
    let samples_written = samples.last().map_or(0, |prompt| prompt.sample + 1);
    Ok(Probe { open_s, samples: count * samples_written, prompts: count * samples.len(), ..tried })
}

/// Runs the first sample under some of the cells.
fn probe_of(
    context_tokens: usize,
    cells: &[&Cell],
    registry: &Registry,
    cpu: &Cpu,
    limit_bytes: u64,
) -> Result<Probe, EvalError> {
    // Policies differ in what their scores cost.
    let places = (0..cells.len()).step_by(cells.len().div_ceil(PROBED_CELLS));
    let tried: Vec<Cell> = places.map(|at| Cell { samples: Some(1), context_tokens, ..cells[at].clone() }).collect();
    let tried: Vec<&Cell> = tried.iter().collect();
    let group = Group::open(&tried, registry, limit_bytes)?;
    let treatments = group.treatments()?;
    let prompt = &group.samples[0];
    // The first run takes the memory and finds the files cold.
    group.alone(cpu, treatments[0], prompt)?;
    let (mut alone_s, mut read_s) = (0.0, 0.0);
    for treatment in [treatments[0], treatments[treatments.len() / 2]] {
        let start = Instant::now();
        let alone = group.alone(cpu, treatment, prompt)?;
        alone_s += start.elapsed().as_secs_f64() / 2.0;
        read_s += alone.first_token_ns as f64 * 1e-9 / 2.0;
    }
    let watch = Watch::default();
    let mut evaluator = Evaluator::new(group.stage(cpu, &group.shared_arena), &group.text, &watch, &treatments)?;
    let start = Instant::now();
    evaluator.run(prompt, &treatments, |asked| group.room(prompt, asked))?;
    let all_s = start.elapsed().as_secs_f64();
    let asking_s = all_s - readings(&tried, registry) as f64 * read_s;
    let cell_s = (asking_s / (treatments.len() + 1) as f64).max(0.0);
    Ok(Probe { context_tokens, open_s: 0.0, read_s, cell_s, alone_s, samples: 1, prompts: group.samples.len() })
}

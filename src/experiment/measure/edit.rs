//! `edit`: what a model answers that was told facts, through a memory or in its context (`docs/larimar.md`).
//!
//! Cells that differ only in how the model is told are one comparison: each episode of facts is drawn once and put to all of them.
//! Policies evict from the facts' own context, before a question is seen, to as many bytes as the grid's first memory takes.

use super::eval::{RANDOM, with_random};
use super::{Choice, Comparisons, Measure, Measurement, Runs, Scope, Stage};
use crate::device::Cpu;
use crate::editing::{Answered, EditError, Editor, Encoder, Episode, InContext, MEMORY, Maps, Retrieval};
use crate::episodic::EpisodicError;
use crate::experiment::axes::{BudgetText, Many};
use crate::experiment::cell::{Cell, Device};
use crate::experiment::edited::Edited;
use crate::experiment::engine::MODELS_ON_CPU;
use crate::experiment::policy_axis::choices;
use crate::experiment::record::{Memory, Record, Status};
use crate::experiment::runner::latency;
use crate::experiment::spec::Grid;
use crate::memory::Arena;
use crate::model::{BUILTIN, Config, Eviction, Model, ModelError, Text, fingerprint, locate};
use crate::named::{Named, Parameter};
use crate::policy::{Budget, Policy, PolicyError, Registry};
use crate::tensor::DType;
use std::path::Path;

/// Episodes where nothing is said.
const EPISODES: usize = 8;
/// Between the seeds of two episodes.
const STRIDE: u32 = 16;
/// Reading the facts nearest to the question, in the place of a memory: `nearest:facts=4`.
const NEAREST: &str = "nearest";
const NEAREST_PARAMETERS: [Parameter; 1] =
    [Parameter { name: "facts", default: "1", about: "facts that are read with a question" }];

/// A model by numbers of facts by ways of telling it.
pub(super) struct Edit;

impl Measurement for Edit {
    fn name(&self) -> &'static str {
        "edit"
    }

    fn about(&self) -> &'static str {
        "a model's answers about facts it was told, through a memory or in its context"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["model", "maps", "facts", "memory", "policy", "samples"]
    }

    fn compares(&self) -> Choice {
        Choice::Policy
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        let Some(path) = &grid.maps else {
            return Err("maps is missing; write maps = \"models/larimar/builtin.safetensors\"".into());
        };
        if grid.facts.is_empty() || grid.facts.0.contains(&0) {
            return Err("facts says how many are written, each at least 1; write facts = [1, 4, 16, 64]".into());
        }
        let samples = grid.samples.unwrap_or(EPISODES);
        if samples == 0 {
            return Err("samples is 0; at least 1 is needed".into());
        }
        let models = grid.model.or(BUILTIN.into());
        let [model] = &models[..] else {
            return Err(format!("{} models; maps are of one, so give each a grid of its own", models.len()));
        };
        let words = |error: ModelError| error.to_string();
        let located = locate(Path::new(model)).map_err(words)?;
        let (config, base) = (Config::read(&located).map_err(words)?, fingerprint(&located).map_err(words)?);
        let maps = Maps::load(path, &config, &base).map_err(|error| error.to_string())?;
        let hash = std::fs::read(path).map_err(|error| format!("cannot read '{}': {error}", path.display()))?;
        let hash = blake3::hash(&[base.as_bytes(), &hash].concat()).to_hex()[..16].to_string();
        let memories = grid.memory.or(MEMORY.into());
        let mut cells = Vec::new();
        for &facts in &grid.facts.0 {
            for memory in &memories {
                telling(memory, &maps).map_err(|error| error.to_string())?;
            }
            let named = |memory: &&String| !memory.starts_with(NEAREST);
            let first = memories.iter().find(named).map_or(MEMORY, String::as_str);
            let held = Editor::memory(first, &maps).and_then(|name| Editor::bytes(&maps, (&name, facts)));
            let held = held.map_err(|error| error.to_string())?;
            // As many bytes as the memory takes.
            let budget = Many(vec![BudgetText(Budget::Bytes(held).to_string())]);
            let policies = with_random(choices(&Grid { budget, ..grid.clone() }, scope.registry)?, scope.registry);
            for (name, budget) in &policies {
                let name = name.as_deref().unwrap_or(RANDOM);
                let policy = scope.registry.policy(name).map_err(|error| error.to_string())?;
                eviction((&policy, name), budget.as_deref(), 0)
                    .and_then(|eviction| eviction.check(&config))
                    .map_err(|error| error.to_string())?;
            }
            for seed in grid.seed.or(0) {
                let cell = Cell {
                    measure: Measure::EDIT,
                    device: scope.device,
                    model: Some(model.clone()),
                    maps: Some(path.display().to_string()),
                    facts: Some(facts),
                    samples: Some(samples),
                    kernel: "tiled".into(),
                    layers: config.layers,
                    batch: 1,
                    q_heads: config.q_heads,
                    kv_heads: config.kv_heads,
                    head_dim: config.head_dim,
                    dtype: DType::F32,
                    causal: true,
                    seed,
                    workload_hash: hash.clone(),
                    ..Cell::default()
                };
                let memory = |memory: &String| Cell { memory: Some(memory.clone()), ..cell.clone() };
                cells.extend(memories.iter().map(memory));
                let policy = |(policy, budget): &(Option<String>, Option<String>)| Cell {
                    policy: policy.clone(),
                    budget: budget.clone(),
                    ..cell.clone()
                };
                cells.extend(policies.iter().map(policy));
            }
        }
        Ok(cells)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

impl Comparisons for Edit {
    fn refusal(&self, device: Device) -> Option<String> {
        (device == Device::Cuda).then(|| MODELS_ON_CPU.into())
    }

    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let cells: Vec<Cell> = records.iter().map(|record| record.cell.clone()).collect();
        let ended = match stage.engine.for_models() {
            Ok(cpu) => asked(&cells, stage, cpu, each).map_err(|error| status_of(&error)),
            Err(reason) => Err((Status::Skipped, reason)),
        };
        let all =
            |(status, reason): (Status, String)| cells.iter().map(|_| Ended::Not(status, reason.clone())).collect();
        let ended = ended.unwrap_or_else(all);
        records.into_iter().zip(ended).map(|(record, ended)| ended.fill(record, stage.limit_bytes)).collect()
    }
}

/// How a model is told facts.
enum Telling {
    /// Through a memory of this name.
    Memory(String),
    /// Those nearest to the question, so many of them, stand before it.
    Nearest(usize),
    /// All of them stand before it, evicted by a policy.
    Context(Policy, Option<String>),
}

/// A memory, or what stands in its place.
fn telling(memory: &str, maps: &Maps) -> Result<Telling, EditError> {
    let named: Named = memory.parse().map_err(EpisodicError::from)?;
    if named.name != NEAREST {
        return Editor::memory(memory, maps).map(Telling::Memory);
    }
    named.check(&NEAREST_PARAMETERS).map_err(EpisodicError::from)?;
    Ok(Telling::Nearest(named.count("facts", 1, 1).map_err(EpisodicError::from)?))
}

/// A policy with what it may keep, as cells have it.
fn eviction<'p>(
    (policy, name): (&'p Policy, &'p str),
    budget: Option<&str>,
    seed: u64,
) -> Result<Eviction<'p>, PolicyError> {
    let budget = budget.map(str::parse).transpose()?;
    Ok(Eviction { policy, name, budget, seed, repeat: None })
}

/// A cell while its comparison runs.
struct State {
    telling: Telling,
    answered: Answered,
    memory: Option<Memory>,
    warnings: Vec<String>,
    ended: Option<(Status, String)>,
}

/// How a cell ended.
enum Ended {
    With(Box<State>),
    Not(Status, String),
}

impl Ended {
    fn fill(self, record: Record, limit_bytes: u64) -> Record {
        let state = match self {
            Ended::Not(status, reason) => return Record { status, reason: Some(reason), ..record },
            Ended::With(state) => *state,
        };
        let memory = state.memory.map(|memory| Memory { limit_bytes, ..memory });
        if let Some((status, reason)) = state.ended {
            return Record { status, reason: Some(reason), memory, warnings: state.warnings, ..record };
        }
        let nanoseconds = state.answered.edit_seconds.iter().map(|seconds| (seconds * 1e9) as u64).collect();
        Record {
            memory,
            warnings: state.warnings,
            latency: [("edit".to_string(), latency(nanoseconds, 0, "samples"))].into(),
            edit: Edited::of(&state.answered),
            ..record
        }
    }
}

/// Draws the episodes of a comparison and puts each to all of its cells.
fn asked(
    cells: &[Cell],
    stage: &Stage<'_>,
    cpu: &Cpu,
    each: &mut dyn FnMut(&Cell, f64),
) -> Result<Vec<Ended>, EditError> {
    let cell = &cells[0];
    let located = locate(Path::new(cell.model.as_deref().unwrap_or_default()))?;
    let arena = Arena::with_limit(stage.limit_bytes);
    let (text, model) = (Text::open(&located)?, Model::open(&located, &arena)?);
    let path = Path::new(cell.maps.as_deref().unwrap_or_default());
    let maps = Maps::load(path, &model.config, &model.fingerprint)?;
    let encoder = Encoder::new(&model, &text, maps.layer, cpu, &arena)?;
    // What is asked lies in an arena of its own beside the model's: both together have the limit.
    let left_bytes = stage.limit_bytes.saturating_sub(arena.usage().live_bytes);
    let (facts, episodes) = (cell.facts.unwrap_or(1), cell.samples.unwrap_or(1));
    let mut states = cells.iter().map(|cell| state(cell, &maps, stage.registry)).collect::<Result<Vec<_>, _>>()?;
    let (mut done, all) = (0.0, (episodes * cells.len()) as f64);
    for drawn in 0..episodes as u64 {
        let seed = cell.seed.wrapping_mul(1 << 32).wrapping_add(drawn << STRIDE);
        let episode = Episode::draw(&encoder, facts, false, seed)?;
        for (cell, state) in cells.iter().zip(&mut states) {
            each(cell, done / all);
            done += 1.0;
            if state.ended.is_none()
                && let Err(error) = state.ask(cell, &encoder, &maps, (drawn, &episode), left_bytes)
            {
                state.ended = Some(status_of(&error));
            }
        }
    }
    Ok(states.into_iter().map(|state| Ended::With(Box::new(state))).collect())
}

fn state(cell: &Cell, maps: &Maps, registry: &Registry) -> Result<State, EditError> {
    let telling = match &cell.memory {
        Some(memory) => telling(memory, maps)?,
        None => {
            let policy = cell.build_policy(registry).map_err(ModelError::from)?;
            Telling::Context(policy.unwrap_or_else(Policy::full), cell.budget.clone())
        }
    };
    Ok(State { telling, answered: Answered::default(), memory: None, warnings: Vec::new(), ended: None })
}

impl State {
    fn ask(
        &mut self,
        cell: &Cell,
        encoder: &Encoder<'_>,
        maps: &Maps,
        (drawn, episode): (u64, &Episode),
        left_bytes: u64,
    ) -> Result<(), EditError> {
        let arena = Arena::with_limit(left_bytes);
        let answered = match &self.telling {
            Telling::Memory(name) => {
                let shape = (&**name, episode.facts().len());
                let predicted_peak_bytes = Editor::peak_bytes(maps, shape, episode.most_questions())?;
                self.memory = Some(Memory { predicted_peak_bytes, ..Memory::default() });
                if predicted_peak_bytes > left_bytes {
                    let message = format!(
                        "the memory needs {predicted_peak_bytes} bytes, the model leaves {left_bytes} of the limit"
                    );
                    self.ended = Some((Status::Oom, message));
                    return Ok(());
                }
                let answered = episode.ask(encoder, &mut Editor::new(encoder, maps, shape, &arena)?)?;
                let usage = arena.usage();
                self.memory = Some(Memory {
                    predicted_peak_bytes,
                    peak_bytes: usage.peak_bytes,
                    residual_bytes: usage.peak_bytes as i64 - predicted_peak_bytes as i64,
                    arena_growth_bytes: usage.peak_bytes,
                    peak_by_label: usage.peak,
                    ..Memory::default()
                });
                answered
            }
            Telling::Nearest(count) => episode.ask(encoder, &mut Retrieval::new(encoder, maps, *count))?,
            Telling::Context(policy, budget) => {
                let name = cell.policy.as_deref().unwrap_or("full");
                let eviction = eviction((policy, name), budget.as_deref(), cell.seed).map_err(ModelError::from)?;
                let eviction = eviction.of_sample(drawn as usize);
                let context = InContext::tokens(encoder, &episode.facts())?.len();
                let (token_bytes, lists) = (cell.kv_format().token_bytes(cell.head_dim), cell.layers * cell.kv_heads);
                let kept = policy.budget_tokens(name, eviction.budget.as_ref(), context, token_bytes, lists);
                let kept = kept.map_err(PolicyError::from).map_err(ModelError::from)?;
                let evicts = policy.scorer.is_some();
                if policy.is_bound_by_budget() && kept >= context {
                    let reason = format!("the budget holds a whole context of {context} tokens: nothing to evict");
                    self.ended = Some((Status::Skipped, reason));
                    return Ok(());
                }
                self.warnings = eviction.warnings(&encoder.model.config, context, cell.kv_format());
                let most_tokens = episode.most_tokens(encoder)?;
                episode.ask(encoder, &mut InContext::new(encoder, evicts.then_some(eviction), most_tokens, &arena)?)?
            }
        };
        self.answered.add(answered);
        Ok(())
    }
}

/// How a cell ends that met this error.
fn status_of(error: &EditError) -> (Status, String) {
    let memory = matches!(
        error,
        EditError::Arena(_)
            | EditError::Memory(EpisodicError::Arena(_))
            | EditError::Model(ModelError::Arena(_) | ModelError::Policy(PolicyError::Arena(_)))
    );
    (if memory { Status::Oom } else { Status::Failed }, error.to_string())
}

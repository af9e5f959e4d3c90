//! What the cells of a group share: the model, the samples, and a treatment for each cell.

use super::grid::{frame, read};
use crate::device::Cpu;
use crate::eval::{Alone, Asked, Choice, EvalError, Prompt, Stage, Treatment, alone, documents, prompts};
use crate::experiment::cell::Cell;
use crate::experiment::weights::OtherWeights;
use crate::format::KvFormat;
use crate::memories::{self, Memory};
use crate::memory::Arena;
use crate::model::{Eviction, Model, ModelError, Repeat, Text, locate};
use crate::policy::{Policy, PolicyError, Registry};
use crate::task;
use crate::train::sensitivity;
use crate::units;
use std::path::Path;

/// Samples that each cell also runs alone, for times and memory: fewer where many cells do so.
const ALONE_SAMPLES: usize = 3;
const FEW_CELLS: usize = 8;
/// Tokens that go through the model together.
const CHUNK_TOKENS: usize = 512;
/// An answer may be twice as long as a right one, and so many tokens.
const MORE_TOKENS: usize = 8;

/// A model with its own weights or others.
struct Opened<'c> {
    weights: Option<&'c OtherWeights>,
    /// Of the weights and of what runs alone, so that the peak of a run is its own.
    arena: Arena,
    model: Model,
}

/// Cells that differ only in policy, budget and formats, or in the memory, with all that they need.
pub struct Group<'c> {
    cells: &'c [&'c Cell],
    /// The model as its files have it, and with each of the other weights.
    models: Vec<Opened<'c>>,
    /// Of what all cells share.
    pub shared_arena: Arena,
    /// Its tokenizer.
    pub text: Text,
    /// What is asked.
    pub samples: Vec<Prompt>,
    /// Most tokens of a sequence.
    pub max_tokens: usize,
    policies: Vec<Policy>,
    /// How the model is asked to repeat a context, where a policy looks at that.
    repeat: Option<Repeat>,
    memories: Vec<Option<Box<dyn Memory>>>,
}

impl<'c> Group<'c> {
    /// Reads the model and writes the samples.
    ///
    /// # Errors
    /// When the model, the tokenizer or the text cannot be read any more, or the weights have no room.
    pub fn open(cells: &'c [&'c Cell], registry: &Registry, limit_bytes: u64) -> Result<Self, EvalError> {
        let cell = cells[0];
        let folder = locate(Path::new(cell.model.as_deref().unwrap_or_default()))?;
        let mut models = Vec::new();
        let mut left_bytes = limit_bytes;
        for weights in weights(cells) {
            let arena = Arena::with_limit(left_bytes);
            let model = OtherWeights::open(weights, &folder, &arena)?;
            left_bytes = left_bytes.saturating_sub(arena.usage().live_bytes);
            models.push(Opened { weights, arena, model });
        }
        let shared_arena = Arena::with_limit(left_bytes);
        let text = Text::open(&folder)?;
        let samples = samples(cell, &folder, &text)?;
        let policy = |cell: &&Cell| Ok(cell.build_policy(registry)?.unwrap_or_else(Policy::full));
        let policies: Vec<Policy> =
            cells.iter().map(policy).collect::<Result<_, PolicyError>>().map_err(ModelError::from)?;
        let repeats = policies.iter().any(|policy| policy.reconstruction.is_some());
        let repeat = if repeats { Some(Repeat::new(&folder, &text)?.with_gradients(sensitivity)) } else { None };
        let limit = if cell.beyond_limit { usize::MAX } else { models[0].model.config.most_tokens() };
        let more = |prompt: &Prompt| -> usize {
            let how = policies.iter().filter_map(|policy| policy.reconstruction);
            let of = |how| repeat.as_ref().map_or(0, |repeat| repeat.most_tokens(prompt.budgeted_tokens(), how));
            how.map(of).max().unwrap_or(0)
        };
        let longest = samples
            .iter()
            .map(|prompt| prompt.most_tokens(|asked| most_tokens(cell, asked)).max(prompt.context.len() + more(prompt)))
            .max();
        let max_tokens = longest.unwrap_or(0).min(limit);
        let memory = |cell: &&Cell| cell.memory.as_deref().map(memories::memory).transpose();
        let memories = cells.iter().map(memory).collect::<Result<_, _>>()?;
        Ok(Group { cells, models, shared_arena, text, samples, max_tokens, policies, repeat, memories })
    }

    /// What each cell does to the context.
    ///
    /// # Errors
    /// When a budget is none.
    pub fn treatments(&self) -> Result<Vec<Treatment<'_>>, EvalError> {
        let mut treatments = Vec::new();
        for ((cell, policy), memory) in self.cells.iter().zip(&self.policies).zip(&self.memories) {
            let choice = match memory {
                Some(memory) => Choice::Remember(&**memory),
                None => {
                    let budget = cell.budget.as_ref().map(|text| text.parse()).transpose();
                    let budget = budget.map_err(PolicyError::from).map_err(ModelError::from)?;
                    let name = cell.policy.as_deref().unwrap_or("full");
                    Choice::Evict(Eviction { policy, name, budget, seed: cell.seed, repeat: self.repeat.as_ref() })
                }
            };
            let model = self.models.iter().find(|opened| opened.weights == cell.weights.as_ref());
            let model = &model.expect("those of all cells were opened").model;
            treatments.push(Treatment { model, choice, kv_format: cell.kv_format(), activations: cell.activations });
        }
        Ok(treatments)
    }

    /// How the model is run, in one of the arenas.
    pub fn stage<'a>(&'a self, cpu: &'a Cpu, arena: &'a Arena) -> Stage<'a> {
        let cell = self.cells[0];
        Stage {
            model: &self.models[0].model,
            cpu,
            arena,
            kernel: &cell.kernel,
            dtype: cell.dtype,
            kv_format: KvFormat::plain(cell.dtype),
            activations: None,
            max_tokens: self.max_tokens,
            chunk_tokens: CHUNK_TOKENS,
        }
    }

    /// How long the answer to a question of a prompt may be.
    pub fn room(&self, prompt: &Prompt, asked: &Asked) -> usize {
        let left = self.max_tokens.saturating_sub(prompt.context.len() + asked.prompt.len());
        most_tokens(self.cells[0], asked).clamp(1, left.max(1))
    }

    /// One cell by itself, for its times and memory.
    ///
    /// # Errors
    /// As [`alone()`].
    pub fn alone(&self, cpu: &Cpu, treatment: Treatment<'_>, prompt: &Prompt) -> Result<Alone, EvalError> {
        let opened = self.models.iter().find(|opened| std::ptr::eq(&opened.model, treatment.model));
        let arena = &opened.expect("treatments are of models of the group").arena;
        alone(&self.stage(cpu, arena), treatment, prompt, self.room(prompt, &prompt.asked[0]))
    }
}

/// The weights that a comparison holds at once: those of the model's own files, and each of the others.
fn weights<'c>(cells: &[&'c Cell]) -> Vec<Option<&'c OtherWeights>> {
    let mut all = vec![None];
    for weights in cells.iter().map(|cell| cell.weights.as_ref()) {
        if !all.contains(&weights) {
            all.push(weights);
        }
    }
    all
}

/// What a cell without room must know, in words: how many models its comparison holds at once. Nothing where it is one.
pub fn models_at_once(cells: &[&Cell]) -> Option<String> {
    let all = weights(cells);
    let folder = locate(Path::new(cells[0].model.as_deref()?)).ok()?;
    let bytes = all.iter().map(|weights| OtherWeights::bytes(*weights, &folder)).sum::<Result<u64, _>>().ok()?;
    (all.len() > 1).then(|| {
        let (count, bytes) = (all.len(), units::bytes(bytes));
        format!(
            "the comparison holds {count} models at once, {bytes} of weights; fewer weights in a run leave more room"
        )
    })
}

/// How many samples each of the cells of a comparison also runs alone.
pub fn alone_samples(cells: &[&Cell]) -> usize {
    cells[0].alone_samples.unwrap_or(if cells.len() > FEW_CELLS { 1 } else { ALONE_SAMPLES })
}

/// The samples of a cell.
fn samples(cell: &Cell, folder: &Path, text: &Text) -> Result<Vec<Prompt>, EvalError> {
    let count = cell.samples.unwrap_or(1);
    if let Some(path) = &cell.text {
        let (path, content) = read(Path::new(path))?;
        return documents(text, (&path, &content), cell.context_tokens, cell.new_tokens, count);
    }
    let name = cell.task.as_deref().unwrap_or_default();
    let task = task::task(name)?;
    let words = (text, &frame(folder, text, cell.chat)?);
    let sample = |sample| prompts((name, &*task), cell.context_tokens, (cell.seed, sample), cell.protocol(), words);
    let prompts = (0..count).map(sample).collect::<Result<Vec<_>, _>>()?;
    Ok(prompts.into_iter().flatten().collect())
}

/// How long an answer may be.
fn most_tokens(cell: &Cell, asked: &Asked) -> usize {
    match cell.new_tokens {
        // A text is gone on with as it is; its own words would be compared with nothing.
        _ if asked.question.is_none() => 1,
        0 => 2 * asked.expected.len() + MORE_TOKENS,
        tokens => tokens,
    }
}

//! Cells that differ only in policy and budget, or in the memory, evaluated together: samples outside, cells inside, so that a slow moment
//! of the machine falls on all of them.

use super::grid::{frame, read};
use super::journal::{Given, Journal};
use super::tally::Tally;
use crate::device::Cpu;
use crate::eval::{Asked, Choice, EvalError, Prompt, Session, Stage, Watch, alone, documents, prompts};
use crate::experiment::answers::Answers;
use crate::experiment::cell::Cell;
use crate::experiment::record::{Memory, Status};
use crate::memories;
use crate::memory::Arena;
use crate::model::{Eviction, Model, ModelError, Text, locate};
use crate::policy::{Decoding, Policy, PolicyError, Registry};
use crate::task;
use std::collections::BTreeMap;
use std::path::Path;

/// Samples that each cell also runs alone, for times and memory: fewer where many cells do so.
const ALONE_SAMPLES: usize = 3;
const FEW_CELLS: usize = 8;
/// Tokens that go through the model together.
const CHUNK_TOKENS: usize = 512;
/// An answer may be twice as long as a right one, and so many tokens.
const MORE_TOKENS: usize = 8;

/// How a cell ended.
pub struct Ended {
    /// Numbers, or why there are none.
    pub result: Result<Numbers, (Status, String)>,
    /// What a reader should know.
    pub warnings: Vec<String>,
}

/// What a cell measured.
pub struct Numbers {
    /// What the model answered.
    pub answers: Answers,
    /// Of the first run alone.
    pub memory: Memory,
    /// Of all runs alone, by phase: `first_token` and `decode`.
    pub samples_ns: BTreeMap<&'static str, Vec<u64>>,
}

/// Evaluates a group; `each` is told of the cell that is at work and of the fraction of the samples that is done. What `journal` holds is not asked again, and what each
/// sample gives is written there.
///
/// # Errors
/// When the model, the tokenizer or the text cannot be read any more, or the full cache already has no room.
pub fn run(
    cells: &[&Cell],
    registry: &Registry,
    cpu: &Cpu,
    limit_bytes: u64,
    journal: &mut Journal,
    mut each: impl FnMut(&Cell, f64),
) -> Result<Vec<Ended>, EvalError> {
    let cell = cells[0];
    let folder = locate(Path::new(cell.model.as_deref().unwrap_or_default()))?;
    // Runs alone are in the arena of the weights and what is shared in another, so that the peak of a run is its own.
    let arena = Arena::with_limit(limit_bytes);
    let model = Model::open(&folder, &arena)?;
    let shared_arena = Arena::with_limit(limit_bytes.saturating_sub(arena.usage().live_bytes));
    let text = Text::open(&folder)?;
    let samples = samples(cell, &folder, &text)?;
    let limit = if cell.beyond_limit { usize::MAX } else { model.config.most_tokens() };
    let longest = samples.iter().map(|prompt| prompt.most_tokens(|asked| most_tokens(cell, asked))).max();
    let max_tokens = longest.unwrap_or(0).min(limit);
    let stage = Stage {
        model: &model,
        cpu,
        arena: &shared_arena,
        kernel: &cell.kernel,
        dtype: cell.dtype,
        kv_format: cell.kv_format(),
        max_tokens,
        chunk_tokens: CHUNK_TOKENS,
    };
    let room = |prompt: &Prompt, asked: &Asked| {
        let left = max_tokens.saturating_sub(prompt.context.len() + asked.prompt.len());
        most_tokens(cell, asked).clamp(1, left.max(1))
    };

    let policy = |cell: &&Cell| Ok(cell.build_policy(registry)?.unwrap_or_else(Policy::full));
    let policies = cells.iter().map(policy).collect::<Result<Vec<Policy>, PolicyError>>().map_err(ModelError::from)?;
    let built = cells.iter().map(|cell| cell.memory.as_deref().map(memories::memory).transpose());
    let built = built.collect::<Result<Vec<_>, _>>()?;
    let choices = cells.iter().zip(&policies).zip(&built).map(|((cell, policy), memory)| match memory {
        Some(memory) => Ok(Choice::Remember(&**memory)),
        None => choice(cell, policy).map(Choice::Evict),
    });
    let choices = choices.collect::<Result<Vec<Choice<'_>>, _>>().map_err(ModelError::from)?;
    let shortest = samples.iter().map(Prompt::budgeted_tokens).min().unwrap_or(0);
    let kept = samples.iter().map(|prompt| prompt.kept).min().unwrap_or(0);
    let tokens = [shortest, max_tokens, kept];
    let mut states: Vec<State> = choices.iter().map(|choice| State::new(choice, &model, cell, tokens)).collect();
    let going = |states: &[State]| (0..states.len()).filter(|&at| states[at].ended.is_none()).collect::<Vec<_>>();
    let first: Vec<Choice<'_>> = going(&states).into_iter().map(|at| choices[at]).collect();
    let watch = Watch::default();
    let mut session = Session::new(stage, &text, &watch, &first)?;
    let ids: Vec<String> = cells.iter().map(|cell| cell.id()).collect();
    let mut alone_samples = 0..if cells.len() > FEW_CELLS { 1 } else { ALONE_SAMPLES };
    for (number, prompt) in samples.iter().enumerate() {
        // Of a sample that is many prompts the first is enough.
        let is_alone = alone_samples.start == prompt.sample && alone_samples.next().is_some();
        let (known, missing): (Vec<usize>, Vec<usize>) =
            going(&states).into_iter().partition(|&at| journal.given(&ids[at], number).is_some());
        for at in known {
            states[at].take(prompt, journal.given(&ids[at], number).expect("it is known").clone());
        }
        let Some(&at_work) = missing.first() else { continue };
        let done = |part: f64| (number as f64 + part) / samples.len() as f64;
        each(cells[at_work], done(0.0));
        let chosen: Vec<Choice<'_>> = missing.iter().map(|&at| choices[at]).collect();
        let answered = session.run(prompt, &chosen, |asked| room(prompt, asked))?;
        for (place, (&at, answers)) in missing.iter().zip(answered).enumerate() {
            let by_itself = || {
                // Beside the answers of all cells together, which took about as long as one of these runs.
                each(cells[at], done((place + 1) as f64 / (missing.len() + 1) as f64));
                alone(&Stage { arena: &arena, ..stage }, choices[at], prompt, room(prompt, &prompt.asked[0]))
            };
            let given = answers.and_then(|answers| Ok(Given { answers, alone: is_alone.then(by_itself).transpose()? }));
            match given {
                Ok(given) => {
                    journal.append(&ids[at], number, &given)?;
                    states[at].take(prompt, given);
                }
                Err(error) => states[at].ended = Some(status_of(&error)),
            }
        }
    }
    Ok(states.into_iter().map(|state| state.end(limit_bytes)).collect())
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

fn choice<'c>(cell: &'c Cell, policy: &'c Policy) -> Result<Eviction<'c>, PolicyError> {
    let budget = cell.budget.as_ref().map(|text| text.parse()).transpose()?;
    Ok(Eviction { policy, name: cell.policy.as_deref().unwrap_or("full"), budget, seed: cell.seed })
}

/// A cell while its group runs.
struct State {
    tally: Tally,
    /// Whether every context must lose tokens.
    evicts: bool,
    /// What a reader should know before trusting the numbers.
    warnings: Vec<String>,
    ended: Option<(Status, String)>,
}

impl State {
    /// `shortest` and `longest` are tokens of the shortest context, and of the longest with its answer; `kept` those that stay
    /// beside any budget.
    fn new(choice: &Choice<'_>, model: &Model, cell: &Cell, [shortest, longest, kept]: [usize; 3]) -> Self {
        let lists = cell.layers * cell.kv_heads;
        let token_bytes = cell.kv_format().token_bytes(cell.head_dim);
        let tally = |unprotected| Tally::new(lists, token_bytes, model.weights.bytes(), unprotected);
        let Choice::Evict(choice) = choice else {
            return State { tally: tally(None), evicts: false, warnings: Vec::new(), ended: None };
        };
        let policy = choice.policy;
        let budget = policy.budget_tokens(choice.name, choice.budget.as_ref(), shortest, token_bytes, lists);
        let warnings =
            budget.as_ref().map_or(Vec::new(), |&tokens| policy.warnings(tokens, shortest, kept, cell.layers));
        let unprotected = budget.as_ref().ok().and_then(|&tokens| Some((tokens, policy.unprotected(tokens, kept)?)));
        // Some evict what the model writes too.
        let evicted = if policy.schedule.decoding == Decoding::Never { shortest } else { longest };
        let (evicts, ended) = match budget {
            Err(error) => (true, Some((Status::Failed, error.to_string()))),
            _ if policy.scorer.is_none() => (false, None),
            Ok(tokens) if tokens >= evicted => {
                let reason = format!("the budget holds a whole context of {evicted} tokens: nothing to evict");
                (false, Some((Status::Skipped, reason)))
            }
            Ok(tokens) => (tokens < shortest, None),
        };
        State { tally: tally(unprotected), evicts, warnings, ended }
    }

    fn take(&mut self, prompt: &Prompt, given: Given) {
        self.tally.add(prompt, given.answers);
        if let Some(alone) = given.alone {
            self.tally.run_alone(prompt.sample, alone);
        }
    }

    fn end(self, limit_bytes: u64) -> Ended {
        let State { tally, evicts, warnings, ended } = self;
        let warnings = warnings.into_iter().chain(tally.warnings()).collect();
        let result = match ended {
            Some(ended) => Err(ended),
            None if evicts && tally.kept_everything() => {
                Err((Status::Failed, "the policy evicted nothing, although its budget is less than the context".into()))
            }
            None => tally
                .finish(limit_bytes)
                .ok_or_else(|| (Status::Failed, "there was no sample to learn from".to_string())),
        };
        Ended { result, warnings }
    }
}

/// How a cell ends that met this error.
pub fn status_of(error: &EvalError) -> (Status, String) {
    let memory = matches!(
        error,
        EvalError::Arena(_) | EvalError::Model(ModelError::Arena(_) | ModelError::Policy(PolicyError::Arena(_)))
    );
    (if memory { Status::Oom } else { Status::Failed }, error.to_string())
}

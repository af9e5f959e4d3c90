//! Cells that differ only in policy, budget and format, or in the memory, evaluated together: samples outside, cells inside, so
//! that a slow moment of the machine falls on all of them.

use super::group::{Group, alone_samples};
use super::journal::{Given, Journal};
use super::tally::Tally;
use crate::device::Cpu;
use crate::eval::{Choice, EvalError, Evaluator, Prompt, Treatment, Watch};
use crate::experiment::answers::Answers;
use crate::experiment::cell::Cell;
use crate::experiment::record::{Memory, Status};
use crate::model::ModelError;
use crate::policy::{Decoding, PolicyError, Registry};
use std::collections::BTreeMap;

/// Cells whose answers beside one another take about as long as a context does to be read, which a run alone does by itself.
const CELLS_OF_A_READ: f64 = 4.0;

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
    /// Of the first run alone, if there was one.
    pub memory: Option<Memory>,
    /// Of all runs alone, by phase: `first_token` and `decode`.
    pub samples_ns: BTreeMap<&'static str, Vec<u64>>,
}

/// Evaluates a group; `each` is told of the cell that is at work and of the fraction of the samples that is done. What
/// `journal` holds is not asked again, and what each sample gives is written there.
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
    let group = Group::open(cells, registry, limit_bytes)?;
    let Group { samples, .. } = &group;
    let treatments = group.treatments()?;
    let shortest = samples.iter().map(Prompt::budgeted_tokens).min().unwrap_or(0);
    let kept = samples.iter().map(|prompt| prompt.kept).min().unwrap_or(0);
    let tokens = [shortest, group.max_tokens, kept];
    let states = treatments.iter().zip(cells).map(|(treatment, cell)| State::new(treatment, cell, tokens));
    let mut states: Vec<State> = states.collect();
    for (state, treatment) in states.iter_mut().zip(&treatments).filter(|(state, _)| state.evicts) {
        let policy = treatment.choice.eviction().map(|eviction| eviction.policy);
        let few = |prompt: &Prompt| policy?.few_queries(prompt.context.len());
        let told: Vec<String> = samples.iter().filter_map(few).collect();
        let of_all = |first: &String| format!("{first} ({} of {} contexts)", told.len(), samples.len());
        state.warnings.extend(told.first().map(of_all));
    }
    let going = |states: &[State]| (0..states.len()).filter(|&at| states[at].ended.is_none()).collect::<Vec<_>>();
    let first: Vec<Treatment<'_>> = going(&states).into_iter().map(|at| treatments[at]).collect();
    let watch = Watch::default();
    let mut evaluator = Evaluator::new(group.stage(cpu, &group.shared_arena), &group.text, &watch, &first)?;
    let ids: Vec<String> = cells.iter().map(|cell| cell.id()).collect();
    let mut alone_samples = 0..alone_samples(cells);
    let share = 1.0 + cells.len() as f64 / CELLS_OF_A_READ;
    let of_samples = samples.last().map_or(0, |prompt| prompt.sample + 1).min(alone_samples.end);
    let work = samples.len() as f64 * share + (of_samples * cells.len()) as f64;
    let mut done = 0.0;
    for (number, prompt) in samples.iter().enumerate() {
        // Of a sample that is many prompts the first is enough.
        let is_alone = alone_samples.start == prompt.sample && alone_samples.next().is_some();
        let (known, missing): (Vec<usize>, Vec<usize>) =
            going(&states).into_iter().partition(|&at| journal.given(&ids[at], number).is_some());
        for at in known {
            states[at].take(prompt, journal.given(&ids[at], number).expect("it is known").clone());
        }
        let ends_at = done + share + if is_alone { cells.len() as f64 } else { 0.0 };
        let Some(&at_work) = missing.first() else {
            done = ends_at;
            continue;
        };
        each(cells[at_work], done / work);
        let chosen: Vec<Treatment<'_>> = missing.iter().map(|&at| treatments[at]).collect();
        let answered = evaluator.run(prompt, &chosen, |asked| group.room(prompt, asked))?;
        done = ends_at - if is_alone { missing.len() as f64 } else { 0.0 };
        for (&at, answers) in missing.iter().zip(answered) {
            let by_itself = || {
                each(cells[at], done / work);
                done += 1.0;
                group.alone(cpu, treatments[at], prompt)
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
        done = ends_at;
    }
    Ok(states.into_iter().map(|state| state.end(limit_bytes)).collect())
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
    fn new(treatment: &Treatment<'_>, cell: &Cell, [shortest, longest, kept]: [usize; 3]) -> Self {
        let lists = cell.layers * cell.kv_heads;
        let token_bytes = treatment.kv_format.token_bytes(cell.head_dim);
        let tally = |unprotected| {
            Tally::new(lists, (treatment.kv_format, cell.head_dim), treatment.model.weights.bytes(), unprotected)
        };
        let Choice::Evict(choice) = treatment.choice else {
            return State { tally: tally(None), evicts: false, warnings: Vec::new(), ended: None };
        };
        let policy = choice.policy;
        let budget = policy.budget_tokens(choice.name, choice.budget.as_ref(), shortest, token_bytes, lists);
        let of = |&tokens: &usize| policy.warnings(tokens, shortest, kept, (cell.layers, cell.kv_heads));
        let warnings = budget.as_ref().map_or(Vec::new(), of);
        let unprotected = budget.as_ref().ok().and_then(|&tokens| Some((tokens, policy.unprotected(tokens, kept)?)));
        // Some evict what the model writes too.
        let evicted = if policy.schedule.decoding == Decoding::Never { shortest } else { longest };
        let (evicts, ended) = match budget {
            Err(error) => (true, Some((Status::Failed, error.to_string()))),
            _ if policy.scorer.is_none() => (false, None),
            Ok(tokens) if tokens >= evicted && policy.is_bound_by_budget() => {
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

//! A plan held against a run: kvsieve reads a prompt with the model at hand, and beside each predicted size stands what the
//! arena counted and what the operating system saw.
//!
//! Predicted is what is known before anything is read: weights from the headers of files, the rest from the shape. The
//! arena's account is to agree to the byte. The process's is how far its resident set grew: pages of mapped files count as they are
//! touched, so that a load shows what it reads, and a pass what it uses.

use super::PlanError;
use super::own::Own;
use super::scenario::Scenario;
use crate::device::Cpu;
use crate::memory::{Arena, Label, LabelBytes, os};
use crate::model::{Config, Decoder, Model, ModelError};
use serde::Serialize;

/// A size, predicted and measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Held {
    /// What it is of.
    pub term: &'static str,
    /// From headers and shapes.
    pub predicted_bytes: u64,
    /// As the arena counted it; `None` where pages of files are part of the question, which it does not hold.
    pub arena_bytes: Option<u64>,
    /// Growth of the process; `None` where the system tells nothing of a part.
    pub process_bytes: Option<u64>,
}

/// A context's sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// Tokens of the prompt.
    pub context_tokens: u64,
    /// The load, the terms, and the peak of all.
    pub held: Vec<Held>,
}

/// Terms by the arena's label.
const TERMS: [(&str, Label); 4] = [
    ("keys and values", Label::Kv),
    ("scores", Label::Scores),
    ("activations and logits", Label::Activations),
    ("workspace", Label::Workspace),
];

/// Most sequences at once.
const MOST_BATCH: u64 = 1 << 16;

/// Refuses what kvsieve does not run, contexts beyond the model's, and what would take more than `limit_bytes` on so many threads.
///
/// # Errors
/// In words, with the option that is wrong.
pub fn check(scenario: &Scenario<'_>, threads: usize, limit_bytes: u64) -> Result<(), PlanError> {
    let own = Own::of(scenario)?;
    let (tokens, most) = ((scenario.context + scenario.output) as usize, Config::read(own.folder)?.most_tokens());
    if tokens > most {
        return Err(ModelError::TooLong { tokens, most }.into());
    }
    if scenario.batch > MOST_BATCH {
        let expected = format!("it must be at most {MOST_BATCH}");
        return Err(PlanError::Value { what: "--batch", value: scenario.batch.to_string(), expected });
    }
    let (peak, _) = predicted(&own, threads)?;
    if peak > limit_bytes {
        let (value, batch) = (scenario.context.to_string(), scenario.batch);
        let expected = format!("with --batch {batch} it would take {peak} bytes, and {limit_bytes} may be taken");
        return Err(PlanError::Value { what: "--context", value, expected });
    }
    Ok(())
}

/// The peak, and its parts.
fn predicted(own: &Own<'_>, threads: usize) -> Result<(u64, LabelBytes), PlanError> {
    let unknown = || PlanError::File {
        path: own.folder.into(),
        reason: "it has tensors of a type that kvsieve does not run".into(),
    };
    own.bytes(threads)?.ok_or_else(unknown)
}

/// Loads the model, reads a prompt of the scenario's context, decodes its output, and gives all back.
///
/// # Errors
/// When kvsieve does not run such a scenario, the model cannot be read, or the arena has no room.
pub fn measure(scenario: &Scenario<'_>, cpu: &Cpu, limit_bytes: u64) -> Result<Measured, PlanError> {
    let own = Own::of(scenario)?;
    let (peak, predicted) = predicted(&own, cpu.threads())?;
    let (prompt, output) = (scenario.context as usize, scenario.output as usize);
    let arena = Arena::with_limit(limit_bytes);
    let before = os::reset_peak().then(os::resident).flatten();
    let grown = || Some(os::resident()?.peak_bytes.saturating_sub(before?.now_bytes));
    let model = Model::open_in(own.folder, own.format, &arena)?;
    let (loaded, load_process) = (arena.usage().peak_bytes, grown());
    os::reset_peak();
    let setup = own.setup(model.weights.dtype());
    let mut decoder = Decoder::new(&model, setup, cpu, &arena)?;
    // Any tokens do; not all the same, so that rows of the embedding are read as text would read them.
    let token = |place: usize| (place * 7919 % model.config.vocab) as u32;
    let tokens: Vec<u32> = (0..prompt).map(token).collect();
    decoder.prefill(&vec![&tokens[..]; setup.batch], |_, _, _| ())?;
    for place in 0..output {
        decoder.follow(&vec![&[token(place)][..]; setup.batch], |_, _, _| ())?;
    }
    let (usage, process) = (arena.usage(), grown());
    let weights = predicted.get(&Label::Weights).copied().unwrap_or(0);
    // Matrices that are encoded anew are read from pages of their file, which the process holds until all are.
    let read = own.format.and(scenario.subject.held).map_or(0, |held| held.total());
    let part = |term, predicted_bytes, arena_bytes| Held {
        term,
        predicted_bytes,
        arena_bytes: Some(arena_bytes),
        process_bytes: None,
    };
    let of = |label| (predicted.get(&label).copied().unwrap_or(0), usage.peak.get(&label).copied().unwrap_or(0));
    let load = Held {
        arena_bytes: (read == 0).then_some(loaded),
        process_bytes: load_process,
        ..part("load", weights + read, 0)
    };
    let terms = TERMS.map(|(term, label)| part(term, of(label).0, of(label).1));
    let peak = Held { process_bytes: process, ..part("peak", peak, usage.peak_bytes) };
    let held = [load, part("weights", weights, of(Label::Weights).1)].into_iter().chain(terms).chain([peak]);
    let held = held.filter(|held| held.predicted_bytes + held.arena_bytes.unwrap_or(0) > 0).collect();
    Ok(Measured { context_tokens: scenario.context, held })
}

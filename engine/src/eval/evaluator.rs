//! One context for many policies, formats and questions.
//!
//! A context is prefilled once for each format of keys and values, with everything kept that any of the policies looks at.
//! Each policy evicts from a fork of it and each question is asked of a fork of that, so that what is the same is computed
//! once. What was given with the full cache of plain elements is what all are compared with: the same question, then the
//! tokens of the right answer one by one (teacher-forced), and apart from that the model's own words (greedy).

use super::distribution::{divergence, likeliest, nats};
use super::{Choice, EvalError, Prompt, Stage, Treatment};
use crate::cache::Column;
use crate::eval::Asked;
use crate::memories::{Memory, Modes};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::{Activation, Decoder, Eviction, Hook, Model, ModelError, Setup, Text};
use crate::policy::{Policy, Statistic};
use crate::task::Tokens;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The context with a full cache.
const CONTEXT: usize = 0;
/// The context as a policy leaves it.
const EVICTED: usize = 1;
/// The same behind a question.
const ASKED: usize = 2;
/// The same behind a part of the right answer.
const FORCED: usize = 3;
const SEQUENCES: usize = 4;

/// What a question gave under a treatment, compared with the full cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// 0 to 1; `None` for a text that only goes on.
    pub score: Option<f64>,
    /// The same with the full cache.
    pub full_score: Option<f64>,
    /// Tokens of the right answer that were compared ([`Asked::compared`]).
    pub tokens: usize,
    /// Divergence from the full cache's distributions at each of these tokens.
    pub kl_nats: Vec<f64>,
    /// Of these tokens, those where both think the same token likeliest.
    pub agreed: usize,
    /// Minus the log-probability of the right answer.
    pub nll_nats: f64,
    /// The same with the full cache.
    pub full_nll_nats: f64,
    /// The model's own words.
    pub written: Vec<u32>,
    /// Fraction of the full cache's own words that these begin with.
    pub same: f64,
    /// For each layer, squared distance of attention's outputs from the full cache's, and their squared norm.
    pub o_distance: Vec<(f64, f64)>,
}

/// What a prompt gave under a treatment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// One for each question.
    pub answers: Vec<Answer>,
    /// KV bytes of whole pages that the evicted context holds, or of the memory.
    pub kv_bytes_live: u64,
    /// Tokens that it holds, summed over the KV heads of all layers.
    pub held_tokens: usize,
    /// KV bytes that the last decode step of an answer read, on average over questions.
    pub kv_bytes_read: u64,
    /// What the modes of the memory hold, by layer; nothing without a memory that has modes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modes: Vec<Modes>,
}

/// Looks at what attention gives while a question is asked.
#[derive(Default)]
pub struct Watch(Mutex<Option<Outputs>>);

impl Watch {
    fn outputs(&self) -> MutexGuard<'_, Option<Outputs>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for Watch {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if let (Activation::O, Some(outputs)) = (what, self.outputs().as_mut()) {
            outputs.push(layer, rows);
        }
    }
}

/// A decoder for evaluations of up to so many tokens.
pub struct Evaluator<'a> {
    stage: Stage<'a>,
    text: &'a Text,
    decoder: Decoder<'a>,
    watch: &'a Watch,
    setup: Setup<'a>,
    /// Policies that evict forks of a context.
    recorded: Vec<&'a Policy>,
    /// Logits behind the last token that was fed.
    last: Vec<f32>,
    /// Logits behind the context of [`CONTEXT`] and of [`EVICTED`], as the first token of an answer is chosen where nothing
    /// is fed in between.
    behind_context: [Vec<f32>; 2],
}

impl<'a> Evaluator<'a> {
    /// For these treatments; the stage's format is that of the full cache which all are compared with. `text` is what
    /// answers are written with, and `watch` looks on.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(
        stage: Stage<'a>,
        text: &'a Text,
        watch: &'a Watch,
        treatments: &[Treatment<'a>],
    ) -> Result<Self, EvalError> {
        let evictions = treatments.iter().filter_map(|treatment| treatment.choice.eviction());
        let policies: Vec<&Policy> = evictions.map(|eviction| eviction.policy).collect();
        let plain = policies.iter().all(|policy| policy.columns().is_empty());
        let setup = stage.setup(SEQUENCES, if plain { &[] } else { &Column::ALL });
        let recorded: Vec<&Policy> = policies.into_iter().filter(|policy| !reads_alone(policy)).collect();
        let decoder = recording(stage, setup, &recorded, watch)?;
        let [last, context, evicted] = [(); 3].map(|()| vec![0.0; stage.model.config.vocab]);
        let behind_context = [context, evicted];
        Ok(Evaluator { stage, text, decoder, watch, setup, recorded, last, behind_context })
    }

    /// Asks everything of `prompt` under each of `treatments`. `most_tokens` is how long an answer may be. An error of one
    /// treatment is its own; one of the full cache is an error of all.
    ///
    /// # Errors
    /// When the arena has no room for the context, or a logit is no number.
    pub fn run(
        &mut self,
        prompt: &Prompt,
        treatments: &[Treatment<'a>],
        most_tokens: impl Fn(&Asked) -> usize,
    ) -> Result<Vec<Result<Answers, EvalError>>, EvalError> {
        self.decoder.clear();
        self.prefill(CONTEXT, &prompt.context)?;
        let full = prompt.asked.iter().map(|asked| self.ask(CONTEXT, asked, most_tokens(asked)));
        let full = full.collect::<Result<Vec<Given>, _>>()?;
        let mut answers: Vec<Option<_>> = treatments.iter().map(|_| None).collect();
        let (model, kv_format, activations) = (self.stage.model, self.setup.kv_format, self.setup.activations);
        for (at, treatment) in treatments.iter().enumerate() {
            if treatment.reads_like(&Treatment { model, kv_format, activations, ..*treatment }) {
                answers[at] = Some(self.treated(prompt, treatment, &full, &most_tokens));
            }
        }
        // What is left has other formats, which read the context again, one after another.
        while let Some(first) = answers.iter().position(Option::is_none) {
            self.decoder.clear();
            let Treatment { model, kv_format, activations, .. } = treatments[first];
            let setup = Setup { kv_format, activations, ..self.setup };
            let stage = Stage { model, ..self.stage };
            let other = match recording(stage, setup, &self.recorded, self.watch) {
                Ok(other) => other,
                Err(error) => {
                    answers[first] = Some(Err(error));
                    continue;
                }
            };
            let mut is_read = false;
            self.with(other, |evaluator| {
                let alike = |&at: &usize| treatments[at].reads_like(&treatments[first]);
                for at in (first..treatments.len()).filter(alike) {
                    let read = if is_read { Ok(()) } else { evaluator.prefill(CONTEXT, &prompt.context) };
                    is_read = read.is_ok();
                    let treatment = &treatments[at];
                    answers[at] = Some(read.and_then(|()| evaluator.treated(prompt, treatment, &full, &most_tokens)));
                }
            });
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Runs something with another decoder in place of this one.
    fn with<T>(&mut self, mut other: Decoder<'a>, run: impl FnOnce(&mut Self) -> T) -> T {
        std::mem::swap(&mut self.decoder, &mut other);
        let result = run(self);
        self.decoder = other;
        result
    }

    fn treated(
        &mut self,
        prompt: &Prompt,
        treatment: &Treatment<'a>,
        full: &[Given],
        most_tokens: &impl Fn(&Asked) -> usize,
    ) -> Result<Answers, EvalError> {
        match &treatment.choice {
            Choice::Evict(eviction) => self.evicted(prompt, eviction, full, most_tokens),
            Choice::Remember(memory) => self.remembered(prompt, (treatment.model, *memory), full, most_tokens),
        }
    }

    fn evicted(
        &mut self,
        prompt: &Prompt,
        choice: &Eviction<'a>,
        full: &[Given],
        most_tokens: &impl Fn(&Asked) -> usize,
    ) -> Result<Answers, EvalError> {
        let choice = choice.of_sample(prompt.sample);
        if reads_alone(choice.policy) {
            (EVICTED..SEQUENCES).for_each(|sequence| self.decoder.free(sequence));
            self.decoder.evict(choice, &[prompt.budgeted_tokens(); SEQUENCES])?;
            self.decoder.never_evict(prompt.budgeted_tokens()..prompt.context.len());
            self.prefill(EVICTED, &prompt.context)?;
        } else {
            self.decoder.fork(CONTEXT, EVICTED)?;
            self.behind_context[EVICTED] = self.behind_context[CONTEXT].clone();
            self.decoder.evict_recorded(EVICTED, choice, prompt.kept)?;
        }
        self.answers(prompt, full, most_tokens)
    }

    /// The context is read again, by a decoder with the memory.
    fn remembered(
        &mut self,
        prompt: &Prompt,
        (model, memory): (&'a Model, &'a dyn Memory),
        full: &[Given],
        most_tokens: &impl Fn(&Asked) -> usize,
    ) -> Result<Answers, EvalError> {
        let Stage { cpu, arena, .. } = self.stage;
        let mut other = Decoder::with_memory(model, self.setup, memory, cpu, arena)?;
        other.hook(self.watch);
        self.with(other, |evaluator| {
            evaluator.prefill(EVICTED, &prompt.context)?;
            evaluator.answers(prompt, full, most_tokens)
        })
    }

    /// Asks everything of the context as it was evicted.
    fn answers(
        &mut self,
        prompt: &Prompt,
        full: &[Given],
        most_tokens: &impl Fn(&Asked) -> usize,
    ) -> Result<Answers, EvalError> {
        let (kv_bytes_live, held_tokens) = (self.decoder.sequence_kv_bytes(EVICTED), self.decoder.held_tokens(EVICTED));
        let modes = self.decoder.modes(EVICTED);
        let mut read_bytes = 0;
        let answer = |(asked, full): (&Asked, &Given)| {
            let given = self.ask(EVICTED, asked, most_tokens(asked))?;
            // A text is not answered: its own tokens are what follows.
            read_bytes += self.decoder.step_kv_bytes(if asked.question.is_some() { ASKED } else { FORCED });
            Ok(self.compare(asked, full, given))
        };
        let answers = prompt.asked.iter().zip(full).map(answer).collect::<Result<_, EvalError>>()?;
        let kv_bytes_read = read_bytes / prompt.asked.len() as u64;
        Ok(Answers { answers, kv_bytes_live, held_tokens, kv_bytes_read, modes })
    }

    fn prefill(&mut self, sequence: usize, tokens: &[u32]) -> Result<(), EvalError> {
        // A question that failed may have left its watch on.
        *self.watch.outputs() = None;
        let behind = &mut self.behind_context[sequence];
        self.decoder.prefill(&only(sequence, tokens), |_, _, logits| behind.copy_from_slice(logits))?;
        numbers(&self.behind_context[sequence])
    }

    /// Logits behind `tokens`.
    fn feed(&mut self, sequence: usize, tokens: &[u32]) -> Result<(), EvalError> {
        let last = &mut self.last;
        self.decoder.follow(&only(sequence, tokens), |_, _, logits| last.copy_from_slice(logits))?;
        numbers(&self.last)
    }

    fn ask(&mut self, from: usize, asked: &Asked, most_tokens: usize) -> Result<Given, EvalError> {
        let config = &self.stage.model.config;
        let (vocab, forced) = (config.vocab, asked.expected.len());
        let mut logits = self.stage.arena.alloc::<f32>(Label::Activations, forced * vocab)?;
        let rows = asked.prompt.len() + forced - 1;
        *self.watch.outputs() = Some(Outputs::new(self.stage.arena, config.layers, rows * config.q_width())?);
        self.decoder.fork(from, ASKED)?;
        self.last.copy_from_slice(&self.behind_context[from]);
        if !asked.prompt.is_empty() {
            self.feed(ASKED, &asked.prompt)?;
        }
        self.decoder.fork(ASKED, FORCED)?;
        let behind_prompt = self.last.clone();
        logits[..vocab].copy_from_slice(&self.last);
        let fed = &asked.expected[..forced - 1];
        self.decoder.follow_closely(&only(FORCED, fed), |_, place, row| {
            logits[(place + 1) * vocab..][..vocab].copy_from_slice(row);
        })?;
        logits.chunks_exact(vocab).try_for_each(numbers)?;
        let outputs = self.watch.outputs().take().expect("put there above");

        let mut written = vec![likeliest(&behind_prompt) as u32];
        while written.len() < most_tokens && !config.eos.contains(&written[written.len() - 1]) {
            self.feed(ASKED, &written[written.len() - 1..])?;
            written.push(likeliest(&self.last) as u32);
        }
        Ok(Given { logits, outputs, written })
    }

    fn compare(&self, asked: &Asked, full: &Given, given: Given) -> Answer {
        let vocab = self.stage.model.config.vocab;
        let skipped = asked.expected.len() - asked.compared();
        let rows = || full.logits.chunks_exact(vocab).zip(given.logits.chunks_exact(vocab)).skip(skipped);
        let compared = || asked.expected[skipped..].iter().zip(rows());
        let score = |given: &Given| Some(asked.question.as_ref()?.score(&self.text.decode(&given.written)));
        let same = full.written.iter().zip(&given.written).take_while(|(a, b)| a == b).count();
        Answer {
            score: score(&given),
            full_score: score(full),
            tokens: asked.compared(),
            kl_nats: rows().map(|(full, given)| divergence(full, given)).collect(),
            agreed: rows().filter(|(full, given)| likeliest(full) == likeliest(given)).count(),
            nll_nats: compared().map(|(&token, (_, given))| nats(given, token)).sum(),
            full_nll_nats: compared().map(|(&token, (full, _))| nats(full, token)).sum(),
            same: same as f64 / full.written.len() as f64,
            o_distance: full.outputs.distance(&given.outputs),
            written: given.written,
        }
    }
}

/// A decoder whose contexts are forked for these policies.
fn recording<'a>(
    stage: Stage<'a>,
    setup: Setup<'a>,
    policies: &[&Policy],
    watch: &'a Watch,
) -> Result<Decoder<'a>, EvalError> {
    let mut decoder = Decoder::new(stage.model, setup, stage.cpu, stage.arena)?;
    decoder.record_queries(policies.iter().copied());
    decoder.hook(watch);
    Ok(decoder)
}

/// Refuses logits that are no numbers.
pub(super) fn numbers(logits: &[f32]) -> Result<(), EvalError> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        Some(token) => Err(ModelError::Logit { logit: logits[token], token: token as u32 }.into()),
        None => Ok(()),
    }
}

/// Tokens for one sequence.
fn only(sequence: usize, tokens: &[u32]) -> [&[u32]; SEQUENCES] {
    let mut all: [&[u32]; SEQUENCES] = [&[]; SEQUENCES];
    all[sequence] = tokens;
    all
}

/// Whether a policy has something to do while the context is read, to evict after chunks or to look at hidden states, so that
/// it needs a prefill of its own.
pub fn reads_alone(policy: &Policy) -> bool {
    let does = policy.schedule.chunk_tokens.is_some() || policy.looks_at(Statistic::HiddenStates);
    policy.scorer.is_some() && does
}

/// What a question gave under one policy.
struct Given {
    /// `[tokens of the right answer, vocab]`.
    logits: Buffer<f32>,
    outputs: Outputs,
    written: Vec<u32>,
}

/// Outputs of attention in every layer, behind one another.
struct Outputs {
    /// `[layers, room]`.
    data: Buffer<f32>,
    room: usize,
    fill: Vec<usize>,
}

impl Outputs {
    fn new(arena: &Arena, layers: usize, room: usize) -> Result<Self, ArenaError> {
        Ok(Outputs { data: arena.alloc(Label::Activations, layers * room)?, room, fill: vec![0; layers] })
    }

    fn push(&mut self, layer: usize, row: &[f32]) {
        let fill = self.fill[layer];
        self.data[layer * self.room + fill..][..row.len()].copy_from_slice(row);
        self.fill[layer] += row.len();
    }

    fn distance(&self, other: &Outputs) -> Vec<(f64, f64)> {
        let layer = |(full, given): (&[f32], &[f32])| {
            full.iter().zip(given).fold((0.0, 0.0), |(distance, norm), (&full, &given)| {
                let (full, given) = (f64::from(full), f64::from(given));
                (distance + (full - given).powi(2), norm + full * full)
            })
        };
        self.data.chunks_exact(self.room).zip(other.data.chunks_exact(self.room)).map(layer).collect()
    }
}

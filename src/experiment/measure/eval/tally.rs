//! From answers to the numbers of a record.

use super::together::Numbers;
use crate::eval::{Alone, Answer, Answers as Given, Prompt};
use crate::experiment::answers::{Answers, Estimate, Spread};
use crate::experiment::record::Memory;
use crate::format::KvFormat;
use crate::memories::Modes;
use crate::memory::Label;
use std::collections::BTreeMap;

/// What one cell has given so far.
pub(super) struct Tally {
    /// KV heads of all layers.
    lists: usize,
    /// How one of them keeps its tokens, and the elements of a head.
    kept: (KvFormat, usize),
    weights_bytes: u64,
    /// Tokens of the budget, and those of them that are not protected, where something is evicted.
    budget: Option<(usize, usize)>,
    samples: BTreeMap<usize, Sample>,
    alone: Vec<(usize, Alone)>,
}

/// One sample: all its questions.
#[derive(Default)]
struct Sample {
    answers: Vec<Answer>,
    /// Tokens of each context that its budget counts, KV bytes that stayed, and tokens of these that did.
    contexts: Vec<(usize, u64, usize)>,
    /// KV bytes that a decode step behind each of them reads.
    kv_bytes_read: Vec<u64>,
    /// What the modes of a memory hold behind each of them, by layer.
    modes: Vec<Vec<Modes>>,
    depth: Option<f64>,
}

impl Sample {
    fn mean(&self, value: impl Fn(&Answer) -> f64) -> f64 {
        self.answers.iter().map(value).sum::<f64>() / self.answers.len() as f64
    }

    fn per_token(&self, value: impl Fn(&Answer) -> f64) -> f64 {
        let tokens: usize = self.answers.iter().map(|answer| answer.tokens).sum();
        self.answers.iter().map(value).sum::<f64>() / tokens as f64
    }

    /// `None` where there is no score.
    fn score(&self, read: impl Fn(&Answer) -> Option<f64>) -> Option<f64> {
        let scores: Option<Vec<f64>> = self.answers.iter().map(read).collect();
        scores.map(|scores| scores.iter().sum::<f64>() / scores.len() as f64)
    }

    fn o_drift(&self, layer: usize) -> f64 {
        let add = |(distance, norm): (f64, f64), answer: &Answer| {
            (distance + answer.o_distance[layer].0, norm + answer.o_distance[layer].1)
        };
        let (distance, norm) = self.answers.iter().fold((0.0, 0.0), add);
        if distance == 0.0 { 0.0 } else { (distance / norm).sqrt() }
    }
}

impl Tally {
    pub fn new(lists: usize, kept: (KvFormat, usize), weights_bytes: u64, budget: Option<(usize, usize)>) -> Self {
        Tally { lists, kept, weights_bytes, budget, samples: BTreeMap::new(), alone: Vec::new() }
    }

    pub fn add(&mut self, prompt: &Prompt, given: Given) {
        let sample = self.samples.entry(prompt.sample).or_default();
        let held = given.held_tokens.saturating_sub(prompt.kept * self.lists);
        sample.contexts.push((prompt.budgeted_tokens(), given.kv_bytes_live, held));
        sample.kv_bytes_read.push(given.kv_bytes_read);
        sample.modes.push(given.modes);
        sample.answers.extend(given.answers);
        sample.depth = prompt.depth;
    }

    pub fn run_alone(&mut self, sample: usize, given: Alone) {
        self.alone.push((sample, given));
    }

    /// Whether no context lost a token.
    pub fn kept_everything(&self) -> bool {
        self.contexts().all(|(tokens, _, held)| held == tokens * self.lists)
    }

    pub fn warnings(&self) -> Vec<String> {
        let differs = |(sample, alone): &&(usize, Alone)| {
            let shared = self.samples.get(sample).and_then(|sample| sample.answers.first());
            shared.is_some_and(|shared| !alone.written.starts_with(&shared.written))
        };
        match self.alone.iter().filter(differs).count() {
            0 => Vec::new(),
            count => vec![format!("{count} answers differ when the context is read for this policy alone")],
        }
    }

    /// The numbers of a record; `None` without a sample.
    pub fn finish(&self, limit_bytes: u64) -> Option<Numbers> {
        let samples: Vec<&Sample> = self.samples.values().collect();
        let first = self.alone.first().map(|(_, alone)| alone);
        let values = |value: &dyn Fn(&Sample) -> f64| samples.iter().map(|sample| value(sample)).collect::<Vec<_>>();
        let over = |value: &dyn Fn(&Sample) -> f64| Estimate::over(&values(value));
        let share = |value: &dyn Fn(&Sample) -> f64| Estimate::of_shares(&[&values(value)]);
        let scored = |value: &dyn Fn(&Sample) -> Option<f64>| -> Option<Vec<f64>> {
            samples.iter().map(|sample| value(sample)).collect()
        };
        let scores = scored(&|sample| sample.score(|answer| answer.score));
        let differences = scored(&|sample| sample.score(|answer| Some(answer.score? - answer.full_score?)));
        let modes: Vec<&Vec<Modes>> = samples.iter().flat_map(|sample| &sample.modes).collect();
        let of_layer = |layer: usize| {
            Modes::mean(&modes.iter().filter_map(|layers| layers.get(layer)).copied().collect::<Vec<_>>())
        };
        let nll_nats = |sample: &Sample| sample.per_token(|answer| answer.nll_nats);
        let kl_nats = |sample: &Sample| sample.per_token(|answer| answer.kl_nats.iter().sum());
        let layers = samples.first()?.answers.first()?.o_distance.len();
        let questions = samples.iter().map(|sample| sample.answers.len()).sum();
        // Of a text the tokens that are fed; the first of them is compared with nothing.
        let words = |answer: &Answer| if answer.score.is_some() { answer.written.len() } else { answer.tokens + 1 };
        let words: usize = samples.iter().flat_map(|sample| &sample.answers).map(words).sum();
        let contexts = self.contexts().count() as f64;
        let tokens = self.contexts().map(|(tokens, ..)| tokens as f64).sum::<f64>();
        let (format, head_dim) = self.kept;
        let dense = self.contexts().map(|(tokens, ..)| format.list_bytes(head_dim, tokens) as f64).sum::<f64>();
        let held = self.contexts().map(|(_, _, held)| held as f64).sum::<f64>() / self.lists as f64;
        let live = self.contexts().map(|(_, bytes, _)| bytes as f64).sum::<f64>();
        let read = samples.iter().flat_map(|sample| &sample.kv_bytes_read).map(|&bytes| bytes as f64).sum::<f64>();
        let of_tokens = samples.iter().flat_map(|sample| &sample.answers).flat_map(|answer| answer.kl_nats.clone());
        let kl_of_tokens: Vec<f64> = of_tokens.collect();
        let answers = Answers {
            samples: samples.len(),
            questions,
            accuracy: scores.as_ref().and_then(|scores| Estimate::of_shares(&[scores])),
            accuracy_difference: differences.and_then(Estimate::of_differences),
            kl_nats: over(&kl_nats)?,
            kl_of_tokens: Some(Spread::of(&kl_of_tokens)?),
            top1_agreement: share(&|sample| sample.per_token(|answer| answer.agreed as f64))?,
            nll_nats: over(&nll_nats)?,
            nll_difference_nats: over(&|sample| sample.per_token(|answer| answer.nll_nats - answer.full_nll_nats))?,
            greedy_agreement: scores.as_ref().and_then(|_| share(&|sample| sample.mean(|answer| answer.same))),
            o_drift_by_layer: (0..layers).map(|layer| over(&|sample| sample.o_drift(layer))).collect::<Option<_>>()?,
            budget_tokens: self.budget.map(|(tokens, _)| tokens),
            unprotected_tokens: self.budget.map(|(_, unprotected)| unprotected),
            kept_fraction: held / tokens,
            context_tokens: tokens / contexts,
            answer_tokens: words as f64 / questions as f64,
            kv_bytes_dense: (dense * self.lists as f64 / contexts).round() as u64,
            kv_bytes_live: (live / contexts).round() as u64,
            kv_bytes_read: (read / contexts).round() as u64,
            weights_bytes: Some(self.weights_bytes),
            kv_bytes_peak: self.alone.iter().map(|(_, alone)| alone.kv_bytes_peak).max(),
            evicted_tokens: first.map(|alone| alone.evicted_tokens),
            sample_scores: scores.unwrap_or_default(),
            sample_kl_nats: samples.iter().map(|sample| kl_nats(sample)).collect(),
            sample_nll_nats: values(&nll_nats),
            sample_depths: samples.iter().map(|sample| sample.depth).collect::<Option<_>>().unwrap_or_default(),
            modes_by_layer: (0..layers).map_while(of_layer).collect(),
        };
        let memory = first.map(|alone| Memory {
            predicted_peak_bytes: alone.full_peak_bytes,
            peak_bytes: alone.peak_bytes,
            residual_bytes: alone.peak_bytes as i64 - alone.full_peak_bytes as i64,
            workspace_bytes: alone.peak_by_label.get(&Label::Workspace).copied().unwrap_or(0),
            peak_by_label: alone.peak_by_label.clone(),
            arena_growth_bytes: alone.peak_bytes - self.weights_bytes,
            limit_bytes,
            ..Memory::default()
        });
        let first_token = self.alone.iter().map(|(_, alone)| alone.first_token_ns).collect();
        let steps = self.alone.iter().flat_map(|(_, alone)| alone.step_ns.clone()).collect();
        let mut samples_ns: BTreeMap<&str, Vec<u64>> =
            BTreeMap::from([("first_token", first_token), ("decode", steps)]);
        samples_ns.retain(|_, samples_ns| !samples_ns.is_empty());
        Some(Numbers { answers, memory, samples_ns })
    }

    fn contexts(&self) -> impl Iterator<Item = (usize, u64, usize)> + '_ {
        self.samples.values().flat_map(|sample| sample.contexts.iter().copied())
    }
}

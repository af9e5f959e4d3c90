//! One treatment by itself: what a context, a question and its answer take, without anything that other policies need.

use super::{Choice, EvalError, Prompt, Stage, Treatment};
use crate::memory::LabelBytes;
use crate::model::{Decoder, ModelError, Sampler, Sampling, Setup, bytes_of_calls, bytes_with_memory};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What a run took.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Alone {
    /// From the start to the first token of the answer: reading the context, evicting it, reading the question.
    pub first_token_ns: u64,
    /// Between one token of the answer and the next, eviction steps included.
    pub step_ns: Vec<u64>,
    /// The answer.
    pub written: Vec<u32>,
    /// KV bytes of pages in use once the context was evicted, or of the memory.
    pub kv_bytes_live: u64,
    /// Most KV bytes of pages in use at one moment.
    pub kv_bytes_peak: u64,
    /// Most bytes in use at one moment, weights included.
    pub peak_bytes: u64,
    /// Most bytes of each label.
    pub peak_by_label: LabelBytes,
    /// Peak with a full cache, or with the memory, from the extents alone.
    pub full_peak_bytes: u64,
    /// Tokens evicted, summed over the KV heads of all layers.
    pub evicted_tokens: u64,
}

/// Reads `prompt`, lets the policy evict, asks its first question, and lets the model answer in up to `most_tokens`
/// tokens. The arena of `stage` holds the weights and else only what this run takes.
///
/// # Errors
/// When the policy cannot do this, a logit is no number, or the arena has no room.
pub fn alone(
    stage: &Stage<'_>,
    treatment: Treatment<'_>,
    prompt: &Prompt,
    most_tokens: usize,
) -> Result<Alone, EvalError> {
    let Stage { cpu, arena, .. } = *stage;
    let Treatment { model, choice, kv_format, activations } = treatment;
    let (context, question) = (&prompt.context[..], &prompt.asked[0].prompt[..]);
    let columns = choice.eviction().map_or(&[][..], |eviction| eviction.policy.columns());
    let more_tokens = choice.eviction().map_or(0, |eviction| eviction.more_tokens(prompt.budgeted_tokens()));
    let max_tokens = context.len() + more_tokens.max(question.len() + most_tokens);
    let setup = Setup { max_tokens, kv_format, activations, ..stage.setup(1, columns) };
    arena.reset_peak();
    let mut decoder = match choice {
        Choice::Evict(_) => Decoder::new(model, setup, cpu, arena)?,
        Choice::Remember(memory) => Decoder::with_memory(model, setup, memory, cpu, arena)?,
    };
    if let Some(eviction) = choice.eviction() {
        decoder.evict(eviction.of_sample(prompt.sample), &[prompt.budgeted_tokens()])?;
        decoder.never_evict(prompt.budgeted_tokens()..context.len());
    }
    let mut sampler = Sampler::new(Sampling::GREEDY);
    let start = Instant::now();
    let mut chosen = Ok(0);
    decoder.prefill(&[context], |_, _, logits| chosen = sampler.next(logits))?;
    let kv_bytes_live = decoder.kv_bytes();
    decoder.follow(&[question], |_, _, logits| chosen = sampler.next(logits))?;
    let first_token_ns = start.elapsed().as_nanos() as u64;
    let (mut written, mut step_ns) = (vec![chosen?], Vec::new());
    while written.len() < most_tokens && !model.config.eos.contains(&written[written.len() - 1]) {
        let start = Instant::now();
        let mut chosen: Result<u32, ModelError> = Ok(0);
        decoder.follow(&[&written[written.len() - 1..]], |_, _, logits| chosen = sampler.next(logits))?;
        written.push(chosen?);
        step_ns.push(start.elapsed().as_nanos() as u64);
    }
    let usage = arena.usage();
    let steps = written.len() - 1;
    let calls: [&[usize]; 2] = [&[context.len()], &[question.len()]];
    let predicted = match choice {
        Choice::Evict(_) => bytes_of_calls(model, &setup, &calls, steps, cpu.threads()),
        Choice::Remember(memory) => {
            let calls: Vec<&[usize]> = calls.into_iter().chain(std::iter::repeat_n(&[1][..], steps)).collect();
            bytes_with_memory(model, &setup, memory, &calls, cpu.threads())
        }
    };
    Ok(Alone {
        first_token_ns,
        step_ns,
        written,
        kv_bytes_live,
        kv_bytes_peak: decoder.most_kv_bytes(),
        peak_bytes: usage.peak_bytes,
        peak_by_label: usage.peak,
        full_peak_bytes: predicted.map_err(ModelError::from)?,
        evicted_tokens: decoder.evicted_tokens(),
    })
}

//! A prompt and what follows it, token by token.

use super::sample::Sampler;
use super::{Decoder, ModelError};
use std::time::Instant;

/// What followed, and how long it took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// New tokens; one that ends a text is the last of them.
    pub tokens: Vec<u32>,
    /// From the start to the first new token.
    pub first_token_ns: u64,
    /// Between one new token and the next, eviction steps included.
    pub step_ns: Vec<u64>,
    /// KV bytes of pages in use once the prompt was evicted.
    pub prompt_kv_bytes: u64,
}

/// A model at work on one sequence, on any device.
pub trait OneSequence {
    /// Runs the prompt; `last` sees the logits of its last token.
    ///
    /// # Errors
    /// As [`Decoder::prefill`].
    fn prompt(&mut self, tokens: &[u32], last: &mut dyn FnMut(&[f32])) -> Result<(), ModelError>;

    /// Runs a token that follows; `logits` sees its logits.
    ///
    /// # Errors
    /// As [`Decoder::follow`].
    fn step(&mut self, token: u32, logits: &mut dyn FnMut(&[f32])) -> Result<(), ModelError>;

    /// KV bytes of pages in use.
    fn kv_bytes(&self) -> u64;
}

impl OneSequence for Decoder<'_> {
    fn prompt(&mut self, tokens: &[u32], last: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.prefill(&[tokens], |_, place, logits| {
            if place + 1 == tokens.len() {
                last(logits);
            }
        })
    }

    fn step(&mut self, token: u32, logits: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.follow(&[&[token]], |_, _, row| logits(row))
    }

    fn kv_bytes(&self) -> u64 {
        Decoder::kv_bytes(self)
    }
}

/// Runs a prompt through a decoder of one sequence and lets `sampler` choose up to `most_tokens` that follow, until one
/// of `ends` is chosen. `each` sees all new tokens whenever there is one more.
///
/// # Errors
/// When a token of the prompt is not one of the model's, a logit is no number, the policy lacks something, or the arena
/// has no room.
///
/// # Panics
/// When the decoder has more than one sequence or has seen tokens, or there is no room for all of them.
pub fn generate(
    decoder: &mut impl OneSequence,
    prompt: &[u32],
    sampler: &mut Sampler,
    ends: &[u32],
    most_tokens: usize,
    mut each: impl FnMut(&[u32]),
) -> Result<Generated, ModelError> {
    let start = Instant::now();
    let mut chosen = Ok(0);
    decoder.prompt(prompt, &mut |logits| chosen = sampler.next(logits))?;
    let first_token_ns = start.elapsed().as_nanos() as u64;
    let prompt_kv_bytes = decoder.kv_bytes();
    let mut generated = Generated { tokens: Vec::new(), first_token_ns, step_ns: Vec::new(), prompt_kv_bytes };
    loop {
        let token = chosen?;
        generated.tokens.push(token);
        each(&generated.tokens);
        if ends.contains(&token) || generated.tokens.len() >= most_tokens {
            return Ok(generated);
        }
        let start = Instant::now();
        chosen = Ok(0);
        decoder.step(token, &mut |logits| chosen = sampler.next(logits))?;
        generated.step_ns.push(start.elapsed().as_nanos() as u64);
    }
}

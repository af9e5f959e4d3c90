//! kvsieve's side of `models.py`: a prompt's pass and the steps after it, through a model that stays open.

use super::Answer;
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{Decoder, Model, Sampler, Sampling, Setup, generate};
use serde::Deserialize;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Tokens that go through the model together: what the commands do when nothing else is asked for.
const CHUNK_TOKENS: usize = 512;

#[derive(Deserialize)]
pub struct Request {
    /// Its folder.
    model: PathBuf,
    threads: usize,
    prompt: Vec<u32>,
    new_tokens: usize,
}

/// A model and the arena of its weights.
pub struct Open {
    folder: PathBuf,
    model: Model,
    arena: Arena,
}

impl Open {
    fn new(folder: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        let arena = Arena::unlimited();
        Ok(Open { folder: folder.into(), model: Model::open(folder, &arena)?, arena })
    }
}

/// Runs a prompt and `new_tokens` steps, in a cache of its own; the model is opened when it is not the one of before.
pub fn run(open: &mut Option<Open>, request: &Request) -> Answer {
    if open.as_ref().is_none_or(|open| open.folder != request.model) {
        *open = None;
        *open = Some(Open::new(&request.model)?);
    }
    let Open { model, arena, .. } = open.as_ref().expect("one was just opened");
    let (cpu, prompt) = (Cpu::new(Some(request.threads))?, &request.prompt);
    let setup = Setup {
        chunk_tokens: CHUNK_TOKENS.min(prompt.len()),
        ..Setup::of(prompt.len() + request.new_tokens, model.weights.dtype())
    };
    let mut decoder = Decoder::new(model, setup, &cpu, arena)?;
    let mut sampler = Sampler::new(Sampling { temperature: 0.0, top_p: 1.0, seed: 0 });
    let mut generated = generate(&mut decoder, prompt, &mut sampler, &[], request.new_tokens, |_| ())?;
    generated.step_ns.sort_unstable();
    let step_ns = generated.step_ns.get(generated.step_ns.len() / 2);
    Ok(json!({ "prefill_ns": generated.first_token_ns, "step_ns": step_ns, "tokens": generated.tokens }))
}

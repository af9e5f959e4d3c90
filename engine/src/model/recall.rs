//! What each token of a context is looked at while a model repeats it (KVzip, arXiv 2505.23416), without evicting anything: what
//! gates are fitted to, and what scores of whole heads are made of.

use super::{Decoder, Eviction, Hook, Model, ModelError, Repeat, Setup};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::policy::{Context, Policy, PolicyError, Reconstruction, Scorer, Statistic};
use crate::tensor::DType;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens that go through the model together.
const CHUNK: usize = 512;
/// The policy in errors.
const NAME: &str = "kvzip";

/// A model that repeats contexts.
#[derive(Clone, Copy)]
pub struct Recall<'a> {
    /// The model.
    pub model: &'a Model,
    /// The words that ask it to.
    pub repeat: &'a Repeat,
    /// What becomes a token's score.
    pub how: Reconstruction,
    /// Element type of its passes and of its cache.
    pub dtype: DType,
    /// Where it runs.
    pub cpu: &'a Cpu,
    /// Where its memory comes from.
    pub arena: &'a Arena,
}

impl Recall<'_> {
    /// Scores of a context's tokens, `[layers, Hkv, tokens]`; `hook` sees the model read and repeat it.
    ///
    /// # Errors
    /// When the model cannot repeat it, or the arena has no room.
    pub fn scores(&self, tokens: &[u32], hook: Option<&dyn Hook>) -> Result<Vec<f32>, ModelError> {
        let Recall { model, repeat, how, dtype, cpu, arena } = *self;
        let heard = Arc::new(Mutex::new(Vec::new()));
        let policy = Policy { reconstruction: Some(how), ..Policy::after_prefill(Listener(heard.clone())) };
        let setup = Setup {
            chunk_tokens: CHUNK,
            columns: policy.columns(),
            ..Setup::of(tokens.len() + repeat.most_tokens(tokens.len(), how), dtype)
        };
        let eviction = Eviction { policy: &policy, name: NAME, budget: None, seed: 0, repeat: Some(repeat) };
        let mut decoder = Decoder::new(model, setup, cpu, arena)?;
        if let Some(hook) = hook {
            decoder.hook(hook);
        }
        decoder.evict(eviction, &[tokens.len()])?;
        decoder.prefill(&[tokens], |_, _, _| ())?;
        drop(decoder);
        let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut heard))
    }
}

/// Hands on what tokens were looked at, and retains all of them.
struct Listener(Arc<Mutex<Vec<f32>>>);

impl Scorer for Listener {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Reconstruction]
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let what = "a model that repeats its context";
        let found = context.reconstructed.ok_or(PolicyError::Missing { policy: NAME, what })?;
        scores.copy_from_slice(found);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = found.to_vec();
        Ok(())
    }
}

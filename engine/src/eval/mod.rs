//! What a model answers under a policy and a budget, beside what it answers with its full cache.
//!
//! A [`Prompt`] is a context and what is asked of it, as tokens. What is compared with the full cache is a [`Treatment`]:
//! a policy or a memory, the format of keys and values, and that of the weights. An [`Evaluator`] reads a context once for
//! each pair of formats and lets every policy that evicts only after prefill evict a fork of it; [`alone()`] runs one
//! treatment by itself, as a server would, and measures what that takes; [`ask`] answers a user's own questions.
//! `docs/evaluation.md` says what each number is.

mod alone;
mod ask;
mod distribution;
mod evaluator;
mod perplexity;
mod prompt;
mod protocol;

pub use alone::{Alone, alone};
pub use ask::{Replies, ask, questions};
pub use evaluator::{Answer, Answers, Evaluator, Watch, reads_alone};
pub use perplexity::{Perplexity, Windows, perplexity};
pub use prompt::{Asked, Frame, Prompt, documents, prompts};
pub use protocol::Protocol;

use crate::cache::Column;
use crate::device::Cpu;
use crate::format::{KvFormat, RowFormat};
use crate::memories::Memory;
use crate::memory::{Arena, ArenaError};
use crate::model::{Eviction, Model, ModelError, Setup};
use crate::named::NamedError;
use crate::task::TaskError;
use crate::tensor::DType;

/// An evaluation that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The model or the policy.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A task that the tokenizer or the length does not allow.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// No such task.
    #[error(transparent)]
    Named(#[from] NamedError),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The system refuses what is to be kept of a sample.
    #[error("cannot write down what a sample gave: {0}")]
    File(#[from] std::io::Error),
}

/// What is compared with the full cache of plain elements of the stage's model.
#[derive(Clone, Copy)]
pub struct Treatment<'a> {
    /// The stage's model, or the same with its weights in another format.
    pub model: &'a Model,
    /// What a context loses.
    pub choice: Choice<'a>,
    /// How its keys and values are kept.
    pub kv_format: KvFormat,
    /// What its activations are rounded to, as in [`crate::model::Setup`].
    pub activations: Option<RowFormat>,
}

/// What a context loses.
#[derive(Clone, Copy)]
pub enum Choice<'a> {
    /// A policy at work in the cache.
    Evict(Eviction<'a>),
    /// A memory in place of the cache.
    Remember(&'a dyn Memory),
}

impl Treatment<'_> {
    /// Whether both read a context alike, so that it is read once for both.
    fn reads_like(&self, other: &Treatment<'_>) -> bool {
        let same_formats = (self.kv_format, self.activations) == (other.kv_format, other.activations);
        std::ptr::eq(self.model, other.model) && same_formats
    }
}

impl<'a> Choice<'a> {
    /// What is asked of a policy, if it is one.
    pub fn eviction(&self) -> Option<Eviction<'a>> {
        match *self {
            Choice::Evict(eviction) => Some(eviction),
            Choice::Remember(_) => None,
        }
    }
}

/// What all runs of an evaluation share.
#[derive(Clone, Copy)]
pub struct Stage<'a> {
    /// The model that others are compared with.
    pub model: &'a Model,
    /// The threads.
    pub cpu: &'a Cpu,
    /// Where everything is allocated.
    pub arena: &'a Arena,
    /// Kernel of attention, as in [`crate::model::Setup`].
    pub kernel: &'a str,
    /// Element type of the pass, as in [`crate::model::Setup`].
    pub dtype: DType,
    /// How keys and values are kept where no [`Treatment`] says otherwise.
    pub kv_format: KvFormat,
    /// What activations are rounded to where no [`Treatment`] says otherwise, as in [`crate::model::Setup`].
    pub activations: Option<RowFormat>,
    /// Most tokens of a sequence.
    pub max_tokens: usize,
    /// Tokens that go through the model together.
    pub chunk_tokens: usize,
}

impl<'a> Stage<'a> {
    /// How a decoder of `batch` sequences is set up, whose cache has these columns.
    fn setup(&self, batch: usize, columns: &'static [Column]) -> Setup<'a> {
        Setup {
            kernel: self.kernel,
            batch,
            chunk_tokens: self.chunk_tokens,
            activations: self.activations,
            kv_format: self.kv_format,
            columns,
            ..Setup::of(self.max_tokens, self.dtype)
        }
    }
}

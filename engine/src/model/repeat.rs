//! How a model is asked to repeat its context (KVzip, arXiv 2505.23416): the words around each chunk of it, as tokens.

use super::{ChatTemplate, Model, ModelError, Text};
use crate::device::Cpu;
use crate::memory::{Arena, Buffer};
use crate::policy::Reconstruction;
use crate::tensor::DType;
use std::path::Path;

/// What asks for the first chunk, and what for another; the last tokens of the chunk before it follow. The words are those of
/// kvpress; the second request of KVzip's authors ends in a space.
const FIRST: &str = "\n\nRepeat the previous context exactly.";
const NEXT: &str = "\n\nRepeat the part of the previous context exactly, starting with";
/// Tokens of the chunk before that say where the next one starts.
const OVERLAP: usize = 8;
/// What stands before an answer where the model has no chat template.
const PLAIN: &str = "\n";

/// Norms of gradients while pieces of text are read behind a context (KVgrad): of `sum |h|^2` over a piece's tokens, with `h` what the last
/// block puts out, by what attention adds to the residual stream at each, `[layers, tokens]` for each piece. It needs a backward pass,
/// which a model has above this floor (`train::sensitivity`).
pub type Gradients = fn(&Model, DType, &[u32], &[Vec<u32>], &Cpu, &Arena) -> Result<Vec<Buffer<f32>>, ModelError>;

/// Tokens that ask a model to repeat its context.
#[derive(Debug, Clone)]
pub struct Repeat {
    /// For its first chunk.
    pub first: Vec<u32>,
    /// For another chunk: the end of the one before follows.
    pub next: Vec<u32>,
    /// Between what a user says and the model's answer.
    pub answer: Vec<u32>,
    /// Who knows gradients meanwhile, for policies that look at them.
    pub gradients: Option<Gradients>,
}

impl Repeat {
    /// For a model's folder or file with this tokenizer: in its chat template, if it has one.
    ///
    /// # Errors
    /// When the tokenizer has no tokens for the words, or the template is not understood.
    pub fn new(model: &Path, text: &Text) -> Result<Self, ModelError> {
        let answer = match ChatTemplate::find(model)? {
            Some(template) => {
                let [_, behind] = template.around(text)?;
                behind
            }
            None => text.piece(PLAIN)?,
        };
        Ok(Repeat { first: text.piece(FIRST)?, next: text.piece(NEXT)?, answer, gradients: None })
    }

    /// The same where gradients are known.
    pub fn with_gradients(self, gradients: Gradients) -> Self {
        Repeat { gradients: Some(gradients), ..self }
    }

    /// What is fed to have the model repeat chunk `number` of a context, the chunk as its answer included.
    pub fn tokens(&self, context: &[u32], how: Reconstruction, number: usize) -> Vec<u32> {
        let start = number * how.chunk_tokens;
        let chunk = &context[start..context.len().min(start + how.chunk_tokens)];
        let (asks, overlap) = match number {
            0 => (&self.first, &[][..]),
            _ => (&self.next, &context[start.saturating_sub(OVERLAP.min(how.chunk_tokens))..start]),
        };
        [asks, overlap, &self.answer, chunk].concat()
    }

    /// Most tokens that are fed at a time for a context of so many.
    pub fn most_tokens(&self, context_tokens: usize, how: Reconstruction) -> usize {
        self.first.len().max(self.next.len() + OVERLAP) + self.answer.len() + how.chunk_tokens.min(context_tokens)
    }
}

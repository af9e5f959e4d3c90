//! Heads that copy: how often a head's attention is largest on the very token of the needle that comes next (Wu et al. 2024,
//! "Retrieval Head Mechanistically Explains Long-Context Factuality", arXiv 2404.15574).
//!
//! A needle is hidden in a context, asked for, and its value fed token by token. At each step the next token is known, and
//! so is where it stands in the needle: a head that looks there most copies it. The authors let the model write and count
//! only what it copies rightly; here the right answer is fed, so that a weak model's heads are scored on as many steps.

use super::{activations, heads::softmaxes};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Activation, Model, ModelError, Text};
use crate::task::{Draw, TaskError, Tokens, generate, task};
use rayon::prelude::*;

/// The needle: a number of seven digits in an essay.
const TASK: &str = "niah-single-2";

/// How often each head copies.
#[derive(Debug, Clone, PartialEq)]
pub struct Retrieval {
    /// Steps that were looked at.
    pub steps: usize,
    /// Fraction of the steps, `[layers][Hq]`.
    pub scores: Vec<Vec<f64>>,
}

/// Needles that cannot be hidden.
#[derive(Debug, thiserror::Error)]
pub enum RetrievalError {
    /// The context is too short, or the tokenizer loses something.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Retrieval {
    /// Heads `[layer, head]` with their scores, the highest first.
    pub fn heads(&self) -> Vec<([usize; 2], f64)> {
        let scores = self.scores.iter().enumerate();
        let mut heads: Vec<_> = scores
            .flat_map(|(layer, heads)| heads.iter().enumerate().map(move |(head, &score)| ([layer, head], score)))
            .collect();
        heads.sort_by(|a, b| b.1.total_cmp(&a.1));
        heads
    }
}

/// How often the heads of `model` copy the values of `samples` needles, each in a context of `context_tokens` with its
/// question and its answer.
///
/// # Errors
/// When the context is too short for a needle, the model cannot read it, or the arena has no room.
pub fn retrieval(
    model: &Model,
    text: &Text,
    (context_tokens, samples): (usize, usize),
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Retrieval, RetrievalError> {
    let (layers, kv_heads) = (model.config.layers, model.config.kv_heads);
    let mut hits = vec![vec![0usize; model.config.q_heads]; layers];
    let mut steps = 0;
    for sample in 0..samples {
        let Sequence { tokens, copies, .. } = sequence(text, context_tokens, sample)?;
        let [q, k] = &activations(model, &tokens, [Activation::Q, Activation::K], cpu, arena)?;
        let (q, k) = (q.view(), k.view());
        let of_layer = |(layer, hits): (usize, &mut Vec<usize>)| {
            for (kv_head, hits) in hits.chunks_exact_mut(model.config.q_heads / kv_heads).enumerate() {
                for &[query, source] in &copies {
                    softmaxes(model, layer, (&q, &k), [kv_head, query], cpu, |member, softmax| {
                        hits[member] += usize::from(softmax.iter().all(|p| *p <= softmax[source]));
                    });
                }
            }
        };
        cpu.install(|| hits.par_iter_mut().enumerate().for_each(of_layer));
        steps += copies.len();
    }
    let fraction = |hits: &usize| *hits as f64 / steps.max(1) as f64;
    let scores = hits.iter().map(|heads| heads.iter().map(fraction).collect()).collect();
    Ok(Retrieval { steps, scores })
}

/// A context with its question and its answer.
pub(super) struct Sequence {
    pub tokens: Vec<u32>,
    /// Tokens of the context.
    pub context: usize,
    /// Of each token of the value: the place of the query that comes before it, and that of the same token in the needle.
    pub copies: Vec<[usize; 2]>,
}

pub(super) fn sequence(text: &Text, context_tokens: usize, sample: usize) -> Result<Sequence, RetrievalError> {
    let beginning = text.beginning()?;
    let needles = task(TASK).expect("the task is built in");
    let target = context_tokens.saturating_sub(beginning.len());
    let written =
        generate(TASK, &*needles, target, &Draw::new(0, sample as u64), text).map_err(|error| match error {
            // What was asked for includes the beginning.
            TaskError::TooShort { task, least_tokens, .. } => TaskError::TooShort {
                task,
                target_tokens: context_tokens,
                least_tokens: least_tokens + beginning.len(),
            },
            error => error,
        })?;
    let question = &written.questions[0];
    let context = [beginning, text.encode(&written.context)].concat();
    let [prompt, answer] = [question.prompt(), question.expected.clone()].map(|words| text.encode(&words));
    let places = copied(&context, &answer);
    let before = context.len() + prompt.len() - 1;
    let copies = places.into_iter().enumerate().map(|(step, source)| [before + step, source]).collect();
    Ok(Sequence { context: context.len(), tokens: [context, prompt, answer].concat(), copies })
}

/// Where the longest beginning of `answer` stands in `context`; what comes behind it, a full stop perhaps, is written in
/// other tokens there.
fn copied(context: &[u32], answer: &[u32]) -> std::ops::Range<usize> {
    let length = |at: &usize| context[*at..].iter().zip(answer).take_while(|(a, b)| a == b).count();
    let at = (0..context.len()).rev().max_by_key(length).unwrap_or(0);
    at..at + length(&at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_needle_is_found_by_the_tokens_of_its_value() {
        let context = [1, 5, 9, 2, 5, 6, 7, 3, 5, 6, 1];
        assert_eq!(copied(&context, &[5, 6, 7, 8]), 4..7);
        assert_eq!(copied(&context, &[4]).len(), 0);
    }
}

//! A user's own questions about a context, asked of one cache: its full one, an evicted one, or a memory.
//!
//! Where the protocol hides the questions from the policy, the context is read and evicted once and every question is asked
//! of a fork of it; where the policy sees a question, the context is read again with each.

use super::{Choice, EvalError, Frame, Prompt, Protocol, Stage};
use crate::model::{Decoder, Generated, ModelError, OneSequence, Sampler, Sampling, Text, generate};
use serde::Serialize;
use std::time::Instant;

/// The context that is read.
const CONTEXT: usize = 0;
/// The same, behind a question.
const ASKED: usize = 1;
const SEQUENCES: usize = 2;

/// What all questions gave, and what the cache took.
#[derive(Debug, Clone, Serialize)]
pub struct Replies {
    /// One for each question, counted from the end of the eviction on.
    #[serde(skip)]
    pub replies: Vec<Generated>,
    /// Reading the context and evicting from it: the first time, where each question reads it again.
    pub read_ns: u64,
    /// KV bytes of whole pages that the context then holds.
    pub kv_bytes_live: u64,
    /// Tokens that it then holds, summed over the KV heads of all layers.
    pub held_tokens: usize,
}

/// A user's questions about a context, as `protocol` has them read. Without a chat template a question is written as
/// `Question: ... Answer:`, as the tasks write theirs.
///
/// # Errors
/// When the tokenizer has no tokens for the words.
pub fn questions(
    context: &str,
    questions: &[String],
    (protocol, chat): (Protocol, bool),
    (text, frame): (&Text, &Frame),
) -> Result<Vec<Prompt>, EvalError> {
    let context = [&frame.before[..], &text.piece(context)?].concat();
    let mut split = Vec::new();
    for question in questions {
        let (words, prefix) = match chat {
            true => (format!("\n\n{question}"), String::new()),
            false => (format!("\n\nQuestion: {question}"), "\nAnswer:".into()),
        };
        let prefix = [&frame.behind[..], &text.piece(&prefix)?].concat();
        split.push((text.piece(&words)?, prefix, Vec::new(), None));
    }
    Ok(protocol.prompts(0, &context, None, split))
}

/// Reads the context, lets the policy evict, and answers every question in up to `most_tokens` tokens.
///
/// # Errors
/// When the policy cannot do this, a logit is no number, or the arena has no room.
pub fn ask(
    stage: &Stage<'_>,
    choice: Option<Choice<'_>>,
    prompts: &[Prompt],
    (sampling, most_tokens): (Sampling, usize),
    mut each: impl FnMut(),
) -> Result<Replies, EvalError> {
    let Stage { model, cpu, arena, .. } = *stage;
    let eviction = choice.and_then(|choice| choice.eviction());
    let setup = stage.setup(SEQUENCES, eviction.map_or(&[], |eviction| eviction.policy.columns()));
    let mut decoder = match choice {
        Some(Choice::Remember(memory)) => Decoder::with_memory(model, setup, memory, cpu, arena)?,
        _ => Decoder::new(model, setup, cpu, arena)?,
    };
    let mut found = Replies { replies: Vec::new(), read_ns: 0, kv_bytes_live: 0, held_tokens: 0 };
    for prompt in prompts {
        decoder.clear();
        if let Some(eviction) = eviction {
            decoder.evict(eviction, &[prompt.budgeted_tokens(); SEQUENCES])?;
            decoder.never_evict(prompt.budgeted_tokens()..prompt.context.len());
        }
        let start = Instant::now();
        let mut behind_context = Vec::new();
        decoder.prefill(&[&prompt.context, &[]], |_, _, logits| behind_context = logits.to_vec())?;
        // Of the first, where there are several: all are of one prompt then.
        if found.replies.is_empty() {
            found.read_ns = start.elapsed().as_nanos() as u64;
            found.kv_bytes_live = decoder.sequence_kv_bytes(CONTEXT);
            found.held_tokens = decoder.held_tokens(CONTEXT);
        }
        for asked in &prompt.asked {
            let mut fork = Fork { decoder: &mut decoder, behind_context: &behind_context };
            let mut sampler = Sampler::new(sampling);
            found.replies.push(generate(
                &mut fork,
                &asked.prompt,
                &mut sampler,
                &model.config.eos,
                most_tokens,
                |_| {},
            )?);
            each();
        }
    }
    Ok(found)
}

/// A question and its answer, behind a fork of the context.
struct Fork<'d, 'a> {
    decoder: &'d mut Decoder<'a>,
    behind_context: &'d [f32],
}

impl OneSequence for Fork<'_, '_> {
    fn prompt(&mut self, tokens: &[u32], last: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.decoder.fork(CONTEXT, ASKED)?;
        match tokens {
            [] => last(self.behind_context),
            tokens => self.decoder.follow(&[&[], tokens], |_, _, logits| last(logits))?,
        }
        Ok(())
    }

    fn step(&mut self, token: u32, logits: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.decoder.follow(&[&[], &[token]], |_, _, row| logits(row))
    }

    fn kv_bytes(&self) -> u64 {
        self.decoder.sequence_kv_bytes(ASKED)
    }
}

//! Samples of tasks, and pieces of a text, as tokens: what is read, and what is asked and expected after it.

use super::EvalError;
use crate::model::{ModelError, Text};
use crate::task::{Draw, Question, Task, TaskError, Tokens, generate};

/// One thing that is asked of a context.
#[derive(Debug, Clone)]
pub struct Asked {
    /// What follows the context; at least one token.
    pub prompt: Vec<u32>,
    /// What a right answer begins with; at least one token.
    pub expected: Vec<u32>,
    /// How another answer is scored; a text that only goes on has no score.
    pub question: Option<Question>,
}

/// A context and what is asked of it.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Number of the sample; questions that are asked query-aware are prompts of one sample.
    pub sample: usize,
    /// What is read before a policy evicts; at least one token.
    pub context: Vec<u32>,
    /// What is asked afterwards, each by itself.
    pub asked: Vec<Asked>,
    /// Where a single needle lies, 0 the beginning and 1 the end.
    pub depth: Option<f64>,
}

impl Prompt {
    /// Tokens of the longest question with `answer` tokens for each.
    pub fn most_tokens(&self, answer: impl Fn(&Asked) -> usize) -> usize {
        let asked = self.asked.iter().map(|asked| asked.prompt.len() + answer(asked).max(asked.expected.len()));
        self.context.len() + asked.max().unwrap_or(0)
    }

    /// The last token of the context is read with each question: where a question has no words of its own, logits are
    /// still wanted behind something.
    fn lend_last(&mut self) {
        if let Some(last) = self.context.pop() {
            self.asked.iter_mut().for_each(|asked| asked.prompt.insert(0, last));
        }
    }
}

impl Tokens for Text {
    fn encode(&self, text: &str) -> Vec<u32> {
        // What has no tokens comes back as nothing, and `generate` says what was lost.
        self.piece(text).unwrap_or_default()
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.text(tokens).unwrap_or_default()
    }
}

/// Sample `sample` of a task, of `context_tokens` with its question and its answer. `name` is what errors call the task.
/// Query-aware, each question is read before the policy evicts, all but its last token, and is a prompt of its own.
///
/// # Errors
/// When the task does not fit the tokenizer or the length.
pub fn prompts(
    (name, task): (&str, &dyn Task),
    context_tokens: usize,
    (seed, sample): (u64, usize),
    query_aware: bool,
    text: &Text,
) -> Result<Vec<Prompt>, EvalError> {
    let beginning = text.beginning()?;
    let target = context_tokens.saturating_sub(beginning.len());
    let written = generate(name, task, target, &Draw::new(seed, sample as u64), text).map_err(|error| match error {
        // What the tokenizer puts before every text counts.
        TaskError::TooShort { task, least_tokens, .. } => {
            TaskError::TooShort { task, target_tokens: context_tokens, least_tokens: least_tokens + beginning.len() }
        }
        error => error,
    })?;
    let context = [beginning, text.encode(&written.context)].concat();
    let asked = |question: Question| Asked {
        prompt: text.encode(&question.prompt),
        expected: text.encode(&question.expected),
        question: Some(question),
    };
    let asked: Vec<Asked> = written.questions.into_iter().map(asked).collect();
    let depth = written.depth;
    if query_aware {
        let alone = |asked: Asked| {
            let context = [&context[..], &asked.prompt].concat();
            let mut prompt = Prompt { sample, context, asked: vec![Asked { prompt: Vec::new(), ..asked }], depth };
            prompt.lend_last();
            prompt
        };
        return Ok(asked.into_iter().map(alone).collect());
    }
    let mut prompt = Prompt { sample, context, asked, depth };
    if prompt.asked.iter().any(|asked| asked.prompt.is_empty()) {
        prompt.lend_last();
    }
    Ok(vec![prompt])
}

/// Pieces of a text, each of `context_tokens` and the `new_tokens` that follow them, at most `most`; none overlaps
/// another.
///
/// # Errors
/// When the text is shorter than one piece.
pub fn documents(
    text: &Text,
    (path, content): (&std::path::Path, &str),
    context_tokens: usize,
    new_tokens: usize,
    most: usize,
) -> Result<Vec<Prompt>, EvalError> {
    let beginning = text.beginning()?;
    let tokens = text.piece(content)?;
    let read = context_tokens.saturating_sub(beginning.len());
    let piece = |(sample, tokens): (usize, &[u32])| {
        let (context, expected) = tokens.split_at(read);
        let asked = vec![Asked { prompt: Vec::new(), expected: expected.to_vec(), question: None }];
        let mut prompt = Prompt { sample, context: [&beginning[..], context].concat(), asked, depth: None };
        prompt.lend_last();
        prompt
    };
    let pieces: Vec<Prompt> =
        tokens.chunks_exact((read + new_tokens).max(1)).take(most).enumerate().map(piece).collect();
    if pieces.is_empty() || read == 0 {
        let reason = format!(
            "{} tokens; {context_tokens} before the eviction and {new_tokens} behind it are needed, and at least two \
             before it",
            tokens.len()
        );
        return Err(ModelError::Config { path: path.into(), reason }.into());
    }
    Ok(pieces)
}

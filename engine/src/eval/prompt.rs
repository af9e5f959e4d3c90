//! Samples of tasks, and pieces of a text, as tokens: what is read, and what is asked and expected after it.

use super::{EvalError, Protocol};
use crate::model::{ChatTemplate, ModelError, Text};
use crate::task::{Draw, Question, Task, TaskError, Tokens, generate};

/// One thing that is asked of a context.
#[derive(Debug, Clone)]
pub struct Asked {
    /// What is fed behind the eviction and before the answer. Where it is empty, the first token of the answer comes from
    /// the prefill's own logits, in which no eviction shows.
    pub prompt: Vec<u32>,
    /// What a right answer begins with, at least one token that is fed behind the eviction; empty where nobody knows it.
    pub expected: Vec<u32>,
    /// How another answer is scored; a text that only goes on has no score.
    pub question: Option<Question>,
}

impl Asked {
    /// Tokens of the right answer whose distributions are compared: a first one that comes from the prefill is not.
    pub fn compared(&self) -> usize {
        self.expected.len() - usize::from(self.prompt.is_empty())
    }
}

/// A context and what is asked of it.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Number of the sample; where questions are read before the eviction, the prompts of one sample are several.
    pub sample: usize,
    /// What is read before a policy evicts; at least one token.
    pub context: Vec<u32>,
    /// Tokens at the end of `context` that are never evicted and that no budget counts.
    pub kept: usize,
    /// What is asked afterwards, each by itself.
    pub asked: Vec<Asked>,
    /// Where a single needle lies, 0 the beginning and 1 the end.
    pub depth: Option<f64>,
}

impl Prompt {
    /// Tokens of the longest question with `answer` tokens for each.
    pub fn most_tokens(&self, answer: impl Fn(&Asked) -> usize) -> usize {
        let asked =
            self.asked.iter().map(|asked| asked.prompt.len().saturating_add(answer(asked).max(asked.expected.len())));
        self.context.len().saturating_add(asked.max().unwrap_or(0))
    }

    /// Tokens that a budget counts.
    pub fn budgeted_tokens(&self) -> usize {
        self.context.len() - self.kept
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

/// Tokens that stand around the words of every prompt.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Before the context.
    pub before: Vec<u32>,
    /// Between the question and the words with which the answer is begun.
    pub behind: Vec<u32>,
}

impl Frame {
    /// What the tokenizer puts before every text.
    ///
    /// # Errors
    /// When the tokenizer has no token for a letter.
    pub fn plain(text: &Text) -> Result<Self, EvalError> {
        Ok(Frame { before: text.beginning()?, behind: Vec::new() })
    }

    /// Context and question as one turn of a user's.
    ///
    /// # Errors
    /// When the template is not understood.
    pub fn chat(template: &ChatTemplate, text: &Text) -> Result<Self, EvalError> {
        let [before, behind] = template.around(text)?;
        Ok(Frame { before, behind })
    }
}

/// Sample `sample` of a task, of `context_tokens` with its question and its answer. `name` is what errors call the task.
/// Where the protocol lets a policy see the question, each question is a prompt of its own.
///
/// # Errors
/// When the task does not fit the tokenizer or the length, or nothing of an answer is fed behind the eviction.
pub fn prompts(
    (name, task): (&str, &dyn Task),
    context_tokens: usize,
    (seed, sample): (u64, usize),
    protocol: Protocol,
    (text, frame): (&Text, &Frame),
) -> Result<Vec<Prompt>, EvalError> {
    let around = frame.before.len() + frame.behind.len();
    let target = context_tokens.saturating_sub(around);
    let written =
        generate(name, task, target, &Draw::of_task(name, seed, sample as u64), text).map_err(|error| match error {
            // What stands around the words counts.
            TaskError::TooShort { task, least_tokens, .. } => {
                TaskError::TooShort { task, target_tokens: context_tokens, least_tokens: least_tokens + around }
            }
            TaskError::TooLong { task, most_tokens, .. } => {
                TaskError::TooLong { task, target_tokens: context_tokens, most_tokens: most_tokens + around }
            }
            error => error,
        })?;
    let context = [&frame.before[..], &text.encode(&written.context)].concat();
    let mut split = Vec::new();
    for question in written.questions {
        let prefix = [&frame.behind[..], &text.encode(&question.answer_prefix)].concat();
        split.push((text.encode(&question.text), prefix, text.encode(&question.expected), Some(question)));
    }
    let prompts = protocol.prompts(sample, &context, written.depth, split);
    let asked = || prompts.iter().flat_map(|prompt| &prompt.asked);
    match asked().any(|asked| asked.expected.len() <= usize::from(asked.prompt.is_empty())) {
        true => Err(TaskError::OneToken { task: name.into() }.into()),
        false => Ok(prompts),
    }
}

/// The tokens of a question, those with which its answer is begun, those of the right answer, and how others are scored.
type Split = (Vec<u32>, Vec<u32>, Vec<u32>, Option<Question>);

impl Protocol {
    /// Which tokens of each question are read with the context, before the eviction, and which behind it.
    pub(super) fn prompts(
        self,
        sample: usize,
        context: &[u32],
        depth: Option<f64>,
        questions: Vec<Split>,
    ) -> Vec<Prompt> {
        let mut prompts: Vec<Prompt> = Vec::new();
        for (words, prefix, expected, question) in questions {
            let kept = if self == Protocol::AwareKept { words.len() } else { 0 };
            let (read, prompt) = match self {
                Protocol::Agnostic => (Vec::new(), [words, prefix].concat()),
                Protocol::Aware | Protocol::AwareKept => (words, prefix),
                Protocol::AwareWhole => ([words, prefix].concat(), Vec::new()),
            };
            let asked = Asked { prompt, expected, question };
            match prompts.first_mut().filter(|_| self == Protocol::Agnostic) {
                Some(prompt) => prompt.asked.push(asked),
                None => {
                    let context = [context, &read].concat();
                    prompts.push(Prompt { sample, context, kept, asked: vec![asked], depth });
                }
            }
        }
        prompts
    }
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
        Prompt { sample, context: [&beginning[..], context].concat(), kept: 0, asked, depth: None }
    };
    let pieces: Vec<Prompt> =
        tokens.chunks_exact((read + new_tokens).max(1)).take(most).enumerate().map(piece).collect();
    if pieces.is_empty() || read == 0 {
        let reason = format!(
            "{} tokens; {context_tokens} before the eviction and {new_tokens} behind it are needed, and at least one of its \
             own before it",
            tokens.len()
        );
        return Err(ModelError::Config { path: path.into(), reason }.into());
    }
    Ok(pieces)
}

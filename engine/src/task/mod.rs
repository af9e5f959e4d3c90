//! Tasks that need no download: text with something in it, questions about it, and how answers are scored.
//!
//! A [`Task`] writes a [`Sample`] of a given size from seeded random numbers; [`generate`] finds the size that fills a
//! context of so many tokens of the tokenizer at hand. A sample keeps its context, its questions and the words with which
//! an answer begins apart, because protocols of evaluation differ in which of them a policy sees.
//! `docs/tasks.md` says where each task comes from and what differs. Adding one is a file and a line in [`TASKS`].

mod counting;
mod facts;
mod fill;
mod haystack;
mod long;
mod needles;
mod passkey;
mod recall;
mod score;
pub mod text;
mod threading;
mod tracing;

pub use fill::{Draw, TaskError, Tokens, generate, length_tokens};
pub use score::Rule;

use crate::named::{Named, NamedError, Parameter};

/// A context and what is asked about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// What is read once.
    pub context: String,
    /// What may be asked of it, each by itself after the context.
    pub questions: Vec<Question>,
    /// Where in the context the needle lies, 0 its beginning and 1 its end; only where one needle is asked for.
    pub depth: Option<f64>,
}

/// A question, its right answer, and how another is scored.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// What is asked, behind the context; empty where the context itself goes on.
    pub text: String,
    /// The words with which an answer is begun for the model, such as ` Answer:`; the answer follows them.
    pub answer_prefix: String,
    /// A right answer, as it would be written.
    pub expected: String,
    /// What counts as right.
    pub rule: Rule,
}

impl Question {
    /// All that stands between the context and the answer.
    pub fn prompt(&self) -> String {
        format!("{}{}", self.text, self.answer_prefix)
    }

    /// The fraction of the answer that is right: 0 to 1.
    pub fn score(&self, answer: &str) -> f64 {
        self.rule.score(answer)
    }
}

/// Writes samples.
pub trait Task: Send + Sync {
    /// A sample with `units` units of filler; more units make it longer. `None` where there cannot be so many, or so
    /// few.
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample>;

    /// Fewest units with which there is a sample.
    fn least_units(&self) -> usize {
        0
    }
}

/// A task as the registry knows it.
pub struct TaskEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Where it comes from.
    pub origin: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Makes it.
    pub build: fn(&Named) -> Result<Box<dyn Task>, NamedError>,
}

/// Every task, in the order in which they are listed.
pub const TASKS: &[TaskEntry] = &[
    needles::SINGLE_1,
    needles::SINGLE_2,
    needles::SINGLE_3,
    needles::MULTIKEY_1,
    needles::MULTIKEY_2,
    needles::MULTIKEY_3,
    needles::MULTIVALUE,
    needles::MULTIQUERY,
    tracing::ENTRY,
    counting::COMMON,
    counting::FREQUENT,
    facts::SINGLE_HOP,
    facts::TWO_HOP,
    passkey::ENTRY,
    recall::RECALL,
    recall::RETRIEVAL,
    threading::ENTRY,
    long::COUNT,
    long::COPY,
    long::REPEAT,
];

/// Makes the task that a text such as `niah-single-1:depth=0.5` names.
///
/// # Errors
/// When there is no such task or parameter, or a value is wrong.
pub fn task(text: &str) -> Result<Box<dyn Task>, NamedError> {
    let named: Named = text.parse()?;
    let entry = named.find("task", TASKS, |entry| entry.name)?;
    named.check(entry.parameters)?;
    (entry.build)(&named)
}

/// The page `docs/tasks.md`, straight from the registry.
pub fn markdown() -> String {
    let mut page = String::from(include_str!("tasks.md"));
    for entry in TASKS {
        let parameters = match entry.parameters {
            [] => "none".into(),
            all => all.iter().map(|p| format!("`{}={}` {}", p.name, p.default, p.about)).collect::<Vec<_>>().join("; "),
        };
        page.push_str(&format!("| `{}` | {} | {} | {parameters} |\n", entry.name, entry.about, entry.origin));
    }
    page
}

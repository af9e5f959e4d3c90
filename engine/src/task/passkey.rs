//! Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300): one number in text that says nothing.

use super::haystack::{Haystack, depth, hide};
use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use crate::named::{Named, NamedError, Parameter};

struct Passkey {
    digits: usize,
    depth: Option<f64>,
}

/// `passkey`.
pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "passkey",
    about: "the one number in a text of repeated sentences, said twice",
    origin: "Landmark Attention (arXiv 2305.16300)",
    parameters: &[
        Parameter { name: "digits", default: "5", about: "digits of the number, at most 18" },
        Parameter { name: "depth", default: "random", about: "where it lies: 0 the beginning, 1 the end" },
    ],
    build,
};

fn build(named: &Named) -> Result<Box<dyn Task>, NamedError> {
    Ok(Box::new(Passkey { digits: named.count_in("digits", 5, 1..=18)?, depth: depth(named)? }))
}

impl Task for Passkey {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let key = text::number(&mut draw.content(), self.digits);
        let needle = format!(" The secret number is {key}. Remember it: {key} is the secret number.");
        let (context, depth) = hide(&Haystack::Repeat.sentences(units, draw), &[needle], self.depth, draw);
        let question = Question {
            text: " What is the secret number?".into(),
            answer_prefix: " The secret number is".into(),
            expected: format!(" {key}."),
            rule: Rule::FirstNumber(key.parse().ok()?),
        };
        Some(Sample { context, questions: vec![question], depth: Some(depth) })
    }
}

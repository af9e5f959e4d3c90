//! Associative recall: a list of keys with values, and keys to look up.
//!
//! `recall` is multi-query associative recall (Arora et al. 2023, arXiv 2312.04927) in words. `kv-retrieval` is a JSON
//! object of codes of which several are asked one after the other over the same context, as in SCBench (arXiv
//! 2412.10319): what was thrown away for the first question is missed by the next.

use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use crate::named::Parameter;
use rand::seq::index;

struct Recall {
    queries: usize,
}

struct Retrieval {
    queries: usize,
}

/// `recall`.
pub(super) const RECALL: TaskEntry = TaskEntry {
    name: "recall",
    about: "the value of a key in a list of pairs of words; several keys, asked one by one",
    origin: "MQAR, Zoology (arXiv 2312.04927)",
    parameters: &[Parameter {
        name: "queries",
        default: "4",
        about: "keys that are asked for, or all of a shorter list",
    }],
    build: |named| Ok(Box::new(Recall { queries: named.count("queries", 4, 1)? })),
};

/// `kv-retrieval`.
pub(super) const RETRIEVAL: TaskEntry = TaskEntry {
    name: "kv-retrieval",
    about: "values of a JSON object of codes; several turns over one context",
    origin: "SCBench (arXiv 2412.10319)",
    parameters: &[Parameter { name: "queries", default: "4", about: "turns, or as many as there are pairs" }],
    build: |named| Ok(Box::new(Retrieval { queries: named.count("queries", 4, 1)? })),
};

impl Task for Recall {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        // The filler's own stream: a longer list begins with the shorter one.
        let mut rng = draw.filler();
        let mut seen = std::collections::HashSet::new();
        let mut pairs: Vec<(String, &str)> = Vec::with_capacity(units);
        while pairs.len() < units {
            let key = text::distinct_pairs(&mut rng, 1).remove(0);
            let value = text::distinct_words(&mut rng, 1)[0];
            if seen.insert(key.clone()) {
                pairs.push((key, value));
            }
            if seen.len() > 20_000 {
                return None;
            }
        }
        let context: String = pairs.iter().map(|(key, value)| format!(" {key}: {value};")).collect();
        let asked = index::sample(&mut draw.places(), units, self.queries.min(units));
        let questions = asked.into_iter().map(|at| Question {
            text: format!(" {}", pairs[at].0),
            answer_prefix: ":".into(),
            expected: format!(" {};", pairs[at].1),
            rule: Rule::Prefix(vec![pairs[at].1.into()]),
        });
        Some(Sample { context, questions: questions.collect(), depth: None })
    }

    fn least_units(&self) -> usize {
        2
    }
}

impl Task for Retrieval {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.filler();
        let pairs: Vec<(String, String)> = (0..units).map(|_| (text::code(&mut rng), text::code(&mut rng))).collect();
        let members: Vec<String> = pairs.iter().map(|(key, value)| format!(" \"{key}\": \"{value}\"")).collect();
        let asked = index::sample(&mut draw.places(), units, self.queries.min(units));
        let questions = asked.into_iter().map(|at| Question {
            text: format!(" The value of key \"{}\"", pairs[at].0),
            answer_prefix: " is".into(),
            expected: format!(" \"{}\".", pairs[at].1),
            rule: Rule::AllOf(vec![pairs[at].1.clone()]),
        });
        let context = format!(" {{{} }}", members.join(","));
        Some(Sample { context, questions: questions.collect(), depth: None })
    }

    fn least_units(&self) -> usize {
        2
    }
}

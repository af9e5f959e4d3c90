//! Needles in a haystack: RULER's eight retrieval tasks (Hsieh et al. 2024, arXiv 2404.06654).
//!
//! A needle says that a key has a value. What is hidden, in what, and how many of it are asked for is what the eight
//! differ in.

use super::haystack::{Haystack, depth, hide};
use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use crate::named::{Named, NamedError, Parameter};
use rand::Rng;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    /// A key of two words.
    Words,
    /// A number of seven digits.
    Number,
    /// Four groups of four hexadecimal digits.
    Code,
}

#[derive(Debug, Clone, Copy)]
struct Needles {
    /// What needles lie in; `None`: among other needles.
    haystack: Option<Haystack>,
    key: Piece,
    value: Piece,
    /// Keys with needles of their own, the ones that are asked for included.
    keys: usize,
    /// Values of the key that is asked for.
    values: usize,
    /// Keys that are asked for.
    queries: usize,
    depth: Option<f64>,
}

impl Needles {
    fn entry(self, named: &Named) -> Result<Box<dyn Task>, NamedError> {
        Ok(Box::new(Needles { depth: depth(named)?, ..self }))
    }
}

const PLAIN: Needles = Needles {
    haystack: Some(Haystack::Essay),
    key: Piece::Words,
    value: Piece::Number,
    keys: 1,
    values: 1,
    queries: 1,
    depth: None,
};
const DEPTH: &[Parameter] =
    &[Parameter { name: "depth", default: "random", about: "where the needle lies: 0 the beginning, 1 the end" }];
const RULER: &str = "RULER (arXiv 2404.06654)";

macro_rules! entry {
    ($constant:ident, $name:literal, $about:literal, $parameters:expr, $($field:ident: $value:expr),*) => {
        #[doc = $about]
        pub const $constant: TaskEntry = TaskEntry {
            name: $name,
            about: $about,
            origin: RULER,
            parameters: $parameters,
            build: |named| Needles { $($field: $value,)* ..PLAIN }.entry(named),
        };
    };
}

entry!(SINGLE_1, "niah-single-1", "a number among repeated sentences", DEPTH, haystack: Some(Haystack::Repeat));
entry!(SINGLE_2, "niah-single-2", "a number in an essay", DEPTH, haystack: Some(Haystack::Essay));
entry!(SINGLE_3, "niah-single-3", "a hexadecimal code in an essay", DEPTH, value: Piece::Code);
entry!(MULTIKEY_1, "niah-multikey-1", "one of four keys' numbers in an essay", DEPTH, keys: 4);
entry!(MULTIKEY_2, "niah-multikey-2", "a number among other keys' numbers", DEPTH, haystack: None);
entry!(MULTIKEY_3, "niah-multikey-3", "a code among other codes' codes", DEPTH, haystack: None, key: Piece::Code, value: Piece::Code);
entry!(MULTIVALUE, "niah-multivalue", "all four numbers of one key in an essay", &[], values: 4);
entry!(MULTIQUERY, "niah-multiquery", "the numbers of four keys in an essay, asked at once", &[], keys: 4, queries: 4);

/// `count` pieces: keys of words differ, numbers and codes are drawn one by one.
fn pieces(kind: Piece, rng: &mut impl Rng, count: usize) -> Vec<String> {
    match kind {
        Piece::Words => text::distinct_pairs(rng, count),
        Piece::Number => (0..count).map(|_| text::number(rng, 7)).collect(),
        Piece::Code => (0..count).map(|_| text::code(rng)).collect(),
    }
}

impl Task for Needles {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.content();
        let keys = pieces(self.key, &mut rng, self.keys);
        let values = pieces(self.value, &mut rng, self.keys - 1 + self.values);
        // The first key has the first values, every other one value.
        let values_of = |key: usize| match key {
            0 => &values[..self.values],
            key => &values[self.values + key - 1..self.values + key],
        };
        let needles: Vec<String> = (0..self.keys)
            .flat_map(|key| values_of(key).iter().map(|value| text::needle(&keys[key], value)).collect::<Vec<_>>())
            .collect();
        let filler = match self.haystack {
            Some(haystack) => haystack.sentences(units, draw),
            None => {
                let mut rng = draw.filler();
                (0..units)
                    .map(|_| {
                        loop {
                            let key = pieces(self.key, &mut rng, 1).remove(0);
                            let value = pieces(self.value, &mut rng, 1).remove(0);
                            // Two needles of one key would leave the question without an answer.
                            if key != keys[0] {
                                break text::needle(&key, &value);
                            }
                        }
                    })
                    .collect()
            }
        };
        let (context, depth) = hide(&filler, &needles, self.depth, draw);
        let asked: Vec<&str> = keys[..self.queries].iter().map(String::as_str).collect();
        let answers: Vec<String> = (0..self.queries).flat_map(|key| values_of(key).to_vec()).collect();
        let question = match (self.queries, self.values) {
            (1, 1) => Question {
                text: text::needle_question(asked[0]),
                answer_prefix: text::needle_stem(asked[0]),
                expected: format!(" {}.", answers[0]),
                rule: Rule::AllOf(answers),
            },
            _ => Question {
                text: format!(" What are all the codes of {}?", asked.join(", ")),
                answer_prefix: " The codes are".into(),
                expected: format!(" {}.", answers.join(", ")),
                rule: Rule::AllOf(answers),
            },
        };
        let alone = (needles.len() == 1 || self.queries * self.values == 1).then_some(depth);
        Some(Sample { context, questions: vec![question], depth: alone })
    }
}

//! Variable tracking: RULER's `vt`. A number is given to a variable and handed on; all that hold it are asked for.

use super::haystack::Haystack;
use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use crate::named::{Named, NamedError, Parameter};
use rand::seq::index;

struct Tracking {
    hops: usize,
}

/// `vt`.
pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "vt",
    about: "all variables that hold a number, which is handed on from one to the next",
    origin: "RULER (arXiv 2404.06654)",
    parameters: &[Parameter { name: "hops", default: "4", about: "times the number is handed on, at most 99" }],
    build,
};

fn build(named: &Named) -> Result<Box<dyn Task>, NamedError> {
    Ok(Box::new(Tracking { hops: named.count_in("hops", 4, 1..=99)? }))
}

impl Task for Tracking {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.content();
        let variables = text::distinct_words(&mut rng, self.hops + 1);
        let value = text::number(&mut rng, 5);
        let mut statements = vec![format!(" VAR {} = {value};", variables[0])];
        statements.extend(variables.windows(2).map(|hop| format!(" VAR {} = VAR {};", hop[1], hop[0])));
        let sentences = Haystack::Repeat.sentences(units, draw);
        // Statements stand in their order: none uses a variable before it has its number.
        let mut places = index::sample(&mut draw.places(), units + statements.len(), statements.len()).into_vec();
        places.sort_unstable();
        let (mut sentences, mut context) = (sentences.into_iter(), String::new());
        for at in 0..units + statements.len() {
            match places.binary_search(&at) {
                Ok(statement) => context.push_str(&statements[statement]),
                Err(_) => context.push_str(&sentences.next()?),
            }
        }
        let question = Question {
            text: format!(" Question: which variables are {value}?"),
            answer_prefix: " Answer:".into(),
            expected: format!(" {}.", variables.join(", ")),
            rule: Rule::AllOf(variables.iter().map(|name| name.to_string()).collect()),
        };
        Some(Sample { context, questions: vec![question], depth: None })
    }
}

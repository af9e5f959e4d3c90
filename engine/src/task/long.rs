//! Long answers: what a policy does while a model writes. The answer is as long as the context, or longer.

use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use rand::RngExt;

struct Count;
struct Copy;
struct Repeat;

/// `count`.
pub(super) const COUNT: TaskEntry = TaskEntry {
    name: "count",
    about: "go on counting from a number; nearly all of the length is answer",
    origin: "long decoding without a data set",
    parameters: &[],
    build: |_| Ok(Box::new(Count)),
};

/// `copy`.
pub(super) const COPY: TaskEntry = TaskEntry {
    name: "copy",
    about: "write a list of words again, in its order",
    origin: "long decoding without a data set",
    parameters: &[],
    build: |_| Ok(Box::new(Copy)),
};

/// `repeat`.
pub(super) const REPEAT: TaskEntry = TaskEntry {
    name: "repeat",
    about: "write the whole text again",
    origin: "KVzip's context reconstruction (arXiv 2505.23416), as a task",
    parameters: &[],
    build: |_| Ok(Box::new(Repeat)),
};

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_string).collect()
}

fn question(text: &str, answer_prefix: &str, expected: String) -> Vec<Question> {
    let rule = Rule::Prefix(words(&expected));
    vec![Question { text: text.into(), answer_prefix: answer_prefix.into(), expected, rule }]
}

impl Task for Count {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let first: usize = draw.content().random_range(1..500);
        let number = |at: usize| format!(" {}", first + at);
        let context = format!(" Count:{}", (0..4).map(number).collect::<String>());
        let questions = question("", "", (4..4 + units).map(number).collect());
        Some(Sample { context, questions, depth: None })
    }

    fn least_units(&self) -> usize {
        1
    }
}

impl Task for Copy {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.filler();
        let list: String = (0..units).map(|_| format!(" {}", text::distinct_words(&mut rng, 1)[0])).collect();
        let context = format!(" List:{list}.");
        Some(Sample { context, questions: question(" Copy", ":", list), depth: None })
    }

    fn least_units(&self) -> usize {
        1
    }
}

impl Task for Repeat {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.filler();
        let text: String = (0..units).map(|_| text::sentence(&mut rng)).collect();
        Some(Sample { questions: question(" Copy the text", ":", text.clone()), context: text, depth: None })
    }

    fn least_units(&self) -> usize {
        1
    }
}

//! Needle threading (Roberts et al. 2024, arXiv 2411.05000): follow a chain of keys through a list of pairs.

use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use crate::named::Parameter;
use rand::seq::SliceRandom;

struct Threading {
    steps: usize,
}

/// `needle-threading`.
pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "needle-threading",
    about: "the end of a chain: each value is the next pair's key",
    origin: "Needle Threading (arXiv 2411.05000)",
    parameters: &[Parameter { name: "steps", default: "3", about: "pairs of the chain, at most 1000" }],
    build: |named| Ok(Box::new(Threading { steps: named.count_in("steps", 3, 1..=1000)? })),
};

impl Task for Threading {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.content();
        let chain: Vec<String> = (0..=self.steps).map(|_| text::code(&mut rng)).collect();
        let mut filler = draw.filler();
        let mut pairs: Vec<String> =
            (0..units).map(|_| format!(" {} -> {};", text::code(&mut filler), text::code(&mut filler))).collect();
        pairs.extend(chain.windows(2).map(|link| format!(" {} -> {};", link[0], link[1])));
        pairs.shuffle(&mut draw.places());
        let question = Question {
            text: format!(" The chain of {} steps that begins with {}", self.steps, chain[0]),
            answer_prefix: " ends with".into(),
            expected: format!(" {}.", chain[self.steps]),
            rule: Rule::AllOf(vec![chain[self.steps].clone()]),
        };
        Some(Sample { context: pairs.concat(), questions: vec![question], depth: None })
    }
}

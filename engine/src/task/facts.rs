//! Questions over a corpus of generated facts: what RULER takes from SQuAD (`qa_1`, one fact) and HotpotQA (`qa_2`, two
//! facts that must be joined), without the download.
//!
//! Each paragraph is about a thing and its owner. All paragraphs but the one or two that answer the question are
//! distractors of the same form.

use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use rand::Rng;
use rand::RngExt;
use rand::seq::SliceRandom;

struct Facts {
    hops: usize,
}

/// `qa-1`.
pub(super) const SINGLE_HOP: TaskEntry = TaskEntry {
    name: "qa-1",
    about: "a question that one fact of a generated corpus answers",
    origin: "RULER's qa_1 (arXiv 2404.06654)",
    parameters: &[],
    build: |_| Ok(Box::new(Facts { hops: 1 })),
};

/// `qa-2`.
pub(super) const TWO_HOP: TaskEntry = TaskEntry {
    name: "qa-2",
    about: "a question that takes two facts of a generated corpus, the owner of a thing and where that owner was born",
    origin: "RULER's qa_2 (arXiv 2404.06654)",
    parameters: &[],
    build: |_| Ok(Box::new(Facts { hops: 2 })),
};

/// Somebody who owns something and was born somewhere.
struct Entry {
    thing: String,
    owner: String,
    home: String,
}

/// A name of a person: a first name and a noun with a capital.
fn person(rng: &mut impl Rng) -> String {
    let name = text::NAMES[rng.random_range(0..text::NAMES.len())];
    let noun = text::NOUNS[rng.random_range(0..text::NOUNS.len())];
    format!("{name} of {noun}")
}

impl Task for Facts {
    /// A unit is another distractor.
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        if units > 4_000 {
            return None;
        }
        let mut rng = draw.filler();
        let mut owners = std::collections::HashSet::new();
        let mut entries: Vec<Entry> = Vec::with_capacity(units + 1);
        while entries.len() <= units {
            let [thing, home] = [(); 2].map(|()| text::distinct_pairs(&mut rng, 1).remove(0));
            let owner = person(&mut rng);
            if owners.insert(owner.clone()) && entries.iter().all(|entry| entry.thing != thing) {
                entries.push(Entry { thing, owner, home });
            }
        }
        let mut paragraphs: Vec<String> = Vec::new();
        for entry in &entries {
            paragraphs.push(format!(" The {} was made for {}.{}", entry.thing, entry.owner, text::sentence(&mut rng)));
            paragraphs.push(format!(" {} came from the {}.{}", entry.owner, entry.home, text::sentence(&mut rng)));
        }
        paragraphs.shuffle(&mut draw.places());
        let asked = &entries[0];
        let (text, answer_prefix, answer) = match self.hops {
            1 => (format!(" For whom was the {} made?", asked.thing), " Answer:", &asked.owner),
            _ => (format!(" The one for whom the {} was made", asked.thing), " came from the", &asked.home),
        };
        let (answer_prefix, rule) = (answer_prefix.into(), Rule::AnyOf(vec![answer.clone()]));
        let question = Question { text, answer_prefix, expected: format!(" {answer}."), rule };
        Some(Sample { context: paragraphs.concat(), questions: vec![question], depth: None })
    }
}

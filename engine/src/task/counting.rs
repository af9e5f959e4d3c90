//! Words that stand often in a list: RULER's `cwe` (some stand more often than all others) and `fwe` (frequencies fall
//! by a power law).

use super::{Draw, Question, Rule, Sample, Task, TaskEntry, text};
use crate::named::{Named, NamedError, Parameter};
use rand::seq::SliceRandom;

const RULER: &str = "RULER (arXiv 2404.06654)";

struct Common {
    words: usize,
    often: usize,
    seldom: usize,
}

struct Frequent {
    alpha: f64,
}

/// `cwe`.
pub(super) const COMMON: TaskEntry = TaskEntry {
    name: "cwe",
    about: "the ten entries that stand most often in a numbered list of words and pairs of others",
    origin: RULER,
    parameters: &[
        Parameter { name: "words", default: "10", about: "words that are asked for, at most 100" },
        Parameter {
            name: "often",
            default: "6",
            about: "times that each of them stands there (RULER: 30 from 4096 tokens on)",
        },
        Parameter {
            name: "seldom",
            default: "1",
            about: "times that each other word does (RULER: 3 from 4096 tokens on)",
        },
    ],
    build: common,
};

/// `fwe`.
pub(super) const FREQUENT: TaskEntry = TaskEntry {
    name: "fwe",
    about: "the three most frequent words of a text whose frequencies fall by a power law",
    origin: RULER,
    parameters: &[Parameter { name: "alpha", default: "2.0", about: "exponent of the law" }],
    build: |named| Ok(Box::new(Frequent { alpha: named.number("alpha", 2.0, 1.1..=3.0)? })),
};

/// Most times that a word stands in a list.
const MOST_TIMES: usize = 1000;

fn common(named: &Named) -> Result<Box<dyn Task>, NamedError> {
    let (words, seldom) = (named.count_in("words", 10, 1..=100)?, named.count_in("seldom", 1, 1..=MOST_TIMES - 1)?);
    Ok(Box::new(Common { words, often: named.count_in("often", 6, seldom + 1..=MOST_TIMES)?, seldom }))
}

impl Task for Common {
    /// A unit is another seldom word.
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.content();
        let common = text::distinct_words(&mut rng, self.words);
        let mut list: Vec<String> =
            common.iter().flat_map(|word| std::iter::repeat_n(word.to_string(), self.often)).collect();
        // Pairs of words, so that there are enough; no word of them is one of the common ones, which would stand there oftener than they should.
        let others = text::distinct_pairs_without(&mut draw.filler(), units, &common)?;
        list.extend(others.into_iter().flat_map(|word| std::iter::repeat_n(word, self.seldom)));
        list.shuffle(&mut draw.places());
        let context: String = list.iter().enumerate().map(|(at, word)| format!(" {}. {word}", at + 1)).collect();
        let question = Question {
            text: format!(" Question: which {} entries are most common in the list?", self.words),
            answer_prefix: " Answer:".into(),
            expected: format!(" {}.", common.join(", ")),
            rule: Rule::AllOf(common.iter().map(|word| word.to_string()).collect()),
        };
        Some(Sample { context, questions: vec![question], depth: None })
    }
}

impl Task for Frequent {
    /// A unit is another place of the text.
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let ranks = text::distinct_words(&mut draw.content(), 50);
        if units < self.least_units() {
            return None;
        }
        // The first rank is noise, as in the original: the three behind it are asked for.
        let count = |rank: usize| (units as f64 * self.share(rank)).round() as usize;
        let mut list: Vec<&str> = std::iter::repeat_n("...", count(1)).collect();
        list.extend((2..=ranks.len()).flat_map(|rank| std::iter::repeat_n(ranks[rank - 1], count(rank))));
        list.shuffle(&mut draw.places());
        let asked = &ranks[1..4];
        let question = Question {
            text: " Question: which three words are most common in the text?".into(),
            answer_prefix: " Answer:".into(),
            expected: format!(" {}.", asked.join(", ")),
            rule: Rule::AllOf(asked.iter().map(|word| word.to_string()).collect()),
        };
        let context = list.iter().map(|word| format!(" {word}")).collect();
        Some(Sample { context, questions: vec![question], depth: None })
    }

    /// From here on the fourth rank has at least one word more than the fifth.
    fn least_units(&self) -> usize {
        (1.0 / (self.share(4) - self.share(5))).ceil() as usize
    }
}

impl Frequent {
    /// The fraction of the text that a rank has, from 1 on.
    fn share(&self, rank: usize) -> f64 {
        let zeta: f64 = (1..10_000).map(|rank| f64::from(rank).powf(-self.alpha)).sum();
        (rank as f64).powf(-self.alpha) / zeta
    }
}

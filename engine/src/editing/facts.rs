//! Generated facts: keys of two words with a value of one, as in the task `recall`, and the ways in which they are asked for.

use super::EditError;
use crate::task::text;
use rand::seq::index;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;

/// Questions that maps are trained with; `KEY` stands for the key. The first is the fact's own stem.
pub const TRAINED: [&str; 4] = [
    " KEY:",
    " What is the value for KEY? Answer:",
    " The code of KEY is",
    " Question: Which word is with KEY? Answer:",
];
/// The same in words that no training has.
pub const HELD_OUT: [&str; 2] =
    [" Remember the value of KEY. It was", " What was the secret word for KEY? The word is"];
/// Most words before and behind a key among others.
const BEFORE: usize = 6;
const BEHIND: usize = 4;
/// Part of the values that no training has: every tenth.
const KEPT_BACK: usize = 10;

/// A fact as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// What it is about, ` amber falcon:`.
    pub stem: String,
    /// What is said of it, ` river`.
    pub value: String,
}

impl Fact {
    /// A drawn fact.
    pub fn new(key: &str, value: &str) -> Self {
        Fact { stem: question(TRAINED[0], key), value: format!(" {value}") }
    }

    /// As it stands in a context.
    pub fn statement(&self) -> String {
        format!("{}{};", self.stem, self.value)
    }
}

/// A question about a key.
fn question(template: &str, key: &str) -> String {
    template.replace("KEY", key)
}

/// A key with the value that is written, and another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drawn {
    /// Two words.
    pub key: String,
    /// One.
    pub value: String,
    /// Another.
    pub other: String,
}

impl Drawn {
    /// `count` facts of different keys, whose values are those of training or, with `kept_back`, those that no training has;
    /// `usable` says which words can be values.
    ///
    /// # Errors
    /// When less than two words are usable, or there are not so many keys.
    pub fn draw(
        seed: u64,
        count: usize,
        kept_back: bool,
        usable: impl Fn(&str) -> bool,
    ) -> Result<Vec<Drawn>, EditError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values = values(kept_back, usable)?;
        let most = text::NOUNS.len() * text::ADJECTIVES.len();
        if count > most {
            return Err(EditError::Words(format!("{count} facts are asked for; there are words for {most}")));
        }
        let keys = text::distinct_pairs(&mut rng, count);
        let drawn = keys.into_iter().map(|key| {
            let two = index::sample(&mut rng, values.len(), 2);
            Drawn { key, value: values[two.index(0)].into(), other: values[two.index(1)].into() }
        });
        Ok(drawn.collect())
    }

    /// The fact with the value that is written first.
    pub fn fact(&self) -> Fact {
        Fact::new(&self.key, &self.value)
    }

    /// The fact with the other value.
    pub fn changed(&self) -> Fact {
        Fact::new(&self.key, &self.other)
    }

    /// Its key among words that are no keys, in no order that makes sense: what maps must not look at.
    pub fn among_words(&self, rng: &mut ChaCha8Rng) -> String {
        let keys: HashSet<&str> = text::NOUNS.iter().chain(text::ADJECTIVES).copied().collect();
        let others: Vec<&str> = text::words().filter(|word| !keys.contains(word)).collect();
        let mut words = |most: usize| -> String {
            let count = rng.random_range(0..=most);
            (0..count).map(|_| format!(" {}", others[rng.random_range(0..others.len())])).collect()
        };
        let (before, behind) = (words(BEFORE), words(BEHIND));
        let end = ["", ":", ".", "?", ". Answer:", "? Answer:"][rng.random_range(0..6)];
        format!("{before} {}{behind}{end}", self.key)
    }

    /// A question about it.
    pub fn ask(&self, template: &str) -> String {
        question(template, &self.key)
    }
}

/// Words that can be values, of training or kept back from it.
///
/// # Errors
/// When there are less than two.
pub fn values(kept_back: bool, usable: impl Fn(&str) -> bool) -> Result<Vec<&'static str>, EditError> {
    let mut seen = HashSet::new();
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let words = text::NOUNS.iter().chain(text::ADJECTIVES).copied();
    // Which are kept back is drawn, the same for every seed and model.
    let marked: Vec<(&str, bool)> = words.map(|word| (word, rng.random_range(0..KEPT_BACK) == 0)).collect();
    let fitting = |(word, back): &(&'static str, bool)| *back == kept_back && usable(word) && seen.insert(*word);
    let values: Vec<&str> = marked
        .into_iter()
        .filter({
            let mut fitting = fitting;
            move |pair| fitting(pair)
        })
        .map(|(word, _)| word)
        .collect();
    match values.len() {
        0 | 1 => Err(EditError::Words(
            "the model's tokenizer has no two words of one token each among those that facts are made of".into(),
        )),
        _ => Ok(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_that_cannot_be_drawn_are_refused_in_words() {
        let said = |count, usable: fn(&str) -> bool| Drawn::draw(0, count, false, usable).unwrap_err().to_string();
        assert!(said(30_000, |_| true).starts_with("30000 facts are asked for; there are words for "));
        assert!(said(1, |_| false).contains("no two words of one token each"));
        assert_eq!(Drawn::draw(0, 25_000, false, |_| true).unwrap().len(), 25_000);
    }
}

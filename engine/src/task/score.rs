//! How an answer is scored: exact rules on the text, as the originals have them.

/// What counts as right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// The fraction of these texts that the answer contains, without regard to case (RULER's `string_match_all`); of words as whole
    /// words, as the closed list has `old` as well as `golden`.
    AllOf(Vec<String>),
    /// Whether the answer contains any of these, likewise (RULER's `string_match_part`).
    AnyOf(Vec<String>),
    /// Whether the first whole number of the answer is this one (passkey retrieval).
    FirstNumber(u64),
    /// The fraction of these words with which the answer begins, in order, up to the first that is wrong, whatever stands between
    /// words.
    Prefix(Vec<String>),
}

impl Rule {
    /// The score of an answer, 0 to 1.
    pub fn score(&self, answer: &str) -> f64 {
        let lower = answer.to_lowercase();
        let holds = |text: &String| contains(&lower, &text.to_lowercase());
        match self {
            Rule::AllOf(texts) => texts.iter().filter(|text| holds(text)).count() as f64 / texts.len().max(1) as f64,
            Rule::AnyOf(texts) => f64::from(u8::from(texts.iter().any(holds))),
            Rule::FirstNumber(number) => {
                let digits = answer.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty());
                f64::from(u8::from(digits.and_then(|digits| digits.parse().ok()) == Some(*number)))
            }
            Rule::Prefix(words) => {
                let wanted: Vec<&str> = words.iter().flat_map(|text| alone(text)).collect();
                let same = alone(answer).zip(&wanted).take_while(|(found, word)| found == *word).count();
                same as f64 / wanted.len().max(1) as f64
            }
        }
    }
}

/// Whether a text contains another; one of nothing but words not as a part of longer words.
fn contains(text: &str, part: &str) -> bool {
    let is_of_words = part.chars().all(|c| c.is_alphabetic() || c == ' ');
    let is_whole = |at: usize| {
        let (before, behind) = (&text[..at], &text[at + part.len()..]);
        !before.ends_with(char::is_alphanumeric) && !behind.starts_with(char::is_alphanumeric)
    };
    text.match_indices(part).any(|(at, _)| !is_of_words || is_whole(at))
}

/// The words of a text without what stands between them.
fn alone(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_score_what_is_right_and_what_is_not() {
        let texts = |list: &[&str]| list.iter().map(|text| text.to_string()).collect::<Vec<_>>();
        let cases = [
            (Rule::AllOf(texts(&["12", "Lamp"])), "a LAMP and 12", 1.0),
            (Rule::AllOf(texts(&["12", "Lamp"])), "a lamp and 21", 0.5),
            (Rule::AnyOf(texts(&["12", "34"])), "it is 34.", 1.0),
            (Rule::AnyOf(texts(&["12", "34"])), "it is 43.", 0.0),
            // Words of the closed list are parts of others of it; numbers and codes may stand in anything.
            (Rule::AllOf(texts(&["old", "arrow", "late"])), " cold, narrow, plate, golden, Late.", 1.0 / 3.0),
            (Rule::AnyOf(texts(&["Ada of hat"])), " That is Ada of hats, not ada of chat.", 0.0),
            (Rule::AnyOf(texts(&["Ada of hat"])), " (that is Ada of Hat)", 1.0),
            (Rule::AllOf(texts(&["1234567", "03fa-77c1"])), " x1234567x03fa-77c10", 1.0),
            (Rule::FirstNumber(123), " 123. 456", 1.0),
            (Rule::FirstNumber(123), " 1234", 0.0),
            (Rule::FirstNumber(123), "none", 0.0),
            (Rule::Prefix(texts(&["1", "2", "3", "4"])), " 1 2 4 4", 0.5),
            (Rule::Prefix(texts(&["1", "2", "3", "4"])), " 1 2 3 4 5", 1.0),
            (Rule::Prefix(texts(&["1", "2"])), "", 0.0),
            // A value is right whatever the answer goes on with.
            (Rule::Prefix(texts(&["otter"])), " otter", 1.0),
            (Rule::Prefix(texts(&["otter"])), " otter;,,,,", 1.0),
            (Rule::Prefix(texts(&["otter"])), " otters;", 0.0),
        ];
        for (rule, answer, expected) in cases {
            assert_eq!(rule.score(answer), expected, "{rule:?} of {answer:?}");
        }
    }
}

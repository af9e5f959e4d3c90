//! The material of generated tasks: a closed list of words, sentences of a small grammar, keys and numbers.
//!
//! Everything that is written here begins with a space and ends without one, so that pieces can be put together in any
//! order, and a tokenizer that joins a space to the word behind it cuts them as it cuts the whole. The list is closed
//! ([`words`]): a vocabulary that holds it has one token for each word, and lengths in tokens can be met exactly.

use rand::seq::{IndexedRandom, index};
use rand::{Rng, RngExt};

/// Things: the nouns of sentences, and keys.
#[rustfmt::skip]
pub const NOUNS: &[&str] = &[
    "anchor", "apple", "arrow", "badger", "ball", "banner", "barrel", "basket", "beacon", "bear", "bell", "bench",
    "berry", "bird", "blanket", "boat", "bone", "book", "boot", "bottle", "bowl", "box", "branch", "bread", "brick",
    "bridge", "brush", "bucket", "button", "cabin", "cake", "camel", "candle", "canoe", "card", "carpet", "carrot",
    "castle", "cat", "chain", "chair", "chest", "clock", "cloud", "coat", "coin", "comb", "copper", "cork", "crab",
    "crane", "crow", "crown", "cup", "curtain", "deer", "desk", "dish", "dog", "door", "drum", "duck", "eagle", "egg",
    "engine", "falcon", "feather", "fence", "fern", "fiddle", "field", "fish", "flag", "flame", "flower", "flute",
    "forest", "fox", "frog", "garden", "gate", "glass", "glove", "goat", "goose", "grape", "hammer", "harbour", "harp",
    "hat", "hawk", "helmet", "hen", "hill", "honey", "hook", "horn", "horse", "house", "island", "jacket", "jar", "jug",
    "kettle", "kite", "knife", "ladder", "lake", "lamp", "lantern", "leaf", "lemon", "letter", "lion", "lock", "map",
    "marble", "mask", "meadow", "melon", "mill", "mirror", "moon", "moose", "mouse", "nail", "needle", "nest", "net",
    "oak", "oar", "onion", "otter", "owl", "paddle", "paper", "parcel", "pear", "pebble", "pencil", "pepper", "piano",
    "pigeon", "pillow", "pipe", "plate", "plum", "pony", "pot", "rabbit", "raven", "ribbon", "ring", "river", "robin",
    "rock", "rope", "rose", "saddle", "sail", "salmon", "scarf", "seal", "shark", "sheep", "shell", "shield", "ship",
    "shoe", "shovel", "silver", "snail", "spade", "spider", "spoon", "stone", "stork", "sword", "table", "tent",
    "tiger", "torch", "tower", "train", "trumpet", "turtle", "valley", "violin", "wagon", "walnut", "whale", "wheel",
    "whistle", "willow", "window", "wolf",
];

/// What things are like: the adjectives of sentences, and the first half of two-word keys.
#[rustfmt::skip]
pub const ADJECTIVES: &[&str] = &[
    "amber", "ancient", "bitter", "black", "blue", "bold", "brave", "bright", "broad", "broken", "brown", "calm",
    "careful", "cheap", "clean", "clear", "clever", "cold", "cool", "crooked", "curious", "dark", "deep", "dry", "dusty",
    "early", "empty", "faint", "famous", "fast", "fine", "firm", "flat", "fresh", "frozen", "gentle", "giant", "golden",
    "grand", "green", "grey", "happy", "hard", "heavy", "hidden", "high", "hollow", "humble", "hungry", "huge", "icy",
    "jolly", "keen", "kind", "large", "late", "lazy", "light", "little", "lively", "lonely", "long", "loud", "lucky",
    "mellow", "merry", "mighty", "narrow", "neat", "new", "noble", "noisy", "odd", "old", "open", "orange", "pale",
    "patient", "plain", "polite", "proud", "purple", "quick", "quiet", "rapid", "rare", "red", "rich", "rough", "round",
    "royal", "rusty", "salty", "sharp", "short", "shy", "silent", "simple", "slow", "small", "smooth", "soft", "solid",
    "sour", "square", "steady", "steep", "strange", "strong", "sunny", "sweet", "swift", "tall", "tame", "thick", "thin",
    "tidy", "tiny", "tired", "warm", "weak", "wet", "white", "wide", "wild", "wise", "wooden", "yellow", "young",
];

/// What was done: verbs of the past, each followed by an object.
#[rustfmt::skip]
pub const VERBS: &[&str] = &[
    "admired", "borrowed", "bought", "broke", "brought", "built", "carried", "caught", "chased", "cleaned", "copied",
    "counted", "covered", "drew", "dropped", "feared", "fed", "filled", "followed", "forgot", "found", "guarded", "held",
    "hid", "kept", "left", "lifted", "lost", "loved", "moved", "noticed", "opened", "painted", "passed", "praised",
    "pulled", "pushed", "reached", "repaired", "saw", "shared", "sold", "stole", "touched", "turned", "visited",
    "wanted", "washed", "watched", "weighed",
];

/// Who did it.
#[rustfmt::skip]
pub const NAMES: &[&str] = &[
    "Ada", "Anton", "Berta", "Carl", "Clara", "David", "Dora", "Edgar", "Ella", "Emil", "Felix", "Flora", "Greta",
    "Hanna", "Hugo", "Ida", "Ivan", "Jonas", "Julia", "Karin", "Leo", "Lotte", "Magda", "Marta", "Max", "Nora", "Olga",
    "Oscar", "Otto", "Paul", "Rosa", "Simon", "Theo", "Vera",
];

/// Where, in front of a place.
const WHERE: &[&str] = &["near", "behind", "under", "beside", "above", "beyond"];

/// When.
const WHEN: &[&str] = &["yesterday", "today", "again", "once", "twice", "alone", "together", "slowly"];

/// The other words of sentences, statements and questions. Those with a capital begin a sentence.
#[rustfmt::skip]
const FRAME: &[&str] = &[
    "The", "the", "A", "a", "and", "but", "then", "while", "In", "in", "morning", "evening", "winter", "summer", "of",
    "is", "What", "Which", "code", "word", "value", "key", "for", "to", "with", "Remember", "Copy", "copy", "list",
    "List", "Question", "Answer", "text", "pairs", "Pairs", "number", "secret", "are", "all", "was", "that", "it",
];

/// Words of tasks' statements and questions that no sentence has.
#[rustfmt::skip]
const ASKED: &[&str] = &[
    "Count", "For", "VAR", "begins", "came", "codes", "common", "ends", "from", "made", "most", "one", "steps",
    "three", "variables", "which", "whom", "words",
];

/// Every word that this module writes, each once; numbers are not among them.
pub fn words() -> impl Iterator<Item = &'static str> {
    [NOUNS, ADJECTIVES, VERBS, NAMES, WHERE, WHEN, FRAME, ASKED].into_iter().flatten().copied()
}

/// A sentence of the grammar, ` The old bear carried a lamp near the red gate.`, of 4 to 26 words.
pub fn sentence(rng: &mut impl Rng) -> String {
    let mut text = String::with_capacity(80);
    match rng.random_range(0..8) {
        0 => text.push_str(&format!(" In the {},", one(rng, &["morning", "evening", "winter", "summer"]))),
        1..5 => {
            subject(rng, &mut text, ["The", "A"]);
            return clause_end(rng, text);
        }
        _ => {
            text.push(' ');
            text.push_str(one(rng, NAMES));
            return clause_end(rng, text);
        }
    }
    subject(rng, &mut text, ["the", "a"]);
    clause_end(rng, text)
}

/// The verb and what follows it.
fn clause_end(rng: &mut impl Rng, mut text: String) -> String {
    predicate(rng, &mut text);
    if rng.random_bool(0.25) {
        text.push(' ');
        text.push_str(one(rng, &["and", "but", "then", "while"]));
        subject(rng, &mut text, ["the", "a"]);
        predicate(rng, &mut text);
    }
    text.push('.');
    text
}

fn subject(rng: &mut impl Rng, text: &mut String, articles: [&str; 2]) {
    text.push(' ');
    text.push_str(one(rng, &articles));
    if rng.random_bool(0.5) {
        text.push(' ');
        text.push_str(one(rng, ADJECTIVES));
    }
    text.push(' ');
    text.push_str(one(rng, NOUNS));
}

fn predicate(rng: &mut impl Rng, text: &mut String) {
    text.push(' ');
    text.push_str(one(rng, VERBS));
    subject(rng, text, ["the", "a"]);
    if rng.random_bool(0.4) {
        text.push(' ');
        text.push_str(one(rng, WHERE));
        subject(rng, text, ["the", "a"]);
    } else if rng.random_bool(0.3) {
        text.push(' ');
        text.push_str(one(rng, WHEN));
    }
}

fn one<'a>(rng: &mut impl Rng, list: &[&'a str]) -> &'a str {
    list.choose(rng).expect("no list of words is empty")
}

/// `count` different words that can be keys or values, each one token of a vocabulary that holds [`words`].
///
/// # Panics
/// When there are not so many nouns and adjectives (about 320).
pub fn distinct_words(rng: &mut impl Rng, count: usize) -> Vec<&'static str> {
    let all = NOUNS.len() + ADJECTIVES.len();
    assert!(count <= all, "{count} different words asked of {all}");
    let word = |at: usize| if at < NOUNS.len() { NOUNS[at] } else { ADJECTIVES[at - NOUNS.len()] };
    index::sample(rng, all, count).into_iter().map(word).collect()
}

/// `count` different keys of an adjective and a noun, `amber falcon`.
///
/// # Panics
/// When there are not so many (about 25,000).
pub fn distinct_pairs(rng: &mut impl Rng, count: usize) -> Vec<String> {
    let all = NOUNS.len() * ADJECTIVES.len();
    assert!(count <= all, "{count} different pairs of words asked of {all}");
    let pair = |at: usize| format!("{} {}", ADJECTIVES[at / NOUNS.len()], NOUNS[at % NOUNS.len()]);
    index::sample(rng, all, count).into_iter().map(pair).collect()
}

/// As [`distinct_pairs`], of words other than `taken`; `None` where there are not so many.
pub fn distinct_pairs_without(rng: &mut impl Rng, count: usize, taken: &[&str]) -> Option<Vec<String>> {
    let free = |words: &[&'static str]| words.iter().copied().filter(|word| !taken.contains(word)).collect::<Vec<_>>();
    let (nouns, adjectives) = (free(NOUNS), free(ADJECTIVES));
    let all = nouns.len() * adjectives.len();
    let pair = |at: usize| format!("{} {}", adjectives[at / nouns.len()], nouns[at % nouns.len()]);
    (count <= all).then(|| index::sample(rng, all, count).into_iter().map(pair).collect())
}

/// A number of exactly `digits` digits, the first of them not 0.
pub fn number(rng: &mut impl Rng, digits: usize) -> String {
    let digit = |at: usize| char::from(b'0' + rng.random_range(u8::from(at == 0)..10));
    (0..digits).map(digit).collect()
}

/// Four groups of four hexadecimal digits, `03fa-77c1-e210-9b44`: a name that says nothing, and is never met twice.
pub fn code(rng: &mut impl Rng) -> String {
    let bits: u64 = rng.random();
    format!("{:04x}-{:04x}-{:04x}-{:04x}", bits >> 48, bits >> 32 & 0xffff, bits >> 16 & 0xffff, bits & 0xffff)
}

/// The statement that hides a value in a text: ` The code of KEY is VALUE.`
pub fn needle(key: &str, value: &str) -> String {
    format!("{} {value}.", needle_stem(key))
}

/// A needle up to its value, which a reader who remembers it goes on with: ` The code of KEY is`.
pub fn needle_stem(key: &str) -> String {
    format!(" The code of {key} is")
}

/// The question for a needle: ` What is the code of KEY?`
pub fn needle_question(key: &str) -> String {
    format!(" What is the code of {key}?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use std::collections::BTreeSet;

    #[test]
    fn sentences_hold_only_listed_words_and_the_list_has_none_twice() {
        let listed: BTreeSet<&str> = words().collect();
        assert_eq!(listed.len(), words().count(), "a word is listed twice");
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut seen = BTreeSet::new();
        for _ in 0..5000 {
            let text = sentence(&mut rng);
            assert!(text.starts_with(' ') && text.ends_with('.'), "{text:?}");
            let count = text[1..].split(' ').count();
            assert!((4..=26).contains(&count), "{count} words: {text}");
            for word in text[1..].split(' ').map(|word| word.trim_end_matches(['.', ','])) {
                assert!(listed.contains(word), "'{word}' of '{text}' is not listed");
                seen.insert(word.to_string());
            }
        }
        for list in [NOUNS, ADJECTIVES, VERBS, NAMES, WHERE, WHEN] {
            assert!(list.iter().all(|word| seen.contains(*word)), "a listed word is never written");
        }
        let fixed = [needle("amber falcon", "12"), needle_question("amber falcon")].concat();
        for word in fixed.split(' ').map(|word| word.trim_end_matches(['.', '?'])).filter(|word| !word.is_empty()) {
            assert!(listed.contains(word) || word.parse::<u32>().is_ok(), "'{word}' is not listed");
        }
    }

    #[test]
    fn keys_differ_and_numbers_have_their_digits() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        assert_eq!(distinct_words(&mut rng, 320).into_iter().collect::<BTreeSet<_>>().len(), 320);
        assert_eq!(distinct_pairs(&mut rng, 2000).into_iter().collect::<BTreeSet<_>>().len(), 2000);
        for digits in 1..10 {
            let text = number(&mut rng, digits);
            assert!(text.len() == digits && !text.starts_with('0') && text.parse::<u64>().is_ok(), "{text}");
        }
    }

    #[test]
    fn the_same_seed_writes_the_same_text() {
        let text = |seed| -> String {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            (0..20).map(|_| sentence(&mut rng)).collect()
        };
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
    }
}

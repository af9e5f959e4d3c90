//! Inputs that are almost right: what a corpus holds, with a few changes drawn at random.
//!
//! Bytes are flipped, taken out, doubled and put together from two inputs; numbers become extreme ones; a JSON document is
//! also changed as a tree (a value becomes another one, is left out, doubled, or moves elsewhere), which gets past the
//! parser of JSON and into what reads it.

use rand::{Rng, RngExt};
use serde_json::Value;

/// Numbers at which arithmetic on sizes goes wrong.
const NUMBERS: [&str; 19] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "255",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775808",
    "18446744073709551615",
    "0.5",
    "-0.0",
    "1e-308",
    "1e308",
    "1e400",
];

/// An input drawn from those of a corpus, with one to four changes. `words` are texts that mean something to its reader.
pub fn mutated(rng: &mut impl Rng, corpus: &[Vec<u8>], words: &[&str]) -> Vec<u8> {
    let mut input = corpus[rng.random_range(0..corpus.len())].clone();
    for _ in 0..rng.random_range(1..=4) {
        let other = &corpus[rng.random_range(0..corpus.len())];
        if !(rng.random_bool(0.7) && change_line(rng, &mut input, other, words)) {
            change_bytes(rng, &mut input, corpus, words);
        }
    }
    // What grows without end shows nothing new.
    input.truncate(1 << 20);
    input
}

/// Changes one line that is a JSON document; false where the line drawn is none.
fn change_line(rng: &mut impl Rng, input: &mut Vec<u8>, other: &[u8], words: &[&str]) -> bool {
    let tree = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok().filter(|tree| count(tree) > 1);
    let other = tree(other.split(|&byte| byte == b'\n').next().unwrap_or(&[])).unwrap_or_default();
    if let Some(mut tree) = tree(input) {
        change_tree(rng, &mut tree, &other, words);
        *input = tree.to_string().into_bytes();
        return true;
    }
    let lines: Vec<&[u8]> = input.split(|&byte| byte == b'\n').collect();
    let chosen = rng.random_range(0..lines.len());
    let Some(mut tree) = tree(lines[chosen]) else { return false };
    change_tree(rng, &mut tree, &other, words);
    let changed = tree.to_string().into_bytes();
    let lines: Vec<&[u8]> =
        lines.iter().enumerate().map(|(at, line)| if at == chosen { &changed[..] } else { line }).collect();
    *input = lines.join(&b'\n');
    true
}

fn change_bytes(rng: &mut impl Rng, input: &mut Vec<u8>, corpus: &[Vec<u8>], words: &[&str]) {
    let mut draw = |most: usize| if most == 0 { 0 } else { rng.random_range(0..most) };
    let (from, len) = (draw(input.len() + 1), draw(16));
    let to = (from + len).min(input.len());
    match draw(8) {
        0 => {
            if let Some(byte) = input.get_mut(from) {
                *byte ^= 1 << draw(8);
            }
        }
        1 => {
            if let Some(byte) = input.get_mut(from) {
                *byte = draw(256) as u8;
            }
        }
        2 => input.truncate(from),
        3 => drop(input.drain(from..to)),
        4 => {
            let piece = input[from..to].to_vec();
            drop(input.splice(from..from, piece));
        }
        5 => {
            let other = &corpus[draw(corpus.len())];
            let start = draw(other.len() + 1);
            input.truncate(from);
            input.extend_from_slice(&other[start..]);
        }
        6 if !words.is_empty() => {
            let word = words[draw(words.len())].bytes();
            drop(input.splice(from..to, word));
        }
        _ => {
            // The number behind `from`, if there is one.
            let digit = |byte: &u8| byte.is_ascii_digit();
            let Some(start) = input[from..].iter().position(digit).map(|place| from + place) else { return };
            let end = input[start..].iter().position(|byte| !digit(byte)).map_or(input.len(), |place| start + place);
            drop(input.splice(start..end, NUMBERS[draw(NUMBERS.len())].bytes()));
        }
    }
}

/// Changes one value of a tree, or takes one from another tree.
fn change_tree(rng: &mut impl Rng, tree: &mut Value, other: &Value, words: &[&str]) {
    let mut place = rng.random_range(0..count(tree));
    let taken = (count(other) > 1 && rng.random_bool(0.2)).then(|| {
        let mut place = rng.random_range(0..count(other));
        let mut other = other.clone();
        nth(&mut other, &mut place).map(|value| value.take()).unwrap_or_default()
    });
    let Some(value) = nth(tree, &mut place) else { return };
    if let Some(taken) = taken {
        *value = taken;
        return;
    }
    let number = || NUMBERS.map(|text| serde_json::from_str::<Value>(text).unwrap_or(Value::Null));
    match (value, rng.random_range(0..4)) {
        (Value::Array(list), 0) if !list.is_empty() => drop(list.remove(rng.random_range(0..list.len()))),
        (Value::Array(list), 1) if !list.is_empty() => {
            let from = list[rng.random_range(0..list.len())].clone();
            list.insert(rng.random_range(0..=list.len()), from);
        }
        (Value::Array(list), 2) => list.clear(),
        (Value::Object(map), 0 | 1) if !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).cloned().unwrap_or_default();
            drop(map.remove(&key));
        }
        (Value::Object(map), 2) if !words.is_empty() => {
            let word = words[rng.random_range(0..words.len())];
            drop(map.insert(word.into(), number()[rng.random_range(0..NUMBERS.len())].clone()));
        }
        (value, 0) if !words.is_empty() => *value = words[rng.random_range(0..words.len())].into(),
        (value, 1) => {
            let plain =
                [Value::Null, true.into(), false.into(), "".into(), "é\n\u{0}".into(), Value::Array(Vec::new())];
            *value = plain[rng.random_range(0..plain.len())].clone();
        }
        (value, _) => *value = number()[rng.random_range(0..NUMBERS.len())].clone(),
    }
}

/// Values of a tree, itself among them.
fn count(tree: &Value) -> usize {
    1 + match tree {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

/// The value at a place of a tree, counted from its root; counts `place` down.
fn nth<'t>(tree: &'t mut Value, place: &mut usize) -> Option<&'t mut Value> {
    if *place == 0 {
        return Some(tree);
    }
    *place -= 1;
    match tree {
        Value::Array(list) => list.iter_mut().find_map(|value| nth(value, place)),
        Value::Object(map) => map.values_mut().find_map(|value| nth(value, place)),
        _ => None,
    }
}

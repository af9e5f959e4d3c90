//! The keys of a JSON object, each taken once and checked; what is left over is not understood.

use super::harmless::is_harmless;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Most of any extent; products of two stay far from overflow.
const MOST: u64 = 1 << 28;

/// An object of a JSON file.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Name of the object before a key, as `rope_scaling.`.
    within: &'static str,
    taken: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Fields<'a> {
    /// None of whose keys has been asked for.
    pub fn new(map: &'a Map<String, Value>, within: &'static str) -> Self {
        Fields { map, within, taken: RefCell::default() }
    }

    /// The value of a key; `null` is no value.
    pub fn value(&self, key: &'a str) -> Option<&'a Value> {
        self.taken.borrow_mut().insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key is this whole number.
    pub fn is(&self, key: &'a str, number: i64) -> bool {
        self.value(key).and_then(Value::as_i64) == Some(number)
    }

    /// Whether a key is there, be it as `null`.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    fn parsed<T>(
        &self,
        key: &'a str,
        expected: &str,
        parse: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let wrong = || format!("{}{key} is {}; it must be {expected}", self.within, shown(value));
        parse(value).map(Some).ok_or_else(wrong)
    }

    /// A whole number from 1 on.
    pub fn count(&self, key: &'a str) -> Result<Option<usize>, String> {
        let whole = |value: &Value| value.as_u64().filter(|&count| (1..=MOST).contains(&count));
        let count = self.parsed(key, "a whole number from 1 to 2^28", whole)?;
        Ok(count.map(|count| count as usize))
    }

    /// A count that may be 0.
    pub fn place(&self, key: &'a str) -> Result<Option<usize>, String> {
        let place = self.parsed(key, "a whole number up to 2^28", |value| value.as_u64().filter(|&n| n <= MOST))?;
        Ok(place.map(|place| place as usize))
    }

    /// A number above 0.
    pub fn number(&self, key: &'a str) -> Result<Option<f64>, String> {
        self.parsed(key, "a number above 0", positive)
    }

    /// A list of them.
    pub fn numbers(&self, key: &'a str) -> Result<Option<Vec<f64>>, String> {
        self.parsed(key, "a list of numbers above 0", |value| value.as_array()?.iter().map(positive).collect())
    }

    /// Whether a key says true; without it, false.
    pub fn flag(&self, key: &'a str) -> Result<bool, String> {
        Ok(self.parsed(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// A text.
    pub fn text(&self, key: &'a str) -> Result<Option<&'a str>, String> {
        self.parsed(key, "a text", Value::as_str)
    }

    /// A list of texts.
    pub fn texts(&self, key: &'a str) -> Result<Option<Vec<&'a str>>, String> {
        let texts = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.parsed(key, "a list of texts", texts)
    }

    /// One token or a list of them.
    pub fn tokens(&self, key: &'a str) -> Result<Vec<u32>, String> {
        let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let tokens = |value: &'a Value| match value.as_array() {
            Some(list) => list.iter().map(token).collect(),
            None => token(value).map(|token| vec![token]),
        };
        Ok(self.parsed(key, "a token or a list of tokens", tokens)?.unwrap_or_default())
    }

    /// An object within this one, which `within` names before its keys.
    pub fn object(&self, key: &'a str, within: &'static str) -> Result<Option<Fields<'a>>, String> {
        Ok(self.parsed(key, "an object", Value::as_object)?.map(|map| Fields::new(map, within)))
    }

    /// A key that must be there.
    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, String> {
        value.ok_or_else(|| format!("{}{key} is missing", self.within))
    }

    /// A key that would change results in a way that is not understood.
    pub fn refuse(&self, key: &str, reason: &str) -> String {
        let value = self.map.get(key).map_or("missing".to_string(), shown);
        format!("{}{key} is {value}; {reason}", self.within)
    }

    /// Refuses what nobody asked for.
    pub fn finish(&self) -> Result<(), String> {
        let taken = self.taken.borrow();
        let unknown = |(key, value): &(&String, &Value)| !taken.contains(key.as_str()) && !is_harmless(key, value);
        match self.map.iter().find(unknown) {
            None => Ok(()),
            Some((key, value)) => {
                let reason = "this option is not known and may change results; where it cannot, make it null";
                Err(format!("{}{key} is {}; {reason}", self.within, shown(value)))
            }
        }
    }
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| *x > 0.0 && x.is_finite())
}

/// A value as a message shows it: lists and objects only by their beginning.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

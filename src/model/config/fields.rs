//! The keys of a JSON object, each taken once and checked; what is left over is not understood.

use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Keys that say nothing about results.
const HARMLESS: [&str; 38] = [
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "cache_implementation",
    "chunk_size_feed_forward",
    "do_sample",
    "embd_pdrop",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_length",
    "max_sequence_length",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "rms_norm",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "vocab_file",
];

/// Most of any extent; products of two stay far from overflow.
const MOST: u64 = 1 << 28;

/// An object of a JSON file.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Name of the object before a key, as `rope_scaling.`.
    within: &'static str,
    taken: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>, within: &'static str) -> Self {
        Fields { map, within, taken: RefCell::default() }
    }

    /// The value of a key; `null` is no value.
    pub fn value(&self, key: &'a str) -> Option<&'a Value> {
        self.taken.borrow_mut().insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn parsed<T>(
        &self,
        key: &'a str,
        expected: &str,
        parse: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let wrong = || format!("{}{key} is {value}; it must be {expected}", self.within);
        parse(value).map(Some).ok_or_else(wrong)
    }

    pub fn count(&self, key: &'a str) -> Result<Option<usize>, String> {
        let whole = |value: &Value| value.as_u64().filter(|&count| (1..=MOST).contains(&count));
        let count = self.parsed(key, "a whole number from 1 to 2^28", whole)?;
        Ok(count.map(|count| count as usize))
    }

    pub fn number(&self, key: &'a str) -> Result<Option<f64>, String> {
        self.parsed(key, "a number above 0", |value| value.as_f64().filter(|x| *x > 0.0 && x.is_finite()))
    }

    pub fn flag(&self, key: &'a str) -> Result<bool, String> {
        Ok(self.parsed(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn text(&self, key: &'a str) -> Result<Option<&'a str>, String> {
        self.parsed(key, "a text", Value::as_str)
    }

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

    pub fn object(&self, key: &'a str, within: &'static str) -> Result<Option<Fields<'a>>, String> {
        Ok(self.parsed(key, "an object", Value::as_object)?.map(|map| Fields::new(map, within)))
    }

    /// A key that must be there.
    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, String> {
        value.ok_or_else(|| format!("{}{key} is missing", self.within))
    }

    /// A key that would change results in a way that is not understood.
    pub fn refuse(&self, key: &str, reason: &str) -> String {
        let value = self.map.get(key).map_or("missing".to_string(), Value::to_string);
        format!("{}{key} is {value}; {reason}", self.within)
    }

    /// Refuses what nobody asked for.
    pub fn finish(&self) -> Result<(), String> {
        let taken = self.taken.borrow();
        let unknown = |(key, value): &(&String, &Value)| {
            let silent = value.is_null() || *value == &Value::Bool(false);
            !silent && !taken.contains(key.as_str()) && !HARMLESS.contains(&key.as_str())
        };
        match self.map.iter().find(unknown) {
            None => Ok(()),
            Some((key, value)) => {
                Err(format!("{}{key} is {value}; this option is not known and may change results", self.within))
            }
        }
    }
}

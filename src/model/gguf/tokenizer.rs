//! Metadata to a `tokenizer.json`: byte-level BPE, with the ways of cutting text before it that llama.cpp names.

use super::Gguf;
use crate::model::ModelError;
use serde_json::{Map, Value, json};

/// Letters with what precedes them, numbers of up to so many digits, and marks: Llama 3's and Qwen 2's.
fn split(digits: &str) -> Value {
    let pattern = format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    let split = json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    json!({ "type": "Sequence", "pretokenizers": [split, bytes(false)] })
}

fn bytes(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

/// How text is cut, by the name of llama.cpp's `tokenizer.ggml.pre`.
fn pre_tokenizer(name: &str) -> Option<Value> {
    match name {
        "gpt-2" => Some(bytes(true)),
        "smollm" => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            Some(json!({ "type": "Sequence", "pretokenizers": [digits, bytes(true)] }))
        }
        "llama-bpe" => Some(split("{1,3}")),
        "qwen2" => Some(split("")),
        _ => None,
    }
}

/// Names of all of these.
pub(super) const KINDS_OF_CUTS: [&str; 4] = ["gpt-2", "smollm", "llama-bpe", "qwen2"];

/// Kinds of tokens: those that only mark something, and those that a user added.
pub(super) const CONTROL: u64 = 3;
/// See [`CONTROL`].
pub(super) const USER_DEFINED: u64 = 4;

impl Gguf {
    /// The `tokenizer.json` that says the same.
    ///
    /// # Errors
    /// When the tokenizer is of another kind, or its lists do not fit each other.
    pub fn tokenizer_json(&self) -> Result<String, ModelError> {
        let json = tokenizer_json(&self.metadata);
        let json = json.map_err(|reason| ModelError::Config { path: self.path().into(), reason })?;
        Ok(json.to_string())
    }
}

/// The `tokenizer.json` that says the same as these keys.
///
/// # Errors
/// In words, as [`Gguf::tokenizer_json`].
pub(super) fn tokenizer_json(metadata: &Map<String, Value>) -> Result<Value, String> {
    let key = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}"));
    let kind = key("model").and_then(Value::as_str).unwrap_or("nothing");
    if kind != "gpt2" {
        return Err(format!("its tokenizer is '{kind}'; read is gpt2 (byte-level BPE); `logits` takes tokens"));
    }
    let pre = key("pre").and_then(Value::as_str).unwrap_or("gpt-2");
    let known = KINDS_OF_CUTS.join(", ");
    let pre_tokenizer = pre_tokenizer(pre).ok_or_else(|| format!("its text is cut as '{pre}'; known: {known}"))?;
    let list = |name: &str| key(name).and_then(Value::as_array).ok_or(format!("it has no list tokenizer.ggml.{name}"));
    let (tokens, merges) = (list("tokens")?, list("merges")?);
    let kinds = key("token_type").and_then(Value::as_array);
    if kinds.is_some_and(|kinds| kinds.len() != tokens.len()) {
        return Err("tokenizer.ggml.token_type has not one element for each token".into());
    }
    let (mut vocabulary, mut added) = (Map::new(), Vec::new());
    for (id, token) in tokens.iter().enumerate() {
        let token = token.as_str().ok_or_else(|| format!("token {id} is no text"))?;
        let kind = kinds.and_then(|kinds| kinds[id].as_u64()).unwrap_or(1);
        if kind == CONTROL || kind == USER_DEFINED {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            }));
        }
        vocabulary.insert(token.into(), id.into());
    }
    let normalizer = if pre == "qwen2" { json!({ "type": "NFC" }) } else { Value::Null };
    Ok(json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(metadata, tokens),
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre == "llama-bpe", "vocab": vocabulary, "merges": merges,
        },
    }))
}

/// What puts the first token before every text, where the file asks for that.
fn post_processor(metadata: &Map<String, Value>, tokens: &[Value]) -> Value {
    let key = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}"));
    let wanted = key("add_bos_token").and_then(Value::as_bool).unwrap_or(false);
    let bos = key("bos_token_id").and_then(Value::as_u64).filter(|_| wanted);
    let Some((id, token)) = bos.and_then(|id| Some((id, tokens.get(id as usize)?))) else { return Value::Null };
    let special = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let sequence = |name: &str, type_id: usize| json!({ "Sequence": { "id": name, "type_id": type_id } });
    json!({
        "type": "TemplateProcessing",
        "single": [special, sequence("A", 0)],
        "pair": [special, sequence("A", 0), sequence("B", 1)],
        "special_tokens": { token.as_str().unwrap_or_default(): { "id": token, "ids": [id], "tokens": [token] } },
    })
}

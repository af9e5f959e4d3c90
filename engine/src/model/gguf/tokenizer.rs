//! Metadata to a `tokenizer.json`: byte-level BPE, with the ways of cutting text before it that llama.cpp names, or
//! SentencePiece's ([`super::sentencepiece`]).

use super::{Gguf, sentencepiece};
use crate::model::ModelError;
use serde_json::{Map, Value, json};

/// Letters with what precedes them, numbers of up to so many digits, and marks: Llama 3's and Qwen 2's.
fn split(digits: &str) -> Value {
    cut_by(&format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ))
}

/// As these, but words end where small letters are followed by a capital, and what is `behind` a word belongs to it: Mistral's from Nemo
/// on, and OpenAI's o200k.
fn by_case(behind: &str, digits: &str) -> Value {
    const SMALL: &str = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    const CAPITAL: &str = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    const BEFORE: &str = r"[^\r\n\p{L}\p{N}]?";
    cut_by(&format!(
        r"{BEFORE}{CAPITAL}*{SMALL}+{behind}|{BEFORE}{CAPITAL}+{SMALL}*{behind}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ))
}

fn cut_by(pattern: &str) -> Value {
    let split = json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    json!({ "type": "Sequence", "pretokenizers": [split, bytes(false)] })
}

fn bytes(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

fn single_digits() -> Value {
    let digits = json!({ "type": "Digits", "individual_digits": true });
    json!({ "type": "Sequence", "pretokenizers": [digits, bytes(true)] })
}

/// A way of cutting text.
struct Cut {
    /// What llama.cpp's `tokenizer.ggml.pre` calls it; the first is written.
    names: &'static [&'static str],
    pre_tokenizer: fn() -> Value,
    /// A piece that is a token stays whole, whatever the merges say; and, unless the file says otherwise, a text begins with the
    /// token for that.
    whole: bool,
    /// Letters and their accents are put together first (NFC).
    composed: bool,
}

const CUTS: [Cut; 8] = [
    Cut { names: &["gpt-2", "phi-2"], pre_tokenizer: || bytes(true), whole: false, composed: false },
    Cut {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        pre_tokenizer: single_digits,
        whole: false,
        composed: false,
    },
    Cut {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3"],
        pre_tokenizer: || split("{1,3}"),
        whole: true,
        composed: false,
    },
    Cut { names: &["qwen2"], pre_tokenizer: || split(""), whole: false, composed: true },
    Cut { names: &["dbrx", "smaug-bpe"], pre_tokenizer: || split("{1,3}"), whole: false, composed: false },
    Cut { names: &["tekken"], pre_tokenizer: || by_case("", ""), whole: true, composed: false },
    Cut {
        names: &["gpt-4o", "llama4"],
        pre_tokenizer: || by_case("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"),
        whole: false,
        composed: false,
    },
    Cut { names: &["deepseek-r1-qwen", "megrez"], pre_tokenizer: || split(""), whole: false, composed: false },
];

/// What is written for each way of cutting text.
pub(super) fn kinds_of_cuts() -> impl Iterator<Item = &'static str> {
    CUTS.iter().map(|cut| cut.names[0])
}

/// Kinds of tokens: text, what stands for what has no token, what only marks something, what a user added, what nothing stands
/// for, and single bytes.
pub(super) const TEXT: u64 = 1;
/// See [`TEXT`].
pub(super) const UNKNOWN: u64 = 2;
/// See [`TEXT`].
pub(super) const CONTROL: u64 = 3;
/// See [`TEXT`].
pub(super) const USER_DEFINED: u64 = 4;
/// See [`TEXT`].
pub(super) const UNUSED: u64 = 5;
/// See [`TEXT`].
pub(super) const BYTE: u64 = 6;

/// The tokens of a file, by their numbers.
pub(super) struct Tokens<'t> {
    pub texts: Vec<&'t str>,
    kinds: Vec<u64>,
    /// Marks take the spaces behind them along. Files do not say it; llama.cpp knows it of the model's name.
    strips: bool,
}

impl<'t> Tokens<'t> {
    fn read(metadata: &'t Map<String, Value>) -> Result<Self, String> {
        let texts = list(metadata, "tokens")?.iter().enumerate();
        let texts = texts.map(|(id, token)| token.as_str().ok_or_else(|| format!("token {id} is no text")));
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        let kinds = match list(metadata, "token_type") {
            Ok(kinds) => kinds.iter().map(|kind| kind.as_u64().unwrap_or(TEXT)).collect(),
            Err(_) => vec![TEXT; texts.len()],
        };
        match kinds.len() == texts.len() {
            true => Ok(Tokens { texts, kinds, strips: is_phi3(metadata) }),
            false => Err("tokenizer.ggml.token_type has not one element for each token".into()),
        }
    }

    /// Whether a token is a part of texts, and no mark, byte or gap.
    pub fn is_text(&self, id: usize) -> bool {
        matches!(self.kinds[id], TEXT | USER_DEFINED | UNUSED)
    }

    /// Tokens that are found in a text before it is cut, as `tokenizer.json` has them.
    pub fn added(&self) -> Vec<Value> {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        let added = all.filter(|(_, (_, kind))| matches!(**kind, CONTROL | USER_DEFINED | UNKNOWN));
        let added = added.map(|(id, (token, kind))| {
            let is_mark = matches!(*kind, CONTROL | UNKNOWN);
            let strips = self.strips && !["<unk>", "<s>", "<|endoftext|>"].contains(token);
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": strips,
                "normalized": false, "special": is_mark,
            })
        });
        added.collect()
    }

    /// Numbers of all.
    pub fn vocabulary(&self) -> Map<String, Value> {
        self.texts.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect()
    }
}

/// Whether a file says that its model is a Phi 3.
fn is_phi3(metadata: &Map<String, Value>) -> bool {
    let name = metadata.get(NAME).and_then(Value::as_str).unwrap_or_default().to_lowercase();
    name.contains("phi-3") || name.contains("phi3")
}

/// The key of a model's name.
pub(super) const NAME: &str = "general.name";

fn list<'m>(metadata: &'m Map<String, Value>, name: &str) -> Result<&'m [Value], String> {
    let found = metadata.get(&format!("tokenizer.ggml.{name}")).and_then(Value::as_array);
    found.map(Vec::as_slice).ok_or_else(|| format!("it has no list tokenizer.ggml.{name}"))
}

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
    let key = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}")).and_then(Value::as_str);
    match key("model").unwrap_or("nothing") {
        "gpt2" => byte_level(metadata, &Tokens::read(metadata)?, key("pre").unwrap_or("gpt-2")),
        "llama" => sentencepiece::tokenizer_json(metadata, &Tokens::read(metadata)?),
        kind => Err(format!(
            "its tokenizer is '{kind}'; read are gpt2 (byte-level BPE) and llama (SentencePiece's BPE); `logits` takes tokens"
        )),
    }
}

fn byte_level(metadata: &Map<String, Value>, tokens: &Tokens<'_>, pre: &str) -> Result<Value, String> {
    let cut = CUTS.iter().find(|cut| cut.names.contains(&pre)).ok_or_else(|| {
        let known: Vec<&str> = CUTS.iter().flat_map(|cut| cut.names).copied().collect();
        format!("its text is cut as '{pre}'; known: {}", known.join(", "))
    })?;
    Ok(json!({
        "version": "1.0",
        "added_tokens": tokens.added(),
        "normalizer": if cut.composed { json!({ "type": "NFC" }) } else { Value::Null },
        "pre_tokenizer": (cut.pre_tokenizer)(),
        "post_processor": post_processor(metadata, tokens, None, cut.whole)?,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": cut.whole,
            "vocab": tokens.vocabulary(), "merges": list(metadata, "merges")?,
        },
    }))
}

/// What puts the first token before every text, and the last behind it, where the file asks for that, or else `wanted` for the first;
/// `usual` is the first one of files that do not say which it is.
///
/// # Errors
/// When one of them is no token.
pub(super) fn post_processor(
    metadata: &Map<String, Value>,
    tokens: &Tokens<'_>,
    usual: Option<u64>,
    wanted: bool,
) -> Result<Value, String> {
    let key = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}"));
    let mark = |name: &str, usual: Option<u64>, wanted: bool| -> Result<Option<(u64, &str)>, String> {
        let wanted = key(&format!("add_{name}_token")).and_then(Value::as_bool).unwrap_or(wanted);
        let Some(id) = key(&format!("{name}_token_id")).and_then(Value::as_u64).or(usual).filter(|_| wanted) else {
            return Ok(None);
        };
        let token = tokens.texts.get(id as usize).ok_or_else(|| {
            format!("tokenizer.ggml.{name}_token_id is {id}; there are {} tokens", tokens.texts.len())
        })?;
        Ok(Some((id, *token)))
    };
    let (begin, end) = (mark("bos", usual, wanted)?, mark("eos", None, false)?);
    if begin.or(end).is_none() {
        return Ok(Value::Null);
    }
    let special = |(_, token): (u64, &str)| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let sequence = |name: &str, type_id: usize| json!({ "Sequence": { "id": name, "type_id": type_id } });
    let (begin_mark, end_mark) = (begin.map(special), end.map(special));
    let with_marks =
        |texts: &[Value]| -> Vec<Value> { begin_mark.iter().chain(texts).chain(&end_mark).cloned().collect() };
    let marks: Map<String, Value> = begin
        .into_iter()
        .chain(end)
        .map(|(id, token)| (token.to_string(), json!({ "id": token, "ids": [id], "tokens": [token] })))
        .collect();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": with_marks(&[sequence("A", 0)]),
        "pair": with_marks(&[sequence("A", 0), sequence("B", 1)]),
        "special_tokens": marks,
    }))
}

//! A Hugging Face folder's configuration and tokenizer as the metadata of a GGUF file: what `config.rs` and `tokenizer.rs` read, the
//! other way.
//!
//! How a byte-level tokenizer cuts text has a name in GGUF files and a pattern in folders. Patterns are written in many ways, so that
//! the name is found as llama.cpp's conversion finds it: the one whose tokens of a text of odd cases are those of the folder. A
//! SentencePiece tokenizer has scores there and merges here: a token's score is less the later its merge comes.

use super::config::{ARCHITECTURES, ENDS};
use super::sentencepiece::SPACE;
use super::tokenizer::{BYTE, CONTROL, NAME, TEXT, UNKNOWN, UNUSED, USER_DEFINED, kinds_of_cuts, tokenizer_json};
use super::write::Keys;
use crate::model::config::{Family, RopeScaling};
use crate::model::{ChatTemplate, Config, ModelError, Text};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Digits, spaces, line breaks, contractions, marks and letters of several scripts.
const PROBE: &str = "It's 2024, we'll see: 3.14159 x 1000000!\n\n  \tTabs   and  spaces \r\n naïve Ünïcödé ЁЖ 漢字かな ∑∞ don't I'VE\n \n";

impl Keys {
    /// Metadata of a folder; without a `tokenizer.json` it has no tokenizer.
    ///
    /// # Errors
    /// When the architecture or the tokenizer has no place in a GGUF file that is read here.
    pub fn of_folder(folder: &Path, config: &Config) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::Config { path: folder.into(), reason };
        let mut map = architecture(config).map_err(wrong)?;
        if folder.join("tokenizer.json").exists() {
            map.extend(tokenizer(folder, config)?);
        }
        let mut keys = Keys::new();
        map.iter().for_each(|(key, value)| keys.put(key, value));
        Ok(keys)
    }
}

fn architecture(config: &Config) -> Result<Map<String, Value>, String> {
    let named = ARCHITECTURES.iter().find(|(_, family)| *family == config.family);
    let &(name, family) = named.ok_or_else(|| {
        format!("a {} has no place in the GGUF files that are read here", config.family.architecture())
    })?;
    let mut map = Map::new();
    map.insert("general.architecture".into(), name.into());
    let mut put = |key: &str, value: Value| map.insert(format!("{name}.{key}"), value);
    put("block_count", config.layers.into());
    put("context_length", config.max_positions.into());
    put("embedding_length", config.hidden.into());
    put("feed_forward_length", config.ffn.into());
    put("attention.head_count", config.q_heads.into());
    put("attention.head_count_kv", config.kv_heads.into());
    put("attention.key_length", config.head_dim.into());
    put("attention.value_length", config.head_dim.into());
    put("attention.layer_norm_rms_epsilon", config.norm_eps.into());
    put("rope.dimension_count", (2 * config.rope.pairs(config.head_dim)).into());
    put("rope.freq_base", config.rope.theta.into());
    put("vocab_size", config.vocab.into());
    for (key, cap) in
        [("attn_logit_softcapping", config.attention_softcap), ("final_logit_softcapping", config.final_softcap)]
    {
        if let Some(cap) = cap {
            put(key, cap.into());
        }
    }
    if let (Family::Phi3 | Family::Gemma2, Some(window)) = (family, config.windows.iter().flatten().next()) {
        put("attention.sliding_window", (*window).into());
    }
    match config.rope.scaling {
        RopeScaling::Long { original_positions, attention_factor, .. } => {
            put("rope.scaling.original_context_length", original_positions.into());
            put("rope.scaling.attn_factor", attention_factor.into());
        }
        RopeScaling::Linear { factor } => {
            put("rope.scaling.type", "linear".into());
            put("rope.scaling.factor", factor.into());
        }
        RopeScaling::Yarn { factor, original_positions, .. } => {
            put("rope.scaling.type", "yarn".into());
            put("rope.scaling.factor", factor.into());
            put("rope.scaling.original_context_length", original_positions.into());
        }
        // Others are told by what is read back.
        _ => {}
    }
    Ok(map)
}

/// What the added tokens of a `tokenizer.json` take along of the text around them, where they do.
fn taken_along(json: &Value) -> Vec<(u64, [bool; 3])> {
    let added = json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice).iter();
    let flags = |token: &Value| ["lstrip", "rstrip", "single_word"].map(|flag| token[flag] == true);
    let mut found: Vec<_> = added.map(|token| (token["id"].as_u64().unwrap_or(0), flags(token))).collect();
    found.retain(|(_, flags)| flags.contains(&true));
    found.sort_unstable();
    found
}

fn tokenizer(folder: &Path, config: &Config) -> Result<Map<String, Value>, ModelError> {
    let path = folder.join("tokenizer.json");
    let wrong = |reason: &str| ModelError::Config { path: path.clone(), reason: reason.into() };
    let text = std::fs::read_to_string(&path).map_err(|error| wrong(&error.to_string()))?;
    let original = Text::parse(path.clone(), &text)?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(&error.to_string()))?;
    let model = &json["model"];
    let (Some("BPE"), Some(vocabulary), Some(merges)) =
        (model["type"].as_str(), model["vocab"].as_object(), model["merges"].as_array())
    else {
        return Err(wrong("its model is no BPE; the tokenizers of GGUF files that are read here are"));
    };
    let mut tokens: Vec<Value> = (0..config.vocab).map(|id| format!("[PAD{id}]").into()).collect();
    let mut kinds = vec![UNUSED; config.vocab];
    let own = vocabulary.iter().map(|(token, id)| (token.as_str(), id, kind_of(model, token)));
    let added = json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice).iter().map(|token| {
        let text = token["content"].as_str().unwrap_or_default();
        let kind = if token["special"] == true { CONTROL } else { USER_DEFINED };
        (text, &token["id"], if kind_of(model, text) == UNKNOWN { UNKNOWN } else { kind })
    });
    for (token, id, kind) in own.chain(added) {
        let id = id.as_u64().filter(|&id| id < config.vocab as u64);
        let id = id.ok_or_else(|| wrong("a token's number is not below the model's vocab_size"))? as usize;
        (tokens[id], kinds[id]) = (token.into(), kind);
    }
    let pairs = || {
        merges.iter().map(|merge| match merge {
            Value::Array(pair) => pair.iter().filter_map(Value::as_str).collect(),
            text => text.as_str().unwrap_or_default().split(' ').collect::<Vec<_>>(),
        })
    };
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(format!("tokenizer.ggml.{key}"), value);
    let in_pieces = model["byte_fallback"] == true;
    if in_pieces {
        put("model", "llama".into());
        put("scores", scores(&tokens, pairs().map(|pair| pair.concat())).into());
        let first = *original.tokens("a")?.last().expect("no text has no tokens") as usize;
        let first = tokens.get(first).and_then(Value::as_str).unwrap_or_default();
        put("add_space_prefix", first.starts_with(SPACE).into());
        if let Some(id) = kinds.iter().position(|kind| *kind == UNKNOWN) {
            put("unknown_token_id", id.into());
        }
    } else {
        put("model", "gpt2".into());
        put("merges", pairs().map(|pair| Value::from(pair.join(" "))).collect());
    }
    // The end that the tokenizer names comes first: it is the only one that some programs look for.
    let settings = std::fs::read_to_string(folder.join("tokenizer_config.json")).unwrap_or_default();
    let settings: Value = serde_json::from_str(&settings).unwrap_or_default();
    let ending = settings.pointer("/eos_token/content").unwrap_or(&settings["eos_token"]).clone();
    let mut ends = config.eos.clone();
    ends.sort_by_key(|&id| tokens.get(id as usize) != Some(&ending));
    if ends.len() > ENDS.len() {
        let (found, places) = (ends.len(), ENDS.len());
        return Err(wrong(&format!("the model ends texts with {found} tokens; a GGUF file has places for {places}")));
    }
    put("tokens", tokens.into());
    put("token_type", kinds.into());
    let beginning = original.beginning()?;
    put("add_bos_token", config.bos.is_some_and(|bos| beginning == [bos]).into());
    if let Some(bos) = config.bos {
        put("bos_token_id", bos.into());
    }
    for (key, id) in ENDS.into_iter().zip(ends) {
        put(key, id.into());
    }
    if let Some(template) = ChatTemplate::find(folder)? {
        map.insert("tokenizer.chat_template".into(), template.source().into());
    }
    let made = |map: &Map<String, Value>| tokenizer_json(map).map(|json| taken_along(&json)).unwrap_or_default();
    map.insert("tokenizer.ggml.pre".into(), json!("default"));
    if made(&map) != taken_along(&json) {
        map.insert(NAME.into(), "Phi-3".into());
        if config.family != Family::Phi3 || made(&map) != taken_along(&json) {
            return Err(wrong(
                "its added tokens take spaces along (lstrip, rstrip, single_word) as no GGUF file can say; formats of folders, as \
                 int4, keep it as it is",
            ));
        }
    }
    let wanted = original.piece(PROBE)?;
    let ways: Vec<&str> = if in_pieces { vec!["default"] } else { kinds_of_cuts().collect() };
    for pre in &ways {
        map.insert("tokenizer.ggml.pre".into(), json!(pre));
        let same = tokenizer_json(&map).and_then(|json| {
            let made = Text::parse(path.clone(), &json.to_string()).map_err(|error| error.to_string())?;
            made.piece(PROBE).map_err(|error| error.to_string())
        });
        if same.is_ok_and(|tokens| tokens == wanted) {
            return Ok(map);
        }
    }
    Err(wrong(&match in_pieces {
        true => "its tokens are none that scores give, as GGUF files have them".into(),
        false => format!(
            "it cuts text in none of the ways that are written to GGUF files: {}; formats of folders, as int4, keep it as it is",
            ways.join(", ")
        ),
    }))
}

/// The kind of a token of the model's own vocabulary.
fn kind_of(model: &Value, token: &str) -> u64 {
    let is_byte = || token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
    match model["byte_fallback"] == true {
        true if model["unk_token"] == token => UNKNOWN,
        true if is_byte() => BYTE,
        _ => TEXT,
    }
}

/// Scores by which tokens are made in the order in which `made` names them; others are never made.
fn scores(tokens: &[Value], made: impl Iterator<Item = String>) -> Vec<f64> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (at, token) in made.enumerate() {
        first.entry(token).or_insert(at);
    }
    let last = first.len();
    let score = |token: &Value| token.as_str().and_then(|token| first.get(token)).copied().unwrap_or(last);
    tokens.iter().map(|token| -(score(token) as f64)).collect()
}

//! SentencePiece's BPE as a `tokenizer.json`: the tokenizer of Llama 2, Mistral, Phi 3 and Gemma.
//!
//! Spaces are letters, `▁`, and a text is not cut: of all neighbours that a token can be made of, those of the best scored token are
//! put together first. A `tokenizer.json` has a list of pairs in the place of scores, which is made here of every way to cut a token
//! in two tokens, the best scored first, as `transformers` makes it. What has no token is its bytes.

use super::tokenizer::{Tokens, post_processor};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// A space, as tokens have it.
pub(super) const SPACE: &str = "\u{2581}";

/// Longest token that is looked for in a text, in bytes: published ones have some dozens, and every cut of a token is tried.
const LONGEST_BYTES: usize = 1024;

/// The `tokenizer.json` that says the same as a file's keys, of which `tokens` are known already.
///
/// # Errors
/// In words, when scores or the token for what is unknown are missing.
pub(super) fn tokenizer_json(metadata: &Map<String, Value>, tokens: &Tokens<'_>) -> Result<Value, String> {
    let key = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}"));
    let scores = key("scores").and_then(Value::as_array).ok_or("it has no list tokenizer.ggml.scores")?;
    let scores: Option<Vec<f64>> = scores.iter().map(Value::as_f64).collect();
    let scores = scores.filter(|scores| scores.len() == tokens.texts.len());
    let scores = scores.ok_or("tokenizer.ggml.scores has not one number for each token")?;
    let unknown = key("unknown_token_id").and_then(Value::as_u64).unwrap_or(0);
    let unknown = tokens.texts.get(unknown as usize).ok_or("tokenizer.ggml.unknown_token_id is no token")?;
    let prefix = key("add_space_prefix").and_then(Value::as_bool).unwrap_or(true);
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    let normalizers = match prefix {
        true => vec![json!({ "type": "Prepend", "prepend": SPACE }), spaces],
        false => vec![spaces],
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(json!({
        "version": "1.0",
        "added_tokens": tokens.added(),
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "post_processor": post_processor(metadata, tokens, Some(1), true)?,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": tokens.vocabulary(), "merges": merges(tokens, &scores),
        },
    }))
}

/// Pairs of tokens that make a third, those of the best score first.
fn merges<'t>(tokens: &Tokens<'t>, scores: &[f64]) -> Vec<[&'t str; 2]> {
    let pieces = || tokens.texts.iter().zip(scores).enumerate().filter(|(id, _)| tokens.is_text(*id)).map(|(_, of)| of);
    let known: HashSet<&str> = pieces().map(|(piece, _)| *piece).collect();
    let mut pairs: Vec<(f64, [&str; 2])> = Vec::new();
    for (piece, score) in pieces().filter(|(piece, _)| piece.len() <= LONGEST_BYTES) {
        let cuts = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
        let found = cuts.filter(|(left, right)| known.contains(left) && known.contains(right));
        pairs.extend(found.map(|(left, right)| (*score, [left, right])));
    }
    pairs.sort_by(|(a, [left, _]), (b, [other, _])| b.total_cmp(a).then(other.len().cmp(&left.len())));
    pairs.into_iter().map(|(_, pair)| pair).collect()
}

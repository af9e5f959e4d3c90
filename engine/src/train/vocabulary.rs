//! The tokenizer of a model that is trained: its own, where it comes from a folder or file. A new model's is a byte-level BPE,
//! so that every text has tokens and none is unknown, of one of two kinds.
//!
//! *Of the generated texts* every word is one token, with the space before it, and numbers go in pairs of digits: there are no
//! merges, and `ignore_merges` takes a whole piece of the pattern where the vocabulary holds it, as Llama 3's tokenizer does.
//! *Learned from a text* its tokens are the pairs that are merged most often (Sennrich et al. 2016, arXiv 1508.07909), within
//! GPT-2's pieces of a text, with each digit apart as in SmolLM2.

use crate::model::{Config, ModelError, Text};
use crate::task::{Tokens, text};
use serde_json::{Value, json};
use std::path::Path;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// What begins every text.
pub const BEGIN: &str = "<|begin|>";
/// What ends one.
pub const END: &str = "<|end|>";

/// Words with the space before them, pairs of digits, single signs, white space.
const PATTERN: &str = r" ?[A-Za-z]+| ?[0-9]{1,2}| ?[^\sA-Za-z0-9]|\s";
/// GPT-2's, with each digit apart.
const LEARNED: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Tokens of a learned vocabulary: at least both ends of a text and all bytes.
pub(super) const LEARNED_TOKENS: std::ops::RangeInclusive<usize> = 258..=65_536;

/// The tokenizer, and what it puts at the ends of a text.
pub struct Vocabulary {
    text: Text,
    begin: Vec<u32>,
    end: Option<u32>,
}

impl Vocabulary {
    /// The token [`BEGIN`].
    pub(super) const BEGIN: u32 = 0;
    /// The token [`END`].
    pub(super) const END: u32 = 1;

    /// The tokenizer of a model's folder or GGUF file.
    ///
    /// # Errors
    /// When there is none that fits the model, or it has no tokens for words.
    pub fn of_folder(folder: &Path, config: &Config) -> Result<Self, ModelError> {
        let text = Text::open(folder)?;
        let path = if folder.is_dir() { folder.join("tokenizer.json") } else { folder.into() };
        let wrong = |reason| ModelError::Config { path: path.clone(), reason };
        if text.last() as usize >= config.vocab {
            let last = text.last();
            return Err(wrong(format!("its largest token is {last}; the model has tokens 0 to {}", config.vocab - 1)));
        }
        if text.piece(" The code of amber falcon is 1234567.")?.is_empty() {
            return Err(wrong("it has no tokens for words and numbers".into()));
        }
        let known = |token: &&u32| (**token as usize) < config.vocab;
        let (begin, end) = (text.beginning()?, config.eos.iter().find(known).copied());
        Ok(Vocabulary { text, begin, end })
    }

    /// What a `tokenizer.json` that is written here says.
    ///
    /// # Panics
    /// When it cannot be read back.
    pub(super) fn of_json(json: &str) -> Self {
        let text = Text::parse("tokenizer.json".into(), json).expect("the tokenizer that is written here can be read");
        Vocabulary { text, begin: vec![Self::BEGIN], end: Some(Self::END) }
    }

    /// The vocabulary of the words of [`text::words`].
    #[cfg(test)]
    pub(super) fn of_generated_text() -> Self {
        Self::of_json(&Self::json_of_generated_text())
    }

    /// `tokenizer.json` with the words of [`text::words`].
    pub(super) fn json_of_generated_text() -> String {
        let mut entries: Vec<String> = vec![BEGIN.into(), END.into()];
        entries.extend((0..=255).map(|byte| letter(byte).to_string()));
        let space = letter(b' ');
        entries.extend((0..10).map(|digit| format!("{space}{digit}")));
        entries.extend((0..100).map(|pair| format!("{space}{pair:02}")));
        entries.extend((0..100).map(|pair| format!("{pair:02}")));
        entries.extend(text::words().map(|word| format!("{space}{word}")));
        let vocab: serde_json::Map<String, Value> =
            entries.iter().enumerate().map(|(id, entry)| (entry.clone(), json!(id))).collect();
        format!("{:#}\n", file(PATTERN, &vocab, true))
    }

    /// `tokenizer.json` with `count` tokens learned from documents.
    ///
    /// # Panics
    /// When `count` is not within [`LEARNED_TOKENS`].
    pub(super) fn json_of_text(documents: &[&str], count: usize) -> String {
        assert!(LEARNED_TOKENS.contains(&count), "{count} tokens");
        let special = [BEGIN, END].map(|token| AddedToken::from(token, true));
        let trainer = BpeTrainer::builder()
            .vocab_size(count)
            .show_progress(false)
            .special_tokens(special.to_vec())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let none = serde_json::Map::from_iter([(BEGIN.into(), json!(0)), (END.into(), json!(1))]);
        let mut tokenizer: Tokenizer =
            file(LEARNED, &none, false).to_string().parse().expect("a tokenizer without merges can be read");
        tokenizer
            .train(&mut TrainerWrapper::from(trainer), documents.iter())
            .expect("byte-level pieces of a text can be counted");
        format!("{}\n", tokenizer.to_string(true).expect("a tokenizer is plain data"))
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.text.last() as usize + 1
    }

    /// Whether there are no tokens, which never happens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens that begin every text.
    pub fn begin(&self) -> &[u32] {
        &self.begin
    }

    /// The token that ends one.
    pub fn end(&self) -> Option<u32> {
        self.end
    }
}

impl Tokens for Vocabulary {
    fn encode(&self, text: &str) -> Vec<u32> {
        // What has no tokens comes back as nothing, and a task's length says what was lost.
        self.text.piece(text).unwrap_or_default()
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.text.text(tokens).unwrap_or_default()
    }
}

/// A `tokenizer.json` without merges.
fn file(pattern: &str, vocab: &serde_json::Map<String, Value>, ignore_merges: bool) -> Value {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(Vocabulary::BEGIN, BEGIN), special(Vocabulary::END, END)],
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BEGIN: {"id": BEGIN, "ids": [Vocabulary::BEGIN], "tokens": [BEGIN]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocab, "merges": []},
    })
}

/// The letter that stands for a byte in a byte-level vocabulary (GPT-2): itself where it can be printed, else one of
/// those from U+0100 on, in order.
fn letter(byte: u8) -> char {
    let printed = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if printed(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|byte| !printed(*byte)).count() as u32;
    char::from_u32(0x100 + before).expect("68 letters from U+0100 on are letters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_and_pair_of_digits_is_one_token_and_every_text_comes_back() {
        let vocabulary = Vocabulary::of_generated_text();
        assert!(vocabulary.len() <= 1024, "{} tokens", vocabulary.len());
        for word in text::words() {
            assert_eq!(vocabulary.encode(&format!(" {word}")).len(), 1, "{word}");
        }
        assert_eq!(vocabulary.encode(" The code of amber falcon is 1234567.").len(), 6 + 4 + 1);
        for text in
            [" The code of amber falcon is 1234567.", "a\tb\n c", "Größe 東京 🦊", "\"03fa-77c1\": {x};", "  two"]
        {
            let tokens = vocabulary.encode(text);
            assert_eq!(vocabulary.decode(&tokens), text);
            assert!(tokens.iter().all(|&token| token > 1 && (token as usize) < vocabulary.len()));
        }
    }

    #[test]
    fn pieces_that_begin_with_a_space_have_the_tokens_of_the_whole() {
        let vocabulary = Vocabulary::of_generated_text();
        let pieces = [" The code of amber falcon is", " 1234567.", " What is it?", " 98;", " A bear saw the sea."];
        let apart: Vec<u32> = pieces.iter().flat_map(|piece| vocabulary.encode(piece)).collect();
        assert_eq!(apart, vocabulary.encode(&pieces.concat()));
    }

    #[test]
    fn learned_tokens_are_the_frequent_pairs_with_digits_apart_and_every_text_comes_back() {
        let document = "The cache holds keys and values.\nThe cache holds 12 keys.".repeat(20);
        let json = Vocabulary::json_of_text(&[&document, "Größe"], 320);
        assert_eq!(json, Vocabulary::json_of_text(&[&document, "Größe"], 320), "the same text, the same tokens");
        let vocabulary = Vocabulary::of_json(&json);
        assert!(vocabulary.len() > 280 && vocabulary.len() <= 320, "{}", vocabulary.len());
        assert_eq!(vocabulary.encode(" cache").len(), 1);
        assert_eq!(vocabulary.encode(" 1234").len(), 4);
        assert_eq!(vocabulary.begin(), [0]);
        for text in [" The code of amber falcon is 1234567.", "a\tb\n\n c", "Größe 東京 🦊"] {
            assert_eq!(vocabulary.decode(&vocabulary.encode(text)), text);
        }
    }
}

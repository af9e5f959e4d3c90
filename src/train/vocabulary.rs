//! The tokenizer of a model that is trained: its own, where it comes from a folder or file. A new model's has every word of the
//! generated texts as one token, with the space before it; numbers go in pairs of digits; all else falls to bytes, so that
//! every text has tokens and none is unknown.
//!
//! As a `tokenizer.json` this is a byte-level BPE without merges whose `ignore_merges` takes a whole piece of the
//! pattern where the vocabulary holds it, as Llama 3's tokenizer does.

use crate::model::{Config, ModelError, Text};
use crate::task::{Tokens, text};
use serde_json::{Value, json};
use std::path::Path;

/// What begins every text.
pub const BEGIN: &str = "<|begin|>";
/// What ends one.
pub const END: &str = "<|end|>";

/// Words with the space before them, pairs of digits, single signs, white space.
const PATTERN: &str = r" ?[A-Za-z]+| ?[0-9]{1,2}| ?[^\sA-Za-z0-9]|\s";

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

    /// The vocabulary of the words of [`text::words`].
    ///
    /// # Panics
    /// When the file that is made here cannot be read back.
    pub fn of_generated_text() -> Self {
        let text = Text::parse("tokenizer.json".into(), &Self::json_of_generated_text());
        let text = text.expect("the tokenizer that is written here can be read");
        Vocabulary { text, begin: vec![Self::BEGIN], end: Some(Self::END) }
    }

    /// Its `tokenizer.json`.
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
        let special = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        };
        let file = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [special(Self::BEGIN, BEGIN), special(Self::END, END)],
            "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                         {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {BEGIN: {"id": BEGIN, "ids": [0], "tokens": [BEGIN]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
                "vocab": vocab, "merges": []},
        });
        format!("{file:#}\n")
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
}

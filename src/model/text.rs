//! Text to tokens and back, by the folder's `tokenizer.json`.

use super::ModelError;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// A tokenizer.
pub struct Text {
    path: PathBuf,
    tokenizer: Tokenizer,
}

impl Text {
    /// Reads the `tokenizer.json` of a folder.
    ///
    /// # Errors
    /// When it is not there or not understood.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("tokenizer.json");
        let wrong = |reason| ModelError::Config { path: path.clone(), reason };
        if !path.exists() {
            return Err(wrong("there is no such file; text needs a tokenizer, `logits` takes tokens".into()));
        }
        let tokenizer = Tokenizer::from_file(&path).map_err(|error| wrong(error.to_string()))?;
        Ok(Text { path, tokenizer })
    }

    /// Tokens of a text, with those that the tokenizer puts before and behind every text.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it, or there is no token at all.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let wrong = |reason| ModelError::Config { path: self.path.clone(), reason };
        let encoding = self.tokenizer.encode(text, true).map_err(|error| wrong(error.to_string()))?;
        match encoding.get_ids() {
            [] => Err(wrong("the text has no tokens; give at least one".into())),
            tokens => Ok(tokens.to_vec()),
        }
    }

    /// The text of tokens, without those that only mark its ends.
    ///
    /// # Errors
    /// When the tokenizer does not know one.
    pub fn text(&self, tokens: &[u32]) -> Result<String, ModelError> {
        let wrong =
            |error: tokenizers::Error| ModelError::Config { path: self.path.clone(), reason: error.to_string() };
        self.tokenizer.decode(tokens, true).map_err(wrong)
    }
}

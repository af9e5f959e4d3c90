//! Text to tokens and back, by the folder's `tokenizer.json`.

use super::ModelError;
use super::adapter::base;
use super::gguf::{Gguf, is_gguf};
use serde_json::{Value, json};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::Once;
use tokenizers::Tokenizer;

/// A tokenizer.
pub struct Text {
    path: PathBuf,
    tokenizer: Tokenizer,
    /// The same, without the space that it puts before a text; `None` where it puts none.
    inside: Option<Tokenizer>,
}

impl Text {
    /// Reads the `tokenizer.json` of a folder, or the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// When it is not there or not understood.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let folder = &*base(folder)?;
        if is_gguf(folder) {
            return Self::parse(folder.into(), &Gguf::open(folder)?.tokenizer_json()?);
        }
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            let reason =
                "there is no such file; text needs a tokenizer, `logits` takes tokens, and a GGUF file is named itself"
                    .into();
            return Err(ModelError::Config { path, reason });
        }
        let json = std::fs::read_to_string(&path)
            .map_err(|error| ModelError::Config { path: path.clone(), reason: error.to_string() })?;
        Self::parse(path, &json)
    }

    /// Reads the content of a `tokenizer.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// When it is not understood.
    pub fn parse(path: PathBuf, json: &str) -> Result<Self, ModelError> {
        let read = |json: &str| {
            guarded(&path, || {
                let mut tokenizer: Tokenizer = json.parse()?;
                // How a batch was cut and padded when the file was saved; a text is taken whole here, as `transformers`
                // takes it where a caller asks for neither.
                tokenizer.with_padding(None).with_truncation(None)?;
                Ok(tokenizer)
            })
        };
        let (tokenizer, inside) = (read(json)?, without_space_before(json).map(|json| read(&json)).transpose()?);
        Ok(Text { path, tokenizer, inside })
    }

    /// Tokens of a text, with those that the tokenizer puts before and behind every text.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it, or none for anything in it, or there is no token at all.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = guarded(&self.path, || self.tokenizer.encode(text, true))?;
        let wrong = |reason: &str| Err(ModelError::Config { path: self.path.clone(), reason: reason.into() });
        let is_its_own = encoding.get_special_tokens_mask().contains(&0);
        match encoding.get_ids() {
            [] => wrong("the text has no tokens; give at least one"),
            // Only those that stand before and behind every text, as if it were empty.
            _ if !text.is_empty() && !is_its_own => wrong("the vocabulary has no token for anything in the text"),
            tokens => Ok(tokens.to_vec()),
        }
    }

    /// Tokens of a piece of text, with nothing put before or behind it: no space either, which SentencePiece's tokenizers put
    /// before every text, as if each were the first of a text of its own.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it.
    pub fn piece(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let tokenizer = self.inside.as_ref().unwrap_or(&self.tokenizer);
        Ok(guarded(&self.path, || tokenizer.encode_fast(text, false))?.get_ids().to_vec())
    }

    /// Tokens of a text in which all that marks its beginning is written out, as chat templates write it.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it.
    pub fn rendered(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        Ok(guarded(&self.path, || self.tokenizer.encode_fast(text, false))?.get_ids().to_vec())
    }

    /// Tokens that the tokenizer puts before every text.
    ///
    /// # Errors
    /// When the tokenizer has no token for the letter that this is tried with.
    pub fn beginning(&self) -> Result<Vec<u32>, ModelError> {
        let bare = self.rendered("a")?;
        let mut whole = guarded(&self.path, || self.tokenizer.encode_fast("a", true))?.get_ids().to_vec();
        let at = (0..=whole.len() - bare.len().min(whole.len())).find(|&at| whole[at..].starts_with(&bare));
        whole.truncate(at.unwrap_or(0));
        Ok(whole)
    }

    /// The largest token.
    pub fn last(&self) -> u32 {
        self.tokenizer.get_vocab(true).into_values().max().unwrap_or(0)
    }

    /// The text of tokens, without those that only mark its ends.
    ///
    /// # Errors
    /// When the tokenizer does not know one.
    pub fn text(&self, tokens: &[u32]) -> Result<String, ModelError> {
        guarded(&self.path, || self.tokenizer.decode(tokens, true))
    }
}

/// A `tokenizer.json` that says the same but for the space that it puts before a text; `None` where it puts none.
fn without_space_before(json: &str) -> Option<String> {
    /// Takes it out of a normalizer or pre-tokenizer and the parts of it; whether there was one.
    fn strip(part: &mut Value) -> bool {
        let mut found = false;
        if part["type"] == "Prepend" {
            // What does nothing in its place.
            (*part, found) = (json!({ "type": "Sequence", "normalizers": [] }), true);
        }
        if part["prepend_scheme"].as_str().is_some_and(|scheme| scheme != "never") {
            (part["prepend_scheme"], found) = ("never".into(), true);
        }
        if part["add_prefix_space"] == true {
            (part["add_prefix_space"], found) = (false.into(), true);
        }
        for list in ["normalizers", "pretokenizers"] {
            for part in part.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                found |= strip(part);
            }
        }
        found
    }
    let mut json: Value = serde_json::from_str(json).ok()?;
    let parts = ["normalizer", "pre_tokenizer"].map(|part| json.get_mut(part).is_some_and(strip));
    parts.contains(&true).then(|| json.to_string())
}

thread_local! {
    /// Whether this thread is inside the library.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls the library. Where a part of `tokenizer.json` is of the right kind but makes no sense, `tokenizers` panics
/// instead of returning an error ("expected ident", an `unwrap` of a regular expression): a mistake in a user's file, which
/// is told as any other. There is no way to ask it beforehand, so the panic is caught here, in the one place that calls it,
/// and its message kept from stderr for this thread only. Nothing that a panic left half done is used again: opening
/// gives no tokenizer then, and encoding changes none.
fn guarded<T>(path: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, ModelError> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                usual(panic);
            }
        }));
    });
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(false);
    let reason = match result {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            format!("it makes no sense to the tokenizers library: {}", words.replace('\n', " "))
        }
    };
    Err(ModelError::Config { path: path.into(), reason })
}

//! Sequences of tokens from a JSON file, as `logits` takes them: `{"tokens": [[1, 2, ...], ...]}`.

use super::ModelError;
use serde_json::Value;
use std::path::Path;

/// The sequences of a file, each of at least one token; there is at least one.
///
/// # Errors
/// When the file cannot be read or is not of this form.
pub fn sequences(path: &Path) -> Result<Vec<Vec<u32>>, ModelError> {
    let said = |reason: String| ModelError::Config { path: path.into(), reason };
    let wrong = |reason: String| said(format!("{reason}; {{\"tokens\": [[1, 2, ...], ...]}} is needed"));
    let text = std::fs::read_to_string(path).map_err(|error| said(format!("it cannot be read: {error}")))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(format!("it is not JSON: {error}")))?;
    let all = json.get("tokens").and_then(Value::as_array).ok_or_else(|| wrong("it has no list 'tokens'".into()))?;
    if all.is_empty() {
        return Err(wrong("'tokens' is empty".into()));
    }
    let sequence = |(index, tokens): (usize, &Value)| {
        let tokens = tokens.as_array().filter(|tokens| !tokens.is_empty());
        let tokens = tokens.ok_or_else(|| wrong(format!("sequence {index} is no list of at least one token")))?;
        let token = |(place, token): (usize, &Value)| {
            let number = token.as_u64().and_then(|token| u32::try_from(token).ok());
            number.ok_or_else(|| wrong(format!("token {place} of sequence {index} is {token}, no whole number")))
        };
        tokens.iter().enumerate().map(token).collect()
    };
    all.iter().enumerate().map(sequence).collect()
}

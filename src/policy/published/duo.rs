//! Gates of heads as DuoAttention's authors publish them (`attn_patterns/` of mit-han-lab/duo-attention, MIT): a table of text, a row
//! for each layer and a column for each KV head.

use super::wrong;
use crate::policy::{Learned, PolicyError};
use std::path::Path;

/// The table's name in its folder.
const TABLE: &str = "full_attention_heads.tsv";

/// Reads the gates of a folder, `[layers, Hkv]`.
///
/// # Errors
/// When there is no such table, or it is none of numbers.
pub(in crate::policy) fn read(path: &Path) -> Result<Learned, PolicyError> {
    let text = std::fs::read_to_string(path.join(TABLE)).map_err(|error| wrong(path, &format!("{TABLE}: {error}")))?;
    let mut values = Vec::new();
    let rows = || text.lines().filter(|line| !line.trim().is_empty());
    let (layers, heads) = (rows().count(), rows().next().map_or(0, |row| row.split_whitespace().count()));
    for (layer, row) in rows().enumerate() {
        let before = values.len();
        for word in row.split_whitespace() {
            let number = word.parse().ok().filter(|gate: &f32| gate.is_finite());
            let is_none = || wrong(path, &format!("{TABLE}, row {}: '{word}' is no number", layer + 1));
            values.push(number.ok_or_else(is_none)?);
        }
        if values.len() - before != heads {
            let reason = format!("{TABLE}, row {} has {} gates; {heads} are needed", layer + 1, values.len() - before);
            return Err(wrong(path, &reason));
        }
    }
    match values.is_empty() {
        true => Err(wrong(path, &format!("{TABLE} is empty"))),
        false => Ok(Learned::new(&[layers, heads], values)),
    }
}

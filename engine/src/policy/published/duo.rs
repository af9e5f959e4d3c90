//! Gates of heads as DuoAttention's authors publish them (`attn_patterns/` of mit-han-lab/duo-attention, MIT): a table of text, a row
//! for each layer and a column for each KV head.

use super::wrong;
use crate::policy::allocation::Near;
use crate::policy::{Learned, PolicyError};
use serde_json::Value;
use std::path::Path;

/// The table's name in its folder.
const TABLE: &str = "full_attention_heads.tsv";

/// How the gates were trained, beside the table where it is there.
const CONFIG: &str = "config.json";

/// Reads the gates of a folder, `[layers, Hkv]`, and what streaming heads read, `usual` where the folder does not say.
///
/// # Errors
/// When there is no such table, it is none of numbers, or a count beside it is none.
pub(in crate::policy) fn read(path: &Path, usual: Near) -> Result<(Learned, Near), PolicyError> {
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
        false => Ok((Learned::new(&[layers, heads], values), near(path, usual)?)),
    }
}

/// What streaming heads read, as `config.json` says.
fn near(path: &Path, usual: Near) -> Result<Near, PolicyError> {
    let config = path.join(CONFIG);
    if !config.exists() {
        return Ok(usual);
    }
    let text = std::fs::read_to_string(&config).map_err(|error| wrong(path, &format!("{CONFIG}: {error}")))?;
    let config: Value = serde_json::from_str(&text).map_err(|error| wrong(path, &format!("{CONFIG}: {error}")))?;
    let count = |key: &str, least: u64, usual: usize| match &config[key] {
        Value::Null => Ok(usual),
        value => {
            value.as_u64().filter(|count| (least..1 << 20).contains(count)).map(|count| count as usize).ok_or_else(
                || wrong(path, &format!("{CONFIG}: {key} is {value}; a count of at least {least} is needed")),
            )
        }
    };
    Ok(Near { sink: count("sink_size", 0, usual.sink)?, recent: count("recent_size", 1, usual.recent)? })
}

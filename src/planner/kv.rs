//! Bytes of a token's keys and values: the formats of this project's caches, and those that other engines have.

use super::PlanError;
use super::architecture::KvGroup;
use crate::format::{FormatError, KvFormat};
use std::fmt;
use std::str::FromStr;

/// How a cache keeps keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvStore {
    /// A format that kvsieve has: bytes of a row, scales included.
    Own(KvFormat),
    /// One that others have: name, bits of an element.
    Other(&'static str, f64),
}

/// Formats of other engines: name, bits of an element with its scales.
pub const OTHERS: [(&str, f64); 1] = [
    ("fp8", 8.0), // vLLM, TensorRT-LLM: a scale per tensor
];

impl KvStore {
    /// Refuses heads that the format cannot keep.
    ///
    /// # Errors
    /// When a group's keys or values have a width that it has no whole blocks for.
    pub fn check(self, groups: &[KvGroup]) -> Result<(), FormatError> {
        let KvStore::Own(format) = self else { return Ok(()) };
        if let Some(format) = [format.k, format.v].into_iter().find(|format| format.is_of_weights()) {
            return Err(FormatError::OfWeights { format: format.to_string() });
        }
        if format.v.group_tokens().is_some() {
            return Err(FormatError::OfKeys { format: format.v.to_string() });
        }
        groups.iter().try_for_each(|group| {
            format.k.check("the head dim", group.k_dim)?;
            format.v.check("the head dim", group.v_dim)
        })
    }

    /// Bytes of a token in the layers of a group.
    pub fn token_bytes(self, group: &KvGroup) -> u64 {
        let rows = (group.layers * group.heads) as u64;
        let row = match self {
            KvStore::Own(format) => {
                let v = if group.v_dim == 0 { 0 } else { format.v.row_bytes(group.v_dim) };
                (format.k.row_bytes(group.k_dim) + v) as u64
            }
            KvStore::Other(_, bits) => (((group.k_dim + group.v_dim) as f64 * bits) / 8.0).ceil() as u64,
        };
        rows * row
    }
}

impl fmt::Display for KvStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvStore::Own(format) => format.fmt(formatter),
            KvStore::Other(name, _) => formatter.pad(name),
        }
    }
}

impl FromStr for KvStore {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let other = OTHERS.iter().find(|(name, _)| *name == text);
        match (text.parse::<KvFormat>(), other) {
            (Ok(format), _) if format.keeps_full() => Err(PlanError::Value {
                what: "format of keys and values",
                value: format!("'{text}'"),
                expected: "it must keep every token alike: plans do not count tokens in full".into(),
            }),
            (Ok(format), _) => Ok(KvStore::Own(format)),
            (Err(_), Some(&(name, bits))) => Ok(KvStore::Other(name, bits)),
            (Err(error), None) => {
                let others = OTHERS.map(|(name, _)| name).join(", ");
                let expected = format!("{error}; of other engines {others} are known");
                Err(PlanError::Value { what: "format of keys and values", value: format!("'{text}'"), expected })
            }
        }
    }
}

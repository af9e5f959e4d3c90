//! The formats of a cache's keys and of its values: `int8`, or `k=int8,v=bf16`.

use super::{FormatError, RowFormat};
use crate::named::NamedError;
use crate::tensor::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a cache keeps keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct KvFormat {
    /// Keys.
    pub k: RowFormat,
    /// Values.
    pub v: RowFormat,
}

impl KvFormat {
    /// Keys and values in one format.
    pub fn both(format: RowFormat) -> Self {
        KvFormat { k: format, v: format }
    }

    /// Keys and values as plain elements.
    pub fn plain(dtype: DType) -> Self {
        KvFormat::both(RowFormat::plain(dtype))
    }

    /// The type of the elements, if keys and values are nothing but elements of one type.
    pub fn dtype(self) -> Option<DType> {
        self.k.dtype().filter(|_| self.k == self.v)
    }

    /// The type of the elements of a cache that kernels of a GPU read.
    ///
    /// # Errors
    /// In words, when they do not read this format.
    pub fn on_gpu(self) -> Result<DType, String> {
        self.dtype()
            .ok_or_else(|| format!("no kernel for GPUs reads a cache in {self}; use f32, bf16 or f16, or --device cpu"))
    }

    /// The format of keys (`part` 0) or of values (`part` 1).
    pub(crate) fn of(&self, part: usize) -> &RowFormat {
        if part == 0 { &self.k } else { &self.v }
    }

    /// Refuses formats of weights, and heads that a format cannot keep.
    ///
    /// # Errors
    /// As [`RowFormat::check`].
    pub fn check(self, head_dim: usize) -> Result<(), FormatError> {
        [self.k, self.v].into_iter().try_for_each(|format| match format.is_of_weights() {
            true => Err(FormatError::OfWeights { format: format.to_string() }),
            false => format.check("the head dim", head_dim),
        })
    }

    /// Bytes of one token of one KV head: its key and its value, `D` elements each.
    pub fn token_bytes(self, head_dim: usize) -> u64 {
        (self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim)) as u64
    }
}

impl From<DType> for KvFormat {
    fn from(dtype: DType) -> Self {
        KvFormat::plain(dtype)
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.k == self.v {
            true => formatter.pad(&self.k.to_string()),
            false => formatter.pad(&format!("k={},v={}", self.k, self.v)),
        }
    }
}

impl FromStr for KvFormat {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let Some(rest) = text.strip_prefix("k=") else { return Ok(KvFormat::both(text.parse()?)) };
        // Parameters of the keys' format have commas of their own, but none is called `v`.
        let (k, v) = rest.split_once(",v=").ok_or_else(|| NamedError::Value {
            name: "format of keys and values".into(),
            key: "v".into(),
            value: text.into(),
            expected: "given beside k, as k=int8,v=bf16".into(),
        })?;
        Ok(KvFormat { k: k.parse()?, v: v.parse()? })
    }
}

impl From<KvFormat> for String {
    fn from(format: KvFormat) -> String {
        format.to_string()
    }
}

impl TryFrom<String> for KvFormat {
    type Error = NamedError;

    fn try_from(text: String) -> Result<Self, NamedError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_and_written() {
        for text in ["f32", "bf16", "f16", "int8", "k=int8,v=bf16", "k=f32,v=int8"] {
            assert_eq!(text.parse::<KvFormat>().unwrap().to_string(), text);
        }
        assert_eq!("k=int8,v=int8".parse::<KvFormat>().unwrap().to_string(), "int8");
        let cases = [
            ("int9", "unknown format 'int9'; did you mean 'int8'"),
            ("int8:group=3", "'int8' has no parameter 'group'; it has none"),
            ("k=int8", "v is 'k=int8'; it must be given beside k, as k=int8,v=bf16"),
            ("k=int8,v=", "is not of the form NAME"),
        ];
        for (text, expected) in cases {
            let error = text.parse::<KvFormat>().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_token_takes_its_elements_and_its_scales() {
        let bytes = |text: &str, width| text.parse::<KvFormat>().unwrap().token_bytes(width);
        assert_eq!(bytes("bf16", 128), 512);
        assert_eq!(bytes("int8", 128), 264);
        assert_eq!(bytes("k=int8,v=f32", 64), 68 + 256);
        // Whole words.
        assert_eq!(bytes("int8", 33), 80);
    }

    #[test]
    fn super_blocks_are_for_weights() {
        let check =
            |text: &str, head_dim| text.parse::<KvFormat>().unwrap().check(head_dim).map_err(|error| error.to_string());
        assert_eq!(check("k=q8_0,v=q4_0", 256), Ok(()));
        let error = check("k=q8_0,v=q4_k", 256).unwrap_err();
        assert_eq!(
            error,
            "q4_k is a format of weights; for keys and values there are int8, int4 and others, see kvsieve list formats"
        );
    }
}

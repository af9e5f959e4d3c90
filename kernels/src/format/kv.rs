//! The formats of a cache's keys and of its values: `int8`, `k=int8,v=bf16`, `kivi:bits=4`; and the tokens that stay in full beside
//! them: `q4_0:recent=128,first=4`, `k=int8,v=q4_0:recent=128`.

use super::{FORMATS, FormatError, RowFormat};
use crate::named::{Named, NamedError, Parameter};
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
    /// Tokens that are kept as they came.
    pub full: Full,
}

/// Tokens of a list that stay in the type of the pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// The first of a sequence.
    pub first: usize,
    /// The newest, at least: a token is coded when it leaves them, and where keys share scales when a whole group of tokens has.
    pub recent: usize,
    /// The type of the pass.
    pub dtype: DType,
}

impl Full {
    /// No token.
    pub const NONE: Self = Full { first: 0, recent: 0, dtype: DType::F32 };
}

/// Parameters that every format of fewer bits has, for keys and values together.
pub const FULL_PARAMETERS: &[Parameter] = &[
    Parameter { name: "recent", default: "0", about: "newest tokens that stay in the type of the pass" },
    Parameter { name: "first", default: "0", about: "first tokens that do" },
];

/// A pair of formats as it is listed.
pub struct PairEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line for `kvsieve list formats`.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
}

/// The pair of KIVI (arXiv 2402.02750): keys by channel, values by token, both with zero points.
pub const KIVI: PairEntry = PairEntry {
    name: "kivi",
    about: "KIVI: keys with scales for each channel of a group of tokens, values for each group of a token's elements",
    parameters: &[
        Parameter { name: "bits", default: "2", about: "bits of a code: 2 or 4" },
        Parameter {
            name: "group",
            default: "32",
            about: "tokens, and elements, that share a scale: 32, 64, 128 or 256",
        },
        Parameter { name: "recent", default: "128", about: "newest tokens that stay in the type of the pass" },
        FULL_PARAMETERS[1],
    ],
};
const KIVI_RECENT: usize = 128;

impl KvFormat {
    /// Keys and values in one format.
    pub fn both(format: RowFormat) -> Self {
        KvFormat { k: format, v: format, full: Full::NONE }
    }

    /// Keys and values as plain elements.
    pub fn plain(dtype: DType) -> Self {
        KvFormat::both(RowFormat::plain(dtype))
    }

    /// The same with the type in which a pass hands it the tokens that stay in full.
    pub fn in_pass(self, dtype: DType) -> Self {
        match self.keeps_full() {
            true => KvFormat { full: Full { dtype, ..self.full }, ..self },
            false => self,
        }
    }

    /// Whether tokens are kept as they came, be it until there is a whole group of them.
    pub fn keeps_full(self) -> bool {
        self.full.first > 0 || self.full.recent > 0 || self.k.group_tokens().is_some()
    }

    /// Whether a pass in bf16 reads keys and values as bf16: where they are that, and where they are coded, since what a token was
    /// before it was coded was no more exact in such a pass. What is kept in f32 or f16 is read as it is.
    pub fn is_read_as_bf16(self) -> bool {
        let is = |dtype: Option<DType>| dtype.is_none_or(|dtype| dtype == DType::Bf16);
        is(self.k.dtype()) && is(self.v.dtype()) && (!self.keeps_full() || self.full.dtype == DType::Bf16)
    }

    /// Tokens that are coded together.
    pub fn group_tokens(self) -> usize {
        self.k.group_tokens().unwrap_or(1)
    }

    /// The type of the elements, if keys and values are nothing but elements of one type.
    pub fn dtype(self) -> Option<DType> {
        self.k.dtype().filter(|_| self.k == self.v)
    }

    /// The format of keys (`part` 0) or of values (`part` 1).
    pub(crate) fn of(&self, part: usize) -> &RowFormat {
        if part == 0 { &self.k } else { &self.v }
    }

    /// Refuses formats of weights, heads that a format cannot keep, and formats that would code none of `tokens` tokens.
    ///
    /// # Errors
    /// As [`RowFormat::check`].
    pub fn check(self, head_dim: usize, tokens: usize) -> Result<(), FormatError> {
        for format in [self.k, self.v] {
            if format.is_of_weights() {
                return Err(FormatError::OfWeights { format: format.to_string() });
            }
            format.check("the head dim", head_dim)?;
        }
        if self.v.group_tokens().is_some() {
            return Err(FormatError::OfKeys { format: self.v.to_string() });
        }
        let least = self.full.first.saturating_add(self.full.recent).saturating_add(self.group_tokens());
        match self.keeps_full() && tokens < least {
            true => Err(FormatError::InFull { format: self.to_string(), least, tokens }),
            false => Ok(()),
        }
    }

    /// Bytes of one coded token of one KV head: its key and its value, `D` elements each, and its share of what a group has together.
    pub fn token_bytes(self, head_dim: usize) -> u64 {
        let shared = self.k.group_tokens().map_or(0, |group| (4 * head_dim).div_ceil(group));
        (self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim) + shared) as u64
    }

    /// Bytes of the keys and values of a list of `tokens` tokens, of which none was evicted.
    pub fn list_bytes(self, head_dim: usize, tokens: usize) -> u64 {
        if !self.keeps_full() {
            return tokens as u64 * self.token_bytes(head_dim);
        }
        let group = self.group_tokens();
        let first = tokens.min(self.full.first);
        let coded = (tokens - first).saturating_sub(self.full.recent) / group * group;
        let rows = (self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim)) * coded;
        let shared = self.k.group_tokens().map_or(0, |group| coded / group * 4 * head_dim);
        (rows + shared) as u64 + (tokens - coded) as u64 * KvFormat::plain(self.full.dtype).token_bytes(head_dim)
    }

    /// The pair of KIVI with these bits and groups.
    ///
    /// # Errors
    /// When a parameter is wrong.
    fn kivi(named: &Named) -> Result<Self, NamedError> {
        named.check(KIVI.parameters)?;
        let bits = named.count("bits", 2, 0)?;
        if ![2, 4].contains(&bits) {
            return Err(named.wrong("bits", "2 or 4".into()));
        }
        let group = named.text("group").unwrap_or("32");
        let wrong = |_| named.wrong("group", "32, 64, 128 or 256".into());
        let part = |text: String| text.parse::<RowFormat>().map_err(wrong);
        Ok(KvFormat {
            k: part(format!("int{bits}-channel:group={group}"))?,
            v: part(format!("int{bits}:group={group},zero=true"))?,
            full: Full {
                recent: named.count("recent", KIVI_RECENT, 1)?,
                first: named.count("first", 0, 1)?,
                ..Full::NONE
            },
        })
    }

    /// How the pair is written, if it is one of KIVI's.
    fn as_kivi(self) -> Option<String> {
        let group = self.k.group_tokens().filter(|_| self.full.recent > 0)?;
        let texts = [2, 4].map(|bits| format!("{}:bits={bits},group={group}", KIVI.name));
        texts.into_iter().find(|text| {
            let named: Named = text.parse().expect("a name and parameters");
            KvFormat::kivi(&named).is_ok_and(|pair| (pair.k, pair.v) == (self.k, self.v))
        })
    }
}

impl From<DType> for KvFormat {
    fn from(dtype: DType) -> Self {
        KvFormat::plain(dtype)
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = match self.as_kivi() {
            Some(kivi) => kivi,
            None if self.k == self.v => self.k.to_string(),
            None => format!("k={},v={}", self.k, self.v),
        };
        for (key, tokens) in [("recent", self.full.recent), ("first", self.full.first)] {
            if tokens > 0 {
                // They are written as parameters of the last format.
                let last = text.rfind("v=").map_or(&text[..], |at| &text[at..]);
                let sign = if last.contains(':') { ',' } else { ':' };
                text = format!("{text}{sign}{key}={tokens}");
            }
        }
        formatter.pad(&text)
    }
}

/// A format of rows, and the tokens that it is written to leave in full.
fn part(named: &Named) -> Result<(RowFormat, [Option<usize>; 2]), NamedError> {
    let mut rows = named.clone();
    let mut tokens = [None; 2];
    for (parameter, tokens) in FULL_PARAMETERS.iter().zip(&mut tokens) {
        if named.text(parameter.name).is_some() {
            *tokens = Some(named.count(parameter.name, 0, 1)?);
            rows = rows.without(parameter.name);
        }
    }
    let format = RowFormat::of(&rows).map_err(|error| match error {
        NamedError::Unknown { kind, name, .. } => NamedError::unknown(kind, &name, names()),
        error => error,
    })?;
    Ok((format, tokens))
}

/// Names of what keys and values can be kept in.
fn names() -> impl Iterator<Item = &'static str> {
    let of_rows = FORMATS.iter().filter(|entry| !entry.default().is_of_weights()).map(|entry| entry.name);
    of_rows.chain([KIVI.name])
}

impl FromStr for KvFormat {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let whole = |key: &str, value: &str, expected: &str| NamedError::Value {
            name: "format of keys and values".into(),
            key: key.into(),
            value: value.into(),
            expected: expected.into(),
        };
        let (k, v) = match text.strip_prefix("k=") {
            None => {
                if text.starts_with("v=") {
                    return Err(whole("v", text, "given behind k, as k=int8,v=bf16"));
                }
                let named: Named = text.parse()?;
                if named.name == KIVI.name {
                    return KvFormat::kivi(&named);
                }
                let both = part(&named)?;
                (both, both)
            }
            // Parameters of the keys' format have commas of their own, but none is called `v`.
            Some(rest) => {
                let (k, v) =
                    rest.split_once(",v=").ok_or_else(|| whole("v", text, "given beside k, as k=int8,v=bf16"))?;
                (part(&k.parse()?)?, part(&v.parse()?)?)
            }
        };
        let mut tokens = [0; 2];
        for (index, tokens) in tokens.iter_mut().enumerate() {
            let (of_keys, of_values) = (k.1[index], v.1[index]);
            let name = FULL_PARAMETERS[index].name;
            if of_keys.is_some() && of_values.is_some() && of_keys != of_values {
                return Err(whole(name, text, "the same for keys and values, whose tokens leave together"));
            }
            *tokens = of_keys.or(of_values).unwrap_or(0);
        }
        let [recent, first] = tokens;
        if recent + first > 0 && [k.0, v.0].iter().all(|format| format.dtype().is_some()) {
            let key = if recent > 0 { "recent" } else { "first" };
            return Err(whole(key, text, "left out: these formats keep every token in full"));
        }
        Ok(KvFormat { k: k.0, v: v.0, full: Full { recent, first, ..Full::NONE } })
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
        for text in [
            "f32",
            "bf16",
            "f16",
            "int8",
            "k=int8,v=bf16",
            "k=f32,v=int8",
            "q4_0:recent=128,first=4",
            "int4:group=32,recent=7",
            "k=int8,v=q4_0:first=4",
            "k=int4:group=32,v=q4_0:recent=128",
            "k=q4_0,v=int4:group=64,zero=true,recent=1",
            "kivi:bits=2,group=64,recent=32,first=4",
            "kivi:bits=4,group=32,recent=128",
            "k=int8-channel:group=32,v=int8",
            "k=int4-channel:group=32,v=int4:group=32,zero=true",
        ] {
            assert_eq!(text.parse::<KvFormat>().unwrap().to_string(), text);
        }
        assert_eq!("k=int8,v=int8".parse::<KvFormat>().unwrap().to_string(), "int8");
        let spelled = |text: &str| text.parse::<KvFormat>().unwrap().to_string();
        assert_eq!(spelled("kivi"), "kivi:bits=2,group=32,recent=128");
        assert_eq!(spelled("k=int4-channel,v=int4:zero=true,recent=64"), "kivi:bits=4,group=32,recent=64");
        assert_eq!(spelled("k=q4_0:recent=64,v=int8:recent=64"), "k=q4_0,v=int8:recent=64");
        let cases = [
            ("kivi:bits=3", "kivi: bits is '3'; it must be 2 or 4"),
            ("kivi:group=48", "kivi: group is '48'; it must be 32, 64, 128 or 256"),
            ("kivi:recent=0", "kivi: recent is '0'; it must be a whole number of at least 1"),
            ("kivi:zero=true", "'kivi' has no parameter 'zero'; it has bits, group, recent, first"),
            ("q4_0:recent=0", "q4_0: recent is '0'; it must be a whole number of at least 1"),
            ("q4_0:first=-1", "q4_0: first is '-1'; it must be a whole number of at least 1"),
            ("bf16:recent=128", "recent is 'bf16:recent=128'; it must be left out"),
            ("k=q4_0:recent=64,v=q4_0:recent=32", "it must be the same for keys and values"),
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
        // Codes of keys and of values, a scale and a minimum for each channel of 32 tokens and each 32 elements of a value.
        assert_eq!(bytes("kivi:bits=4", 64), 32 + 8 + 40);
        // Whole words.
        assert_eq!(bytes("int8", 33), 80);
    }

    #[test]
    fn super_blocks_are_for_weights() {
        let check = |text: &str, head_dim| {
            text.parse::<KvFormat>().unwrap().check(head_dim, 1024).map_err(|error| error.to_string())
        };
        assert_eq!(check("k=q8_0,v=q4_0", 256), Ok(()));
        let error = check("k=q8_0,v=q4_k", 256).unwrap_err();
        assert_eq!(
            error,
            "q4_k is a format of weights; for keys and values there are int8, int4 and others, see kvsieve list formats"
        );
    }

    #[test]
    fn keys_by_channel_are_keys_and_something_must_be_left_to_code() {
        let check =
            |text: &str, tokens| text.parse::<KvFormat>().unwrap().check(64, tokens).map_err(|error| error.to_string());
        assert_eq!(check("kivi:bits=4", 160), Ok(()));
        let error = check("kivi:bits=4", 159).unwrap_err();
        assert!(error.contains("codes no token before there are 160, and there are 159"), "{error}");
        assert!(check("q4_0:recent=64,first=4", 68).unwrap_err().contains("before there are 69, and there are 68"));
        // As many as can be asked for, and more.
        let most = 1 << 30;
        for text in
            [format!("int8:recent={most}"), format!("int8:first={most},recent=1"), format!("kivi:recent={most}")]
        {
            assert!(check(&text, 1024).unwrap_err().contains("and there are 1024"), "{text}");
        }
        let error = format!("int8:recent={}", usize::MAX).parse::<KvFormat>().unwrap_err().to_string();
        assert!(error.contains("it must be a whole number of at most 1073741824"), "{error}");
        for text in ["int4-channel", "k=f32,v=int4-channel:group=64"] {
            let error = check(text, 1024).unwrap_err();
            assert!(error.contains("is a format of keys: its scales run along a channel"), "{error}");
        }
    }
}

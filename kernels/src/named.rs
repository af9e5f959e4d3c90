//! `name:key=value,key=value`: how kernels and policies are named on the command line and in experiment files.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A name with parameters, not yet given a meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The part before the colon.
    pub name: String,
    arguments: BTreeMap<String, String>,
}

/// What a parameter is, for help texts and for checking.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Parameter {
    /// Its key.
    pub name: &'static str,
    /// Its default, as text; empty where there is not one.
    pub default: &'static str,
    /// One line.
    pub about: &'static str,
}

impl fmt::Display for Parameter {
    /// With its default, as it would be given.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parameter { name, default, .. } = self;
        if default.is_empty() { write!(formatter, "{name}") } else { write!(formatter, "{name}={default}") }
    }
}

/// A name or parameter that means nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamedError {
    /// Not of the form `name:key=value,...`.
    #[error("'{text}' is not of the form NAME or NAME:key=value,key=value")]
    Syntax {
        /// What was given.
        text: String,
    },
    /// A parameter that is given twice.
    #[error("'{text}' gives '{key}' twice")]
    Twice {
        /// What was given.
        text: String,
        /// The parameter.
        key: String,
    },
    /// No such name.
    #[error("unknown {kind} '{name}'; {hint}")]
    Unknown {
        /// What kind of thing was looked for.
        kind: &'static str,
        /// The name.
        name: String,
        /// The names that are near, else those there are.
        hint: String,
    },
    /// What only a GPU has.
    #[error("'{text}' needs --device cuda")]
    Cuda {
        /// What was given.
        text: String,
    },
    /// No such parameter.
    #[error("'{name}' has no parameter '{key}'; it has {known}")]
    Parameter {
        /// The thing named.
        name: String,
        /// The parameter.
        key: String,
        /// The parameters there are.
        known: String,
    },
    /// A parameter with a value that it cannot have.
    #[error("{name}: {key} is '{value}'; it must be {expected}")]
    Value {
        /// The thing named.
        name: String,
        /// The parameter.
        key: String,
        /// The value.
        value: String,
        /// What would be right.
        expected: String,
    },
}

impl NamedError {
    /// The error for a `kind` of thing that has no such name: with the names that were perhaps meant, else all that are
    /// `known`.
    pub fn unknown<'n>(kind: &'static str, name: &str, known: impl IntoIterator<Item = &'n str>) -> Self {
        Self::not_among(kind, name, &known.into_iter().collect::<Vec<_>>())
    }

    /// Compiled once, whatever the names come from.
    fn not_among(kind: &'static str, name: &str, known: &[&str]) -> Self {
        let hint = match &nearest(name, known)[..] {
            [] => format!("there are {}", known.join(", ")),
            near => format!("did you mean '{}'?", near.join("' or '")),
        };
        NamedError::Unknown { kind, name: name.into(), hint }
    }
}

/// The names, at most three and the nearest first, of which `name` may be another spelling: of equal letters and digits, else
/// similar by Jaro and Winkler's measure.
pub fn nearest<'n>(name: &str, known: &[&'n str]) -> Vec<&'n str> {
    const SIMILAR: f64 = 0.85;
    let plain = |name: &str| -> String {
        name.chars().filter(|c| c.is_alphanumeric()).map(|c| c.to_ascii_lowercase()).collect()
    };
    let wanted = plain(name);
    let mut near: Vec<(f64, &str)> =
        known.iter().map(|&known| (strsim::jaro_winkler(&wanted, &plain(known)), known)).collect();
    near.retain(|(similarity, _)| *similarity >= SIMILAR);
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    let is_equal = near.first().is_some_and(|(similarity, _)| *similarity == 1.0);
    near.truncate(if is_equal { 1 } else { 3 });
    near.into_iter().map(|(_, name)| name).collect()
}

impl FromStr for Named {
    type Err = NamedError;
    fn from_str(text: &str) -> Result<Self, NamedError> {
        let syntax = || NamedError::Syntax { text: text.into() };
        let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        if name.is_empty() || rest == Some("") {
            return Err(syntax());
        }
        let mut arguments = BTreeMap::new();
        for pair in rest.into_iter().flat_map(|rest| rest.split(',')) {
            let (key, value) = pair.split_once('=').ok_or_else(syntax)?;
            let (key, value) = (key.trim(), value.trim());
            if key.is_empty() || value.is_empty() {
                return Err(syntax());
            }
            if arguments.insert(key.to_string(), value.to_string()).is_some() {
                return Err(NamedError::Twice { text: text.into(), key: key.into() });
            }
        }
        Ok(Named { name: name.trim().into(), arguments })
    }
}

impl fmt::Display for Named {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.name)?;
        for (index, (key, value)) in self.arguments.iter().enumerate() {
            write!(formatter, "{}{key}={value}", if index == 0 { ':' } else { ',' })?;
        }
        Ok(())
    }
}

/// Largest count of anything: sums and products of a few of them fit in their type.
const MOST_COUNT: usize = 1 << 30;

impl Named {
    /// The entry of a registry that has this name.
    ///
    /// # Errors
    /// Names the entries that are near, else all.
    pub fn find<'e, E>(
        &self,
        kind: &'static str,
        entries: &'e [E],
        name: impl Fn(&'e E) -> &'static str,
    ) -> Result<&'e E, NamedError> {
        let entry = entries.iter().find(|entry| name(entry) == self.name);
        entry.ok_or_else(|| NamedError::unknown(kind, &self.name, entries.iter().map(&name)))
    }

    /// Refuses parameters that are not in `known`.
    ///
    /// # Errors
    /// Names the first parameter that is unknown.
    pub fn check(&self, known: &[Parameter]) -> Result<(), NamedError> {
        let stranger = self.arguments.keys().find(|key| known.iter().all(|parameter| parameter.name != **key));
        match stranger {
            None => Ok(()),
            Some(key) => Err(NamedError::Parameter {
                name: self.name.clone(),
                key: key.clone(),
                known: match known {
                    [] => "none".into(),
                    known => known.iter().map(|parameter| parameter.name).collect::<Vec<_>>().join(", "),
                },
            }),
        }
    }

    /// The text of a parameter, if it was given.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.arguments.get(key).map(String::as_str)
    }

    /// The whole number a parameter has, or `default`; `least` is the smallest that is right.
    ///
    /// # Errors
    /// When it is not a whole number or less than `least`.
    pub fn count(&self, key: &str, default: usize, least: usize) -> Result<usize, NamedError> {
        let Some(text) = self.text(key) else { return Ok(default) };
        match text.parse() {
            Ok(value) if (least..=MOST_COUNT).contains(&value) => Ok(value),
            Ok(value) if value > MOST_COUNT => Err(self.wrong(key, format!("a whole number of at most {MOST_COUNT}"))),
            _ => Err(self.wrong(key, format!("a whole number of at least {least}"))),
        }
    }

    /// As [`Named::count`], where there is a most too.
    ///
    /// # Errors
    /// When it is not a whole number in `range`.
    pub fn count_in(&self, key: &str, default: usize, range: RangeInclusive<usize>) -> Result<usize, NamedError> {
        let found = self.text(key).map_or(Some(default), |text| text.parse().ok());
        let (least, most) = (range.start(), range.end());
        found
            .filter(|value| range.contains(value))
            .ok_or_else(|| self.wrong(key, format!("a whole number from {least} to {most}")))
    }

    /// The number a parameter has, or `default`; it must lie in `range`.
    ///
    /// # Errors
    /// When it is not a number or lies elsewhere.
    pub fn number(&self, key: &str, default: f64, range: RangeInclusive<f64>) -> Result<f64, NamedError> {
        let Some(text) = self.text(key) else { return Ok(default) };
        // A NaN lies in no range.
        let value = text.parse().ok().filter(|value| range.contains(value));
        value.ok_or_else(|| self.wrong(key, format!("a number between {} and {}", range.start(), range.end())))
    }

    /// Whether a parameter is `true`, or `default`.
    ///
    /// # Errors
    /// When it is neither `true` nor `false`.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, NamedError> {
        let Some(text) = self.text(key) else { return Ok(default) };
        text.parse().map_err(|_| self.wrong(key, "true or false".into()))
    }

    /// Keys and values that were given, in order of the keys.
    pub fn arguments(&self) -> impl Iterator<Item = (&str, &str)> {
        self.arguments.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The same without one of its parameters.
    pub fn without(&self, key: &str) -> Named {
        let mut rest = self.clone();
        rest.arguments.remove(key);
        rest
    }

    /// Gives a parameter a value, in place of the one it may have.
    pub fn set(&mut self, key: &str, value: &str) {
        self.arguments.insert(key.into(), value.into());
    }

    /// The error for a parameter whose value is wrong.
    pub fn wrong(&self, key: &str, expected: String) -> NamedError {
        let value = self.text(key).unwrap_or_default().to_string();
        NamedError::Value { name: self.name.clone(), key: key.into(), value, expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_spellings_of_a_name_are_told_and_strangers_get_the_list() {
        let known = ["snapkv", "pyramidkv", "knorm", "streaming-llm"];
        for (name, hint) in [
            ("SnapKV", "did you mean 'snapkv'?"),
            ("snap-kv", "did you mean 'snapkv'?"),
            ("StreamingLLM", "did you mean 'streaming-llm'?"),
            ("pyramid", "did you mean 'pyramidkv'?"),
            ("fancy", "there are snapkv, pyramidkv, knorm, streaming-llm"),
            ("", "there are snapkv, pyramidkv, knorm, streaming-llm"),
        ] {
            let error = NamedError::unknown("policy", name, known).to_string();
            assert_eq!(error, format!("unknown policy '{name}'; {hint}"));
        }
    }

    #[test]
    fn names_with_parameters_are_read_and_printed_in_one_order() {
        let named: Named = "snapkv:window=32,kernel=7".parse().unwrap();
        assert_eq!(named.to_string(), "snapkv:kernel=7,window=32");
        assert_eq!(named.count("window", 64, 1), Ok(32));
        assert_eq!(named.count("sink", 4, 0), Ok(4));
        for bad in ["", ":", "x:", "x:a", "x:a=", "x:=1", "x:a=1,,b=2", "x:a=1,a=2"] {
            assert!(bad.parse::<Named>().is_err(), "{bad}");
        }
        let known = [Parameter { name: "window", default: "64", about: "" }];
        let error = named.check(&known).unwrap_err().to_string();
        assert_eq!(error, "'snapkv' has no parameter 'kernel'; it has window");
        let named: Named = "x:window=-1".parse().unwrap();
        assert!(named.count("window", 1, 1).unwrap_err().to_string().contains("window is '-1'"));
    }
}

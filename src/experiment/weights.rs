//! Which weights an evaluation runs a model with: those of its own files, the same in a format, or those of other files of the same
//! model, as `kvsieve quantize` writes them.

use crate::format::RowFormat;
use crate::memory::Arena;
use crate::model::{Config, Model, ModelError, fingerprint, locate, packed_bytes};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// Weights in place of those that a model's own files hold: the same in a format, or another folder's or GGUF file's of the same model,
/// which is written as its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OtherWeights {
    /// All matrices in this format.
    Format(RowFormat),
    /// A folder or GGUF file, as it was named.
    Model(String),
}

impl OtherWeights {
    /// A model that is at `folder`, with its own weights or others.
    ///
    /// # Errors
    /// When what is named cannot be opened.
    pub fn open(of: Option<&Self>, folder: &Path, arena: &Arena) -> Result<Model, ModelError> {
        match of {
            Some(OtherWeights::Model(name)) => {
                let model = Model::open(&locate(Path::new(name))?, arena)?;
                Ok(Model { weights_of: Some(fingerprint(folder)?), ..model })
            }
            Some(OtherWeights::Format(format)) => Model::open_in(folder, Some(*format), arena),
            None => Model::open(folder, arena),
        }
    }

    /// Bytes of what [`OtherWeights::open`] keeps of a model.
    ///
    /// # Errors
    /// As [`OtherWeights::open`].
    pub fn bytes(of: Option<&Self>, folder: &Path) -> Result<u64, ModelError> {
        let (folder, format) = match of {
            Some(OtherWeights::Model(name)) => (&*locate(Path::new(name))?, None),
            Some(OtherWeights::Format(format)) => (folder, Some(*format)),
            None => (folder, None),
        };
        Ok(packed_bytes(folder, &Config::read(folder)?, format)?.0)
    }

    /// Refuses weights that are not of a model of this configuration.
    ///
    /// # Errors
    /// In words.
    pub fn check(&self, config: &Config) -> Result<(), String> {
        match self {
            OtherWeights::Format(format) => config.check_weights(*format),
            OtherWeights::Model(name) => {
                let found = locate(Path::new(name)).and_then(|folder| Config::read(&folder));
                match found.map_err(|error| error.to_string())?.computes_as(config) {
                    true => Ok(()),
                    false => {
                        Err(format!("the configuration of '{name}' is another; weights must be of the same model"))
                    }
                }
            }
        }
    }

    /// By which files are known again, where these are others.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn fingerprint(&self) -> Result<Option<String>, ModelError> {
        match self {
            OtherWeights::Format(_) => Ok(None),
            OtherWeights::Model(name) => fingerprint(&locate(Path::new(name))?).map(Some),
        }
    }

    /// How a report calls them: `in q4_0`, or `of` a path.
    pub fn words(&self) -> String {
        match self {
            OtherWeights::Format(format) => format!("in {format}"),
            OtherWeights::Model(name) => format!("of {name}"),
        }
    }

    /// The same where it is clear that weights are meant: `in q4_0`, or a file without its folders.
    pub fn short(&self) -> String {
        match self {
            OtherWeights::Format(_) => self.words(),
            OtherWeights::Model(name) => name.rsplit('/').find(|part| !part.is_empty()).unwrap_or(name).to_string(),
        }
    }
}

impl fmt::Display for OtherWeights {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OtherWeights::Format(format) => format.fmt(formatter),
            OtherWeights::Model(name) => formatter.write_str(name),
        }
    }
}

impl FromStr for OtherWeights {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(format) => Ok(OtherWeights::Format(format)),
            // A name with a separator or a dot is no format.
            Err(_) if text.contains(['/', '\\', '.']) => Ok(OtherWeights::Model(text.into())),
            Err(error) => Err(format!("{error}; or write the path of weights, as ./{text}")),
        }
    }
}

impl Serialize for OtherWeights {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OtherWeights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Weights of a comparison: others, or those of the model's own files, which are written `"file"`.
#[derive(Debug, Clone)]
pub struct WeightsText(pub Option<OtherWeights>);

impl FromStr for WeightsText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "file" { Ok(WeightsText(None)) } else { text.parse().map(|weights| WeightsText(Some(weights))) }
    }
}

impl Serialize for WeightsText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            None => serializer.serialize_str("file"),
            Some(weights) => weights.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for WeightsText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

//! Learned policies as others publish them, in folders of their own, and how a policy's text names them: in place of a file.

pub(super) mod dms;
pub(super) mod duo;
pub(super) mod kvzap;

use super::assets::decoded;
use super::{Assets, PolicyError, PolicyFile};
use crate::named::{Named, Parameter};
use crate::tensor::file::TensorFile;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The parameter of policies that read gates.
pub const GATES: Parameter = Parameter {
    name: "gates",
    default: "auto",
    about: "file of trained gates, or a folder as others publish them; auto: --policy-file",
};

/// The folder that a policy's text names in place of a file.
pub fn folder(named: &Named) -> Option<&Path> {
    named.text(GATES.name).map(Path::new).filter(|path| path.is_dir())
}

/// What `build` makes of the file that a policy's text names, or else of the one that was given.
pub fn from_file<T>(
    named: &Named,
    assets: &mut Assets<'_>,
    build: impl FnOnce(&mut Assets<'_>) -> Result<T, PolicyError>,
) -> Result<T, PolicyError> {
    match named.text(GATES.name) {
        None | Some("auto") => build(assets),
        Some(path) => assets.of_file(&PolicyFile::open(Path::new(path))?, build),
    }
}

/// Most tokens that a file's numbers may say.
const MOST_TOKENS: usize = 1 << 30;

/// What the metadata of a policy's file say of its training, a whole number of at least `least`; nothing where they do not.
///
/// # Errors
/// When it is no such number.
pub fn trained_with(assets: &Assets<'_>, key: &str, least: usize) -> Result<Option<usize>, PolicyError> {
    let Some(text) = assets.metadata(key) else { return Ok(None) };
    match text.parse::<usize>().ok().filter(|count| (least..=MOST_TOKENS).contains(count)) {
        Some(count) => Ok(Some(count)),
        None => Err(PolicyError::File(format!(
            "{key} of the gates is '{text}'; it must be a whole number from {least} to {MOST_TOKENS}"
        ))),
    }
}

/// Configuration and weights of a Hugging Face folder.
struct Folder {
    path: PathBuf,
    config: Value,
    files: Vec<TensorFile>,
}

impl Folder {
    /// Reads `config.json` and maps every safetensors file.
    ///
    /// # Errors
    /// When one of them cannot be read.
    fn open(path: &Path) -> Result<Self, PolicyError> {
        let wrong = |reason: String| wrong(path, &reason);
        let text = std::fs::read_to_string(path.join("config.json"));
        let text = text.map_err(|error| wrong(format!("config.json: {error}")))?;
        let config = serde_json::from_str(&text).map_err(|error| wrong(format!("config.json is not JSON: {error}")))?;
        let entries = std::fs::read_dir(path).map_err(|error| wrong(error.to_string()))?;
        let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        paths.sort();
        let files = paths.iter().map(|path| TensorFile::open(path)).collect::<Result<_, _>>()?;
        Ok(Folder { path: path.into(), config, files })
    }

    /// A count of the configuration.
    fn count(&self, key: &str) -> Result<usize, PolicyError> {
        let value = self.config[key].as_u64().filter(|count| (1..1 << 20).contains(count));
        let wrong = || self.wrong(&format!("{key} is {}; a count is needed", self.config[key]));
        value.map(|count| count as usize).ok_or_else(wrong)
    }

    /// A number of the configuration, `default` where it has none.
    fn number(&self, key: &str, default: f64) -> Result<f32, PolicyError> {
        let value = &self.config[key];
        let number = if value.is_null() { Some(default) } else { value.as_f64() };
        let number = number.filter(|number| number.is_finite()).map(|number| number as f32);
        number.ok_or_else(|| self.wrong(&format!("{key} is {value}; a number is needed")))
    }

    /// A tensor of these extents; `None` where there is none of the name.
    fn optional(&self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>, PolicyError> {
        let Some(file) = self.files.iter().find(|file| file.has(name)) else { return Ok(None) };
        let entry = file.entries()?.into_iter().find(|entry| entry.name == name);
        let entry = entry.expect("a file has an entry for each of its names");
        if entry.shape != shape {
            return Err(self.wrong(&format!("'{name}' is {:?}; {shape:?} is needed", entry.shape)));
        }
        decoded(file, &entry).map(Some)
    }

    fn needed(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, PolicyError> {
        self.optional(name, shape)?.ok_or_else(|| self.wrong(&format!("there is no tensor '{name}'")))
    }

    fn wrong(&self, reason: &str) -> PolicyError {
        wrong(&self.path, reason)
    }
}

fn wrong(path: &Path, reason: &str) -> PolicyError {
    PolicyError::File(format!("'{}' holds no gates that can be read: {reason}", path.display()))
}

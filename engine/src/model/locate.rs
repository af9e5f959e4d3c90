//! Where models are found, and by what they are told apart.

use super::ModelError;
use super::adapter::{WEIGHTS, apart_from_base, base, is_adapter};
use super::weight_paths;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The name of the model that comes with kvsieve.
pub const BUILTIN: &str = "builtin";

/// Files up to this long are read whole for [`fingerprint`].
const WHOLE_BYTES: u64 = 64 << 20;
/// Of a longer one, so many pieces of so many bytes.
const PIECES: u64 = 64;
const PIECE_BYTES: u64 = 64 << 10;

/// The folder or GGUF file that `name` names: itself, or for `builtin` the folder `models/builtin` in the working folder,
/// or else in the nearest folder above the program.
///
/// # Errors
/// When there is no such folder or file, or `builtin` is in none of these places.
pub fn locate(name: &Path) -> Result<PathBuf, ModelError> {
    if name != Path::new(BUILTIN) {
        let reason = match name.starts_with("models/smollm2") {
            true => {
                "it is not there; scripts/fetch-smollm2 fetches the model, and scripts/quantize-smollm2 makes its other files"
            }
            false => {
                "there is no such folder or file, and nothing is downloaded; name a local Hugging Face folder or GGUF file"
            }
        };
        return match name.exists() {
            true => Ok(name.into()),
            false => Err(ModelError::Config { path: name.into(), reason: reason.into() }),
        };
    }
    let own = Path::new("models").join(BUILTIN);
    let program = std::env::current_exe().unwrap_or_default();
    let above = program.ancestors().skip(1).map(|folder| folder.join(&own));
    let found = std::iter::once(own.clone()).chain(above).find(|folder| folder.join("config.json").exists());
    found.ok_or_else(|| ModelError::Config {
        path: own,
        reason:
            "the built-in model is neither in the working folder nor above the program; run in kvsieve's own folder, \
                 or name a model's"
                .into(),
    })
}

/// A hash of what decides a model's results: configuration, tokenizer and the files that weights are read from, not what else
/// lies in the folder. Of a file longer than 64 MiB, its length and 64 pieces count: files of other models differ there, a file
/// that was changed in one place may not.
///
/// # Errors
/// When the folder or a file cannot be read.
pub fn fingerprint(folder: &Path) -> Result<String, ModelError> {
    let wrong =
        |path: &Path, error: std::io::Error| ModelError::Config { path: path.into(), reason: error.to_string() };
    if folder.is_file() {
        let mut hasher = blake3::Hasher::new();
        hash_file(folder, &mut hasher).map_err(|error| wrong(folder, error))?;
        return Ok(hasher.finalize().to_hex()[..16].to_string());
    }
    let mut paths = match is_adapter(folder) {
        true => vec![folder.join(WEIGHTS)],
        false => {
            let texts = ["config.json", "tokenizer.json"].map(|name| folder.join(name)).into_iter();
            texts.filter(|path| path.exists()).chain(weight_paths(folder)?).collect()
        }
    };
    paths.sort();
    let mut hasher = blake3::Hasher::new();
    if is_adapter(folder) {
        hasher.update(fingerprint(&base(folder)?)?.as_bytes());
        hasher.update(apart_from_base(folder)?.as_bytes());
    }
    for path in &paths {
        hash_file(path, &mut hasher).map_err(|error| wrong(path, error))?;
    }
    Ok(hasher.finalize().to_hex()[..16].to_string())
}

fn hash_file(path: &Path, hasher: &mut blake3::Hasher) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    hasher.update(&len.to_le_bytes());
    if len <= WHOLE_BYTES {
        hasher.update_reader(file)?;
        return Ok(());
    }
    let mut piece = vec![0; PIECE_BYTES as usize];
    for index in 0..PIECES {
        file.seek(SeekFrom::Start((len - PIECE_BYTES) / (PIECES - 1) * index))?;
        file.read_exact(&mut piece)?;
        hasher.update(&piece);
    }
    Ok(())
}

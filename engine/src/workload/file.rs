//! A user's own queries, keys and values from a safetensors file.

use super::{Extents, Workload, WorkloadError};
use crate::attention::rope::RopeBase;
use crate::memory::{Arena, Label};
use crate::tensor::file::{FileError, TensorFile};
use crate::tensor::{DType, Tensor};
use std::fs::File;
use std::io::{Error, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// A file with `q` `[B, Hq, N, D]`, `k` and `v` `[B, Hkv, N, D]` after RoPE, in one element type.
pub struct FileSource {
    path: PathBuf,
    q_dims: [usize; 4],
    kv_heads: usize,
    dtype: DType,
    /// What the file's metadata says of RoPE.
    rope: Option<RopeBase>,
    /// Whether its sequences are the layers of one, as the metadata of `kvsieve capture` say.
    is_of_layers: bool,
    /// Where `q`, `k` and `v` begin in the file, in bytes.
    starts: [u64; 3],
}

/// A warning where a tensor has more heads than tokens, as one whose two axes were exchanged has.
pub fn looks_swapped(heads: usize, tokens: usize) -> Option<String> {
    (heads > tokens && tokens > 1).then(|| {
        format!("{heads} heads of {tokens} tokens; are these axes exchanged? [batch, heads, tokens, head dim] is read")
    })
}

impl FileSource {
    /// Reads the file's header and checks that the three tensors belong together.
    ///
    /// # Errors
    /// When the file cannot be read, lacks a tensor, or the tensors' shapes or types do not fit together.
    pub fn open(path: &Path) -> Result<Self, WorkloadError> {
        let file = TensorFile::open(path)?;
        let (q_dims, dtype) = file.describe("q")?;
        let kv_heads = file.describe("k")?.0[1];
        let expected = [q_dims[0], kv_heads, q_dims[2], q_dims[3]];
        for name in ["k", "v"] {
            let (found, found_dtype) = file.describe(name)?;
            if found != expected {
                let expected = format!("{expected:?} (batch, tokens and head dim as q {q_dims:?}, heads as k)");
                return Err(
                    FileError::Shape { path: path.into(), name: name.into(), found: found.into(), expected }.into()
                );
            }
            if found_dtype != dtype {
                let (found, asked) = (found_dtype.to_string(), format!("{dtype}, as in q"));
                return Err(mismatched(path, "in k or v", found, asked, "store all three in one element type"));
            }
        }
        let start = |name| file.starts_at(name).map(|byte| byte as u64);
        let starts = [start("q")?, start("k")?, start("v")?];
        let rope = match file.metadata("rope_theta") {
            None => None,
            Some(text) => Some(RopeBase::parse(&text).ok_or_else(|| {
                let expected = "a number from 1 to 1e12, or none".into();
                mismatched(path, "as rope_theta in its metadata", text, expected, "write it again")
            })?),
        };
        let is_of_layers = file.metadata("layers").is_some();
        Ok(FileSource { path: path.into(), q_dims, kv_heads, dtype, rope, is_of_layers, starts })
    }

    /// `(B, Hq, Hkv, N, D, type)` of the file.
    pub fn extents(&self) -> (usize, usize, usize, usize, usize, DType) {
        let [batch, q_heads, tokens, head_dim] = self.q_dims;
        (batch, q_heads, self.kv_heads, tokens, head_dim, self.dtype)
    }

    /// Layers of which the file's sequences are, where nothing else is said.
    pub fn layers(&self) -> usize {
        if self.is_of_layers { self.q_dims[0] } else { 1 }
    }

    /// What is to be known of the tensors before they are believed.
    pub fn warning(&self) -> Option<String> {
        let [_, q_heads, tokens, _] = self.q_dims;
        looks_swapped(q_heads, tokens).map(|warning| format!("'{}': {warning}", self.path.display()))
    }

    /// What the file says of RoPE.
    pub fn rope(&self) -> Option<RopeBase> {
        self.rope
    }

    /// Loads the first `context_tokens + new_tokens` tokens; only these are read from the file.
    ///
    /// # Errors
    /// When the file is too short or otherwise not what is asked for, holds a NaN or an infinity, or the arena has no
    /// room.
    pub fn load(&self, extents: &Extents, arena: &Arena) -> Result<Workload, WorkloadError> {
        self.check(extents)?;
        Ok(Workload {
            q: self.tensor("q", self.starts[0], extents.q_dims(), arena)?,
            k: self.tensor("k", self.starts[1], extents.kv_dims(), arena)?,
            v: self.tensor("v", self.starts[2], extents.kv_dims(), arena)?,
            needles: Vec::new(),
            rope: self.rope,
        })
    }

    /// Says whether the file has what [`FileSource::load`] would be asked for, without reading the tensors.
    ///
    /// # Errors
    /// When the file is too short or its extents or element type differ.
    pub fn check(&self, extents: &Extents) -> Result<(), WorkloadError> {
        extents.check()?;
        let (batch, q_heads, kv_heads, tokens, head_dim, dtype) = self.extents();
        let fixed = [
            ("sequences (of all layers)", batch, extents.folded()),
            ("query heads", q_heads, extents.q_heads),
            ("KV heads", kv_heads, extents.kv_heads),
            ("as head dim", head_dim, extents.head_dim),
        ];
        for (what, found, asked) in fixed {
            if found != asked {
                let remedy = "ask for what the file has";
                return Err(mismatched(&self.path, what, found.to_string(), asked.to_string(), remedy));
            }
        }
        if dtype != extents.dtype {
            let (found, asked) = (dtype.to_string(), extents.dtype.to_string());
            return Err(mismatched(&self.path, "as element type", found, asked, "ask for the file's own"));
        }
        if tokens < extents.total_tokens() {
            let asked = format!("{} and {} new", extents.context_tokens, extents.new_tokens);
            let remedy = "shorten the context or decode fewer tokens";
            return Err(mismatched(&self.path, "tokens", tokens.to_string(), asked, remedy));
        }
        Ok(())
    }

    /// BLAKE3 hash of the whole file, in hexadecimal.
    ///
    /// # Errors
    /// When the file can no longer be read.
    pub fn hash(&self) -> Result<String, WorkloadError> {
        let fail = |error| unreadable(&self.path, &error);
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(&self.path).map_err(fail)?).map_err(fail)?;
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// The first tokens of every head of a tensor, read and not mapped: pages of a mapped file count as the process's memory.
    fn tensor(&self, name: &str, start: u64, dims: [usize; 4], arena: &Arena) -> Result<Tensor, WorkloadError> {
        let fail = |error| unreadable(&self.path, &error);
        let mut tensor = Tensor::zeros(arena, Label::Input, self.dtype, dims)?;
        let row_bytes = dims[3] * self.dtype.bytes();
        let stored_bytes = (self.q_dims[2] * row_bytes) as u64;
        let mut file = File::open(&self.path).map_err(fail)?;
        for (head, target) in tensor.bytes_mut().chunks_exact_mut(dims[2] * row_bytes).enumerate() {
            file.seek(SeekFrom::Start(start + head as u64 * stored_bytes)).map_err(fail)?;
            file.read_exact(target).map_err(fail)?;
        }
        match tensor.first_non_finite() {
            None => Ok(tensor),
            Some((index, value)) => {
                Err(FileError::NonFinite { path: self.path.clone(), name: name.into(), index, value }.into())
            }
        }
    }
}

fn unreadable(path: &Path, error: &Error) -> WorkloadError {
    FileError::Open { path: path.into(), reason: error.to_string() }.into()
}

fn mismatched(path: &Path, what: &'static str, found: String, asked: String, remedy: &str) -> WorkloadError {
    WorkloadError::Mismatch { path: path.into(), what, found, asked, remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::file::{Output, write};
    use tempfile::TempDir;

    const ASKED: Extents = Extents {
        layers: 1,
        batch: 2,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 8,
        context_tokens: 5,
        new_tokens: 2,
        dtype: DType::F16,
    };

    /// A file of 9 tokens whose elements count up, except `spoilt`, which is replaced in `k`.
    fn source(spoilt: Option<(usize, f32)>) -> (TempDir, Result<FileSource, WorkloadError>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.safetensors");
        let arena = Arena::unlimited();
        let tensor = |heads: usize, first: f32, spoilt: Option<(usize, f32)>| {
            let mut values: Vec<f32> = (0..2 * heads * 9 * 8).map(|index| first + index as f32).collect();
            spoilt.into_iter().for_each(|(index, value)| values[index] = value);
            Tensor::from_f32(&arena, Label::Input, DType::F16, [2, heads, 9, 8], &values).unwrap()
        };
        let (q, k, v) = (tensor(4, 0.0, None), tensor(2, 1000.0, spoilt), tensor(2, -500.0, None));
        write(&path, &[Output::tensor("q", &q), Output::tensor("k", &k), Output::tensor("v", &v)]).unwrap();
        (folder, FileSource::open(&path))
    }

    #[test]
    fn the_first_tokens_of_every_head_are_loaded_and_nothing_else_takes_memory() {
        let (_folder, file) = source(None);
        let file = file.unwrap();
        assert_eq!(file.extents(), (2, 4, 2, 9, 8, DType::F16));
        let arena = Arena::unlimited();
        let workload = file.load(&ASKED, &arena).unwrap();
        assert_eq!(arena.usage().peak_bytes, Workload::bytes(&ASKED));
        assert_eq!(Workload::bytes(&ASKED), 2 * (2 * 4 * 7 * 8 + 2 * 2 * 2 * 7 * 8));
        assert!(workload.needles.is_empty());
        for (tensor, heads, start) in [(&workload.q, 4, 0.0), (&workload.k, 2, 1000.0), (&workload.v, 2, -500.0)] {
            assert_eq!(tensor.dims(), [2, heads, 7, 8]);
            for (index, value) in tensor.to_f32().into_iter().enumerate() {
                let (head, within) = (index / 56, index % 56);
                assert_eq!(value, start + (head * 72 + within) as f32);
            }
        }
    }

    #[test]
    fn what_the_file_does_not_have_is_refused() {
        let (_folder, file) = source(None);
        let file = file.unwrap();
        let cases = [
            (Extents { new_tokens: 5, ..ASKED }, "has 9 tokens; needed: 5 and 5 new; shorten"),
            (Extents { q_heads: 8, ..ASKED }, "has 4 query heads; needed: 8"),
            (Extents { kv_heads: 4, ..ASKED }, "has 2 KV heads; needed: 4"),
            (Extents { batch: 1, ..ASKED }, "has 2 sequences (of all layers); needed: 1"),
            (Extents { head_dim: 16, ..ASKED }, "has 8 as head dim; needed: 16"),
            (Extents { dtype: DType::F32, ..ASKED }, "has f16 as element type; needed: f32"),
        ];
        for (extents, expected) in cases {
            let error = file.load(&extents, &Arena::unlimited()).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn infinities_count_only_where_they_are_read() {
        let arena = Arena::unlimited();
        // Token 8 of the second head of k, beyond the seven tokens asked for; then token 6.
        let (_folder, file) = source(Some((72 + 8 * 8, f32::INFINITY)));
        assert!(file.unwrap().load(&ASKED, &arena).is_ok());
        let (_folder, file) = source(Some((72 + 6 * 8 + 3, f32::INFINITY)));
        let error = file.unwrap().load(&ASKED, &arena).err().unwrap().to_string();
        assert!(error.contains("tensor 'k'") && error.contains("[0, 1, 6, 3]"), "{error}");
    }

    #[test]
    fn the_hash_is_that_of_the_bytes_and_strangers_are_refused() {
        let (folder, file) = source(None);
        let path = folder.path().join("in.safetensors");
        let hash = file.unwrap().hash().unwrap();
        assert_eq!(hash, blake3::hash(&std::fs::read(&path).unwrap()).to_hex().to_string());
        let arena = Arena::unlimited();
        let zeros = |dtype, tokens| Tensor::zeros(&arena, Label::Input, dtype, [1, 1, tokens, 8]).unwrap();
        let (q, short, narrow) = (zeros(DType::F32, 4), zeros(DType::F32, 3), zeros(DType::Bf16, 4));
        for (k, v, expected) in [
            (&short, &short, "tensor 'k' in"),
            (&q, &short, "tensor 'v' in"),
            (&q, &narrow, "has bf16 in k or v; needed: f32, as in q"),
        ] {
            write(&path, &[Output::tensor("q", &q), Output::tensor("k", k), Output::tensor("v", v)]).unwrap();
            let error = FileSource::open(&path).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
        write(&path, &[Output::tensor("q", &q), Output::tensor("k", &q)]).unwrap();
        assert!(FileSource::open(&path).err().unwrap().to_string().contains("no tensor 'v'"));
    }
}

//! safetensors files: memory-mapped on the way in, written to a temporary name and renamed on the way out.

use super::{DType, Tensor, stream};
use crate::memory::{Arena, ArenaError, Label};
use memmap2::Mmap;
use safetensors::tensor::TensorView as Stored;
use safetensors::{Dtype, SafeTensors};
use serde::Deserializer;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A file or a tensor in it that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be opened or mapped.
    #[error("cannot read '{path}': {reason}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
    /// The file is not a safetensors file.
    #[error("'{path}' is not a valid safetensors file: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },
    /// A tensor that is needed is not there.
    #[error("'{path}' has no tensor '{name}'; it holds {found}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor asked for.
        name: String,
        /// The names that are there.
        found: String,
    },
    /// A tensor of another element type.
    #[error("tensor '{name}' in '{path}' is {found}; F32, F16 or BF16 are read")]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its element type.
        found: String,
    },
    /// A tensor without four axes.
    #[error("tensor '{name}' in '{path}' has shape {found:?}; {expected} is needed")]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that would be right.
        expected: String,
    },
    /// A NaN or an infinity.
    #[error("tensor '{name}' in '{path}' holds {value} at {index:?}; every element must be finite")]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Where, `[d0, d1, d2, d3]`.
        index: [usize; 4],
        /// The element.
        value: f32,
    },
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The output could not be written; nothing is left behind.
    #[error("cannot write '{path}': {reason}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
}

/// Maps a file for reading.
///
/// # Errors
/// When it cannot be opened or is no regular file.
pub fn map(path: &Path) -> Result<Mmap, FileError> {
    let fail = |error: std::io::Error| FileError::Open { path: path.into(), reason: error.to_string() };
    let file = File::open(path).map_err(fail)?;
    if !file.metadata().map_err(fail)?.is_file() {
        return Err(FileError::Open { path: path.into(), reason: "it is not a regular file".into() });
    }
    // SAFETY: the map is read-only and private to this process; the contract that nobody truncates the file while it is
    // open is the one every memory-mapped reader has.
    unsafe { Mmap::map(&file) }.map_err(fail)
}

/// Has the system map the pages of a part of a mapped file at once, where it can; else each page is mapped when it is first
/// read.
pub fn populate(map: &Mmap, range: Range<usize>) {
    // Linux before 5.14 refuses, which changes nothing but the time of the first pass.
    #[cfg(target_os = "linux")]
    let _ = map.advise_range(memmap2::Advice::PopulateRead, range.start, range.len());
    #[cfg(not(target_os = "linux"))]
    let _ = (map, range);
}

/// A safetensors file, mapped.
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
}

impl TensorFile {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// When it cannot be read or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = TensorFile { path: path.into(), map: map(path)? };
        file.parse()?;
        // The parser keeps the last of tensors with one name, which the format forbids.
        let (header, _) = SafeTensors::read_metadata(&file.map).map_err(|error| file.bad_format(&error))?;
        let header = serde_json::Deserializer::from_slice(&file.map[8..8 + header]).deserialize_map(NamedOnce);
        header.map_err(|error| file.bad_format(&error))?;
        Ok(file)
    }

    /// Names of the tensors, sorted.
    ///
    /// # Errors
    /// When the header is damaged.
    pub fn names(&self) -> Result<Vec<String>, FileError> {
        let mut names: Vec<String> = self.parse()?.names().iter().map(|name| name.to_string()).collect();
        names.sort();
        Ok(names)
    }

    /// Shape `[d0, d1, d2, d3]` and element type of a tensor.
    ///
    /// # Errors
    /// When it is missing, has not four axes, or an element type that is not read.
    pub fn describe(&self, name: &str) -> Result<([usize; 4], DType), FileError> {
        let (dims, dtype, _) = self.find(name)?;
        Ok((dims, dtype))
    }

    /// Where a tensor's elements begin in the file, in bytes.
    ///
    /// # Errors
    /// As [`TensorFile::describe`].
    pub fn starts_at(&self, name: &str) -> Result<usize, FileError> {
        Ok(self.find(name)?.2.start)
    }

    /// Copies a tensor into the arena, refusing NaN and infinity.
    ///
    /// # Errors
    /// As [`TensorFile::describe`], and when an element is not finite or the arena has no room.
    pub fn load(&self, name: &str, arena: &Arena, label: Label) -> Result<Tensor, FileError> {
        let (dims, dtype, range) = self.find(name)?;
        let mut tensor = Tensor::zeros(arena, label, dtype, dims)?;
        tensor.bytes_mut().copy_from_slice(&self.map[range]);
        self.finite(name, tensor)
    }

    /// Copies the tokens in `ranges` of a tensor `[B, H, L, D]` into the arena, one behind another, refusing NaN and infinity.
    ///
    /// # Errors
    /// As [`TensorFile::load`].
    ///
    /// # Panics
    /// When there are fewer tokens.
    pub fn load_tokens(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        arena: &Arena,
        label: Label,
    ) -> Result<Tensor, FileError> {
        let (dims, dtype, bytes) = self.find(name)?;
        let copy = Tensor::from_tokens(arena, label, dtype, dims, &self.map[bytes], ranges)?;
        self.finite(name, copy).map_err(|error| match error {
            FileError::NonFinite { path, name, index: [batch, head, token, at], value } => {
                let token = ranges.iter().cloned().flatten().nth(token).expect("the copy's tokens are these");
                FileError::NonFinite { path, name, index: [batch, head, token, at], value }
            }
            error => error,
        })
    }

    fn finite(&self, name: &str, tensor: Tensor) -> Result<Tensor, FileError> {
        match tensor.first_non_finite() {
            Some((index, value)) => {
                Err(FileError::NonFinite { path: self.path.clone(), name: name.into(), index, value })
            }
            None => Ok(tensor),
        }
    }

    /// Every tensor, as it lies in the file.
    ///
    /// # Errors
    /// When the header is damaged.
    pub fn entries(&self) -> Result<Vec<Entry>, FileError> {
        let entry = |(name, stored): (String, Stored<'_>)| {
            let start = stored.data().as_ptr().addr() - self.map.as_ptr().addr();
            let range = start..start + stored.data().len();
            Entry { name, shape: stored.shape().to_vec(), dtype: stored.dtype(), range }
        };
        Ok(self.parse()?.tensors().into_iter().map(entry).collect())
    }

    /// Has the system map the pages of a part of the file.
    pub fn populate(&self, range: Range<usize>) {
        populate(&self.map, range);
    }

    /// Raw bytes of the mapped file, where an [`Entry`] says.
    ///
    /// # Panics
    /// When the file is shorter.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.map[range]
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// BLAKE3 hash of the whole file, in hexadecimal.
    pub fn hash(&self) -> String {
        blake3::hash(&self.map).to_hex().to_string()
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.parse().is_ok_and(|tensors| tensors.tensor(name).is_ok())
    }

    /// A text of the file's metadata.
    pub fn metadata(&self, key: &str) -> Option<String> {
        let (_, header) = SafeTensors::read_metadata(&self.map).ok()?;
        header.metadata().as_ref()?.get(key).cloned()
    }

    fn parse(&self) -> Result<SafeTensors<'_>, FileError> {
        SafeTensors::deserialize(&self.map).map_err(|error| self.bad_format(&error))
    }

    fn bad_format(&self, error: &dyn std::fmt::Display) -> FileError {
        FileError::Format { path: self.path.clone(), reason: error.to_string() }
    }

    fn find(&self, name: &str) -> Result<([usize; 4], DType, Range<usize>), FileError> {
        let tensors = self.parse()?;
        let stored = tensors.tensor(name).map_err(|_| FileError::Missing {
            path: self.path.clone(),
            name: name.into(),
            found: self.names().map(|names| names.join(", ")).unwrap_or_default(),
        })?;
        let found = stored.dtype();
        let dtype = read_as(found).ok_or_else(|| FileError::DType {
            path: self.path.clone(),
            name: name.into(),
            found: format!("{found:?}"),
        })?;
        let dims = <[usize; 4]>::try_from(stored.shape()).map_err(|_| self.bad_shape(name, stored.shape()))?;
        if dims.contains(&0) {
            return Err(self.bad_shape(name, &dims));
        }
        let start = stored.data().as_ptr().addr() - self.map.as_ptr().addr();
        Ok((dims, dtype, start..start + stored.data().len()))
    }

    fn bad_shape(&self, name: &str, found: &[usize]) -> FileError {
        let expected = "[batch, heads, tokens, head dim], each at least 1,".to_string();
        FileError::Shape { path: self.path.clone(), name: name.into(), found: found.to_vec(), expected }
    }
}

/// A header in which no name stands twice.
struct NamedOnce;

impl<'de> Visitor<'de> for NamedOnce {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut tensors: A) -> Result<(), A::Error> {
        let mut seen = BTreeSet::new();
        while let Some((name, IgnoredAny)) = tensors.next_entry::<String, _>()? {
            if let Some(name) = seen.replace(name) {
                return Err(A::Error::custom(format!("tensor '{name}' is there twice")));
            }
        }
        Ok(())
    }
}

/// A tensor as it lies in a file.
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Any number of axes.
    pub shape: Vec<usize>,
    /// Element type in the file.
    pub dtype: Dtype,
    /// Where its bytes lie in the file.
    pub range: Range<usize>,
}

/// The element type of the program that a file's is read as, if there is one.
pub fn read_as(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::Bf16),
        _ => None,
    }
}

/// The element type of a file that holds the program's.
pub fn stored_as(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
    }
}

/// A tensor to be written: raw little-endian elements, their type, and the shape.
pub struct Output<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Element type in the file.
    pub dtype: Dtype,
    /// Any number of axes.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: &'a [u8],
}

impl<'a> Output<'a> {
    /// A tensor of the arena.
    pub fn tensor(name: &'a str, tensor: &'a Tensor) -> Self {
        Output { name, dtype: stored_as(tensor.dtype()), shape: tensor.dims().to_vec(), bytes: tensor.bytes() }
    }

    /// f32 numbers.
    pub fn f32(name: &'a str, shape: Vec<usize>, values: &'a [f32]) -> Self {
        Output { name, dtype: Dtype::F32, shape, bytes: bytemuck::cast_slice(values) }
    }

    /// i64 numbers.
    pub fn i64(name: &'a str, shape: Vec<usize>, values: &'a [i64]) -> Self {
        Output { name, dtype: Dtype::I64, shape, bytes: bytemuck::cast_slice(values) }
    }
}

/// Writes tensors to `path`: whole or not at all.
///
/// # Errors
/// When the folder cannot be written or the disk is full.
pub fn write(path: &Path, outputs: &[Output<'_>]) -> Result<(), FileError> {
    write_with(path, outputs, None)
}

/// As [`write()`], with texts that [`TensorFile::metadata`] gives back.
///
/// # Errors
/// As [`write()`].
pub fn write_with(
    path: &Path,
    outputs: &[Output<'_>],
    metadata: Option<HashMap<String, String>>,
) -> Result<(), FileError> {
    let mut outputs: Vec<&Output<'_>> = outputs.iter().collect();
    // Wide elements first, so that each lies at a multiple of its size.
    outputs.sort_by(|a, b| b.dtype.cmp(&a.dtype).then(a.name.cmp(b.name)));
    let tensors = outputs.iter().map(|output| (output.name.to_string(), output.dtype, output.shape.clone()));
    stream::write(path, tensors, metadata.unwrap_or_default(), |sink| {
        outputs.iter().try_for_each(|output| sink.put(output.bytes))
    })
}

/// Lets `fill` write the file at a temporary name beside `path` and renames it to `path`: whoever looks sees the old
/// file or the whole new one. Its permissions are those of any new file, not a temporary file's.
///
/// # Errors
/// When the folder cannot be written, the disk is full, or `fill` fails; nothing is left behind.
pub fn replace(path: &Path, fill: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), FileError> {
    let mut fill = Some(fill);
    replaced(path, &mut |temporary| fill.take().map_or(Ok(()), |fill| fill(temporary)))
}

/// As [`replace`], compiled once; calls `fill` once.
fn replaced(path: &Path, fill: &mut dyn FnMut(&Path) -> Result<(), String>) -> Result<(), FileError> {
    let fail = |reason: String| FileError::Write { path: path.into(), reason };
    let system = |error: std::io::Error| fail(error.to_string());
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let temporary = builder.tempfile_in(folder).map_err(system)?;
    let permissions = temporary.as_file().metadata().map_err(system)?.permissions();
    fill(temporary.path()).map_err(fail)?;
    // `fill` may have put another file in the place of the first one, as the safetensors crate does.
    let filled = File::options().write(true).open(temporary.path()).map_err(system)?;
    filled.set_permissions(permissions).and_then(|()| filled.sync_all()).map_err(system)?;
    temporary.persist(path).map_err(|error| system(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_in_every_dtype() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let arena = Arena::unlimited();
        let values: Vec<f32> = (0..24).map(|index| index as f32 - 7.5).collect();
        for dtype in DType::ALL {
            let tensor = Tensor::from_f32(&arena, Label::Input, dtype, [1, 2, 3, 4], &values).unwrap();
            write(&path, &[Output::tensor("q", &tensor), Output::i64("kept", vec![2], &[3, -1])]).unwrap();
            let file = TensorFile::open(&path).unwrap();
            assert_eq!(file.names().unwrap(), ["kept", "q"]);
            assert_eq!(file.load("q", &arena, Label::Input).unwrap().to_f32(), values);
            assert!(matches!(file.describe("kept"), Err(FileError::DType { .. })));
            assert!(matches!(file.describe("v"), Err(FileError::Missing { .. })));
        }
    }

    #[test]
    fn damaged_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        for bytes in [&b""[..], b"not a tensor file", &[0xff; 64], b"\x08\0\0\0\0\0\0\0{\"q\":1}."] {
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(TensorFile::open(&path), Err(FileError::Format { .. } | FileError::Open { .. })));
        }
        assert!(matches!(TensorFile::open(folder.path()), Err(FileError::Open { .. })));
        // Two tensors of one name, of which the second fills the file.
        let one = |start: u32| format!(r#""q":{{"dtype":"U8","shape":[2],"data_offsets":[{start},{}]}}"#, start + 2);
        for (header, expected) in
            [(format!("{{{},{}}}", one(0), one(0)), "tensor 'q' is there twice"), (format!("{{{}}}", one(0)), "")]
        {
            let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), b"xy"].concat();
            std::fs::write(&path, bytes).unwrap();
            let error = TensorFile::open(&path).err().map_or(String::new(), |error| error.to_string());
            assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{error}");
        }
    }
}

//! The container: metadata by key, and where each tensor lies.

use super::types::{bytes_of, numbered};
use crate::format::RowFormat;
use crate::model::ModelError;
use crate::tensor::file;
use memmap2::Mmap;
use serde_json::{Map, Number, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Elements of a list: a multiple of what the largest vocabularies have.
const MOST_ELEMENTS: u64 = 1 << 22;
/// Versions of the format that are read; they differ from the first in the width of counts.
const VERSIONS: Range<u32> = 2..4;
/// Where nothing else is said, tensors begin at multiples of this many bytes.
pub(super) const ALIGNMENT: u64 = 32;
/// Where keys begin: behind four letters, the version and two counts.
const FIRST_KEY: usize = 24;
/// Most axes of a tensor.
const MOST_AXES: u32 = 4;

/// A mapped file.
pub(in crate::model) struct Gguf {
    path: PathBuf,
    map: Mmap,
    pub(in crate::model) metadata: Map<String, Value>,
    tensors: BTreeMap<String, Info>,
}

/// A tensor as it lies in the file.
#[derive(Debug, Clone)]
pub(super) struct Info {
    /// Extents, the slowest first.
    pub shape: Vec<usize>,
    pub format: RowFormat,
    pub range: Range<usize>,
}

impl Gguf {
    /// Maps a file and reads its header.
    ///
    /// # Errors
    /// When it cannot be read, is cut, or is not such a file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let map = file::map(path)?;
        let mut reader = Reader { bytes: &map, at: 0 };
        let (metadata, tensors) = header(&mut reader).map_err(|reason| not_read(path, &reason))?;
        Ok(Gguf { path: path.into(), map, metadata, tensors })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keys, and the kind and value of each as they lie in the file.
    pub(super) fn raw_keys(&self) -> Vec<(String, &[u8])> {
        let mut reader = Reader { bytes: &self.map, at: FIRST_KEY };
        let key = |_| {
            let key = reader.text()?;
            let from = reader.at;
            let kind = reader.u32()?;
            reader.value(kind, true)?;
            Ok((key, &self.map[from..reader.at]))
        };
        let keys: Result<_, String> = (0..self.metadata.len()).map(key).collect();
        keys.expect("they were read before")
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor by its name in the file.
    pub(super) fn find(&self, name: &str) -> Option<&Info> {
        self.tensors.get(name)
    }

    /// Has the system map the pages of a part of the file.
    pub fn populate(&self, range: Range<usize>) {
        file::populate(&self.map, range);
    }

    /// Bytes of the file.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.map[range]
    }
}

/// A tensor as the header describes it.
#[derive(Debug, Clone)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Rows first, as in a Hugging Face folder.
    pub shape: Vec<usize>,
    /// Number of its type in ggml, known here or not.
    pub number: u32,
    offset: u64,
}

impl GgufTensor {
    /// How its rows are kept; `None` where it is of a type that is not run.
    pub fn format(&self) -> Option<RowFormat> {
        numbered(self.number).ok()
    }
}

/// Metadata and tensors of a file, of which only the header is read.
///
/// # Errors
/// When it cannot be read or is no GGUF file.
pub fn gguf_tensors(path: &Path) -> Result<(Map<String, Value>, Vec<GgufTensor>), ModelError> {
    let map = file::map(path)?;
    described(&mut Reader { bytes: &map, at: 0 }).map_err(|reason| not_read(path, &reason))
}

fn not_read(path: &Path, reason: &str) -> ModelError {
    ModelError::Weights { path: path.into(), reason: format!("not a GGUF file that is read: {reason}") }
}

fn described(reader: &mut Reader<'_>) -> Result<(Map<String, Value>, Vec<GgufTensor>), String> {
    if reader.take(4)? != b"GGUF" {
        return Err("it does not begin with 'GGUF'".into());
    }
    let version = reader.u32()?;
    if !VERSIONS.contains(&version) {
        return Err(format!("version {version}; 2 and 3 are read, little-endian"));
    }
    let (tensor_count, key_count) = (reader.u64()?, reader.u64()?);
    let mut metadata = Map::new();
    for _ in 0..key_count {
        let (key, kind) = (reader.text()?, reader.u32()?);
        let value = reader.value(kind, true).map_err(|reason| format!("key '{key}': {reason}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("key '{key}' is there twice"));
        }
    }
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        let name = reader.text()?;
        let (shape, number, offset) = tensor(reader).map_err(|reason| format!("tensor '{name}': {reason}"))?;
        tensors.push(GgufTensor { name, shape, number, offset });
    }
    Ok((metadata, tensors))
}

/// Metadata, and the tensors by name.
type Header = (Map<String, Value>, BTreeMap<String, Info>);

fn header(reader: &mut Reader<'_>) -> Result<Header, String> {
    let (metadata, described) = described(reader)?;
    let alignment = metadata.get("general.alignment").map_or(Some(ALIGNMENT), Value::as_u64);
    let alignment =
        alignment.filter(|alignment| alignment.is_power_of_two()).ok_or("general.alignment is no power of two")?;
    let start = (reader.at as u64).next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    for GgufTensor { name, shape, number, offset } in described {
        let format = numbered(number).map_err(|reason| format!("tensor '{name}': {reason}"))?;
        let bytes = bytes_of(format, &shape)
            .ok_or_else(|| format!("tensor '{name}': shape {shape:?} is not whole blocks of {format}"))?;
        let from = start.checked_add(offset).and_then(|from| usize::try_from(from).ok());
        let range = from.and_then(|from| Some(from..from.checked_add(bytes)?));
        let range = range.filter(|range| range.end <= reader.bytes.len() && offset.is_multiple_of(alignment));
        let range = range.ok_or_else(|| {
            format!(
                "tensor '{name}': {bytes} bytes at offset {offset} are not in a file of {} bytes",
                reader.bytes.len()
            )
        })?;
        if tensors.insert(name.clone(), Info { shape, format, range }).is_some() {
            return Err(format!("tensor '{name}' is there twice"));
        }
    }
    Ok((metadata, tensors))
}

/// Shape, type and offset of the next tensor.
fn tensor(reader: &mut Reader<'_>) -> Result<(Vec<usize>, u32, u64), String> {
    let axes = reader.u32()?;
    if !(1..=MOST_AXES).contains(&axes) {
        return Err(format!("{axes} axes; 1 to {MOST_AXES} are read"));
    }
    let mut shape = Vec::new();
    for _ in 0..axes {
        let extent = reader.u64()?;
        shape.push(usize::try_from(extent).ok().filter(|&extent| extent > 0).ok_or(format!("an extent of {extent}"))?);
    }
    shape.reverse();
    Ok((shape, reader.u32()?, reader.u64()?))
}

/// What is still to be read.
pub(super) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("it ends at byte {}, inside its header", self.bytes.len()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        let bytes = self.take(usize::try_from(length).map_err(|_| format!("a text of {length} bytes"))?)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| "a text that is not UTF-8".into())
    }

    /// A value of a kind that the format numbers so; lists do not hold lists.
    fn value(&mut self, kind: u32, may_be_list: bool) -> Result<Value, String> {
        let real = |x: f64| Number::from_f64(x).map(Value::Number).ok_or(format!("it is {x}; it must be a number"));
        Ok(match kind {
            0 => self.array::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            // The shortest decimal that is this f32: 1e-5 and not 9.999999747378752e-6.
            6 => {
                let x = f32::from_le_bytes(self.array()?);
                real(x.to_string().parse().unwrap_or(f64::from(x)))?
            }
            7 => (self.array::<1>()?[0] != 0).into(),
            8 => self.text()?.into(),
            9 if may_be_list => {
                let (kind, length) = (self.u32()?, self.u64()?);
                // Each element takes at least a byte, so that a wrong length ends here and not in memory; as numbers here they
                // take many times what they do there.
                if length > (self.bytes.len() - self.at) as u64 {
                    return Err(format!("a list of {length} elements in a file of {} bytes", self.bytes.len()));
                }
                if length > MOST_ELEMENTS {
                    return Err(format!("a list of {length} elements; at most {MOST_ELEMENTS} are read"));
                }
                Value::Array((0..length).map(|_| self.value(kind, false)).collect::<Result<_, _>>()?)
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            12 => real(f64::from_le_bytes(self.array()?))?,
            kind => return Err(format!("a value of kind {kind}, which is not known here")),
        })
    }
}

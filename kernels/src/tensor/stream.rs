//! safetensors files whose tensors are never in memory as a whole.

use super::file::{FileError, replace};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensorError};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Takes the bytes of a file's tensors, in their order.
pub struct Sink {
    path: PathBuf,
    file: BufWriter<File>,
    missing_bytes: usize,
}

impl Sink {
    /// Adds bytes.
    ///
    /// # Errors
    /// When the disk is full.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.missing_bytes -= bytes.len();
        self.file.write_all(bytes).map_err(|error| failed(&self.path, error))
    }
}

fn failed(path: &Path, error: impl ToString) -> FileError {
    FileError::Write { path: path.into(), reason: error.to_string() }
}

/// What lies in front of the tensors, and their bytes.
fn header(
    tensors: Vec<(String, Dtype, Vec<usize>)>,
    metadata: HashMap<String, String>,
) -> Result<(Vec<u8>, usize), SafeTensorError> {
    let mut end = 0;
    let place = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let first = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name, TensorInfo { dtype, shape, data_offsets: (first, end) })
    };
    let header = Metadata::new((!metadata.is_empty()).then_some(metadata), tensors.into_iter().map(place).collect())?;
    // By name, as the crate leaves keys of its metadata in any order: the same tensors are to make the same file.
    let sorted =
        serde_json::to_value(&header).and_then(serde_json::from_value::<BTreeMap<String, BTreeMap<String, Value>>>);
    let mut header = serde_json::to_vec(&sorted.expect("names and numbers are plain data")).expect("as they were");
    // So that numbers lie at multiples of their size.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok((header, end))
}

/// Writes tensors of these names, types and shapes to `path`, whole or not at all, with texts that
/// [`super::file::TensorFile::metadata`] gives back. Their bytes are what `fill` puts.
///
/// # Errors
/// When the folder cannot be written or the disk is full, and those of `fill`.
///
/// # Panics
/// When `fill` puts more or fewer bytes than the tensors have.
pub fn write<E: From<FileError>>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    metadata: HashMap<String, String>,
    fill: impl FnOnce(&mut Sink) -> Result<(), E>,
) -> Result<(), E> {
    let (header, end) = header(tensors.into_iter().collect(), metadata).map_err(|error| failed(path, error))?;
    let mut wrong = None;
    let done = replace(path, |temporary| {
        let file = File::create(temporary).map_err(|error| error.to_string())?;
        let mut sink = Sink { path: path.into(), file: BufWriter::new(file), missing_bytes: header.len() + 8 + end };
        let filled = || -> Result<(), E> {
            sink.put(&(header.len() as u64).to_le_bytes())?;
            sink.put(&header)?;
            fill(&mut sink)?;
            assert_eq!(sink.missing_bytes, 0, "every tensor has its bytes");
            sink.file.flush().map_err(|error| failed(path, error))?;
            Ok(())
        };
        filled().map_err(|error| {
            wrong = Some(error);
            String::new()
        })
    });
    match wrong {
        Some(error) => Err(error),
        None => Ok(done?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Label};
    use crate::tensor::file::TensorFile;

    #[test]
    fn what_is_put_is_read_back_and_a_failure_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let tensors = || {
            let shape = |count: usize| vec![1, 1, 1, count];
            [("b".to_string(), Dtype::F32, shape(3)), ("a".into(), Dtype::BF16, shape(2))]
        };
        let texts = HashMap::from([("said".to_string(), "\"so\"".to_string())]);
        let values = [1.5f32, -2.0, 3.25];
        write::<FileError>(&path, tensors(), texts, |sink| {
            values.iter().try_for_each(|value| sink.put(&value.to_le_bytes()))?;
            sink.put(&[0, 0x80, 0x3F, 0][1..])?;
            sink.put(&[0])
        })
        .unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.metadata("said").unwrap(), "\"so\"");
        let arena = Arena::unlimited();
        assert_eq!(file.load("b", &arena, Label::Input).unwrap().to_f32(), values);
        assert_eq!(file.load("a", &arena, Label::Input).unwrap().bytes(), [0x80, 0x3F, 0, 0]);

        let before = std::fs::read(&path).unwrap();
        let full = |sink: &mut Sink| {
            sink.put(&[7; 4])?;
            Err(failed(Path::new("elsewhere"), "full"))
        };
        let error = write::<FileError>(&path, tensors(), HashMap::new(), full).unwrap_err();
        assert_eq!(error.to_string(), failed(Path::new("elsewhere"), "full").to_string());
        assert_eq!(std::fs::read(&path).unwrap(), before);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

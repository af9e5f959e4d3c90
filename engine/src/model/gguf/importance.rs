//! Importance matrices as llama.cpp's `imatrix` writes them: for each matrix of a model the mean square of each of its inputs. Newer files
//! are GGUF containers of two tensors for a matrix, sums of squares (`NAME.in_sum2`) and tokens (`NAME.counts`); older ones (`.dat`) are a
//! list of names, calls and values that are to be divided by them
//! (<https://github.com/ggml-org/llama.cpp/blob/master/tools/imatrix/README.md>).

use super::container::{Gguf, Reader};
use crate::format::RowFormat;
use crate::model::ModelError;
use crate::tensor::{DType, file};
use std::collections::BTreeMap;
use std::path::Path;

/// Mean squares of what each matrix reads, `[width]`, by the matrix's name in GGUF files.
pub type MeanSquares = BTreeMap<String, Vec<f32>>;

/// Reads a file of either kind.
///
/// # Errors
/// When it cannot be read, is neither, holds a number that is no mean square, or has seen no tokens for a matrix.
pub fn read_importance(path: &Path) -> Result<MeanSquares, ModelError> {
    let map = file::map(path)?;
    let read = if map.starts_with(b"GGUF") { of_container(&Gguf::open(path)?) } else { of_list(&map) };
    let wrong =
        |reason| ModelError::Weights { path: path.into(), reason: format!("not an importance matrix: {reason}") };
    let read = read.map_err(wrong)?;
    for (name, squares) in &read {
        if let Some(square) = squares.iter().find(|square| !square.is_finite() || **square < 0.0) {
            return Err(wrong(format!("'{name}' has a mean square of {square}; it must be a number of at least 0")));
        }
    }
    Ok(read)
}

fn of_container(file: &Gguf) -> Result<MeanSquares, String> {
    const SUMS: &str = ".in_sum2";
    let values = |name: &str| -> Result<&[u8], String> {
        let info = file.find(name).ok_or_else(|| format!("it has no tensor '{name}'"))?;
        let is_f32 = info.format == RowFormat::plain(DType::F32);
        is_f32
            .then(|| file.bytes(info.range.clone()))
            .ok_or_else(|| format!("'{name}' is {}; it must be f32", info.format))
    };
    let names: Vec<_> = file.names().filter_map(|name| name.strip_suffix(SUMS)).collect();
    if names.is_empty() {
        return Err(format!("the name of none of its tensors ends in '{SUMS}'"));
    }
    let one = |name: &str| {
        let sums = values(&format!("{name}{SUMS}"))?;
        let counts = floats(values(&format!("{name}.counts"))?);
        match counts[..] {
            [count] if count >= 1.0 => Ok((name.to_owned(), floats(sums).iter().map(|sum| sum / count).collect())),
            [count] => Err(format!("'{name}' has seen {count} tokens")),
            _ => Err(format!("'{name}' has {} experts; models with one MLP are read", counts.len())),
        }
    };
    names.into_iter().map(one).collect()
}

fn of_list(bytes: &[u8]) -> Result<MeanSquares, String> {
    let mut reader = Reader { bytes, at: 0 };
    let mut read = MeanSquares::new();
    for _ in 0..reader.u32()? {
        let length = reader.u32()? as usize;
        let name = String::from_utf8(reader.take(length)?.to_vec()).map_err(|_| "a name that is not UTF-8")?;
        let (calls, count) = (reader.u32()?, reader.u32()? as usize);
        let values = floats(reader.take(count.saturating_mul(4))?);
        if calls == 0 {
            return Err(format!("'{name}' has seen no text"));
        }
        let squares = values.iter().map(|value| value / calls as f32).collect();
        if read.insert(name.clone(), squares).is_some() {
            return Err(format!("'{name}' is there twice"));
        }
    }
    if read.is_empty() { Err("it names no matrix".into()) } else { Ok(read) }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

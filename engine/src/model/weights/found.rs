//! The files of a model: where each tensor lies, by name, and which of them have been taken.

use super::{Bytes, Matrix};
use crate::format::RowFormat;
use crate::memory::{Arena, Label};
use crate::model::adapter::{Adapter, base};
use crate::model::gguf::{Gguf, Located, is_gguf, more, own_name};
use crate::model::packed::{Module, Repacked, Tensors};
use crate::model::{Config, ModelError};
use crate::tensor::file::{Entry, TensorFile, read_as};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where tensors are found by name.
enum Source {
    /// Files, and in which of them a tensor lies.
    Folder(Vec<Arc<TensorFile>>, Tensors),
    Gguf(Arc<Gguf>),
}

/// The tensors of a model by name, and which were taken.
pub(in crate::model) struct Found<'a> {
    folder: PathBuf,
    config: &'a Config,
    arena: &'a Arena,
    source: Source,
    taken: BTreeSet<String>,
    /// What is added to matrices.
    adapter: Option<Adapter>,
    /// Bytes of tensors that are read where their files are mapped, and of copies in the arena.
    pub mapped_bytes: u64,
    pub held_bytes: u64,
}

impl<'a> Found<'a> {
    pub fn open(folder: &Path, config: &'a Config, arena: &'a Arena) -> Result<Self, ModelError> {
        let (adapter, folder) = (Adapter::find(folder)?, &*base(folder)?);
        let source = if is_gguf(folder) { Source::Gguf(Arc::new(Gguf::open(folder)?)) } else { Self::files(folder)? };
        let (folder, taken) = (folder.to_path_buf(), BTreeSet::new());
        Ok(Found { folder, config, arena, source, taken, adapter, mapped_bytes: 0, held_bytes: 0 })
    }

    fn files(folder: &Path) -> Result<Source, ModelError> {
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for file in tensor_files(folder)? {
            for entry in file.entries()? {
                let (path, name) = (file.path(), entry.name.clone());
                if tensors.insert(name.clone(), (files.len(), entry)).is_some() {
                    let reason = format!("tensor '{name}' is in another file of the folder too; leave one of them out");
                    return Err(ModelError::Weights { path: path.into(), reason });
                }
            }
            files.push(Arc::new(file));
        }
        Ok(Source::Folder(files, tensors))
    }

    /// What a parameter is called in the file that it comes from.
    fn own_name(&self, name: &str) -> String {
        let own = matches!(self.source, Source::Gguf(_)).then(|| own_name(self.config, name)).flatten();
        own.unwrap_or_else(|| name.into())
    }

    fn wrong(&self, path: &Path, reason: String) -> ModelError {
        ModelError::Weights { path: path.into(), reason }
    }

    /// An error of the model as a whole.
    pub fn refused(&self, reason: String) -> ModelError {
        self.wrong(&self.folder, reason)
    }

    /// A tensor of a shape: where it lies, or with its adapter, in the arena.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Matrix, ModelError> {
        let counted = (self.mapped_bytes, self.held_bytes);
        let stored = self.stored(name, shape)?;
        let merged =
            self.adapter.as_mut().map(|adapter| adapter.merge(name, &stored, self.arena)).transpose()?.flatten();
        if let Some(merged) = &merged {
            (self.mapped_bytes, self.held_bytes) = (counted.0, counted.1 + merged.bytes().len() as u64);
        }
        Ok(merged.unwrap_or(stored))
    }

    /// A tensor of a shape, where it lies.
    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<Matrix, ModelError> {
        if let Some(packed) = self.packed(name, shape)? {
            return Ok(packed);
        }
        let missing =
            || self.wrong(&self.folder, format!("there is no tensor '{}', {shape:?} is needed", self.own_name(name)));
        let (files, tensors) = match &self.source {
            Source::Folder(files, tensors) => (files, tensors),
            Source::Gguf(gguf) => {
                let gguf = gguf.clone();
                let located = gguf.locate(self.config, name, shape).ok_or_else(missing)?;
                let located = located.map_err(|reason| self.wrong(&self.folder, reason))?;
                return self.located(gguf, located, name, shape);
            }
        };
        let (file, entry) = tensors.get(name).ok_or_else(missing)?;
        let file = &files[*file];
        if entry.shape != shape {
            let reason = format!("tensor '{name}' has shape {:?}; {shape:?} is needed", entry.shape);
            return Err(self.wrong(file.path(), reason));
        }
        let Some(dtype) = read_as(entry.dtype) else {
            let reason = format!("tensor '{name}' is {:?}; F32, F16 or BF16 are read", entry.dtype);
            return Err(self.wrong(file.path(), reason));
        };
        let bytes = file.bytes(entry.range.clone());
        let (range, bytes) = match bytes.as_ptr().addr().is_multiple_of(dtype.bytes()) {
            true => {
                self.mapped_bytes += bytes.len() as u64;
                (entry.range.clone(), Bytes::Mapped(file.clone()))
            }
            false => {
                self.held_bytes += bytes.len() as u64;
                let mut copy = self.arena.alloc::<u8>(Label::Weights, bytes.len())?;
                copy.copy_from_slice(bytes);
                (0..bytes.len(), Bytes::Held(copy))
            }
        };
        Ok(self.take(name, shape, (range, bytes), RowFormat::plain(dtype)))
    }

    /// How a matrix that the folder has packed is repacked, and the names of its tensors; `None` where it is plain.
    fn repacked<'s>(
        &'s self,
        name: &'s str,
        shape: &[usize],
    ) -> Result<Option<(Repacked<'s>, Vec<String>)>, ModelError> {
        let (Some(packing), &[rows, width], Source::Folder(files, tensors)) =
            (self.config.packing, shape, &self.source)
        else {
            return Ok(None);
        };
        if tensors.get(name).is_some_and(|(_, entry)| read_as(entry.dtype).is_some()) {
            return Ok(None);
        }
        let mut module = Module::new(name.strip_suffix(".weight").unwrap_or(name), files, tensors);
        let repacked = module.repack(packing, [rows, width]);
        let repacked = repacked.map_err(|reason| self.refused(format!("{reason} (packed as {packing})")))?;
        Ok(Some((repacked, module.taken)))
    }

    /// A matrix that the folder has packed, in the arena; `None` where it is plain.
    fn packed(&mut self, name: &str, shape: &[usize]) -> Result<Option<Matrix>, ModelError> {
        let Some((Repacked { format, order, input_scale, put }, taken)) = self.repacked(name, shape)? else {
            return Ok(None);
        };
        let (rows, width) = (shape[0], shape[1]);
        let row_bytes = format.row_bytes(width);
        let mut bytes = self.arena.alloc::<u8>(Label::Weights, rows * row_bytes)?;
        bytes.par_chunks_mut(row_bytes).enumerate().for_each(|(row, to)| put(row, to));
        drop(put);
        let order = match order {
            Some(order) => {
                let mut kept = self.arena.alloc::<u32>(Label::Weights, width)?;
                kept.copy_from_slice(&order);
                Some(Arc::new(kept))
            }
            None => None,
        };
        self.held_bytes += bytes.bytes() + order.as_ref().map_or(0, |order| order.bytes());
        self.taken.extend(taken);
        let matrix = self.take(name, shape, (0..bytes.len(), Bytes::Held(bytes)), format);
        Ok(Some(Matrix { order, input_scale, ..matrix }))
    }

    /// How a matrix is kept in memory, and the bytes of what is kept beside its rows; nothing is repacked.
    pub fn kept(&self, name: &str, shape: [usize; 2]) -> Result<(RowFormat, usize), ModelError> {
        if let Some((repacked, _)) = self.repacked(name, &shape)? {
            return Ok((repacked.format, repacked.order.map_or(0, |order| 4 * order.len())));
        }
        let format = match &self.source {
            Source::Folder(_, tensors) => {
                tensors.get(name).and_then(|(_, entry)| read_as(entry.dtype)).map(RowFormat::plain)
            }
            Source::Gguf(gguf) => {
                let located = gguf.locate(self.config, name, &shape).transpose();
                located.map_err(|reason| self.refused(reason))?.map(|located| located.format)
            }
        };
        let missing = || self.refused(format!("there is no tensor '{}', {shape:?} is needed", self.own_name(name)));
        Ok((format.ok_or_else(missing)?, 0))
    }

    /// A tensor of a GGUF file: where it lies, or a copy if its rows are in another order or its elements not aligned.
    fn located(
        &mut self,
        gguf: Arc<Gguf>,
        located: Located,
        name: &str,
        shape: &[usize],
    ) -> Result<Matrix, ModelError> {
        let (bytes, format) = (gguf.bytes(located.range.clone()), located.format);
        let is_aligned = format.dtype().is_none_or(|dtype| bytes.as_ptr().addr().is_multiple_of(dtype.bytes()));
        if located.head_rows.is_none() && is_aligned {
            self.mapped_bytes += bytes.len() as u64;
            let range = located.range;
            return Ok(self.take(name, shape, (range, Bytes::Gguf(gguf)), format));
        }
        let mut copy = self.arena.alloc::<u8>(Label::Weights, bytes.len())?;
        located.copy(bytes, shape[0], &mut copy);
        self.held_bytes += copy.bytes();
        Ok(self.take(name, shape, (0..copy.len(), Bytes::Held(copy)), format))
    }

    fn take(
        &mut self,
        name: &str,
        shape: &[usize],
        (range, bytes): (Range<usize>, Bytes),
        format: RowFormat,
    ) -> Matrix {
        let (rows, width) = (shape[..shape.len() - 1].iter().product(), shape[shape.len() - 1]);
        self.taken.insert(name.into());
        Matrix { bytes: Arc::new(bytes), range, format, rows, width, order: None, input_scale: None }
    }

    /// Widens a vector.
    pub fn widened(&mut self, name: &str, width: usize, to: &mut [f32]) -> Result<(), ModelError> {
        self.tensor(name, &[width])?.all().widen(to);
        if let Source::Gguf(_) = &self.source {
            let more = more(self.config, name);
            to.iter_mut().for_each(|factor| *factor -= more);
        }
        Ok(())
    }

    /// Refuses tensors that the configuration does not know.
    pub fn finish(&self) -> Result<(), ModelError> {
        self.adapter.as_ref().map_or(Ok(()), Adapter::finish)?;
        let config = self.config;
        let harmless = |name: &str| {
            // Frequencies that older folders hold, an output projection that is not looked at, and gates that a policy reads.
            name.ends_with("rotary_emb.inv_freq")
                || (config.tied && name == "lm_head.weight")
                || name.contains(".self_attn.dms_proj_alpha")
        };
        let unknown = match &self.source {
            Source::Folder(files, tensors) => {
                // Some programs write a bias for every packed layer, whether the model has one or not.
                let is_nothing = |name: &str, (file, entry): &(usize, Entry)| {
                    let bytes = || files[*file].bytes(entry.range.clone());
                    config.packing.is_some() && name.ends_with(".bias") && bytes().iter().all(|&byte| byte == 0)
                };
                let known = |name: &str| self.taken.contains(name) || harmless(name);
                let unknown = tensors.iter().find(|&(name, at)| !known(name) && !is_nothing(name, at));
                unknown.map(|(name, _)| name.as_str())
            }
            Source::Gguf(gguf) => gguf.unknown(config, &self.taken),
        };
        if let Source::Folder(files, tensors) = &self.source
            && config.tied
        {
            let bytes = |name: &str| tensors.get(name).map(|(file, entry)| files[*file].bytes(entry.range.clone()));
            let other = bytes("lm_head.weight").zip(bytes("model.embed_tokens.weight"));
            if other.is_some_and(|(head, embedding)| head != embedding) {
                let reason = "lm_head.weight is another matrix than model.embed_tokens.weight, although tie_word_embeddings is true; \
                              make it false, or leave the tensor out";
                return Err(self.wrong(&self.folder, reason.into()));
            }
        }
        unknown.map_or(Ok(()), |name| {
            let architecture = config.family.architecture();
            let reason = format!("tensor '{name}' is not part of a {architecture} as its configuration describes it");
            Err(self.wrong(&self.folder, reason))
        })
    }
}

/// The files of a folder's weights, mapped: `model.safetensors`, or those that its index names.
///
/// # Errors
/// When one is missing or damaged.
pub fn tensor_files(folder: &Path) -> Result<Vec<TensorFile>, ModelError> {
    let open = |path: PathBuf| Ok(TensorFile::open(&path)?);
    weight_paths(folder)?.into_iter().map(open).collect()
}

/// The files of a folder that weights are read from.
///
/// # Errors
/// When an index cannot be read, or names a file that is not there.
pub(crate) fn weight_paths(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let (single, index) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
    if single.exists() || !index.exists() {
        return Ok(vec![single]);
    }
    let path = |name: String| match folder.join(&name) {
        path if path.exists() => Ok(path),
        _ => {
            let reason = format!("it names the file '{name}', which is not there");
            Err(ModelError::Weights { path: index.clone(), reason })
        }
    };
    shards(&index)?.into_iter().map(path).collect()
}

/// The files that an index names, each once.
fn shards(index: &Path) -> Result<Vec<String>, ModelError> {
    let wrong = |reason: String| ModelError::Weights { path: index.into(), reason };
    let text = std::fs::read_to_string(index).map_err(|error| wrong(error.to_string()))?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|error| wrong(format!("not JSON: {error}")))?;
    let map = json.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| wrong("it has no object weight_map".into()))?;
    let mut files = BTreeSet::new();
    for (tensor, file) in map {
        let plain = |file: &&str| Path::new(file).file_name().is_some_and(|name| name == *file);
        let file = file.as_str().filter(plain).ok_or_else(|| {
            wrong(format!("weight_map names the file {file} for '{tensor}'; it must be a file of the same folder"))
        })?;
        files.insert(file.to_string());
    }
    match files.is_empty() {
        true => Err(wrong("its weight_map is empty".into())),
        false => Ok(files.into_iter().collect()),
    }
}

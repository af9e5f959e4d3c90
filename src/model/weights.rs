//! Parameters of a model: mapped safetensors files, one or several by an index; or a mapped GGUF file.
//!
//! Matrices stay where the files lie and are read in their own type or blocks; the arena counts their bytes under `weights` as if
//! it held them, since every pass reads all of them. Where a format is asked for, they are encoded in the arena instead, and
//! those whose rows a GGUF file has in another order are copied there.
//! Vectors (norms and biases) are widened to f32, which is less than
//! a thousandth. Every tensor that the configuration asks for must be there in its shape, and none that it does not
//! know: a bias that nobody adds would make the results wrong.

use super::gguf::{Gguf, Located, is_gguf, more};
use super::linear::Linear;
use super::parameters::{Block, Make, Role, Stack, Tree};
use super::{Config, ModelError};
use crate::format::RowFormat;
use crate::memory::{Arena, ArenaError, Buffer, Claim, Label};
use crate::tensor::file::{Entry, TensorFile, read_as};
use crate::tensor::{DType, Rows, TensorView};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A matrix `[rows, width]` in the format in which it is kept.
#[derive(Clone)]
pub struct Matrix {
    bytes: Arc<Bytes>,
    range: Range<usize>,
    format: RowFormat,
    rows: usize,
    width: usize,
}

/// Where a matrix lies.
enum Bytes {
    Mapped(Arc<TensorFile>),
    Gguf(Arc<Gguf>),
    /// What cannot be read where it lies in its file, or is kept in another format.
    Held(Buffer<u8>),
}

impl Matrix {
    /// All rows.
    pub fn all(&self) -> Rows<'_> {
        self.format.rows(self.bytes(), [self.rows, self.width])
    }

    /// Its elements, as they lie.
    pub(super) fn bytes(&self) -> &[u8] {
        match &*self.bytes {
            Bytes::Mapped(file) => file.bytes(self.range.clone()),
            Bytes::Gguf(file) => file.bytes(self.range.clone()),
            Bytes::Held(bytes) => &bytes[self.range.clone()],
        }
    }

    /// The same with plain elements: itself, or widened in the arena.
    pub(super) fn plain(&self, arena: &Arena) -> Result<Matrix, ArenaError> {
        match self.format.dtype() {
            Some(_) => Ok(self.clone()),
            None => self.encoded(RowFormat::plain(DType::F32), arena),
        }
    }

    /// A matrix `[N, Hq * D]` of plain elements as `[1, Hq, D, N]`; `None` if it is coded.
    pub(super) fn by_head(&self, head_dim: usize) -> Option<TensorView<'_>> {
        let dims = [1, self.rows, self.width / head_dim, head_dim];
        Some(TensorView::contiguous(self.format.dtype()?, dims, self.bytes()).permuted([0, 2, 3, 1]))
    }

    /// How rows are kept.
    pub(super) fn format(&self) -> RowFormat {
        self.format
    }

    /// The same in another format, in the arena.
    fn encoded(&self, format: RowFormat, arena: &Arena) -> Result<Matrix, ArenaError> {
        let row_bytes = format.row_bytes(self.width);
        let mut bytes = arena.alloc::<u8>(Label::Weights, self.rows * row_bytes)?;
        let rows = bytes.par_chunks_mut(row_bytes).enumerate();
        rows.for_each_init(
            || vec![0.0; self.width],
            |widened, (row, to)| {
                self.all().skip(row).first(1).widen(widened);
                format.encode(widened, self.width, to);
            },
        );
        let (range, bytes) = (0..bytes.len(), Arc::new(Bytes::Held(bytes)));
        Ok(Matrix { bytes, range, format, rows: self.rows, width: self.width })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Some of the rows, as a matrix of its own in the same memory.
    fn part(&self, rows: Range<usize>) -> Matrix {
        let row_bytes = self.format.row_bytes(self.width);
        let range = self.range.start + rows.start * row_bytes..self.range.start + rows.end * row_bytes;
        Matrix { range, rows: rows.len(), ..self.clone() }
    }
}

/// Parameters of a block.
pub struct Layer {
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    /// Weights of the norms of each head of q and of k.
    pub(super) qk_norm: Option<[Buffer<f32>; 2]>,
    /// Before attention, after it, before the MLP, after it.
    pub(super) before_attention: Buffer<f32>,
    pub(super) after_attention: Option<Buffer<f32>>,
    pub(super) before_mlp: Buffer<f32>,
    pub(super) after_mlp: Option<Buffer<f32>>,
}

/// All parameters.
pub struct Weights {
    /// `[vocab, hidden]`.
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Buffer<f32>,
    /// `[vocab, hidden]`; the embedding where they are tied.
    pub(super) output: Linear,
    dtype: DType,
    format: RowFormat,
    bytes: u64,
    /// Counts the mapped bytes for as long as they are used.
    _mapped: Claim,
}

impl Weights {
    /// Maps the files of a folder and finds every parameter of `config` in them. Matrices are kept in `format`, or where
    /// none is asked for in that of their files.
    ///
    /// # Errors
    /// When a file is missing or damaged, a tensor is missing or has another shape or a type that is not read, there is
    /// one that the configuration does not know, or the arena has no room.
    pub fn open(folder: &Path, config: &Config, format: Option<RowFormat>, arena: &Arena) -> Result<Self, ModelError> {
        let mut found = Found { format, ..Found::open(folder, config, arena)? };
        let Tree { embedding, blocks, norm, output } = config.parameters(&mut found)?;
        found.finish()?;
        let output = Linear::new(output.unwrap_or_else(|| embedding.clone()), None);
        let layers = blocks.into_iter().map(|block| layer(config, block)).collect();
        let (dtype, bytes) = (found.dtype, found.mapped_bytes + found.held_bytes);
        let most = found.elements.iter().max_by_key(|(_, elements)| *elements);
        let format = most.map_or(RowFormat::plain(dtype), |&(format, _)| format);
        let mapped = arena.claim(Label::Weights, found.mapped_bytes)?;
        Ok(Weights { embedding, layers, norm, output, dtype, format, bytes, _mapped: mapped })
    }

    /// Element type of the embedding in its file, which is that of all matrices in most folders; f32 where it is quantised.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How matrices are kept; of a file of several formats, the one of most elements.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Bytes of all parameters, as the arena counts them.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Where tensors are found by name.
enum Source {
    /// Files, and in which of them a tensor lies.
    Folder(Vec<Arc<TensorFile>>, BTreeMap<String, (usize, Entry)>),
    Gguf(Arc<Gguf>),
}

/// The tensors of a model by name, and which were taken.
pub(super) struct Found<'a> {
    folder: PathBuf,
    config: &'a Config,
    arena: &'a Arena,
    source: Source,
    /// Where matrices are kept in another format than that of their files.
    format: Option<RowFormat>,
    /// Element type of the embedding.
    dtype: DType,
    /// Elements of matrices in each format.
    elements: Vec<(RowFormat, usize)>,
    taken: BTreeSet<String>,
    mapped_bytes: u64,
    held_bytes: u64,
}

impl<'a> Found<'a> {
    pub fn open(folder: &Path, config: &'a Config, arena: &'a Arena) -> Result<Self, ModelError> {
        let source = if is_gguf(folder) { Source::Gguf(Arc::new(Gguf::open(folder)?)) } else { Self::files(folder)? };
        let (folder, taken) = (folder.to_path_buf(), BTreeSet::new());
        Ok(Found {
            folder,
            config,
            arena,
            source,
            format: None,
            dtype: DType::F32,
            elements: Vec::new(),
            taken,
            mapped_bytes: 0,
            held_bytes: 0,
        })
    }

    fn files(folder: &Path) -> Result<Source, ModelError> {
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for file in tensor_files(folder)? {
            for entry in file.entries()? {
                tensors.insert(entry.name.clone(), (files.len(), entry));
            }
            files.push(Arc::new(file));
        }
        Ok(Source::Folder(files, tensors))
    }

    fn wrong(&self, path: &Path, reason: String) -> ModelError {
        ModelError::Weights { path: path.into(), reason }
    }

    /// A tensor of a shape, where it lies.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Matrix, ModelError> {
        let missing = || self.wrong(&self.folder, format!("there is no tensor '{name}', {shape:?} is needed"));
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
        Matrix { bytes: Arc::new(bytes), range, format, rows, width }
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
        let config = self.config;
        let harmless = |name: &str| {
            // Frequencies that older folders hold, and an output projection that is not looked at.
            name.ends_with("rotary_emb.inv_freq") || (config.tied && name == "lm_head.weight")
        };
        let unknown = match &self.source {
            Source::Folder(_, tensors) => {
                tensors.keys().find(|name| !self.taken.contains(*name) && !harmless(name)).map(String::as_str)
            }
            Source::Gguf(gguf) => gguf.unknown(config, &self.taken),
        };
        unknown.map_or(Ok(()), |name| {
            let architecture = config.family.architecture();
            let reason = format!("tensor '{name}' is not part of a {architecture} as its configuration describes it");
            Err(self.wrong(&self.folder, reason))
        })
    }
}

impl Make for Found<'_> {
    type Matrix = Matrix;
    type Vector = Buffer<f32>;
    type Error = ModelError;

    fn matrix(&mut self, name: String, role: Role, shape: [usize; 2]) -> Result<Matrix, ModelError> {
        let counted = (self.mapped_bytes, self.held_bytes);
        let matrix = self.tensor(&name, &shape)?;
        if let (Role::Embedding, Some(dtype)) = (role, matrix.format.dtype()) {
            self.dtype = dtype;
        }
        let elements = shape[0] * shape[1];
        let format = self.format.unwrap_or(matrix.format);
        match self.elements.iter_mut().find(|(known, _)| *known == format) {
            Some((_, all)) => *all += elements,
            None => self.elements.push((format, elements)),
        }
        if format == matrix.format {
            return Ok(matrix);
        }
        if format.is_rotated() {
            let reason =
                format!("weights are multiplied as they lie, and {format} keeps rows rotated; leave hadamard out");
            return Err(self.wrong(&self.folder, reason));
        }
        let what = format!("the width of tensor '{name}'");
        format.check(&what, matrix.width).map_err(|error| self.wrong(&self.folder, error.to_string()))?;
        let matrix = matrix.encoded(format, self.arena)?;
        (self.mapped_bytes, self.held_bytes) = (counted.0, counted.1 + matrix.range.len() as u64);
        Ok(matrix)
    }

    /// Widened.
    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<Buffer<f32>, ModelError> {
        let counted = (self.mapped_bytes, self.held_bytes);
        let mut vector = self.arena.alloc(Label::Weights, width)?;
        self.widened(&name, width, &mut vector)?;
        (self.mapped_bytes, self.held_bytes) = counted;
        self.held_bytes += vector.bytes();
        Ok(vector)
    }
}

/// A block's parameters as the pass reads them.
fn layer(config: &Config, block: Block<Matrix, Buffer<f32>>) -> Layer {
    let (q, kv, ffn) = (config.q_width(), config.kv_width(), config.ffn);
    let [q, k, v] = linears(block.qkv, [q, kv, kv]);
    let ([gate, up], [o], [down]) =
        (linears(block.gate_up, [ffn, ffn]), linears(block.o, [config.hidden]), linears(block.down, [config.hidden]));
    let Block { before_attention, qk_norm, after_attention, before_mlp, after_mlp, .. } = block;
    Layer { q, k, v, o, gate, up, down, qk_norm, before_attention, after_attention, before_mlp, after_mlp }
}

/// The layers of a stack, of `rows` rows each: one tensor each, or all cut out of one.
fn linears<const N: usize>(stack: Stack<Matrix, Buffer<f32>>, rows: [usize; N]) -> [Linear; N] {
    let (matrices, mut biases, mut from) = (stack.matrices, stack.biases.into_iter(), 0);
    let mut at = 0;
    rows.map(|rows| {
        let matrix = &matrices[at.min(matrices.len() - 1)];
        let weight = if matrix.rows == rows { matrix.clone() } else { matrix.part(from..from + rows) };
        (at, from) = (at + 1, from + rows);
        Linear::new(weight, biases.next())
    })
}

/// All parameters of a folder widened to f32, behind one another in the order of [`Config::parameters`].
///
/// # Errors
/// As [`Weights::open`].
///
/// # Panics
/// When `to` is shorter than all parameters.
pub(crate) fn widen(folder: &Path, config: &Config, to: &mut [f32]) -> Result<(), ModelError> {
    let arena = Arena::unlimited();
    let mut widened = Widened { found: Found::open(folder, config, &arena)?, to };
    config.parameters(&mut widened)?;
    widened.found.finish()
}

struct Widened<'a> {
    found: Found<'a>,
    /// Room of the parameters that are still to come.
    to: &'a mut [f32],
}

impl<'a> Widened<'a> {
    fn room(&mut self, elements: usize) -> &'a mut [f32] {
        let (own, rest) = std::mem::take(&mut self.to).split_at_mut(elements);
        self.to = rest;
        own
    }
}

impl Make for Widened<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = ModelError;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<(), ModelError> {
        let matrix = self.found.tensor(&name, &shape)?;
        matrix.all().widen(self.room(shape[0] * shape[1]));
        Ok(())
    }

    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<(), ModelError> {
        let own = self.room(width);
        self.found.widened(&name, width, own)
    }
}

/// The files of a folder's weights, mapped: `model.safetensors`, or those that its index names.
///
/// # Errors
/// When one is missing or damaged.
pub(crate) fn tensor_files(folder: &Path) -> Result<Vec<TensorFile>, ModelError> {
    let (single, index) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
    let (names, index) = match (single.exists(), index.exists()) {
        (false, true) => (shards(&index)?, Some(index)),
        _ => (vec!["model.safetensors".to_string()], None),
    };
    let open = |name: String| {
        let path = folder.join(&name);
        if let Some(index) = index.clone().filter(|_| !path.exists()) {
            let reason = format!("it names the file '{name}', which is not there");
            return Err(ModelError::Weights { path: index, reason });
        }
        Ok(TensorFile::open(&path)?)
    };
    names.into_iter().map(open).collect()
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

/// Widens row `row` of a matrix, times a factor.
pub(super) fn embed(matrix: &Matrix, row: usize, factor: f32, to: &mut [f32]) {
    matrix.all().skip(row).first(1).widen(to);
    if factor != 1.0 {
        to.iter_mut().for_each(|x| *x *= factor);
    }
}

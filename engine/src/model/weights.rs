//! Parameters of a model: mapped safetensors files, one or several by an index; or a mapped GGUF file.
//!
//! Matrices stay where the files lie (`found.rs`) and are read in their own type or blocks; the arena counts their bytes
//! under `weights` as if it held them, since every pass reads all of them. Where a format is asked for, they are encoded in
//! the arena instead, those whose rows a GGUF file has in another order are copied there, and packed ones repacked ([`super::packed`]). Vectors (norms and biases)
//! are widened to f32, which is less than a thousandth. Every tensor that the configuration asks for must be there in its
//! shape, and none that it does not know: a bias that nobody adds would make the results wrong.

mod found;

pub(super) use found::Found;
pub use found::tensor_files;
pub(crate) use found::weight_paths;

use super::gguf::Gguf;
use super::linear::Linear;
use super::parameters::{Block, Make, Role, Stack, Tree};
use super::{Config, ModelError};
use crate::format::{FormatError, RowFormat};
use crate::memory::{Arena, ArenaError, Buffer, Claim, Label};
use crate::tensor::file::TensorFile;
use crate::tensor::{DType, Rows, TensorView};
use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A matrix `[rows, width]` in the format in which it is kept.
#[derive(Clone)]
pub struct Matrix {
    bytes: Arc<Bytes>,
    range: Range<usize>,
    format: RowFormat,
    rows: usize,
    width: usize,
    /// The input of each column, where that is not its own.
    order: Option<Arc<Buffer<u32>>>,
    /// The scale of its inputs as signed bytes, where its folder has one for all tokens.
    input_scale: Option<f32>,
}

/// Where a matrix lies.
enum Bytes {
    Mapped(Arc<TensorFile>),
    Gguf(Arc<Gguf>),
    /// What cannot be read where it lies in its file, or is kept in another format.
    Held(Buffer<u8>),
}

impl Matrix {
    /// All rows, with columns as they lie.
    pub fn all(&self) -> Rows<'_> {
        self.format.rows(self.bytes(), [self.rows, self.width])
    }

    /// The input of each column, where columns lie in another order than inputs.
    pub(crate) fn order(&self) -> Option<&[u32]> {
        self.order.as_ref().map(|order| &***order)
    }

    /// The scale of its inputs as signed bytes, where its folder has one for all tokens.
    pub(super) fn input_scale(&self) -> Option<f32> {
        self.input_scale
    }

    /// Widens the rows from `first` on, as many as `to` holds, with columns in the order of inputs.
    pub(super) fn widen(&self, first: usize, to: &mut [f32]) {
        self.all().skip(first).first(to.len() / self.width).widen(to);
        if let Some(order) = self.order() {
            let mut sorted = vec![0.0; self.width];
            for row in to.chunks_exact_mut(self.width) {
                order.iter().zip(&*row).for_each(|(&input, x)| sorted[input as usize] = *x);
                row.copy_from_slice(&sorted);
            }
        }
    }

    /// Its elements, as they lie.
    pub(super) fn bytes(&self) -> &[u8] {
        match &*self.bytes {
            Bytes::Mapped(file) => file.bytes(self.range.clone()),
            Bytes::Gguf(file) => file.bytes(self.range.clone()),
            Bytes::Held(bytes) => &bytes[self.range.clone()],
        }
    }

    /// Has the system map all pages of a matrix that is read where its file lies, so that the first pass does not stop at each.
    fn populate(&self) {
        match &*self.bytes {
            Bytes::Mapped(file) => file.populate(self.range.clone()),
            Bytes::Gguf(file) => file.populate(self.range.clone()),
            Bytes::Held(_) => {}
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
    pub(crate) fn format(&self) -> RowFormat {
        self.format
    }

    /// The same in another format, in the arena.
    fn encoded(&self, format: RowFormat, arena: &Arena) -> Result<Matrix, ArenaError> {
        self.changed(format, arena, |_, _| ())
    }

    /// The same after a `change` of each row, which is given with its number.
    pub(super) fn changed(
        &self,
        format: RowFormat,
        arena: &Arena,
        change: impl Fn(&mut [f32], usize) + Sync,
    ) -> Result<Matrix, ArenaError> {
        let row_bytes = format.row_bytes(self.width);
        let mut bytes = arena.alloc::<u8>(Label::Weights, self.rows * row_bytes)?;
        let rows = bytes.par_chunks_mut(row_bytes).enumerate();
        rows.for_each_init(
            || vec![0.0; self.width],
            |widened, (row, to)| {
                self.widen(row, widened);
                change(widened, row);
                format.encode(widened, self.width, to);
            },
        );
        let (range, bytes) = (0..bytes.len(), Arc::new(Bytes::Held(bytes)));
        Ok(Matrix { bytes, range, format, order: None, ..self.clone() })
    }

    /// A matrix of f32, whose bytes are in the arena.
    pub(super) fn held(bytes: Buffer<u8>, [rows, width]: [usize; 2]) -> Matrix {
        let (range, bytes, format) = (0..bytes.len(), Arc::new(Bytes::Held(bytes)), RowFormat::plain(DType::F32));
        Matrix { bytes, range, format, rows, width, order: None, input_scale: None }
    }

    /// Whether it is another one's memory.
    fn is(&self, other: &Matrix) -> bool {
        Arc::ptr_eq(&self.bytes, &other.bytes) && self.range == other.range
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
        let found = Found::open(folder, config, arena)?;
        let mut kept = Kept { found, arena, format, dtype: DType::F32, elements: Vec::new() };
        let Tree { embedding, blocks, norm, output } = config.parameters(&mut kept)?;
        let Kept { found, dtype, elements, .. } = kept;
        found.finish()?;
        let output = Linear::new(output.unwrap_or_else(|| embedding.clone()), None);
        let layers = blocks.into_iter().map(|block| layer(config, block)).collect();
        let bytes = found.mapped_bytes + found.held_bytes;
        let most = elements.iter().max_by_key(|(_, elements)| *elements);
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

    /// All matrices, in the order of [`Config::parameters`], of a stack each layer's own; norms and biases are handed to `take`.
    pub(crate) fn each<'a>(&'a self, take: &mut dyn FnMut(&[f32])) -> Vec<&'a Matrix> {
        let mut matrices = vec![&self.embedding];
        let mut stack = |layers: &[&'a Linear], take: &mut dyn FnMut(&[f32])| {
            matrices.extend(layers.iter().map(|layer| layer.weight()));
            layers.iter().filter_map(|layer| layer.bias()).for_each(take);
        };
        for Layer { q, k, v, o, gate, up, down, qk_norm, before_attention, after_attention, before_mlp, after_mlp } in
            &self.layers
        {
            take(before_attention);
            stack(&[q, k, v], take);
            qk_norm.iter().flatten().for_each(|norm| take(norm));
            stack(&[o], take);
            after_attention.iter().for_each(|norm| take(norm));
            take(before_mlp);
            stack(&[gate, up], take);
            stack(&[down], take);
            after_mlp.iter().for_each(|norm| take(norm));
        }
        take(&self.norm);
        matrices.extend(Some(self.output.weight()).filter(|output| !output.is(&self.embedding)));
        matrices
    }
}

/// Parameters as they are kept.
struct Kept<'a> {
    found: Found<'a>,
    arena: &'a Arena,
    /// Where matrices are kept in another format than that of their files.
    format: Option<RowFormat>,
    /// Element type of the embedding.
    dtype: DType,
    /// Elements of matrices in each format.
    elements: Vec<(RowFormat, usize)>,
}

impl Make for Kept<'_> {
    type Matrix = Matrix;
    type Vector = Buffer<f32>;
    type Error = ModelError;

    fn matrix(&mut self, name: String, role: Role, shape: [usize; 2]) -> Result<Matrix, ModelError> {
        let counted = (self.found.mapped_bytes, self.found.held_bytes);
        let matrix = self.found.tensor(&name, &shape)?;
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
            matrix.populate();
            return Ok(matrix);
        }
        Fitting(format).matrix(name, role, shape).map_err(|reason| self.found.refused(reason))?;
        let matrix = matrix.encoded(format, self.arena)?;
        (self.found.mapped_bytes, self.found.held_bytes) = (counted.0, counted.1 + matrix.range.len() as u64);
        Ok(matrix)
    }

    /// Widened.
    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<Buffer<f32>, ModelError> {
        let counted = (self.found.mapped_bytes, self.found.held_bytes);
        let mut vector = self.arena.alloc(Label::Weights, width)?;
        self.found.widened(&name, width, &mut vector)?;
        (self.found.mapped_bytes, self.found.held_bytes) = (counted.0, counted.1 + vector.bytes());
        Ok(vector)
    }
}

/// Bytes of a model's parameters as [`Weights::open`] keeps them (but for adapters, whose sums with matrices are f32), and
/// [`Weights::dtype`], with nothing repacked.
///
/// # Errors
/// As [`Weights::open`].
pub fn packed_bytes(folder: &Path, config: &Config, format: Option<RowFormat>) -> Result<(u64, DType), ModelError> {
    let arena = Arena::unlimited();
    let found = Found::open(folder, config, &arena)?;
    let mut counted = Counted { found, format, bytes: 0, dtype: DType::F32 };
    config.parameters(&mut counted)?;
    Ok((counted.bytes as u64, counted.dtype))
}

struct Counted<'a> {
    found: Found<'a>,
    format: Option<RowFormat>,
    bytes: usize,
    /// Element type of the embedding.
    dtype: DType,
}

impl Make for Counted<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = ModelError;

    fn matrix(&mut self, name: String, role: Role, [rows, width]: [usize; 2]) -> Result<(), ModelError> {
        let (own, beside) = self.found.kept(&name, [rows, width])?;
        if let (Role::Embedding, Some(dtype)) = (role, own.dtype()) {
            self.dtype = dtype;
        }
        let format = self.format.unwrap_or(own);
        self.bytes += rows * format.row_bytes(width) + if format == own { beside } else { 0 };
        Ok(())
    }

    fn vector(&mut self, _: String, _: Role, width: usize) -> Result<(), ModelError> {
        self.bytes += 4 * width;
        Ok(())
    }
}

/// Whether every matrix of a model can be kept in a format.
struct Fitting(RowFormat);

impl Make for Fitting {
    type Matrix = ();
    type Vector = ();
    type Error = String;

    fn matrix(&mut self, name: String, _: Role, [_, width]: [usize; 2]) -> Result<(), String> {
        let format = self.0;
        if format.is_rotated() {
            return Err(format!(
                "weights are multiplied as they lie, and {format} keeps rows rotated; take one that does not (no hadamard=true, \
                 no turboquant)"
            ));
        }
        if format.group_tokens().is_some() {
            return Err(FormatError::OfKeys { format: format.to_string() }.to_string());
        }
        format.check(&format!("the width of tensor '{name}'"), width).map_err(|error| error.to_string())
    }

    fn vector(&mut self, _: String, _: Role, _: usize) -> Result<(), String> {
        Ok(())
    }
}

impl Config {
    /// Refuses a format that the matrices of this model cannot be kept in.
    ///
    /// # Errors
    /// In words, with the first matrix that does not fit.
    pub fn check_weights(&self, format: RowFormat) -> Result<(), String> {
        self.parameters(&mut Fitting(format)).map(drop)
    }
}

/// A block's parameters as the pass reads them.
pub(super) fn layer(config: &Config, block: Block<Matrix, Buffer<f32>>) -> Layer {
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

/// Widens all parameters of a folder to f32, in the order of [`Config::parameters`], and hands them to `take`, of a matrix some
/// rows at a time.
///
/// # Errors
/// As [`Weights::open`].
pub(crate) fn widen(folder: &Path, config: &Config, take: &mut dyn FnMut(Role, &[f32])) -> Result<(), ModelError> {
    let arena = Arena::unlimited();
    let mut widened = Widened { found: Found::open(folder, config, &arena)?, take, values: Vec::new() };
    config.parameters(&mut widened)?;
    widened.found.finish()
}

struct Widened<'a> {
    found: Found<'a>,
    take: &'a mut dyn FnMut(Role, &[f32]),
    /// Those that are handed over next.
    values: Vec<f32>,
}

impl Make for Widened<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = ModelError;

    fn matrix(&mut self, name: String, role: Role, shape: [usize; 2]) -> Result<(), ModelError> {
        /// Rows that are widened together.
        const ROWS: usize = 64;
        let matrix = self.found.tensor(&name, &shape)?;
        for first in (0..shape[0]).step_by(ROWS) {
            self.values.resize(ROWS.min(shape[0] - first) * shape[1], 0.0);
            matrix.widen(first, &mut self.values);
            (self.take)(role, &self.values);
        }
        Ok(())
    }

    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<(), ModelError> {
        self.values.resize(width, 0.0);
        self.found.widened(&name, width, &mut self.values)?;
        (self.take)(role, &self.values);
        Ok(())
    }
}

/// All matrices of a model as its files keep them, in the order of [`Config::parameters`], and the bytes of them that are mapped; norms
/// and biases are widened and handed to `take`. Bytes that cannot be read where they lie are in the arena.
///
/// # Errors
/// As [`Weights::open`].
pub(crate) fn mapped(
    folder: &Path,
    config: &Config,
    arena: &Arena,
    take: &mut dyn FnMut(&[f32]),
) -> Result<(Vec<Matrix>, u64), ModelError> {
    let found = Found::open(folder, config, arena)?;
    let mut mapped = Mapped { found, take, matrices: Vec::new(), mapped_bytes: 0 };
    config.parameters(&mut mapped)?;
    mapped.found.finish()?;
    Ok((mapped.matrices, mapped.mapped_bytes))
}

struct Mapped<'a> {
    found: Found<'a>,
    take: &'a mut dyn FnMut(&[f32]),
    matrices: Vec<Matrix>,
    /// Of matrices alone.
    mapped_bytes: u64,
}

impl Make for Mapped<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = ModelError;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<(), ModelError> {
        let before = self.found.mapped_bytes;
        let matrix = self.found.tensor(&name, &shape)?;
        if matrix.order().is_some() {
            let reason =
                format!("the columns of '{name}' are in another order (desc_act), which gradients do not know");
            return Err(self.found.refused(reason));
        }
        self.matrices.push(matrix);
        self.mapped_bytes += self.found.mapped_bytes - before;
        Ok(())
    }

    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<(), ModelError> {
        let mut values = vec![0.0; width];
        self.found.widened(&name, width, &mut values)?;
        (self.take)(&values);
        Ok(())
    }
}

/// Widens row `row` of a matrix, times a factor.
pub(super) fn embed(matrix: &Matrix, row: usize, factor: f32, to: &mut [f32]) {
    matrix.widen(row, to);
    if factor != 1.0 {
        to.iter_mut().for_each(|x| *x *= factor);
    }
}

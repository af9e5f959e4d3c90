//! Packed matrices of Hugging Face folders: what GPTQ, AWQ, bitsandbytes and fp8 folders hold in place of a `weight`, and the rows of
//! this project's formats that it is repacked into as it is read.
//!
//! Each layout is a file that says of a module `[rows, width]` which tensors it is made of, checks them, and writes one row at a time:
//! the codes in another place, with the scales that belong to them. No number is changed, and nothing is widened. Layouts that have
//! inputs in another order (`desc_act`) keep that order in the rows, with which linear layers read their activations.

mod bitsandbytes;
mod fp8;
mod int8;
mod pack;
mod words;

#[cfg(test)]
mod tests;

pub(super) use pack::Codes;

use super::config::Packing;
use crate::format::RowFormat;
use crate::tensor::file::{Entry, TensorFile};
use half::{bf16, f16};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How a matrix is kept once it is repacked.
pub(super) struct Repacked<'a> {
    pub format: RowFormat,
    /// The input of each column, where that is not its own.
    pub order: Option<Vec<u32>>,
    /// The scale of its inputs as signed bytes, where the folder has one for all tokens.
    pub input_scale: Option<f32>,
    /// Writes a row.
    pub put: PutRow<'a>,
}

/// Writes the bytes of the row of this number.
type PutRow<'a> = Box<dyn Fn(usize, &mut [u8]) + Sync + 'a>;

/// The tensors of a folder by name: in which file each lies.
pub(super) type Tensors = BTreeMap<String, (usize, Entry)>;

/// The tensors of one linear layer.
pub(super) struct Module<'a> {
    /// Its name, without `.weight`.
    name: &'a str,
    files: &'a [Arc<TensorFile>],
    tensors: &'a Tensors,
    /// Names of what it is made of.
    pub taken: Vec<String>,
}

impl<'a> Module<'a> {
    pub fn new(name: &'a str, files: &'a [Arc<TensorFile>], tensors: &'a Tensors) -> Self {
        Module { name, files, tensors, taken: Vec::new() }
    }

    /// Repacks the layer's matrix `[rows, width]`.
    ///
    /// # Errors
    /// In words: which tensor is missing or wrong, how, and what would be right.
    pub fn repack(&mut self, packing: Packing, shape: [usize; 2]) -> Result<Repacked<'a>, String> {
        match packing {
            Packing::Gptq { bits: 4, group, less_one, ordered } => {
                words::gptq::<4>(self, shape, group, less_one, ordered)
            }
            Packing::Gptq { group, less_one, ordered, .. } => words::gptq::<8>(self, shape, group, less_one, ordered),
            Packing::Awq { group } => words::awq(self, shape, group),
            Packing::Nf4 => bitsandbytes::nf4(self, shape),
            Packing::Int8 => bitsandbytes::int8(self, shape),
            Packing::Fp8Blocks(block) => fp8::blocks(self, shape, block),
            Packing::Fp8 => fp8::rows(self, shape),
            Packing::Int8Rows => int8::rows(self, shape),
        }
    }

    /// The scale of each row, of which there may be one for all (`weight_scale`).
    fn row_scales(&mut self, rows: usize) -> Result<impl Fn(usize) -> f32 + Sync + use<'a>, String> {
        let scales = self.numbers(".weight_scale", &[&[rows, 1], &[rows], &[1], &[]])?;
        let is_one = scales.len() == 1;
        Ok(move |row| scales.at(if is_one { 0 } else { row }))
    }

    /// The scale of the layer's inputs, of all tokens, where there is one (`input_scale`).
    fn input_scale(&mut self) -> Result<Option<f32>, String> {
        if !self.has(".input_scale") {
            return Ok(None);
        }
        match self.numbers(".input_scale", &[&[1], &[]])?.at(0) {
            scale if scale > 0.0 => Ok(Some(scale)),
            scale => Err(format!("tensor '{}.input_scale' holds {scale}; it must be above 0", self.name)),
        }
    }

    /// Whether there is a tensor with this end to the layer's name.
    fn has(&self, end: &str) -> bool {
        self.tensors.contains_key(&format!("{}{end}", self.name))
    }

    /// A tensor's type, shape and bytes.
    fn entry(&mut self, end: &str) -> Result<(Dtype, &'a [usize], &'a [u8]), String> {
        let name = format!("{}{end}", self.name);
        let (file, entry) = self.tensors.get(&name).ok_or_else(|| format!("there is no tensor '{name}'"))?;
        self.taken.push(name);
        Ok((entry.dtype, &entry.shape, self.files[*file].bytes(entry.range.clone())))
    }

    /// The bytes of a tensor of this type and shape.
    fn bytes(&mut self, end: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8], String> {
        let (found, of, bytes) = self.entry(end)?;
        match found == dtype && of == shape {
            true => Ok(bytes),
            false => {
                let name = self.name;
                Err(format!("tensor '{name}{end}' is {found:?} {of:?}; {dtype:?} {shape:?} is needed"))
            }
        }
    }

    /// Words of 32 bits.
    fn words(&mut self, end: &str, shape: &[usize]) -> Result<Words<'a>, String> {
        self.bytes(end, Dtype::I32, shape).map(Words)
    }

    /// Finite numbers of one of these shapes.
    fn numbers(&mut self, end: &str, shapes: &[&[usize]]) -> Result<Numbers<'a>, String> {
        let (dtype, of, bytes) = self.entry(end)?;
        let name = self.name;
        if !shapes.contains(&of) {
            let wanted: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
            return Err(format!("tensor '{name}{end}' has shape {of:?}; {} is needed", wanted.join(" or ")));
        }
        if !matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(format!("tensor '{name}{end}' is {dtype:?}; F32, F16 or BF16 are read"));
        }
        let numbers = Numbers { bytes, dtype };
        match (0..numbers.len()).map(|at| numbers.at(at)).enumerate().find(|(_, x)| !x.is_finite()) {
            Some((at, x)) => Err(format!("tensor '{name}{end}' holds {x} at {at}; every number must be finite")),
            None => Ok(numbers),
        }
    }
}

/// Words of 32 bits, of any alignment.
#[derive(Clone, Copy)]
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn at(self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[4 * at..][..4].try_into().expect("four bytes"))
    }
}

/// Floats, of any alignment.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
}

impl Numbers<'_> {
    fn len(self) -> usize {
        self.bytes.len() / if self.dtype == Dtype::F32 { 4 } else { 2 }
    }

    fn at(self, at: usize) -> f32 {
        let two = || self.bytes[2 * at..][..2].try_into().expect("two bytes");
        match self.dtype {
            Dtype::F16 => f16::from_le_bytes(two()).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes(two()).to_f32(),
            _ => f32::from_le_bytes(self.bytes[4 * at..][..4].try_into().expect("four bytes")),
        }
    }
}

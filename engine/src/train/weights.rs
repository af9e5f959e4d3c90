//! The numbers of a model at work: in f32, with matrices rounded to bf16, or frozen as they lie packed in their file.
//!
//! What is frozen is only read. In bf16 its matrices take half the bytes, and their products twice the speed where the
//! processor multiplies pairs of bf16 (`device/simd/dense.rs`); norms and biases stay f32. Packed matrices are decoded a
//! panel at a time, as they are multiplied.

use super::heads::round;
use super::parameters::{Group, Parameter, Parameters};
use super::run::TrainError;
use crate::device::Cpu;
use crate::format::RowFormat;
use crate::memory::{Arena, ArenaError, Buffer, Claim, Label};
use crate::model::{Matrix, Model, mapped, widen};
use crate::tensor::{DType, RowCode, Rows, Strided};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use std::path::Path;

/// Where a model's numbers are read.
#[derive(Clone, Copy)]
pub enum Weights<'a> {
    /// All parameters, behind one another.
    F32(&'a [f32]),
    /// Parameters behind one another, from the one on that lies there among all.
    Part(&'a [f32], usize),
    /// Matrices and vectors, behind one another each.
    Bf16(&'a [bf16], &'a [f32]),
    /// Matrices as their file keeps them, in the order of all parameters, each with its first element among all; vectors behind one
    /// another. Coded ones are multiplied as bf16, or else as f32.
    Packed(&'a [(usize, Matrix)], &'a [f32], bool),
}

impl<'a> Weights<'a> {
    /// A norm's weights, or biases.
    pub(super) fn vector(self, group: &Group) -> &'a [f32] {
        match self {
            Weights::F32(all) => &all[group.range.clone()],
            Weights::Part(part, first) => &part[group.range.start - first..group.range.end - first],
            Weights::Bf16(_, vectors) | Weights::Packed(_, vectors, _) => &vectors[group.of_kind.clone()],
        }
    }

    /// Whether coded rows are rounded to bf16 where they are multiplied.
    pub(super) fn rounds(self) -> bool {
        matches!(self, Weights::Packed(_, _, true))
    }

    /// What makes up matrices below each other, with rows of `width`: each with its first row.
    pub(super) fn matrices(self, group: &Group, width: usize) -> Vec<(usize, Rows<'a>)> {
        match self {
            Weights::Packed(matrices, ..) => {
                let first = matrices.partition_point(|(start, _)| *start < group.range.start);
                let within = matrices[first..].iter().take_while(|(start, _)| *start < group.range.end);
                within.map(|(start, matrix)| ((start - group.range.start) / width, matrix.all())).collect()
            }
            _ => vec![(0, self.matrix(group, width))],
        }
    }

    /// Matrices below each other, with rows of `width`, as one; of packed ones the first.
    pub(super) fn matrix(self, group: &Group, width: usize) -> Rows<'a> {
        let count = group.range.len() / width;
        match self {
            Weights::F32(_) | Weights::Part(..) => {
                Rows::F32(Strided::new(self.vector(group), [width, 1], count, width))
            }
            Weights::Bf16(matrices, _) => {
                Rows::Bf16(Strided::new(&matrices[group.of_kind.clone()], [width, 1], count, width))
            }
            Weights::Packed(..) => self.matrices(group, width)[0].1,
        }
    }
}

/// Numbers that passes only read: a model that stays as it is, or what one that is trained is rounded to.
pub enum Frozen {
    /// In f32.
    F32(Buffer<f32>),
    /// Matrices in bf16, and vectors.
    Bf16(Buffer<bf16>, Buffer<f32>),
    /// Matrices as their file keeps them.
    Packed(Packed),
}

/// A model's matrices as their file keeps them, and vectors in f32.
pub struct Packed {
    matrices: Vec<(usize, Matrix)>,
    vectors: Buffer<f32>,
    rounds: bool,
    /// Counts the mapped bytes for as long as they are used.
    _mapped: Claim,
}

impl Packed {
    /// Maps a model's files. Coded matrices are multiplied in the type of `parameters`.
    ///
    /// # Errors
    /// As [`Frozen::open`].
    pub fn open(folder: &Path, parameters: &Parameters, arena: &Arena) -> Result<Self, TrainError> {
        let [_, of_vectors] = parameters.counts();
        let mut vectors = arena.alloc(Label::Weights, of_vectors)?;
        let mut rest = &mut *vectors;
        let (matrices, mapped_bytes) = mapped(folder, &parameters.config, arena, &mut |values| {
            next(&mut rest, values.len()).copy_from_slice(values);
        })?;
        let starts = parameters.all.iter().filter(|one| one.role.decays()).map(|one| one.range.start);
        let matrices = starts.zip(matrices).collect();
        let rounds = parameters.dtype != DType::F32;
        Ok(Packed { matrices, vectors, rounds, _mapped: arena.claim(Label::Weights, mapped_bytes)? })
    }

    /// Those of a model that is open, whose matrices stay where they are.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When columns of a matrix lie in an order of their own, which gradients do not know.
    pub fn of_model(model: &Model, parameters: &Parameters, arena: &Arena) -> Result<Self, ArenaError> {
        let [_, of_vectors] = parameters.counts();
        let mut vectors = arena.alloc(Label::Weights, of_vectors)?;
        let mut rest = &mut *vectors;
        let all = model.weights.each(&mut |values| next(&mut rest, values.len()).copy_from_slice(values));
        let mut places = parameters.all.iter().filter(|one| one.role.decays()).map(|one| one.range.clone());
        let (mut place, mut matrices) = (0..0, Vec::with_capacity(all.len()));
        for matrix in all {
            assert!(matrix.order().is_none(), "columns in the order of inputs");
            // A parameter is one matrix, or several below each other.
            if place.is_empty() {
                place = places.next().expect("a model with these parameters");
            }
            matrices.push((place.start, matrix.clone()));
            place.start += matrix.rows() * matrix.width();
        }
        let (rounds, _mapped) = (parameters.dtype != DType::F32, arena.claim(Label::Weights, 0)?);
        Ok(Packed { matrices, vectors, rounds, _mapped })
    }

    /// Bytes of all of them, by their formats.
    pub fn bytes(&self) -> u64 {
        let of = |matrix: &Matrix| (matrix.rows() * matrix.format().row_bytes(matrix.width())) as u64;
        self.matrices.iter().map(|(_, matrix)| of(matrix)).sum::<u64>() + 4 * self.vectors.len() as u64
    }

    /// Whether any matrix is kept in blocks of few bits.
    pub fn is_coded(&self) -> bool {
        self.matrices.iter().any(|(_, matrix)| matrix.format().dtype().is_none())
    }
}

impl Frozen {
    /// Reads a model's files; takes [`Parameters::bytes`].
    ///
    /// # Errors
    /// When a file cannot be read or does not fit, or the arena has no room.
    pub fn open(folder: &Path, parameters: &Parameters, arena: &Arena) -> Result<Self, TrainError> {
        if parameters.dtype == DType::F32 {
            return Ok(Frozen::F32(Self::f32(folder, parameters, arena, Label::Weights)?));
        }
        let [of_matrices, of_vectors] = parameters.counts();
        let mut matrices = arena.alloc(Label::Weights, of_matrices)?;
        let mut vectors = arena.alloc(Label::Weights, of_vectors)?;
        let (mut rest, mut rest_of_vectors) = (&mut *matrices, &mut *vectors);
        widen(folder, &parameters.config, &mut |role, values| match role.decays() {
            true => next(&mut rest, values.len()).convert_from_f32_slice(values),
            false => next(&mut rest_of_vectors, values.len()).copy_from_slice(values),
        })?;
        Ok(Frozen::Bf16(matrices, vectors))
    }

    /// Room for numbers that come later, in the type of `parameters`.
    ///
    /// # Errors
    /// When the arena has none.
    pub fn room(parameters: &Parameters, arena: &Arena) -> Result<Self, ArenaError> {
        if parameters.dtype == DType::F32 {
            return Ok(Frozen::F32(arena.alloc(Label::Weights, parameters.count())?));
        }
        let [matrices, vectors] = parameters.counts();
        Ok(Frozen::Bf16(arena.alloc(Label::Weights, matrices)?, arena.alloc(Label::Weights, vectors)?))
    }

    /// Puts the numbers of a parameter in their place: of a matrix what they are in a format, where one is asked for.
    ///
    /// # Panics
    /// When matrices are packed.
    pub fn put(&mut self, cpu: &Cpu, one: &Parameter, from: &[f32], format: Option<RowFormat>) {
        let width = one.shape[one.shape.len() - 1];
        match self {
            Frozen::F32(all) => {
                let to = &mut all[one.range.clone()];
                match format {
                    None => to.copy_from_slice(from),
                    Some(format) => {
                        let rows = to.par_chunks_exact_mut(width).zip(from.par_chunks_exact(width));
                        cpu.install(|| rows.for_each(|(to, from)| coded(format, from, to)));
                    }
                }
            }
            Frozen::Bf16(matrices, vectors) => match (one.role.decays(), format) {
                (false, _) => vectors[one.of_kind.clone()].copy_from_slice(from),
                (true, None) => drop(round(cpu, from, &mut matrices[one.of_kind.clone()])),
                (true, Some(format)) => {
                    let rows = matrices[one.of_kind.clone()].par_chunks_exact_mut(width);
                    let each = |row: &mut Vec<f32>, (to, from): (&mut [bf16], &[f32])| {
                        coded(format, from, row);
                        to.convert_from_f32_slice(row);
                    };
                    let rows = rows.zip(from.par_chunks_exact(width));
                    cpu.install(|| rows.for_each_init(|| vec![0.0; width], each));
                }
            },
            Frozen::Packed(_) => panic!("packed matrices stay as they are"),
        }
    }

    /// All parameters of a model's files in f32.
    ///
    /// # Errors
    /// As [`Frozen::open`].
    pub fn f32(folder: &Path, parameters: &Parameters, arena: &Arena, label: Label) -> Result<Buffer<f32>, TrainError> {
        let mut all = arena.alloc(label, parameters.count())?;
        let mut rest = &mut *all;
        widen(folder, &parameters.config, &mut |_, values| next(&mut rest, values.len()).copy_from_slice(values))?;
        Ok(all)
    }

    /// The weights.
    pub fn all(&self) -> Weights<'_> {
        match self {
            Frozen::F32(all) => Weights::F32(all),
            Frozen::Bf16(matrices, vectors) => Weights::Bf16(matrices, vectors),
            Frozen::Packed(Packed { matrices, vectors, rounds, .. }) => Weights::Packed(matrices, vectors, *rounds),
        }
    }
}

/// What a row is once it is kept in a format.
fn coded(format: RowFormat, from: &[f32], to: &mut [f32]) {
    let mut bytes = vec![0; format.row_bytes(from.len())];
    format.encode(from, from.len(), &mut bytes);
    format.decode(&bytes, 0, to);
}

/// Takes `count` elements from the start of what is left.
fn next<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    rest.split_off_mut(..count).expect("room for every parameter")
}

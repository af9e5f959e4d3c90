//! The numbers of a model at work: all in f32 where any is trained, or frozen with matrices rounded to bf16.
//!
//! What is frozen is only read. In bf16 its matrices take half the bytes, and their products twice the speed where the
//! processor multiplies pairs of bf16 (`device/simd/dense.rs`); norms and biases stay f32.

use super::parameters::{Group, Parameters};
use super::run::TrainError;
use crate::memory::{Arena, Buffer, Label};
use crate::model::widen;
use crate::tensor::{DType, Rows, Strided};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::path::Path;

/// Where a model's numbers are read.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// All parameters, behind one another.
    F32(&'a [f32]),
    /// Parameters behind one another, from the one on that lies there among all.
    Part(&'a [f32], usize),
    /// Matrices and vectors, behind one another each.
    Bf16(&'a [bf16], &'a [f32]),
}

impl<'a> Weights<'a> {
    /// A norm's weights, or biases.
    pub(super) fn vector(self, group: &Group) -> &'a [f32] {
        match self {
            Weights::F32(all) => &all[group.range.clone()],
            Weights::Part(part, first) => &part[group.range.start - first..group.range.end - first],
            Weights::Bf16(_, vectors) => &vectors[group.of_kind.clone()],
        }
    }

    /// Matrices below each other, with rows of `width`.
    pub(super) fn matrix(self, group: &Group, width: usize) -> Rows<'a> {
        let count = group.range.len() / width;
        match self {
            Weights::F32(_) | Weights::Part(..) => {
                Rows::F32(Strided::new(self.vector(group), [width, 1], count, width))
            }
            Weights::Bf16(matrices, _) => {
                Rows::Bf16(Strided::new(&matrices[group.of_kind.clone()], [width, 1], count, width))
            }
        }
    }
}

/// The weights of a model that stays as it is.
pub enum Frozen {
    /// In f32.
    F32(Buffer<f32>),
    /// Matrices in bf16, and vectors.
    Bf16(Buffer<bf16>, Buffer<f32>),
}

impl Frozen {
    /// Reads a model's files; takes [`Parameters::bytes`].
    ///
    /// # Errors
    /// When a file cannot be read or does not fit, or the arena has no room.
    pub fn open(folder: &Path, parameters: &Parameters, arena: &Arena) -> Result<Self, TrainError> {
        if parameters.dtype == DType::F32 {
            let mut all = arena.alloc(Label::Weights, parameters.count())?;
            let mut rest = &mut *all;
            widen(folder, &parameters.config, &mut |_, values| next(&mut rest, values.len()).copy_from_slice(values))?;
            return Ok(Frozen::F32(all));
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

    /// The weights.
    pub fn all(&self) -> Weights<'_> {
        match self {
            Frozen::F32(all) => Weights::F32(all),
            Frozen::Bf16(matrices, vectors) => Weights::Bf16(matrices, vectors),
        }
    }
}

/// Takes `count` elements from the start of what is left.
fn next<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    rest.split_off_mut(..count).expect("room for every parameter")
}

//! Strided, read-only views whose rows can be had in f32.

use super::DType;
use super::dtype::widen_bf16;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ndarray::{ArrayView4, s};
use std::ops::Range;

/// A read-only view `[d0, d1, d2, d3]` of any strides over elements of any [`DType`].
#[derive(Clone, Copy)]
pub enum TensorView<'a> {
    /// f32 elements.
    F32(ArrayView4<'a, f32>),
    /// bf16 elements.
    Bf16(ArrayView4<'a, bf16>),
    /// f16 elements.
    F16(ArrayView4<'a, f16>),
}

/// Runs the same expression for each element type.
macro_rules! each_dtype {
    ($view:expr, $array:ident => $body:expr) => {
        match $view {
            TensorView::F32($array) => $body,
            TensorView::Bf16($array) => $body,
            TensorView::F16($array) => $body,
        }
    };
}

impl<'a> TensorView<'a> {
    /// A view of contiguous raw elements.
    ///
    /// # Panics
    /// When `bytes` is not as long as `dims` say, or not aligned to the element.
    pub fn contiguous(dtype: DType, dims: [usize; 4], bytes: &'a [u8]) -> Self {
        fn shaped<T: bytemuck::Pod>(dims: [usize; 4], bytes: &[u8]) -> ArrayView4<'_, T> {
            ArrayView4::from_shape(dims, bytemuck::cast_slice(bytes)).expect("dims and length of a tensor agree")
        }
        match dtype {
            DType::F32 => TensorView::F32(shaped(dims, bytes)),
            DType::Bf16 => TensorView::Bf16(shaped(dims, bytes)),
            DType::F16 => TensorView::F16(shaped(dims, bytes)),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            TensorView::F32(_) => DType::F32,
            TensorView::Bf16(_) => DType::Bf16,
            TensorView::F16(_) => DType::F16,
        }
    }

    /// The four extents.
    pub fn dims(&self) -> [usize; 4] {
        each_dtype!(self, array => array.dim().into())
    }

    /// The tokens `range` of the third axis (the sequence).
    pub fn tokens(&self, range: Range<usize>) -> TensorView<'a> {
        match *self {
            TensorView::F32(array) => TensorView::F32(array.slice_move(s![.., .., range, ..])),
            TensorView::Bf16(array) => TensorView::Bf16(array.slice_move(s![.., .., range, ..])),
            TensorView::F16(array) => TensorView::F16(array.slice_move(s![.., .., range, ..])),
        }
    }

    /// The view with its axes in another order, as `[B, L, H, D]` data seen as `[B, H, L, D]`.
    pub fn permuted(&self, axes: [usize; 4]) -> TensorView<'a> {
        match *self {
            TensorView::F32(array) => TensorView::F32(array.permuted_axes(axes)),
            TensorView::Bf16(array) => TensorView::Bf16(array.permuted_axes(axes)),
            TensorView::F16(array) => TensorView::F16(array.permuted_axes(axes)),
        }
    }

    /// Rows `start .. start + count` of head `[d0, d1]` in f32, `[count, D]` contiguous: the memory itself where it
    /// is contiguous f32, else converted into `scratch`.
    ///
    /// # Panics
    /// When the rows do not exist, or must be converted and `scratch` is shorter than `count * D`.
    pub fn rows<'s>(&self, d0: usize, d1: usize, start: usize, count: usize, scratch: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's,
    {
        let scratch_len = count * self.dims()[3];
        if let TensorView::F32(array) = *self {
            if let Some(rows) = array.slice_move(s![d0, d1, start..start + count, ..]).to_slice() {
                return rows;
            }
        }
        let scratch = &mut scratch[..scratch_len];
        self.read_rows(d0, d1, start, scratch);
        scratch
    }

    /// Copies rows from `start` on of head `[d0, d1]` into `target` as f32, as many as fit.
    ///
    /// # Panics
    /// When the rows do not exist.
    pub fn read_rows(&self, d0: usize, d1: usize, start: usize, target: &mut [f32]) {
        let width = self.dims()[3];
        let count = target.len() / width;
        match *self {
            TensorView::F32(array) => {
                copy(array, d0, d1, start..start + count, target, |from, to| to.copy_from_slice(from), |x| x)
            }
            TensorView::Bf16(array) => {
                copy(array, d0, d1, start..start + count, target, widen_bf16, |x| x.to_f32())
            }
            TensorView::F16(array) => copy(
                array,
                d0,
                d1,
                start..start + count,
                target,
                |from, to| from.convert_to_f32_slice(to),
                |x| x.to_f32(),
            ),
        }
    }
}

/// Copies rows of one head: whole slices where memory is contiguous, element by element where it is not.
fn copy<T: Copy>(
    array: ArrayView4<'_, T>,
    d0: usize,
    d1: usize,
    rows: Range<usize>,
    target: &mut [f32],
    convert: impl Fn(&[T], &mut [f32]),
    widen: impl Fn(T) -> f32,
) {
    let block = array.slice_move(s![d0, d1, rows, ..]);
    if let Some(slice) = block.to_slice() {
        return convert(slice, target);
    }
    let width = block.ncols();
    for (row, out) in block.rows().into_iter().zip(target.chunks_exact_mut(width)) {
        match row.to_slice() {
            Some(slice) => convert(slice, out),
            None => out.iter_mut().zip(row.iter()).for_each(|(to, &from)| *to = widen(from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::{Arena, Label};
    use crate::tensor::{DType, Tensor};

    #[test]
    fn rows_of_contiguous_transposed_and_half_views_agree() {
        let arena = Arena::unlimited();
        let dims = [2, 3, 5, 4];
        let values: Vec<f32> = (0..120).map(|index| index as f32).collect();
        for dtype in DType::ALL {
            let tensor = Tensor::from_f32(&arena, Label::Input, dtype, dims, &values).unwrap();
            // The same numbers stored as [B, L, H, D] and seen through permuted axes.
            let mut moved = vec![0.0; 120];
            for (index, &value) in values.iter().enumerate() {
                let (b, h, l, d) = (index / 60, index / 20 % 3, index / 4 % 5, index % 4);
                moved[((b * 5 + l) * 3 + h) * 4 + d] = value;
            }
            let stored = Tensor::from_f32(&arena, Label::Input, dtype, [2, 5, 3, 4], &moved).unwrap();
            let permuted = stored.view().permuted([0, 2, 1, 3]);
            assert_eq!(permuted.dims(), dims);
            let (mut one, mut two) = (vec![0.0; 12], vec![0.0; 12]);
            let straight = tensor.view().rows(1, 2, 1, 3, &mut one).to_vec();
            assert_eq!(straight, permuted.rows(1, 2, 1, 3, &mut two));
            assert_eq!(straight[0], 104.0);
            assert_eq!(tensor.view().tokens(1..4).rows(1, 2, 0, 3, &mut one), straight);
        }
    }

    #[test]
    fn the_first_non_finite_element_is_found_by_position() {
        let arena = Arena::unlimited();
        let mut values = vec![1.0; 24];
        values[17] = f32::INFINITY;
        let tensor = Tensor::from_f32(&arena, Label::Input, DType::F16, [1, 2, 4, 3], &values).unwrap();
        assert_eq!(tensor.first_non_finite(), Some(([0, 1, 1, 2], f32::INFINITY)));
    }
}

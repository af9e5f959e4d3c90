//! Strided, read-only views whose rows can be had in f32.

use super::{DType, Rows, Strided};
use half::{bf16, f16};
use ndarray::ArrayView4;
use std::ops::Range;

/// A read-only view `[d0, d1, d2, d3]` of any strides over elements of any [`DType`].
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    elements: Elements<'a>,
    dims: [usize; 4],
    /// Distance between neighbours along each axis, in elements.
    strides: [usize; 4],
    /// Where element `[0, 0, 0, 0]` lies.
    offset: usize,
}

#[derive(Clone, Copy)]
enum Elements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> TensorView<'a> {
    /// A view of contiguous raw elements.
    ///
    /// # Panics
    /// When `bytes` is not as long as `dims` say, or not aligned to the element.
    pub fn contiguous(dtype: DType, dims: [usize; 4], bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len(), dims.iter().product::<usize>() * dtype.bytes(), "dims and length of a tensor agree");
        let elements = match dtype {
            DType::F32 => Elements::F32(bytemuck::cast_slice(bytes)),
            DType::Bf16 => Elements::Bf16(bytemuck::cast_slice(bytes)),
            DType::F16 => Elements::F16(bytemuck::cast_slice(bytes)),
        };
        let strides = [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1];
        TensorView { elements, dims, strides, offset: 0 }
    }

    /// An ndarray view of f32, in any order of axes; `None` if its memory has gaps or runs backwards.
    pub fn from_ndarray(array: ArrayView4<'a, f32>) -> Option<Self> {
        let (dims, strides) = (array.dim().into(), array.strides().to_vec());
        let strides: Vec<usize> = strides.into_iter().map(usize::try_from).collect::<Result<_, _>>().ok()?;
        let elements = Elements::F32(array.to_slice_memory_order()?);
        Some(TensorView { elements, dims, strides: strides.try_into().ok()?, offset: 0 })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self.elements {
            Elements::F32(_) => DType::F32,
            Elements::Bf16(_) => DType::Bf16,
            Elements::F16(_) => DType::F16,
        }
    }

    /// The four extents.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The sequences `range` of the first axis.
    ///
    /// # Panics
    /// When there are fewer sequences.
    pub fn sequences(&self, range: Range<usize>) -> TensorView<'a> {
        assert!(range.start <= range.end && range.end <= self.dims[0], "sequences {range:?} of {}", self.dims[0]);
        let mut view = *self;
        view.dims[0] = range.len();
        view.offset += range.start * self.strides[0];
        view
    }

    /// The tokens `range` of the third axis (the sequence).
    ///
    /// # Panics
    /// When there are fewer tokens.
    pub fn tokens(&self, range: Range<usize>) -> TensorView<'a> {
        assert!(range.start <= range.end && range.end <= self.dims[2], "tokens {range:?} of {}", self.dims[2]);
        let mut view = *self;
        view.dims[2] = range.len();
        view.offset += range.start * self.strides[2];
        view
    }

    /// The view with its axes in another order, as `[B, L, H, D]` data seen as `[B, H, L, D]`.
    pub fn permuted(&self, axes: [usize; 4]) -> TensorView<'a> {
        TensorView { dims: axes.map(|axis| self.dims[axis]), strides: axes.map(|axis| self.strides[axis]), ..*self }
    }

    /// The rows of head `[d0, d1]` from `start` on, `[L - start, D]`, in their own type.
    ///
    /// # Panics
    /// When the head or row `start` does not exist.
    pub fn head(&self, d0: usize, d1: usize, start: usize) -> Rows<'a> {
        let [n0, n1, n2, width] = self.dims;
        assert!(d0 < n0 && d1 < n1 && start < n2, "row [{d0}, {d1}, {start}] of {:?}", self.dims);
        let first = self.offset + d0 * self.strides[0] + d1 * self.strides[1] + start * self.strides[2];
        let (strides, count) = ([self.strides[2], self.strides[3]], n2 - start);
        match self.elements {
            Elements::F32(elements) => Rows::F32(Strided::new(&elements[first..], strides, count, width)),
            Elements::Bf16(elements) => Rows::Bf16(Strided::new(&elements[first..], strides, count, width)),
            Elements::F16(elements) => Rows::F16(Strided::new(&elements[first..], strides, count, width)),
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
        let rows = self.head(d0, d1, start).first(count);
        assert_eq!(rows.count(), count, "rows [{d0}, {d1}, {start}..+{count}] of {:?}", self.dims);
        if let Some(rows) = rows.as_f32() {
            return rows;
        }
        rows.widen(scratch);
        &scratch[..count * self.dims[3]]
    }

    /// Copies rows from `start` on of head `[d0, d1]` into `target` as f32, as many as fit.
    ///
    /// # Panics
    /// When the rows do not exist.
    pub fn read_rows(&self, d0: usize, d1: usize, start: usize, target: &mut [f32]) {
        let count = target.len() / self.dims[3];
        let rows = self.head(d0, d1, start).first(count);
        assert_eq!(rows.count(), count, "rows [{d0}, {d1}, {start}..+{count}] of {:?}", self.dims);
        rows.widen(target);
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::{Arena, Label};
    use crate::tensor::{DType, Tensor, TensorView};

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
            // The last two axes exchanged twice: element by element, and back.
            let turned = tensor.view().permuted([0, 1, 3, 2]);
            assert_eq!(turned.rows(1, 2, 2, 1, &mut one)[..5], [102.0, 106.0, 110.0, 114.0, 118.0][..]);
            assert_eq!(turned.permuted([0, 1, 3, 2]).rows(1, 2, 1, 3, &mut one), straight);
        }
    }

    #[test]
    fn ndarray_views_are_taken_in_any_order_of_axes() {
        let array = ndarray::Array4::from_shape_fn((1, 2, 3, 4), |(_, h, l, d)| (h * 100 + l * 10 + d) as f32);
        let view = TensorView::from_ndarray(array.view()).unwrap();
        assert_eq!(view.rows(0, 1, 2, 1, &mut []), [120.0, 121.0, 122.0, 123.0]);
        let moved = TensorView::from_ndarray(array.view().permuted_axes([0, 2, 1, 3])).unwrap();
        assert_eq!(moved.dims(), [1, 3, 2, 4]);
        assert_eq!(moved.rows(0, 2, 1, 1, &mut [0.0; 4]), [120.0, 121.0, 122.0, 123.0]);
        assert!(TensorView::from_ndarray(array.slice(ndarray::s![.., .., ..;2, ..])).is_none());
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

//! Tensors of four axes in an arena, strided views of them, and safetensors files.
//!
//! Attention's tensors are all `[B, H, L, D]`, so four axes are all there is. An owned [`Tensor`] is contiguous; a
//! [`TensorView`] may have any strides (a transposed layout, a prefix of the sequence). Kernels never look at the
//! element type: they ask a view for rows in f32 and get the memory itself where it already is that.

mod dtype;
pub mod file;
mod rows;
pub mod stream;
mod view;

pub use dtype::DType;
pub use rows::{ChannelScales, Coded, RowCode, Rows, Strided};
pub use view::TensorView;

use crate::memory::{Arena, ArenaError, Buffer, Label};
use std::ops::Range;

/// A contiguous tensor `[d0, d1, d2, d3]`, last index fastest, in an arena.
pub struct Tensor {
    data: Buffer<u8>,
    dtype: DType,
    dims: [usize; 4],
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn zeros(arena: &Arena, label: Label, dtype: DType, dims: [usize; 4]) -> Result<Self, ArenaError> {
        let data = arena.alloc(label, Self::bytes_of(dtype, dims) as usize)?;
        Ok(Tensor { data, dtype, dims })
    }

    /// A tensor with the given values, rounded to `dtype`.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When `values` is not as long as `dims` say.
    pub fn from_f32(
        arena: &Arena,
        label: Label,
        dtype: DType,
        dims: [usize; 4],
        values: &[f32],
    ) -> Result<Self, ArenaError> {
        let mut tensor = Self::zeros(arena, label, dtype, dims)?;
        dtype.encode(values, tensor.bytes_mut());
        Ok(tensor)
    }

    /// The tokens in `ranges` of each head of elements `[B, H, L, D]`, one behind another.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When there are fewer tokens, or `bytes` are not as many as `dims` say.
    pub fn from_tokens(
        arena: &Arena,
        label: Label,
        dtype: DType,
        dims: [usize; 4],
        bytes: &[u8],
        ranges: &[Range<usize>],
    ) -> Result<Self, ArenaError> {
        assert_eq!(bytes.len() as u64, Self::bytes_of(dtype, dims), "bytes of a tensor {dims:?}");
        let [batch, heads, len, width] = dims;
        let (row, tokens) = (width * dtype.bytes(), ranges.iter().map(Range::len).sum());
        let mut tensor = Self::zeros(arena, label, dtype, [batch, heads, tokens, width])?;
        let lists = bytes.chunks_exact(len * row).zip(tensor.bytes_mut().chunks_exact_mut(tokens * row));
        for (from, mut to) in lists {
            for range in ranges {
                let (part, rest) = to.split_at_mut(range.len() * row);
                part.copy_from_slice(&from[range.start * row..range.end * row]);
                to = rest;
            }
        }
        Ok(tensor)
    }

    /// Bytes of a tensor of this type and shape: what [`Tensor::zeros`] takes from the arena.
    pub fn bytes_of(dtype: DType, dims: [usize; 4]) -> u64 {
        dims.iter().map(|&dim| dim as u64).product::<u64>() * dtype.bytes() as u64
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The four extents.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The raw elements.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The raw elements, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }

    /// The whole tensor as a view.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::contiguous(self.dtype, self.dims, &self.data)
    }

    /// All elements as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.dims.iter().product()];
        self.dtype.decode(&self.data, &mut values);
        values
    }

    /// Index `[d0, d1, d2, d3]` of the first NaN or infinity, if there is one.
    pub fn first_non_finite(&self) -> Option<([usize; 4], f32)> {
        let row_len = self.dims[3].max(1);
        let mut row = vec![0.0; row_len];
        for (index, bytes) in self.data.chunks_exact(row_len * self.dtype.bytes()).enumerate() {
            self.dtype.decode(bytes, &mut row);
            if let Some(last) = row.iter().position(|value| !value.is_finite()) {
                let [_, d1, d2, _] = self.dims;
                return Some(([index / (d1 * d2), index / d2 % d1, index % d2, last], row[last]));
            }
        }
        None
    }
}

//! What the kernels of a model's layers take: the structs of `kernels/model.cu`, made only from buffers that are large
//! enough for what the kernels do with them.

use super::problem::{has, short};
use super::{CudaError, DeviceBuffer};
use crate::tensor::DType;
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// Borrows the buffers whose addresses are in a struct.
type Borrowed<'a> = PhantomData<&'a DeviceBuffer>;

/// Rows of a table, by their numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Embedding<'a> {
    tokens: u64,
    table: u64,
    to: u64,
    width: i32,
    factor: f32,
    buffers: Borrowed<'a>,
}

// SAFETY: this struct and all below are `repr(C)` without padding and hold numbers only; their fields are those of the
// structs of the same names in kernels/model.cu (a test compares them). Their constructors compare buffers with extents.
unsafe impl DeviceRepr for Embedding<'_> {}

impl<'a> Embedding<'a> {
    /// `rows` rows of `width` elements, from a table whose rows the `tokens` (u32) are, from number `first` of their buffer
    /// on: whoever wrote these has compared them with its length.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small or an extent too large; so all below.
    pub fn new(
        (tokens, first): (&'a DeviceBuffer, usize),
        table: &'a DeviceBuffer,
        to: &'a mut DeviceBuffer,
        [rows, width]: [usize; 2],
        factor: f32,
    ) -> Result<Self, CudaError> {
        Ok(Embedding {
            tokens: has("tokens", tokens, 4 * (first + rows))? + 4 * first as u64,
            table: table.address(),
            to: has("embedded tokens", to, 4 * rows * width)?,
            width: short("row", width)?,
            factor,
            buffers: PhantomData,
        })
    }
}

/// Root-mean-square norms of rows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    from: u64,
    weight: u64,
    to: u64,
    width: i32,
    eps: f32,
    shift: f32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Embedding`.
unsafe impl DeviceRepr for Norm<'_> {}

impl<'a> Norm<'a> {
    /// `rows` rows of `width` elements of f32, from row `first` of `from` on; `eps` and `shift` as the model has them.
    pub fn new(
        (from, first): (&'a DeviceBuffer, usize),
        weight: &'a DeviceBuffer,
        to: &'a mut DeviceBuffer,
        [rows, width]: [usize; 2],
        [eps, shift]: [f32; 2],
    ) -> Result<Self, CudaError> {
        let from = has("rows", from, 4 * (first + rows) * width)? + 4 * (first * width) as u64;
        let to = has("norms", to, 4 * rows * width)?;
        Self::over([from, to], weight, width, [eps, shift])
    }

    /// The same in place.
    pub fn in_place(
        x: &'a mut DeviceBuffer,
        weight: &'a DeviceBuffer,
        [rows, width]: [usize; 2],
        [eps, shift]: [f32; 2],
    ) -> Result<Self, CudaError> {
        let x = has("rows", x, 4 * rows * width)?;
        Self::over([x, x], weight, width, [eps, shift])
    }

    fn over(
        [from, to]: [u64; 2],
        weight: &'a DeviceBuffer,
        width: usize,
        [eps, shift]: [f32; 2],
    ) -> Result<Self, CudaError> {
        let weight = has("weights of a norm", weight, 4 * width)?;
        Ok(Norm { from, weight, to, width: short("row", width)?, eps, shift, unused: 0, buffers: PhantomData })
    }
}

/// A product with the rows of a matrix of weights.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Linear<'a> {
    x: u64,
    w: u64,
    to: u64,
    rows: i32,
    depth: i32,
    width: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Embedding`.
unsafe impl DeviceRepr for Linear<'_> {}

impl<'a> Linear<'a> {
    /// `to[rows, width] = x[rows, depth] w[width, depth]ᵀ`, `w` of type `dtype` and the others of f32.
    pub fn new(
        x: &'a DeviceBuffer,
        (w, dtype): (&'a DeviceBuffer, DType),
        to: &'a mut DeviceBuffer,
        [rows, depth, width]: [usize; 3],
    ) -> Result<Self, CudaError> {
        Ok(Linear {
            x: has("rows", x, 4 * rows * depth)?,
            w: has("weights", w, dtype.bytes() * width * depth)?,
            to: has("products", to, 4 * rows * width)?,
            rows: short("rows", rows)?,
            depth: short("depth", depth)?,
            width: short("width", width)?,
            unused: 0,
            buffers: PhantomData,
        })
    }
}

/// Rows with heads side by side, and the same head by head.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    rows: u64,
    angles: u64,
    split: u64,
    tokens: i32,
    heads: i32,
    head_dim: i32,
    pairs: i32,
    buffers: Borrowed<'a>,
}

/// The buffers and extents of [`Heads`]: one of `rows` and `split` is written, as the kernel says.
pub struct HeadsOperands<'a> {
    /// `[tokens, heads, D]` in f32.
    pub rows: &'a mut DeviceBuffer,
    /// `[tokens, D]` in f32, where heads are rotated: cosines and then sines of each row.
    pub angles: Option<&'a DeviceBuffer>,
    /// `[heads, tokens, D]` of type `dtype`.
    pub split: &'a mut DeviceBuffer,
    /// Element type of `split`.
    pub dtype: DType,
    /// Rows.
    pub tokens: usize,
    /// Heads of a row.
    pub heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Pairs of channels that angles rotate.
    pub pairs: usize,
}

// SAFETY: see `Embedding`.
unsafe impl DeviceRepr for Heads<'_> {}

impl<'a> Heads<'a> {
    /// Heads over buffers.
    pub fn new(operands: &'a HeadsOperands<'_>) -> Result<Self, CudaError> {
        let HeadsOperands { dtype, tokens, heads, head_dim, pairs, .. } = *operands;
        if 2 * pairs > head_dim {
            return Err(CudaError::Operand(format!("{pairs} rotated pairs of a head of {head_dim} channels")));
        }
        let elements = tokens * heads * head_dim;
        Ok(Heads {
            rows: has("rows", operands.rows, 4 * elements)?,
            angles: operands.angles.map_or(Ok(0), |angles| has("angles", angles, 4 * tokens * head_dim))?,
            split: has("heads", operands.split, dtype.bytes() * elements)?,
            tokens: short("rows", tokens)?,
            heads: short("heads", heads)?,
            head_dim: short("head dim", head_dim)?,
            pairs: short("rotated pairs", pairs)?,
            buffers: PhantomData,
        })
    }
}

/// Elements that change one by one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Each<'a> {
    x: u64,
    y: u64,
    count: u64,
    width: i32,
    cap: f32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Embedding`.
unsafe impl DeviceRepr for Each<'_> {}

impl<'a> Each<'a> {
    /// `count` elements of f32, each with its own of `y`.
    pub fn with(x: &'a mut DeviceBuffer, y: &'a DeviceBuffer, count: usize) -> Result<Self, CudaError> {
        Self::over(x, has("other elements", y, 4 * count)?, count, count.min(1), 0.0)
    }

    /// `rows` rows, each with the same `y` `[width]`.
    pub fn with_row(
        x: &'a mut DeviceBuffer,
        y: &'a DeviceBuffer,
        [rows, width]: [usize; 2],
    ) -> Result<Self, CudaError> {
        Self::over(x, has("row", y, 4 * width)?, rows * width, width, 0.0)
    }

    /// `count` elements by themselves.
    pub fn alone(x: &'a mut DeviceBuffer, count: usize) -> Result<Self, CudaError> {
        Self::over(x, 0, count, 1, 0.0)
    }

    /// `count` elements with a soft-cap.
    pub fn capped(x: &'a mut DeviceBuffer, count: usize, cap: f32) -> Result<Self, CudaError> {
        Self::over(x, 0, count, 1, cap)
    }

    fn over(x: &'a mut DeviceBuffer, y: u64, count: usize, width: usize, cap: f32) -> Result<Self, CudaError> {
        let x = has("elements", x, 4 * count)?;
        Ok(Each { x, y, count: count as u64, width: short("row", width)?, cap, buffers: PhantomData })
    }
}

/// Elements of f32 that are rounded to another type.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Narrowing<'a> {
    from: u64,
    to: u64,
    count: u64,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Embedding`.
unsafe impl DeviceRepr for Narrowing<'_> {}

impl<'a> Narrowing<'a> {
    /// `count` elements to type `dtype`.
    pub fn new(
        from: &'a DeviceBuffer,
        (to, dtype): (&'a mut DeviceBuffer, DType),
        count: usize,
    ) -> Result<Self, CudaError> {
        let (from, to) = (has("elements", from, 4 * count)?, has("rounded elements", to, dtype.bytes() * count)?);
        Ok(Narrowing { from, to, count: count as u64, buffers: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::tests::{in_cuda_text, in_rust};

    #[test]
    fn structs_are_the_same_in_rust_and_in_cuda() {
        let text = include_str!("../../../model.cu");
        for name in ["Embedding", "Norm", "Linear", "Heads", "Each", "Narrowing"] {
            assert_eq!(in_rust(include_str!("layer.rs"), name), in_cuda_text(text, name), "{name}");
        }
    }
}

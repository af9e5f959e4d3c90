//! Tokens that come to a cache, leave it as dense tensors, or go from one tensor to another: further structs of
//! `kernels/compact.cu`, as those of `lists.rs`.

use super::problem::{has, short};
use super::{CudaError, DeviceBuffer};
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;
use std::ops::Range;

/// Borrows the buffers whose addresses are in a struct.
type Borrowed<'a> = PhantomData<&'a DeviceBuffer>;

/// Tokens that come to every list.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Arrival<'a> {
    k: u64,
    v: u64,
    length: i32,
    first: i32,
    count: i32,
    position: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: this struct and those below are `repr(C)` without padding and hold numbers only; their fields are those of the
// structs of the same names in kernels/compact.cu (a test compares them). Their constructors compare buffers with extents.
unsafe impl DeviceRepr for Arrival<'_> {}

impl<'a> Arrival<'a> {
    /// The tokens `range` of `k` and `v`, `lists` times `length` rows of elements, `row_bytes` each; the first of them stands at
    /// `position`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small or an extent too large.
    pub fn new(
        [k, v]: [&'a DeviceBuffer; 2],
        lists: usize,
        length: usize,
        row_bytes: usize,
        range: Range<usize>,
        position: usize,
    ) -> Result<Self, CudaError> {
        if range.end > length {
            return Err(CudaError::Operand(format!("tokens up to {} of {length}", range.end)));
        }
        let bytes = lists * length * row_bytes;
        Ok(Arrival {
            k: has("k", k, bytes)?,
            v: has("v", v, bytes)?,
            length: short("key length", length)?,
            first: short("first token", range.start)?,
            count: short("tokens", range.len())?,
            position: short("position", position)?,
            buffers: PhantomData,
        })
    }
}

/// Tokens of a dense tensor that become some of another's.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Slice<'a> {
    from: u64,
    to: u64,
    first_head: i32,
    length: i32,
    first: i32,
    count: i32,
    to_head: i32,
    to_length: i32,
    to_first: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Arrival`.
unsafe impl DeviceRepr for Slice<'_> {}

/// Rows of each head of a tensor, and where some of them begin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Corner {
    /// The first head that is meant.
    pub head: usize,
    /// Rows of each head.
    pub length: usize,
    /// The first row that is meant.
    pub first: usize,
}

impl<'a> Slice<'a> {
    /// `count` rows of each of `heads` heads, of `row_bytes`: those of `from` at one corner to those of `to` at another.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small or an extent too large.
    pub fn new(
        (from, at): (&'a DeviceBuffer, Corner),
        (to, there): (&'a mut DeviceBuffer, Corner),
        row_bytes: usize,
        [heads, count]: [usize; 2],
    ) -> Result<Self, CudaError> {
        for corner in [at, there] {
            if corner.first + count > corner.length {
                let (last, length) = (corner.first + count, corner.length);
                return Err(CudaError::Operand(format!("tokens up to {last} of {length}")));
            }
        }
        let bytes = |corner: Corner| (corner.head + heads) * corner.length * row_bytes;
        Ok(Slice {
            from: has("tokens", from, bytes(at))?,
            to: has("room for tokens", to, bytes(there))?,
            first_head: short("first head", at.head)?,
            length: short("length", at.length)?,
            first: short("first token", at.first)?,
            count: short("tokens", count)?,
            to_head: short("first head", there.head)?,
            to_length: short("length", there.length)?,
            to_first: short("first token", there.first)?,
            unused: 0,
            buffers: PhantomData,
        })
    }
}

/// Where the first tokens of all lists go as tensors.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Gathering<'a> {
    k: u64,
    v: u64,
    length: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Arrival`.
unsafe impl DeviceRepr for Gathering<'_> {}

impl<'a> Gathering<'a> {
    /// Room for `length` rows of all lists, `bytes` in `k` and in `v`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small or an extent too large.
    pub fn new([k, v]: [&'a mut DeviceBuffer; 2], length: usize, bytes: [usize; 2]) -> Result<Self, CudaError> {
        let (k, v) = (has("k", k, bytes[0])?, has("v", v, bytes[1])?);
        Ok(Gathering { k, v, length: short("length", length)?, unused: 0, buffers: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::tests::{in_cuda_text, in_rust};

    #[test]
    fn structs_are_the_same_in_rust_and_in_cuda() {
        let text = include_str!("../../../compact.cu");
        for name in ["Arrival", "Slice", "Gathering"] {
            assert_eq!(in_rust(include_str!("tokens.rs"), name), in_cuda_text(text, name), "{name}");
        }
    }
}

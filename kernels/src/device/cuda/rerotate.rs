//! Keys of a cache that turn to positions inside it, and queries that turn with them: further structs of
//! `kernels/compact.cu`, as those of `lists.rs`.

use super::problem::{has, short};
use super::{CudaError, DeviceBuffer};
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// Borrows the buffers whose addresses are in a struct.
type Borrowed<'a> = PhantomData<&'a DeviceBuffer>;

/// Keys that turn: so many at the end of each list.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Rerotation<'a> {
    turns_per_token: u64,
    newest: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: this struct and the one below are `repr(C)` without padding and hold numbers only; their fields are those of the
// structs of the same names in kernels/compact.cu (a test compares them). Their constructors compare buffers with extents.
unsafe impl DeviceRepr for Rerotation<'_> {}

impl<'a> Rerotation<'a> {
    /// Keys of heads of `head_dim` channels; `turns` per token of each pair of these, in f64.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small or an extent too large.
    pub fn new(turns: &'a DeviceBuffer, head_dim: usize, newest: usize) -> Result<Self, CudaError> {
        Ok(Rerotation {
            turns_per_token: has("turns", turns, 8 * (head_dim / 2))?,
            newest: short("keys that turn", newest)?,
            unused: 0,
            buffers: PhantomData,
        })
    }
}

/// The buffers and extents of [`Asking`].
pub(crate) struct AskingOperands<'a> {
    /// `[B, Hq, count, D]`, `row_bytes` each row.
    pub q: &'a mut DeviceBuffer,
    /// Turns per token of each pair of channels, `[D / 2]` in f64.
    pub turns: &'a DeviceBuffer,
    /// `B`.
    pub batch: usize,
    /// `Hq`.
    pub q_heads: usize,
    /// Queries of each head.
    pub count: usize,
    /// `D`.
    pub head_dim: usize,
    /// Bytes of a query.
    pub row_bytes: usize,
    /// Tokens that each sequence has seen; the last query is that of the last one.
    pub seen: usize,
}

/// Queries that turn as far as the lists of re-rotated keys are short of what their sequences have seen.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Asking<'a> {
    q: u64,
    turns_per_token: u64,
    heads: i32,
    count: i32,
    seen: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Rerotation`.
unsafe impl DeviceRepr for Asking<'_> {}

impl<'a> Asking<'a> {
    /// Queries over a buffer, which are changed.
    ///
    /// # Errors
    /// As [`Rerotation::new`].
    pub fn new(operands: &'a AskingOperands<'_>) -> Result<Self, CudaError> {
        let AskingOperands { ref q, turns, batch, q_heads, count, head_dim, row_bytes, seen } = *operands;
        Ok(Asking {
            q: has("q", q, batch * q_heads * count * row_bytes)?,
            turns_per_token: has("turns", turns, 8 * (head_dim / 2))?,
            heads: short("query heads", q_heads)?,
            count: short("queries", count)?,
            seen: short("tokens seen", seen)?,
            unused: 0,
            buffers: PhantomData,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::tests::{in_cuda_text, in_rust};

    #[test]
    fn structs_are_the_same_in_rust_and_in_cuda() {
        let text = include_str!("../../../compact.cu");
        for name in ["Rerotation", "Asking"] {
            assert_eq!(in_rust(include_str!("rerotate.rs"), name), in_cuda_text(text, name), "{name}");
        }
    }
}

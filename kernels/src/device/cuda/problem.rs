//! One attention problem as kernels take it: the same struct as in `kernels/problem.cuh`, made only from buffers that
//! are large enough for its extents.

use super::lists::capped;
use super::{CudaError, DeviceBuffer};
use crate::tensor::DType;
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// Extents and options of a problem in the words of ARCHITECTURE.md; also how decode splits the keys.
#[derive(Debug, Clone, Copy)]
pub struct Extents {
    /// `B`.
    pub batch: usize,
    /// `Hq`, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `Lq`.
    pub q_len: usize,
    /// `Lk`.
    pub kv_len: usize,
    /// `D`.
    pub head_dim: usize,
    /// Element type of q and o.
    pub dtype: DType,
    /// Bytes of k, and of v, where they are tensors.
    pub kv_bytes: [usize; 2],
    /// Aligned at the bottom right.
    pub causal: bool,
    /// A query sees its own key and the `window - 1` before it.
    pub window: Option<usize>,
    /// Factor of the inner product.
    pub scale: f32,
    /// `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
    /// Parts into which decode splits the keys that it sees; 1 where nothing is split.
    pub splits: usize,
    /// Keys of one split of decode; `kv_len` or more where nothing is split.
    pub split_keys: usize,
    /// Elements of f32 in `scores`.
    pub scores: usize,
    /// Elements of f32 in `partials`.
    pub partials: usize,
}

/// The buffers of a problem. `scores` and `partials` are empty where a kernel has none.
pub struct Operands<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: &'a DeviceBuffer,
    /// `[B, Hkv, Lk]` rows; `None` where keys lie in [`super::PagedKv`].
    pub k: Option<&'a DeviceBuffer>,
    /// `[B, Hkv, Lk]` rows; `None` where values lie in [`super::PagedKv`].
    pub v: Option<&'a DeviceBuffer>,
    /// `[B, Hq, Lq, D]`.
    pub o: &'a mut DeviceBuffer,
    /// `[B, Hq, Lq]` in f32.
    pub lse: &'a mut DeviceBuffer,
    /// `[B, Hq, Lq, Lk]` in f32: naive.
    pub scores: &'a mut DeviceBuffer,
    /// `[B, Hq, splits, Lq, D + 2]` elements of f32: decode.
    pub partials: &'a mut DeviceBuffer,
}

/// The argument of every kernel. It borrows its buffers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    q: u64,
    k: u64,
    v: u64,
    o: u64,
    lse: u64,
    scores: u64,
    partials: u64,
    batch: i32,
    q_heads: i32,
    kv_heads: i32,
    q_len: i32,
    kv_len: i32,
    causal: i32,
    window: i32,
    splits: i32,
    split_keys: i32,
    scale: f32,
    softcap: f32,
    unused: i32,
    buffers: PhantomData<&'a mut DeviceBuffer>,
}

// SAFETY: the struct is `repr(C)`, has no padding, and holds numbers only; its fields are those of `Problem` in
// kernels/problem.cuh (a test compares them). `new` compares the buffers with the extents.
unsafe impl DeviceRepr for Problem<'_> {}

/// Buffers of which only the addresses are taken.
pub(super) struct Buffers<'a> {
    pub(super) q: &'a DeviceBuffer,
    pub(super) k: Option<&'a DeviceBuffer>,
    pub(super) v: Option<&'a DeviceBuffer>,
    pub(super) o: &'a DeviceBuffer,
    pub(super) lse: &'a DeviceBuffer,
    pub(super) scores: &'a DeviceBuffer,
    pub(super) partials: &'a DeviceBuffer,
}

/// The address of a buffer that has at least `bytes`.
pub(super) fn has(name: &str, buffer: &DeviceBuffer, bytes: usize) -> Result<u64, CudaError> {
    match buffer.bytes() >= bytes as u64 {
        true => Ok(buffer.address()),
        false => Err(CudaError::Operand(format!("{name} has {} bytes; {bytes} are needed", buffer.bytes()))),
    }
}

impl<'a> Problem<'a> {
    /// A problem over buffers.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is smaller than the extents say, or an extent does not fit 31 bits.
    pub fn new(extents: &Extents, operands: &'a mut Operands<'_>) -> Result<Self, CudaError> {
        let Operands { q, k, v, o, lse, scores, partials } = operands;
        Self::over(extents, Buffers { q, k: *k, v: *v, o, lse, scores, partials })
    }

    /// As [`Problem::new`]; which of the buffers are written, the caller's kernels must agree with what it borrows.
    pub(super) fn over(extents: &Extents, operands: Buffers<'a>) -> Result<Self, CudaError> {
        let Extents { batch, q_heads, kv_heads, q_len, kv_len, head_dim, dtype, kv_bytes, .. } = *extents;
        let rows = batch * q_heads * q_len;
        let q_bytes = rows * head_dim * dtype.bytes();
        Ok(Problem {
            q: has("q", operands.q, q_bytes)?,
            k: operands.k.map_or(Ok(0), |k| has("k", k, kv_bytes[0]))?,
            v: operands.v.map_or(Ok(0), |v| has("v", v, kv_bytes[1]))?,
            o: has("o", operands.o, q_bytes)?,
            lse: has("lse", operands.lse, 4 * rows)?,
            scores: has("scores", operands.scores, 4 * extents.scores)?,
            partials: has("partials", operands.partials, 4 * extents.partials)?,
            batch: short("batch", batch)?,
            q_heads: short("query heads", q_heads)?,
            kv_heads: short("KV heads", kv_heads)?,
            q_len: short("query length", q_len)?,
            kv_len: short("key length", kv_len)?,
            causal: i32::from(extents.causal),
            window: extents.window.map_or(0, capped),
            splits: short("splits", extents.splits)?,
            split_keys: short("keys of a split", extents.split_keys.min(kv_len))?,
            scale: extents.scale,
            softcap: extents.softcap.unwrap_or(0.0),
            unused: 0,
            buffers: PhantomData,
        })
    }
}

/// A count as kernels take it: they add two lengths and a window in 32 bits.
pub(super) fn short(name: &str, value: usize) -> Result<i32, CudaError> {
    i32::try_from(value)
        .ok()
        .filter(|&value| value < 1 << 29)
        .ok_or_else(|| CudaError::Operand(format!("{name} is {value}; the CUDA kernels take less than {}", 1 << 29)))
}

/// One launch of a kernel function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Its name in the source.
    pub function: &'static str,
    /// Blocks in x, y and z.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl Launch {
    /// Blocks in y and z that a grid may have.
    pub const MOST_BLOCKS: usize = 65_535;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_has_the_size_that_cuda_gives_it() {
        assert_eq!(size_of::<Problem>(), 7 * 8 + 12 * 4);
    }
}

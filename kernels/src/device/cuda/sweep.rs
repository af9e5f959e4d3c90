//! A cold L2 before a timed pass: a stretch of memory twice as large is read just before, on the same stream.
//!
//! This leaves what rotating among copies of the operands would leave, an L2 full of clean lines of other data, and needs
//! the same memory for a short context and a long one, so that the bytes a problem takes stay its own. It also keeps the
//! GPU busy until the pass is queued: the time of its launch is no part of its own.

use super::device::Ready;
use super::{CudaError, Device, DeviceBuffer, Launch, Module, Program, Source};
use crate::memory::{Arena, Label};
use crate::tensor::DType;
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// Memory read, in sizes of the L2: a cache that does not throw out its oldest line first needs more than one.
const L2_SIZES: u64 = 2;
/// What a block reads at once: 256 threads with 8 words each.
const BLOCK_BYTES: u64 = 256 * 8 * 4;
/// Blocks for each multiprocessor.
const BLOCKS_EACH: u64 = 8;

/// The argument of `sweep` in `kernels/sweep.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    start: u64,
    words: u64,
    result: u64,
    blocks: u64,
    buffer: PhantomData<&'a DeviceBuffer>,
}

// SAFETY: the struct is `repr(C)` and holds four numbers of 64 bits, as `Stretch` in kernels/sweep.cu does. The addresses
// are of a buffer that it borrows and that has `words` words and one behind them.
unsafe impl DeviceRepr for Stretch<'_> {}

/// What is read, and by what.
pub struct Sweep {
    pub(super) ready: Vec<Ready>,
    buffer: DeviceBuffer,
    bytes: u64,
    blocks: u64,
}

impl Sweep {
    /// What is compiled for it.
    pub fn program() -> Program {
        let source = Source { name: "sweep.cu", text: include_str!("../../../sweep.cu") };
        Program { source, dtype: DType::F32, head_dim: 8, macros: Vec::new() }
    }

    /// Takes memory for an L2 of `l2_bytes`, outside every measured arena.
    pub(super) fn new(device: &Device, module: &Module, l2_bytes: u64) -> Result<Self, CudaError> {
        let bytes = (L2_SIZES * l2_bytes).next_multiple_of(BLOCK_BYTES);
        let buffer = device.alloc(&Arena::unlimited(), Label::Workspace, bytes + 4)?;
        let blocks = (bytes / BLOCK_BYTES).min(BLOCKS_EACH * device.limits().multiprocessors as u64);
        let launch = Launch { function: "sweep", grid: [blocks as usize, 1, 1], threads: 256, shared_bytes: 0 };
        Ok(Sweep { ready: device.ready(module, &[launch])?, buffer, bytes, blocks })
    }

    pub(super) fn stretch(&self) -> Stretch<'_> {
        let start = self.buffer.address();
        let (words, result) = (self.bytes / 4, start + self.bytes);
        Stretch { start, words, result, blocks: self.blocks, buffer: PhantomData }
    }
}

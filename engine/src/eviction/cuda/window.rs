//! Observation windows in a GPU's memory: the latest queries of every layer and their log-sum-exps, held until an eviction
//! step looks at them.

use crate::attention::Shape;
use crate::cache::cuda::ObservedRows;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Runtime};
use crate::memory::Arena;
use crate::tensor::DType;

/// Queries of one sequence, oldest first.
pub(crate) struct DeviceWindow {
    queries: ObservedRows,
    /// Their log-sum-exps, in f32.
    sums: ObservedRows,
}

impl DeviceWindow {
    /// Room for `room` queries of `layers` layers with the heads of `shape`.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn new(
        device: &Device,
        arena: &Arena,
        (layers, room): (usize, usize),
        shape: &Shape,
        dtype: DType,
    ) -> Result<Self, CudaError> {
        let extents = [layers, shape.q_heads, room];
        Ok(DeviceWindow {
            queries: ObservedRows::new(device, arena, (dtype, shape.head_dim), extents)?,
            sums: ObservedRows::new(device, arena, (DType::F32, 1), extents)?,
        })
    }

    /// Queries that are held of each layer.
    pub fn count(&self) -> usize {
        self.queries.count()
    }

    /// Begins to take queries `[Hq, new, D]` of a layer in, with their log-sum-exps `[Hq, new]`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small, and as [`Runtime::module`].
    pub fn push(
        &mut self,
        runtime: &Runtime,
        layer: usize,
        new: usize,
        [q, lse]: [&DeviceBuffer; 2],
    ) -> Result<(), CudaError> {
        self.queries.begin_push(runtime, layer, (q, new), new, new)?;
        self.sums.begin_push(runtime, layer, (lse, new), new, new)
    }

    /// Every layer has taken `new` queries in.
    pub fn advance(&mut self, new: usize) {
        self.queries.advance(new);
        self.sums.advance(new);
    }

    /// Forgets all queries.
    pub fn forget(&mut self) {
        self.queries.forget();
        self.sums.forget();
    }

    /// Queries `[layers, Hq, count, D]` and log-sum-exps `[layers, Hq, count]` as tensors of their own.
    ///
    /// # Errors
    /// When there is no room, and as [`DeviceWindow::push`].
    pub fn dense(&self, runtime: &Runtime, arena: &Arena) -> Result<[DeviceBuffer; 2], CudaError> {
        Ok([self.queries.dense(runtime, arena)?, self.sums.dense(runtime, arena)?])
    }

    /// Bytes of these.
    pub fn dense_bytes(&self) -> [u64; 2] {
        [self.queries.dense_bytes(), self.sums.dense_bytes()]
    }

    /// Begins to copy them to memory that is there.
    ///
    /// # Errors
    /// As [`DeviceWindow::push`].
    pub fn begin_dense(&self, runtime: &Runtime, [q, lse]: [&mut DeviceBuffer; 2]) -> Result<(), CudaError> {
        self.queries.begin_dense(runtime, q)?;
        self.sums.begin_dense(runtime, lse)
    }
}

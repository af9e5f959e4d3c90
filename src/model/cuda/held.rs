//! The latest queries of every layer and their log-sum-exps in a GPU's memory, held until a judgement looks at them.
//!
//! There are two copies: each pass writes what stays and what came into the other one, layer by layer.

use crate::attention::Shape;
use crate::cache::cuda::{copy_tokens, take_tokens};
use crate::device::cuda::{Corner, CudaError, Device, DeviceBuffer, Runtime};
use crate::memory::{Arena, Label};
use crate::tensor::DType;

/// Queries of one sequence, oldest first.
pub(super) struct Held {
    /// `[layers, Hq, room, D]`, twice.
    queries: [DeviceBuffer; 2],
    /// `[layers, Hq, room]` in f32, twice.
    sums: [DeviceBuffer; 2],
    /// Element type and head dim of queries.
    kind: (DType, usize),
    /// Query heads of a layer, and of all.
    heads: [usize; 2],
    room: usize,
    /// Which copy holds the queries, and how many.
    now: usize,
    fill: usize,
}

impl Held {
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
        let rows = layers * shape.q_heads * room;
        let take = |bytes: usize| device.alloc(arena, Label::Policy, bytes as u64);
        let row_bytes = shape.head_dim * dtype.bytes();
        Ok(Held {
            queries: [take(rows * row_bytes)?, take(rows * row_bytes)?],
            sums: [take(4 * rows)?, take(4 * rows)?],
            kind: (dtype, shape.head_dim),
            heads: [shape.q_heads, layers * shape.q_heads],
            room,
            now: 0,
            fill: 0,
        })
    }

    /// Queries that are held of each layer.
    pub fn count(&self) -> usize {
        self.fill
    }

    /// Takes queries `[Hq, new, D]` of a layer in, with their log-sum-exps `[Hq, new]`.
    ///
    /// # Errors
    /// As [`take_tokens`].
    pub fn push(
        &mut self,
        runtime: &Runtime,
        layer: usize,
        new: usize,
        [q, lse]: [&DeviceBuffer; 2],
    ) -> Result<(), CudaError> {
        let (taken, kept) = self.shares(new);
        let Held { queries, sums, kind, heads: [heads, _], room, now, fill } = self;
        let own = |first| Corner { head: layer * *heads, length: *room, first };
        let came = Corner { head: 0, length: new, first: new - taken };
        for (kind, pair, source) in [(*kind, queries, q), ((DType::F32, 1), sums, lse)] {
            let [first, second] = pair;
            let (from, to) = if *now == 0 { (first, second) } else { (second, first) };
            if kept > 0 {
                copy_tokens(runtime, kind, (from, own(*fill - kept)), (&mut *to, own(0)), [*heads, kept])?;
            }
            copy_tokens(runtime, kind, (source, came), (to, own(kept)), [*heads, taken])?;
        }
        Ok(())
    }

    /// Every layer has taken `new` queries in.
    pub fn advance(&mut self, new: usize) {
        let (taken, kept) = self.shares(new);
        (self.now, self.fill) = (1 - self.now, kept + taken);
    }

    /// Forgets all queries.
    pub fn forget(&mut self) {
        self.fill = 0;
    }

    /// Queries `[layers, Hq, count, D]` and log-sum-exps `[layers, Hq, count]` as tensors of their own.
    ///
    /// # Errors
    /// When there is no room, and as [`take_tokens`].
    pub fn dense(&self, runtime: &Runtime, arena: &Arena) -> Result<[DeviceBuffer; 2], CudaError> {
        let Held { queries, sums, kind, heads: [_, heads], room, now, fill } = self;
        let copy = |kind: (DType, usize), from: &DeviceBuffer| -> Result<DeviceBuffer, CudaError> {
            let bytes = heads * fill * kind.0.bytes() * kind.1;
            let mut to = runtime.device().alloc(arena, Label::Policy, bytes as u64)?;
            take_tokens(runtime, kind, (from, *room), 0..*heads, 0..*fill, &mut to)?;
            Ok(to)
        };
        Ok([copy(*kind, &queries[*now])?, copy((DType::F32, 1), &sums[*now])?])
    }

    /// How many of `new` queries are taken in, and how many of the old ones stay.
    fn shares(&self, new: usize) -> (usize, usize) {
        let taken = new.min(self.room);
        (taken, self.fill.min(self.room - taken))
    }
}

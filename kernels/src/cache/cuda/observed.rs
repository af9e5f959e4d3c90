//! The latest tokens' rows of every head, held in a GPU's memory until somebody looks: a ring that moves on with the
//! tokens.

use super::{begin_copy, program};
use crate::device::cuda::{Corner, CudaError, Device, DeviceBuffer, Runtime};
use crate::memory::{Arena, Label};
use crate::tensor::DType;

/// Rows of the latest tokens, so many of each head, in some layers.
pub struct ObservedRows {
    /// `[layers, heads, room, D]`; the next token goes to place `next`.
    rows: DeviceBuffer,
    /// Element type, and `D`.
    kind: (DType, usize),
    layers: usize,
    heads: usize,
    room: usize,
    next: usize,
    fill: usize,
}

impl ObservedRows {
    /// Bytes of `room` rows of `kind` of each of `heads` heads, under `policy`.
    fn bytes((dtype, width): (DType, usize), heads: usize, room: usize) -> u64 {
        (heads * room * width * dtype.bytes()) as u64
    }

    /// Room for `room` tokens of `heads` heads in each of `layers` layers.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn new(
        device: &Device,
        arena: &Arena,
        kind: (DType, usize),
        [layers, heads, room]: [usize; 3],
    ) -> Result<Self, CudaError> {
        let rows = device.alloc(arena, Label::Policy, Self::bytes(kind, layers * heads, room))?;
        Ok(ObservedRows { rows, kind, layers, heads, room, next: 0, fill: 0 })
    }

    /// Tokens that are held.
    pub fn count(&self) -> usize {
        self.fill
    }

    /// Takes the `new` last tokens of `from` `[heads, length, D]`, up to `end`, into a layer; every layer takes as many
    /// before [`ObservedRows::advance`].
    ///
    /// # Errors
    /// As [`super::take_tokens`].
    pub fn push(
        &mut self,
        runtime: &Runtime,
        layer: usize,
        from: (&DeviceBuffer, usize),
        end: usize,
        new: usize,
    ) -> Result<(), CudaError> {
        runtime.load([program(self.kind.0.into(), self.kind.1)])?;
        runtime.device().timed(|| self.begin_push(runtime, layer, from, end, new)).map(|_| ())
    }

    /// Begins to do so.
    ///
    /// # Errors
    /// As [`ObservedRows::push`].
    pub fn begin_push(
        &mut self,
        runtime: &Runtime,
        layer: usize,
        (from, length): (&DeviceBuffer, usize),
        end: usize,
        new: usize,
    ) -> Result<(), CudaError> {
        let taken = new.min(self.room);
        let before_end = taken.min(self.room - self.next);
        let own = |first| Corner { head: layer * self.heads, length: self.room, first };
        let came = |first| Corner { head: 0, length, first };
        let first = end - taken;
        for (source, target, count) in [(first, self.next, before_end), (first + before_end, 0, taken - before_end)] {
            if count > 0 {
                let (from, to) = ((from, came(source)), (&mut self.rows, own(target)));
                begin_copy(runtime, self.kind, from, to, [self.heads, count])?;
            }
        }
        Ok(())
    }

    /// Every layer has taken `new` tokens in.
    pub fn advance(&mut self, new: usize) {
        let taken = new.min(self.room);
        (self.next, self.fill) = ((self.next + taken) % self.room, (self.fill + taken).min(self.room));
    }

    /// Forgets all tokens.
    pub fn forget(&mut self) {
        self.fill = 0;
    }

    /// What is held, oldest first: `[layers, heads, count, D]`.
    ///
    /// # Errors
    /// When there is no room, and as [`super::take_tokens`].
    pub fn dense(&self, runtime: &Runtime, arena: &Arena) -> Result<DeviceBuffer, CudaError> {
        let mut to = runtime.device().alloc(arena, Label::Policy, self.dense_bytes())?;
        runtime.load([program(self.kind.0.into(), self.kind.1)])?;
        runtime.device().timed(|| self.begin_dense(runtime, &mut to))?;
        Ok(to)
    }

    /// Bytes of what is held.
    pub fn dense_bytes(&self) -> u64 {
        Self::bytes(self.kind, self.layers * self.heads, self.fill)
    }

    /// Begins to copy what is held to `to`, as [`ObservedRows::dense`] gives it.
    ///
    /// # Errors
    /// As [`ObservedRows::dense`].
    pub fn begin_dense(&self, runtime: &Runtime, to: &mut DeviceBuffer) -> Result<(), CudaError> {
        let ObservedRows { ref rows, kind, room, next, fill, .. } = *self;
        let (heads, oldest) = (self.layers * self.heads, (next + room - fill) % room);
        let before_end = fill.min(room - oldest);
        let corner = |length, first| Corner { head: 0, length, first };
        for (source, target, count) in [(oldest, 0, before_end), (0, before_end, fill - before_end)] {
            if count > 0 {
                let (from, there) = ((rows, corner(room, source)), (&mut *to, corner(fill, target)));
                begin_copy(runtime, kind, from, there, [heads, count])?;
            }
        }
        Ok(())
    }
}

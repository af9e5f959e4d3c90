//! Positions inside the cache: keys are rotated to where they stand in their lists, and queries as far as these are short of what
//! the sequence has seen. Tokens carry the position that they came with ([`Column::Origin`]).

use super::{DeviceCache, ROWS};
use crate::attention::rope::Frequencies;
use crate::cache::Column;
use crate::device::cuda::{Asking, AskingOperands, CudaError, DeviceBuffer, Rerotation, Runtime};
use std::f64::consts::TAU;
use std::ops::Range;

impl DeviceCache {
    /// Says how keys are rotated with their positions, before any of them does.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the cache does not keep [`Column::Origin`] or the frequencies are of another head dim;
    /// [`CudaError::Driver`] when the GPU cannot be told.
    pub fn set_rope(&mut self, rope: &Frequencies) -> Result<(), CudaError> {
        let (pairs, head_dim) = (rope.rad_per_token(), self.shape.head_dim);
        if 2 * pairs.len() != head_dim {
            let found = 2 * pairs.len();
            return Err(CudaError::Operand(format!(
                "RoPE's frequencies are of head dim {found}, the cache of {head_dim}"
            )));
        }
        let there = self.turns.as_mut().ok_or_else(no_origins)?;
        let turns: Vec<f64> = pairs.iter().map(|radians| radians / TAU).collect();
        if self.turns_told != turns {
            there.write(bytemuck::cast_slice(&turns))?;
            self.turns_told = turns;
        }
        Ok(())
    }

    /// Rotates the keys of all lists from their positions to `0 .. len`, in place, and makes these the positions, as
    /// [`crate::cache::PagedCache::rerotate`]. Returns the GPU's time in nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the cache does not keep [`Column::Origin`], and as [`Runtime::module`].
    pub fn rerotate(&mut self, runtime: &Runtime) -> Result<u64, CudaError> {
        let newest = self.max_len();
        runtime.load([self.program()])?;
        runtime.device().timed(|| self.turn_newest(runtime, 0..self.shape.lists(), newest))
    }

    /// Begins to do so with the `newest` tokens of some lists, where all before them are rotated already: inside
    /// [`crate::device::cuda::Device::timed`].
    ///
    /// # Errors
    /// As [`DeviceCache::rerotate`].
    pub fn turn_newest(&self, runtime: &Runtime, lists: Range<usize>, newest: usize) -> Result<(), CudaError> {
        // A threshold may have left nothing anywhere.
        if newest == 0 {
            return Ok(());
        }
        let rerotation = Rerotation::new(self.turns.as_ref().ok_or_else(no_origins)?, self.shape.head_dim, newest)?;
        let grid = [newest.div_ceil(ROWS), lists.len(), 1];
        self.begin(runtime, lists, ("rotate_keys", 128), grid, &rerotation)
    }

    /// Begins to rotate queries `q` `[B, Hq, count, D]`, in place, to where they stand behind some lists of re-rotated keys, those
    /// of `B` sequences that have `seen` so many tokens: inside [`crate::device::cuda::Device::timed`].
    ///
    /// # Errors
    /// As [`DeviceCache::rerotate`]; [`CudaError::Operand`] when `q` is too small.
    pub fn rotate_queries(
        &self,
        runtime: &Runtime,
        lists: Range<usize>,
        q: &mut DeviceBuffer,
        [q_heads, count]: [usize; 2],
        seen: usize,
    ) -> Result<(), CudaError> {
        let batch = lists.len() / self.shape.kv_heads;
        let (head_dim, row_bytes) = (self.shape.head_dim, self.element_bytes());
        let turns = self.turns.as_ref().ok_or_else(no_origins)?;
        let operands = AskingOperands { q, turns, batch, q_heads, count, head_dim, row_bytes, seen };
        let grid = [count.div_ceil(ROWS), batch * q_heads, 1];
        self.begin(runtime, lists, ("rotate_queries", 128), grid, &Asking::new(&operands)?)
    }
}

/// Why keys do not turn.
fn no_origins() -> CudaError {
    CudaError::Operand(format!("keys are rotated in a cache that keeps {:?}", Column::Origin))
}

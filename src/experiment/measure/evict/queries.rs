//! Queries as they attend to the cache: those of the workload, or, where keys are re-rotated to positions inside the cache,
//! rotated with them.

use super::{Running, evicting};
use crate::attention::rope::Rotation;
use crate::experiment::cell::Cell;
use crate::experiment::measure::TrialError;
use crate::memory::Label;
use crate::policy::{PolicyError, action::rerotate::NO_ROPE};
use crate::tensor::{Tensor, TensorView};
use std::ops::Range;

/// Queries `[layers * B, Hq, n, D]`.
pub(super) enum Attending<'a> {
    /// As they are.
    Plain(TensorView<'a>),
    /// A rotated copy.
    Rotated(Tensor),
}

impl Attending<'_> {
    pub fn view(&self) -> TensorView<'_> {
        match self {
            Attending::Plain(view) => *view,
            Attending::Rotated(tensor) => tensor.view(),
        }
    }
}

/// Bytes of `queries` queries.
pub(super) fn query_bytes(cell: &Cell, queries: usize) -> u64 {
    Tensor::bytes_of(cell.dtype, [cell.layers * cell.batch, cell.q_heads, queries, cell.head_dim])
}

impl Running<'_> {
    /// Appends tokens of the workload; their keys are rotated to where they stand in the cache, if the policy says so.
    pub(super) fn append(&mut self, tokens: Range<usize>) -> Result<(), TrialError> {
        let count = tokens.len();
        self.cache.append(self.bench.workload.k.view(), self.bench.workload.v.view(), tokens)?;
        if evicting(self.prepared).is_some_and(|policy| policy.rerotates) {
            let rope = self.frequencies.as_ref().ok_or::<PolicyError>(NO_ROPE)?;
            for list in 0..self.cache.shape().lists() {
                self.cache.rerotate_from(list, self.cache.lens()[list] - count, rope)?;
            }
        }
        Ok(())
    }

    /// The queries `q`, of which the last is that of token `end - 1`, as they attend to the cache. In a cache of rotated
    /// keys token `end - 1` stands at the end of each list, so the queries of its heads are rotated as far as the list is
    /// short of `end`.
    pub(super) fn attending<'q>(&self, q: TensorView<'q>, end: usize) -> Result<Attending<'q>, TrialError> {
        let rotates = evicting(self.prepared).is_some_and(|policy| policy.rerotates);
        if !rotates || self.cache.lens().iter().all(|&len| len == end) {
            return Ok(Attending::Plain(q));
        }
        let rope = self.frequencies.as_ref().ok_or::<PolicyError>(NO_ROPE)?;
        let [sequences, heads, queries, width] = q.dims();
        let group = heads / self.cache.shape().kv_heads;
        let mut rotated = Tensor::zeros(self.bench.arena, Label::Activations, q.dtype(), q.dims())?;
        let row_bytes = width * q.dtype().bytes();
        let (mut row, mut rows) = (vec![0.0; width], rotated.bytes_mut().chunks_exact_mut(row_bytes));
        for (sequence, head) in (0..sequences).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
            let len = self.cache.lens()[self.cache.list(sequence, head / group)];
            let rotation = Rotation::new(rope, len as i64 - end as i64);
            for (query, target) in (0..queries).zip(&mut rows) {
                q.read_rows(sequence, head, query, &mut row);
                rotation.rotate(&mut row);
                q.dtype().encode(&row, target);
            }
        }
        Ok(Attending::Rotated(rotated))
    }
}

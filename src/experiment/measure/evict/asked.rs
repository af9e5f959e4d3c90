//! Queries as the cache is asked: those of the workload, or, where keys are turned to positions inside the cache, turned
//! with them; and the window of recent queries that a policy holds while decoding.

use super::{Session, judging};
use crate::attention::rope::Rotation;
use crate::experiment::cell::Cell;
use crate::experiment::measure::TurnError;
use crate::memory::{Arena, ArenaError, Label};
use crate::policy::{PolicyError, action::rerotate::NO_ROPE};
use crate::tensor::{Tensor, TensorView};
use std::ops::Range;

/// Queries `[layers * B, Hq, n, D]`.
pub(super) enum Asked<'a> {
    /// As they are.
    Plain(TensorView<'a>),
    /// A turned copy.
    Turned(Tensor),
}

impl Asked<'_> {
    pub fn view(&self) -> TensorView<'_> {
        match self {
            Asked::Plain(view) => *view,
            Asked::Turned(tensor) => tensor.view(),
        }
    }
}

/// Bytes of `queries` queries.
pub(super) fn query_bytes(cell: &Cell, queries: usize) -> u64 {
    Tensor::bytes_of(cell.dtype, [cell.layers * cell.batch, cell.q_heads, queries, cell.head_dim])
}

impl Session<'_> {
    /// Appends tokens of the workload; their keys are turned to where they stand in the cache, if the policy says so.
    pub(super) fn append(&mut self, tokens: Range<usize>) -> Result<(), TurnError> {
        let count = tokens.len();
        self.cache.append(self.bench.workload.k.view(), self.bench.workload.v.view(), tokens)?;
        if judging(self.prepared).is_some_and(|policy| policy.rerotates) {
            let rope = self.frequencies.as_ref().ok_or::<PolicyError>(NO_ROPE)?;
            for list in 0..self.cache.shape().lists() {
                self.cache.rerotate_from(list, self.cache.lens()[list] - count, rope)?;
            }
        }
        Ok(())
    }

    /// The queries `q`, of which the last is that of token `end - 1`, as the cache is to be asked. In a cache of turned
    /// keys token `end - 1` stands at the end of each list, so the queries of its heads are turned as far as the list is
    /// short of `end`.
    pub(super) fn ask<'q>(&self, q: TensorView<'q>, end: usize) -> Result<Asked<'q>, TurnError> {
        let turns = judging(self.prepared).is_some_and(|policy| policy.rerotates);
        if !turns || self.cache.lens().iter().all(|&len| len == end) {
            return Ok(Asked::Plain(q));
        }
        let rope = self.frequencies.as_ref().ok_or::<PolicyError>(NO_ROPE)?;
        let [sequences, heads, queries, width] = q.dims();
        let group = heads / self.cache.shape().kv_heads;
        let mut turned = Tensor::zeros(self.bench.arena, Label::Activations, q.dtype(), q.dims())?;
        let row_bytes = width * q.dtype().bytes();
        let (mut row, mut rows) = (vec![0.0; width], turned.bytes_mut().chunks_exact_mut(row_bytes));
        for (sequence, head) in (0..sequences).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
            let len = self.cache.lens()[self.cache.list(sequence, head / group)];
            let rotation = Rotation::new(rope, len as i64 - end as i64);
            for (query, target) in (0..queries).zip(&mut rows) {
                q.read_rows(sequence, head, query, &mut row);
                rotation.turn(&mut row);
                q.dtype().encode(&row, target);
            }
        }
        Ok(Asked::Turned(turned))
    }
}

/// The latest queries, held while decoding for a policy that looks at more than one.
pub(super) struct Recent(Tensor);

impl Recent {
    /// Holds `q` `[B, Hq, n, D]`.
    pub fn hold(arena: &Arena, q: TensorView<'_>) -> Result<Self, ArenaError> {
        let [sequences, heads, queries, width] = q.dims();
        let held = Tensor::zeros(arena, Label::Policy, q.dtype(), [sequences, queries, heads, width])?;
        let mut recent = Recent(held);
        (0..queries).for_each(|query| recent.push(q.tokens(query..query + 1)));
        Ok(recent)
    }

    /// Takes the next query `[B, Hq, 1, D]` in and lets the oldest go.
    pub fn push(&mut self, q: TensorView<'_>) {
        let [sequences, queries, heads, width] = self.0.dims();
        let dtype = self.0.dtype();
        let (row_bytes, mut row) = (width * dtype.bytes(), vec![0.0; width]);
        let token_bytes = heads * row_bytes;
        for (sequence, held) in self.0.bytes_mut().chunks_exact_mut(queries * token_bytes).enumerate() {
            held.copy_within(token_bytes.., 0);
            let newest = held[(queries - 1) * token_bytes..].chunks_exact_mut(row_bytes);
            for (head, target) in newest.enumerate() {
                q.read_rows(sequence, head, 0, &mut row);
                dtype.encode(&row, target);
            }
        }
        debug_assert_eq!(sequences, q.dims()[0]);
    }

    /// `[B, Hq, n, D]`, oldest first.
    pub fn view(&self) -> TensorView<'_> {
        self.0.view().permuted([0, 2, 1, 3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn the_latest_queries_are_held_in_order() {
        let arena = Arena::unlimited();
        let values: Vec<f32> = (0..2 * 3 * 9 * 4).map(|index| index as f32).collect();
        let q = Tensor::from_f32(&arena, Label::Input, DType::F32, [2, 3, 9, 4], &values).unwrap();
        let mut recent = Recent::hold(&arena, q.view().tokens(1..5)).unwrap();
        for end in 5..9 {
            let wanted = q.view().tokens(end - 4..end);
            assert_eq!(recent.view().dims(), wanted.dims());
            for (sequence, head) in (0..2).flat_map(|sequence| (0..3).map(move |head| (sequence, head))) {
                let rows = |view: TensorView<'_>| view.rows(sequence, head, 0, 4, &mut [0.0; 16]).to_vec();
                assert_eq!(rows(recent.view()), rows(wanted), "tokens before {end}");
            }
            recent.push(q.view().tokens(end..end + 1));
        }
        assert_eq!(arena.live_bytes(Label::Policy), 2 * 3 * 4 * 4 * 4);
    }
}

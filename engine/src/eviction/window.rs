//! Observation windows: queries of every layer, and perhaps their log-sum-exps, held until an eviction step looks at them.

use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::policy::{Policy, Statistic};
use crate::tensor::{DType, Tensor, TensorView};
use std::ops::Range;

/// How many queries a window holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    /// All that have come since it was opened.
    All,
    /// The latest so many.
    Latest(usize),
}

impl Span {
    /// Queries that a policy looks at in an eviction step of prefill, or when it begins to select what steps read.
    pub fn of_prefill(policy: &Policy) -> Span {
        if let Some(selection) = &policy.selection {
            Span::Latest(selection.recent_queries())
        } else if looks_at_all_queries(policy) {
            Span::All
        } else {
            Span::of_decoding(policy)
        }
    }

    /// Queries that a policy looks at in an eviction step between new tokens; none where it never evicts.
    pub fn of_decoding(policy: &Policy) -> Span {
        Span::Latest(policy.recent_queries())
    }

    /// One in which both are held.
    pub fn max(self, other: Span) -> Span {
        match (self, other) {
            (Span::Latest(some), Span::Latest(others)) => Span::Latest(some.max(others)),
            _ => Span::All,
        }
    }
}

/// Whether a policy looks at all queries of a context.
fn looks_at_all_queries(policy: &Policy) -> bool {
    let over = |needs: Vec<Statistic>| needs.contains(&Statistic::RecentAttention);
    policy.looks_at(Statistic::Queries) || over(policy.layers.needs()) || over(policy.heads.needs())
}

/// What a window holds of each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowShape {
    /// Layers, or sequences of folded layers.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Of the queries.
    pub dtype: DType,
    /// Whether log-sum-exps are held with the queries.
    pub has_lse: bool,
}

impl WindowShape {
    /// Bytes of a window with room for so many queries of each layer.
    pub fn bytes(&self, queries: usize) -> u64 {
        let lse = if self.has_lse { 4 * self.layers * queries * self.q_heads } else { 0 };
        Tensor::bytes_of(self.dtype, self.dims(queries)) + lse as u64
    }

    fn dims(&self, queries: usize) -> [usize; 4] {
        [self.layers, queries, self.q_heads, self.head_dim]
    }
}

/// Queries of one sequence, oldest first. They grow as they come, or move on when the room is full.
pub struct ObservationWindow {
    arena: Arena,
    shape: WindowShape,
    span: Span,
    room: usize,
    /// `[layers, room, Hq, D]`.
    queries: Tensor,
    /// `[layers, room, Hq]`, or nothing.
    lse: Buffer<f32>,
    /// Queries of each layer so far; while a pass goes on, upper layers have fewer.
    fill: Vec<usize>,
}

impl ObservationWindow {
    /// An empty window, with room for `first` queries, or for all that it will ever hold if these are fewer.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, shape: WindowShape, span: Span, first: usize) -> Result<Self, ArenaError> {
        let room = match span {
            Span::All => first,
            Span::Latest(most) => first.min(most),
        };
        let queries = Tensor::zeros(arena, Label::Policy, shape.dtype, shape.dims(room))?;
        let sums = if shape.has_lse { shape.layers * room * shape.q_heads } else { 0 };
        let lse = arena.alloc(Label::Policy, sums)?;
        Ok(ObservationWindow { arena: arena.clone(), shape, span, room, queries, lse, fill: vec![0; shape.layers] })
    }

    /// Where its memory comes from.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Queries that are held of every layer.
    pub fn queries(&self) -> usize {
        self.fill[0]
    }

    /// Takes queries `[1, Hq, n, D]` of a layer in, with their log-sum-exps `[Hq, n]` where these are held.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn push(&mut self, layer: usize, q: TensorView<'_>, lse: &[f32]) -> Result<(), ArenaError> {
        let WindowShape { q_heads: heads, head_dim: width, dtype, has_lse, .. } = self.shape;
        let (new, fill) = (q.dims()[2], self.fill[layer]);
        let (kept, taken) = match self.span {
            Span::All => (fill, new),
            Span::Latest(most) => (fill.min(most.saturating_sub(new)), new.min(most)),
        };
        if kept + taken > self.room {
            let room = match self.span {
                Span::All => kept + taken,
                // Twice as much, so that tokens which come one by one are not all moved each time.
                Span::Latest(most) => most.min((kept + taken).max(2 * self.room)),
            };
            *self = self.sized(room)?;
        }
        let (rows, row_bytes) = (layer * self.room * heads..(layer + 1) * self.room * heads, width * dtype.bytes());
        let queries = &mut self.queries.bytes_mut()[rows.start * row_bytes..rows.end * row_bytes];
        queries.copy_within((fill - kept) * heads * row_bytes..fill * heads * row_bytes, 0);
        if has_lse {
            self.lse[rows.clone()].copy_within((fill - kept) * heads..fill * heads, 0);
        }
        let mut values = vec![0.0; width];
        for (query, head) in (0..taken).flat_map(|query| (0..heads).map(move |head| (query, head))) {
            let (from, row) = (new - taken + query, (kept + query) * heads + head);
            q.read_rows(0, head, from, &mut values);
            dtype.encode(&values, &mut queries[row * row_bytes..][..row_bytes]);
            if has_lse {
                self.lse[rows.start + row] = lse[head * new + from];
            }
        }
        self.fill[layer] = kept + taken;
        Ok(())
    }

    /// Holds no more than the latest `most` queries from now on.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn narrow(&mut self, most: usize) -> Result<(), ArenaError> {
        self.span = Span::Latest(most);
        *self = self.sized(self.holds().min(most))?;
        Ok(())
    }

    /// A copy with as much of the queries as `span` says; `None` keeps to this one's.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn copy(&self, span: Option<Span>) -> Result<Self, ArenaError> {
        let span = span.unwrap_or(self.span);
        let room = match span {
            Span::All => self.holds(),
            Span::Latest(most) => self.holds().min(most),
        };
        Ok(ObservationWindow { span, ..self.sized(room)? })
    }

    /// Queries of the layer that has most.
    fn holds(&self) -> usize {
        self.fill.iter().copied().max().unwrap_or(0)
    }

    /// A copy with room for so many queries of each layer: the latest.
    fn sized(&self, room: usize) -> Result<Self, ArenaError> {
        let mut copy = ObservationWindow::new(&self.arena, self.shape, Span::Latest(room), room)?;
        copy.span = self.span;
        let (heads, row_bytes) = (self.shape.q_heads, self.shape.head_dim * self.shape.dtype.bytes());
        for (layer, (&fill, kept)) in self.fill.iter().zip(&mut copy.fill).enumerate() {
            *kept = fill.min(room);
            let from = (layer * self.room + fill - *kept) * heads..(layer * self.room + fill) * heads;
            let to = layer * room * heads..(layer * room + *kept) * heads;
            copy.queries.bytes_mut()[to.start * row_bytes..to.end * row_bytes]
                .copy_from_slice(&self.queries.bytes()[from.start * row_bytes..from.end * row_bytes]);
            if self.shape.has_lse {
                copy.lse[to].copy_from_slice(&self.lse[from]);
            }
        }
        Ok(copy)
    }

    /// Queries of some layers, oldest first, `[layers, Hq, n, D]`.
    pub fn view(&self, layers: Range<usize>) -> TensorView<'_> {
        self.queries.view().permuted([0, 2, 1, 3]).sequences(layers).tokens(0..self.queries())
    }

    /// Log-sum-exps of some layers, `[layers, Hq, n]`.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn lse(&self, layers: Range<usize>) -> Result<Buffer<f32>, ArenaError> {
        let (n, heads) = (self.queries(), self.shape.q_heads);
        let mut lse = self.arena.alloc::<f32>(Label::Policy, layers.len() * n * heads)?;
        for (layer, lse) in layers.zip(lse.chunks_mut((n * heads).max(1))) {
            let sums = &self.lse[layer * self.room * heads..][..n * heads];
            for (index, &sum) in sums.iter().enumerate() {
                lse[index % heads * n + index / heads] = sum;
            }
        }
        Ok(lse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_queries_are_held_in_order() {
        let arena = Arena::unlimited();
        for (dtype, first) in DType::ALL.into_iter().flat_map(|dtype| [0, 3, 4, 9].map(|first| (dtype, first))) {
            let values: Vec<f32> = (0..2 * 3 * 9 * 4).map(|index| index as f32).collect();
            let q = Tensor::from_f32(&arena, Label::Input, dtype, [2, 3, 9, 4], &values).unwrap();
            let shape = WindowShape { layers: 2, q_heads: 3, head_dim: 4, dtype, has_lse: true };
            let mut window = ObservationWindow::new(&arena, shape, Span::Latest(4), first).unwrap();
            assert_eq!(arena.live_bytes(Label::Policy), shape.bytes(first.min(4)));
            // Chunks of any size: fewer than the window, as many, and more.
            for tokens in [0..3, 3..4, 4..9] {
                for layer in 0..2 {
                    let lse: Vec<f32> =
                        (0..3).flat_map(|head| tokens.clone().map(move |at| (10 * head + at) as f32)).collect();
                    window.push(layer, q.view().sequences(layer..layer + 1).tokens(tokens.clone()), &lse).unwrap();
                }
                let wanted = tokens.end.saturating_sub(4)..tokens.end;
                let (held, all) = (window.view(0..2), q.view().tokens(wanted.clone()));
                assert_eq!(held.dims(), all.dims());
                for (layer, head) in (0..2).flat_map(|layer| (0..3).map(move |head| (layer, head))) {
                    let rows = |view: TensorView<'_>| view.rows(layer, head, 0, wanted.len(), &mut [0.0; 16]).to_vec();
                    assert_eq!(rows(held), rows(all), "{dtype}, tokens before {}", wanted.end);
                }
                let lse: Vec<f32> =
                    (0..3).flat_map(|head| wanted.clone().map(move |at| (10 * head + at) as f32)).collect();
                assert_eq!(window.lse(1..2).unwrap().to_vec(), lse);
            }
            drop((window, q));
        }
    }
}

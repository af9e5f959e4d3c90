//! Queries of every layer, and their log-sum-exps, held until a judgement looks at them.

use super::Wanted;
use crate::attention::Shape;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{DType, TensorView};
use std::ops::Range;

/// Queries of one sequence, oldest first. They grow as they come, or move on when the room is full.
pub(super) struct Held {
    arena: Arena,
    /// `[layers, room, Hq, D]`.
    queries: Buffer<f32>,
    /// `[layers, room, Hq]`.
    sums: Buffer<f32>,
    /// Queries of each layer so far; while a pass goes on, upper layers have fewer.
    fill: Vec<usize>,
    room: usize,
    wanted: Wanted,
    heads: usize,
    width: usize,
}

impl Held {
    pub fn new(arena: &Arena, layers: usize, shape: &Shape, wanted: Wanted) -> Result<Self, ArenaError> {
        let (heads, width) = (shape.q_heads, shape.head_dim);
        let room = match wanted {
            Wanted::All => shape.q_len,
            Wanted::Latest(queries) => queries,
        };
        let (queries, sums) = Self::take(arena, layers * room * heads, width)?;
        Ok(Held { arena: arena.clone(), queries, sums, fill: vec![0; layers], room, wanted, heads, width })
    }

    fn take(arena: &Arena, rows: usize, width: usize) -> Result<(Buffer<f32>, Buffer<f32>), ArenaError> {
        Ok((arena.alloc(Label::Policy, rows * width)?, arena.alloc(Label::Policy, rows)?))
    }

    /// Queries that are held of every layer.
    pub fn queries(&self) -> usize {
        self.fill[0]
    }

    /// Takes queries `[1, Hq, n, D]` of a layer in, with their log-sum-exps `[Hq, n]`.
    pub fn push(&mut self, layer: usize, q: TensorView<'_>, lse: &[f32]) -> Result<(), ArenaError> {
        let (heads, width, new, fill) = (self.heads, self.width, q.dims()[2], self.fill[layer]);
        let (kept, taken) = match self.wanted {
            Wanted::All => (fill, new),
            Wanted::Latest(most) => (fill.min(most.saturating_sub(new)), new.min(most)),
        };
        if kept + taken > self.room {
            self.resize(kept + taken)?;
        }
        let rows = layer * self.room * heads..(layer + 1) * self.room * heads;
        let queries = &mut self.queries[rows.start * width..rows.end * width];
        let sums = &mut self.sums[rows];
        queries.copy_within((fill - kept) * heads * width..fill * heads * width, 0);
        sums.copy_within((fill - kept) * heads..fill * heads, 0);
        for query in 0..taken {
            let from = new - taken + query;
            for head in 0..heads {
                let row = (kept + query) * heads + head;
                q.read_rows(0, head, from, &mut queries[row * width..][..width]);
                sums[row] = lse[head * new + from];
            }
        }
        self.fill[layer] = kept + taken;
        Ok(())
    }

    /// Holds no more than the latest `most` queries from now on.
    pub fn narrow(&mut self, most: usize) -> Result<(), ArenaError> {
        self.wanted = Wanted::Latest(most);
        self.resize(most)
    }

    /// Makes room for so many queries of each layer; the latest stay.
    fn resize(&mut self, room: usize) -> Result<(), ArenaError> {
        let (layers, heads, width) = (self.fill.len(), self.heads, self.width);
        let (mut queries, mut sums) = Self::take(&self.arena, layers * room * heads, width)?;
        for (layer, fill) in self.fill.iter_mut().enumerate() {
            let kept = (*fill).min(room);
            let from = (layer * self.room + *fill - kept) * heads..(layer * self.room + *fill) * heads;
            let to = layer * room * heads..(layer * room + kept) * heads;
            queries[to.start * width..to.end * width]
                .copy_from_slice(&self.queries[from.start * width..from.end * width]);
            sums[to].copy_from_slice(&self.sums[from]);
            *fill = kept;
        }
        (self.queries, self.sums, self.room) = (queries, sums, room);
        Ok(())
    }

    /// Queries of some layers, `[layers, Hq, n, D]`.
    pub fn view(&self, layers: Range<usize>) -> TensorView<'_> {
        let dims = [self.fill.len(), self.room, self.heads, self.width];
        let all = TensorView::contiguous(DType::F32, dims, bytemuck::cast_slice(&self.queries));
        all.permuted([0, 2, 1, 3]).sequences(layers).tokens(0..self.queries())
    }

    /// Log-sum-exps of some layers, `[layers, Hq, n]`.
    pub fn lse(&self, layers: Range<usize>) -> Result<Buffer<f32>, ArenaError> {
        let (n, heads) = (self.queries(), self.heads);
        let mut lse = self.arena.alloc::<f32>(Label::Policy, layers.len() * n * heads)?;
        for (layer, lse) in layers.zip(lse.chunks_mut((n * heads).max(1))) {
            let sums = &self.sums[layer * self.room * heads..][..n * heads];
            for (index, &sum) in sums.iter().enumerate() {
                lse[index % heads * n + index / heads] = sum;
            }
        }
        Ok(lse)
    }
}

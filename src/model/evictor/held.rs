//! Queries of every layer, and their log-sum-exps, held until a judgement looks at them.

use super::Wanted;
use crate::attention::Shape;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{DType, TensorView};

/// Queries of one sequence, oldest first. Rows of a layer grow as they come, or move on when the room is full.
pub(super) struct Held {
    arena: Arena,
    /// Of each layer: `[room, Hq, D]` queries and `[room, Hq]` log-sum-exps.
    layers: Vec<(Buffer<f32>, Buffer<f32>)>,
    fill: Vec<usize>,
    wanted: Wanted,
    heads: usize,
    width: usize,
}

impl Held {
    pub fn new(arena: &Arena, layers: usize, shape: &Shape, wanted: Wanted) -> Result<Self, ArenaError> {
        let (heads, width) = (shape.q_heads, shape.head_dim);
        let mut held = Held { arena: arena.clone(), layers: Vec::new(), fill: vec![0; layers], wanted, heads, width };
        let room = match wanted {
            Wanted::All => 0,
            Wanted::Latest(queries) => queries,
        };
        held.layers = (0..layers).map(|_| held.room(room)).collect::<Result<_, _>>()?;
        Ok(held)
    }

    fn room(&self, queries: usize) -> Result<(Buffer<f32>, Buffer<f32>), ArenaError> {
        let rows = queries * self.heads;
        Ok((self.arena.alloc(Label::Policy, rows * self.width)?, self.arena.alloc(Label::Policy, rows)?))
    }

    /// Queries that are held.
    pub fn queries(&self) -> usize {
        self.fill[0]
    }

    /// Takes queries `[1, Hq, n, D]` of a layer in, with their log-sum-exps `[Hq, n]`.
    pub fn push(&mut self, layer: usize, q: TensorView<'_>, lse: &[f32]) -> Result<(), ArenaError> {
        let (heads, width, new) = (self.heads, self.width, q.dims()[2]);
        let room = self.layers[layer].1.len() / heads;
        let fill = self.fill[layer];
        let (kept, taken) = match self.wanted {
            Wanted::All => {
                if fill + new > room {
                    let mut larger = self.room(fill + new)?;
                    let (queries, sums) = &self.layers[layer];
                    larger.0[..fill * heads * width].copy_from_slice(&queries[..fill * heads * width]);
                    larger.1[..fill * heads].copy_from_slice(&sums[..fill * heads]);
                    self.layers[layer] = larger;
                }
                (fill, new)
            }
            Wanted::Latest(most) => (fill.min(most.saturating_sub(new)), new.min(most)),
        };
        let (queries, sums) = &mut self.layers[layer];
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

    /// Forgets all but what is wanted from now on.
    pub fn narrow(&mut self, wanted: Wanted) -> Result<(), ArenaError> {
        let most = match wanted {
            Wanted::All => 0,
            Wanted::Latest(most) => most,
        };
        let (heads, row) = (self.heads, self.heads * self.width);
        for layer in 0..self.layers.len() {
            let (fill, mut fresh) = (self.fill[layer], self.room(most)?);
            let kept = fill.min(most);
            let (queries, sums) = &self.layers[layer];
            fresh.0[..kept * row].copy_from_slice(&queries[(fill - kept) * row..fill * row]);
            fresh.1[..kept * heads].copy_from_slice(&sums[(fill - kept) * heads..fill * heads]);
            self.layers[layer] = fresh;
            self.fill[layer] = kept;
        }
        self.wanted = wanted;
        Ok(())
    }

    /// Queries of some layers, `[layers, n, Hq, D]`, and their log-sum-exps, `[layers, Hq, n]`.
    pub fn layers(&self, layers: std::ops::Range<usize>) -> Result<(Buffer<f32>, Buffer<f32>), ArenaError> {
        let (n, heads, row) = (self.queries(), self.heads, self.heads * self.width);
        let mut q = self.arena.alloc::<f32>(Label::Policy, layers.len() * n * row)?;
        let mut lse = self.arena.alloc::<f32>(Label::Policy, layers.len() * n * heads)?;
        let targets = q.chunks_mut((n * row).max(1)).zip(lse.chunks_mut((n * heads).max(1)));
        for ((queries, sums), (q, lse)) in self.layers[layers].iter().zip(targets) {
            q.copy_from_slice(&queries[..n * row]);
            for (index, &sum) in sums[..n * heads].iter().enumerate() {
                lse[index % heads * n + index / heads] = sum;
            }
        }
        Ok((q, lse))
    }

    /// What [`Held::layers`] gave as a view `[layers, Hq, n, D]`.
    pub fn view<'q>(&self, q: &'q [f32], layers: usize) -> TensorView<'q> {
        let dims = [layers, self.queries(), self.heads, self.width];
        TensorView::contiguous(DType::F32, dims, bytemuck::cast_slice(q)).permuted([0, 2, 1, 3])
    }
}

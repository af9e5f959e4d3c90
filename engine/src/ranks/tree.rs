//! Tree attention (arXiv 2408.04093): few queries that every rank has, over keys that are shared out.
//!
//! Each rank computes all queries over its own keys, and partial results are merged up a binomial tree by their log-sum-exps and
//! handed down again. What is sent does not depend on the context.

use super::cost::{Sending, tree_depth};
use super::pieces::{Part, Piece, pieces};
use super::ring::{larger, refuse_window};
use super::{Placement, RankError, Shards, all_reduce_messages};
use crate::attention::{AttentionError, Forward, Kernel, KvRows, Outputs, Params, Partials, Shape, WorkspaceSize};
use crate::memory::{Buffer, Label};
use crate::ranks::Rank;
use crate::tensor::{DType, Tensor, TensorView};
use std::ops::Range;

/// A problem whose keys are shared out.
#[derive(Debug, Clone, Copy)]
pub struct Tree {
    shape: Shape,
    params: Params,
    dtype: DType,
    kv: Shards,
}

impl Tree {
    /// Shares the keys of a problem of this shape out over `ranks`; `dtype` is that of inputs and outputs.
    ///
    /// # Errors
    /// When it has a sliding window, or fewer keys than ranks.
    pub fn new(shape: Shape, params: Params, dtype: DType, ranks: usize) -> Result<Self, RankError> {
        refuse_window(&params)?;
        Ok(Tree { shape, params, dtype, kv: Shards::new(shape.kv_len, ranks, Placement::Contiguous)? })
    }

    /// The keys of each rank.
    pub fn keys(&self) -> &Shards {
        &self.kv
    }

    /// Extents of a rank's own tensors.
    pub fn shape_of(&self, rank: usize) -> Shape {
        Shape { kv_len: self.kv.len(rank), ..self.shape }
    }

    /// Bytes of the queries and of a rank's own keys and values.
    pub fn input_bytes(&self, rank: usize) -> u64 {
        let shape = self.shape_of(rank);
        Tensor::bytes_of(self.dtype, shape.q_dims()) + 2 * Tensor::bytes_of(self.dtype, shape.kv_dims())
    }

    /// Extents of the whole problem.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Scale, mask and soft-cap.
    pub fn params(&self) -> Params {
        self.params
    }

    /// Bytes of the arena that [`Tree::forward`] takes at its peak.
    pub fn forward_bytes(&self, kernel: &dyn Kernel, rank: usize, threads: usize) -> u64 {
        let pieces = self.pieces(rank, 0..self.shape.q_len);
        let results = pieces.iter().map(|piece| Outputs::bytes(&self.part(piece).0, DType::F32)).max().unwrap_or(0);
        let pass = self.workspace(kernel, &pieces, threads).bytes() + results;
        let partials = Partials::bytes(&self.shape);
        partials + pass.max(partials).max(Outputs::bytes(&self.shape, self.dtype))
    }

    /// Bytes that a rank sends in [`Tree::forward`].
    pub fn forward_sent_bytes(&self, rank: usize) -> u64 {
        all_reduce_messages(rank, self.kv.ranks()) * Partials::bytes(&self.shape)
    }

    /// What [`Tree::forward`] sends: partial results up the tree and down again.
    pub fn forward_sending(&self) -> Sending {
        let bytes = Partials::bytes(&self.shape);
        let depth = tree_depth(self.kv.ranks() as u64);
        // On the way up; the result comes down as it is. One rank takes the room too.
        Sending { exchanges: vec![bytes; depth as usize], rooms: vec![bytes; 2], merges: depth / 2 }
    }

    /// Attention of the queries over all keys, the same on every rank. `kv` are this rank's own.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn forward(&self, on: Rank<'_>, q: TensorView<'_>, kv: &dyn KvRows) -> Result<Outputs, RankError> {
        let mut partials = self.partials(on, q, 0..self.shape.q_len, kv)?;
        self.merge(on, &mut partials)?;
        Ok(partials.finish(on.cpu, on.arena, self.dtype)?)
    }

    /// Log-sum-exps over all keys of the queries `q`, which are `queries` of the problem's: `[B, Hq, queries]`, the same on every
    /// rank.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn log_sum_exps(
        &self,
        on: Rank<'_>,
        q: TensorView<'_>,
        queries: Range<usize>,
        kv: &dyn KvRows,
    ) -> Result<Buffer<f32>, RankError> {
        let mut lse = self.partials(on, q, queries, kv)?.finish(on.cpu, on.arena, DType::F32)?.lse;
        let mut theirs: Buffer<f32> = on.arena.alloc(Label::Workspace, lse.len())?;
        on.comm.all_reduce(
            bytemuck::cast_slice_mut(&mut lse),
            bytemuck::cast_slice_mut(&mut theirs),
            |mine, theirs| {
                let pairs = bytemuck::cast_slice_mut::<u8, f32>(mine).iter_mut().zip(bytemuck::cast_slice(theirs));
                pairs.for_each(|(mine, &theirs)| *mine = log_add_exp(*mine, theirs));
            },
        )?;
        Ok(lse)
    }

    /// Sends what [`Tree::forward`] sends, and computes nothing.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn send_alone(&self, on: Rank<'_>) -> Result<(), RankError> {
        self.merge(on, &mut Partials::empty(on.arena, &self.shape)?)
    }

    /// Results of some queries over this rank's own keys.
    fn partials(
        &self,
        on: Rank<'_>,
        q: TensorView<'_>,
        queries: Range<usize>,
        kv: &dyn KvRows,
    ) -> Result<Partials, RankError> {
        let mut partials = Partials::empty(on.arena, &Shape { q_len: queries.len(), ..self.shape })?;
        let pieces = self.pieces(on.comm.rank(), queries);
        let work = || {
            let mut workspace = self.workspace(on.kernel, &pieces, on.cpu.threads()).allocate(on.arena)?;
            for piece in &pieces {
                let (shape, params) = self.part(piece);
                let kv = Part { kv, list: None, keys: piece.k.clone() };
                let mut results = Outputs::allocate(on.arena, &shape, DType::F32)?;
                let call = Forward { shape, params, q: q.tokens(piece.q.clone()), kv: &kv, cpu: on.cpu };
                on.kernel.forward(&call, &mut results, &mut workspace)?;
                partials.add(on.cpu, piece.q.start, &results);
            }
            Ok::<_, AttentionError>(())
        };
        on.comm.exchange(on.cpu, &[], &mut [], work)??;
        Ok(partials)
    }

    fn merge(&self, on: Rank<'_>, partials: &mut Partials) -> Result<(), RankError> {
        let mine = partials.as_bytes();
        let mut theirs: Buffer<u8> = on.arena.alloc(Label::Workspace, mine.len())?;
        on.comm.all_reduce(mine, &mut theirs, |mine, theirs| Partials::merge(&self.shape, on.cpu, mine, theirs))
    }

    fn workspace(&self, kernel: &dyn Kernel, pieces: &[Piece], threads: usize) -> WorkspaceSize {
        let size = |piece: &Piece| {
            let (shape, params) = self.part(piece);
            kernel.workspace(&shape, &params, self.dtype, threads)
        };
        pieces.iter().map(size).fold(WorkspaceSize::default(), larger)
    }

    /// The calls of some of the problem's queries over a rank's keys.
    pub(super) fn pieces(&self, rank: usize, queries: Range<usize>) -> Vec<Piece> {
        let Shape { q_len, kv_len, .. } = self.shape;
        pieces(self.params.causal, [q_len, kv_len], &[queries], &self.kv.of(rank))
    }

    pub(super) fn part(&self, piece: &Piece) -> (Shape, Params) {
        piece.of(self.shape, self.params)
    }
}

/// `ln(exp(a) + exp(b))`.
fn log_add_exp(a: f32, b: f32) -> f32 {
    let max = a.max(b);
    if max == f32::NEG_INFINITY { max } else { max + ((a - max).exp() + (b - max).exp()).ln() }
}

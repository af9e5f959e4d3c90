//! Ring attention (arXiv 2310.01889): queries stay, keys and values go around, and are sent on while they are computed with.
//!
//! Rank `r` of `N` holds the queries, keys and values of two chunks of the sequence ([`Placement::ZigZag`]). In step `t` it has
//! those keys that rank `r - t` began with: it computes its queries over them by calls of a kernel ([`super::pieces`]), adds the
//! results to what it has by their log-sum-exps ([`Partials`]), and meanwhile passes the keys on and gets the next. The backward pass
//! ([`backward`]) goes around the same way, with gradients by keys and values travelling one step behind.

mod backward;

pub use backward::RingBackward;

use super::comm::{Received, Sent};
use super::cost::Sending;
use super::pieces::{Piece, pieces};
use super::{Comm, Placement, RankError, Shards};
use crate::attention::{AttentionError, DenseKv, Forward, Kernel, Outputs, Params, Partials, Shape, WorkspaceSize};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::{DType, Tensor, TensorView};

/// Where a rank computes.
#[derive(Clone, Copy)]
pub struct Rank<'a> {
    /// The others.
    pub comm: &'a Comm,
    /// Its threads.
    pub cpu: &'a Cpu,
    /// Its memory.
    pub arena: &'a Arena,
    /// The kernel of every piece.
    pub kernel: &'a dyn Kernel,
}

/// A problem that is shared out over a ring.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    shape: Shape,
    params: Params,
    dtype: DType,
    q: Shards,
    kv: Shards,
}

impl Ring {
    /// Shares a problem of this shape out over `ranks`; `dtype` is that of inputs and outputs.
    ///
    /// # Errors
    /// When it has a sliding window, or fewer than two queries or keys for each rank.
    pub fn new(shape: Shape, params: Params, dtype: DType, ranks: usize) -> Result<Self, RankError> {
        refuse_window(&params)?;
        let shards = |tokens| Shards::new(tokens, ranks, Placement::ZigZag);
        Ok(Ring { shape, params, dtype, q: shards(shape.q_len)?, kv: shards(shape.kv_len)? })
    }

    /// The queries of each rank.
    pub fn queries(&self) -> &Shards {
        &self.q
    }

    /// The keys of each rank.
    pub fn keys(&self) -> &Shards {
        &self.kv
    }

    /// Extents of a rank's own tensors.
    pub fn shape_of(&self, rank: usize) -> Shape {
        Shape { q_len: self.q.len(rank), kv_len: self.kv.len(rank), ..self.shape }
    }

    /// Bytes of a rank's own queries, keys and values.
    pub fn input_bytes(&self, rank: usize) -> u64 {
        let shape = self.shape_of(rank);
        Tensor::bytes_of(self.dtype, shape.q_dims()) + 2 * Tensor::bytes_of(self.dtype, shape.kv_dims())
    }

    /// Bytes of the arena that [`Ring::forward`] takes at its peak.
    pub fn forward_bytes(&self, kernel: &dyn Kernel, rank: usize, threads: usize) -> u64 {
        let own = self.shape_of(rank);
        let results = self.all_pieces(rank).map(|piece| Outputs::bytes(&self.part(&piece).0, DType::F32));
        let pass = Travelling::bytes(self) + self.workspace(kernel, rank, threads).bytes() + results.max().unwrap_or(0);
        Partials::bytes(&own) + pass.max(Outputs::bytes(&own, self.dtype))
    }

    /// Bytes that a rank sends in [`Ring::forward`]: all keys and values but those of the rank behind it, which go `N - 1` steps.
    pub fn forward_sent_bytes(&self, rank: usize) -> u64 {
        let ranks = self.kv.ranks();
        (0..ranks - 1).map(|step| 2 * self.keys_bytes(source(rank, step, ranks)) as u64).sum()
    }

    /// What [`Ring::forward`] sends.
    pub fn forward_sending(&self) -> Sending {
        let rooms = Travelling::lens(self).map(|bytes| bytes as u64).into_iter().filter(|&bytes| bytes > 0).collect();
        Sending { exchanges: vec![2 * self.most_keys_bytes() as u64; self.kv.ranks() - 1], rooms, merges: 0 }
    }

    /// Attention of this rank's queries over all keys. `k` and `v` are its own.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn forward(&self, on: Rank<'_>, q: TensorView<'_>, [k, v]: [&Tensor; 2]) -> Result<Outputs, RankError> {
        let rank = on.comm.rank();
        let mut partials = Partials::empty(on.arena, &self.shape_of(rank))?;
        {
            let mut workspace = self.workspace(on.kernel, rank, on.cpu.threads()).allocate(on.arena)?;
            self.rotate(on, [k, v], |source, k, v| {
                for piece in self.pieces(rank, source) {
                    let (shape, params) = self.part(&piece);
                    let kv = DenseKv::new(k.tokens(piece.k.clone()), v.tokens(piece.k.clone()))?;
                    let q = q.tokens(piece.q.clone());
                    let mut results = Outputs::allocate(on.arena, &shape, DType::F32)?;
                    let call = Forward { shape, params, q, kv: &kv, cpu: on.cpu };
                    on.kernel.forward(&call, &mut results, &mut workspace)?;
                    partials.add(on.cpu, piece.q.start, &results);
                }
                Ok(())
            })?;
        }
        Ok(partials.finish(on.cpu, on.arena, self.dtype)?)
    }

    /// Sends what [`Ring::forward`] sends, and computes nothing: what computing could hide at best.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn send_alone(&self, on: Rank<'_>, kv: [&Tensor; 2]) -> Result<(), RankError> {
        self.rotate(on, kv, |_, _, _| Ok(()))
    }

    /// Takes keys and values once around the ring, and calls `work` with each rank's number, keys and values.
    fn rotate(
        &self,
        on: Rank<'_>,
        own: [&Tensor; 2],
        mut work: impl FnMut(usize, TensorView<'_>, TensorView<'_>) -> Result<(), AttentionError> + Send,
    ) -> Result<(), RankError> {
        let mut travelling = Travelling::new(self, on.arena)?;
        for step in 0..self.kv.ranks() {
            let hop = travelling.hop(self, on.comm.rank(), step, own);
            let (source, [k, v]) = (hop.source, hop.views(self));
            let (send, mut receive) = hop.messages(on.comm);
            on.comm.exchange(on.cpu, &send, &mut receive, || work(source, k, v))??;
        }
        Ok(())
    }

    fn workspace(&self, kernel: &dyn Kernel, rank: usize, threads: usize) -> WorkspaceSize {
        let size = |piece: Piece| {
            let (shape, params) = self.part(&piece);
            kernel.workspace(&shape, &params, self.dtype, threads)
        };
        self.all_pieces(rank).map(size).fold(WorkspaceSize::default(), larger)
    }

    /// The calls of a rank's queries over the keys that `source` began with.
    fn pieces(&self, rank: usize, source: usize) -> Vec<Piece> {
        let lens = [self.shape.q_len, self.shape.kv_len];
        pieces(self.params.causal, lens, &self.q.of(rank), &self.kv.of(source))
    }

    fn all_pieces(&self, rank: usize) -> impl Iterator<Item = Piece> {
        (0..self.kv.ranks()).flat_map(move |source| self.pieces(rank, source))
    }

    fn part(&self, piece: &Piece) -> (Shape, Params) {
        piece.of(self.shape, self.params)
    }

    fn keys_dims(&self, source: usize) -> [usize; 4] {
        self.shape_of(source).kv_dims()
    }

    /// Bytes of the keys that a rank began with, and of its values.
    fn keys_bytes(&self, source: usize) -> usize {
        Tensor::bytes_of(self.dtype, self.keys_dims(source)) as usize
    }

    fn most_keys_bytes(&self) -> usize {
        (0..self.kv.ranks()).map(|rank| self.keys_bytes(rank)).max().unwrap_or(0)
    }
}

/// Refuses a sliding window, whose edge no piece is aligned with.
pub(super) fn refuse_window(params: &Params) -> Result<(), RankError> {
    match params.window {
        None => Ok(()),
        Some(window) => Err(RankError::Unsupported(format!(
            "a window of {window} is not available over ranks; leave the window out, or --ranks"
        ))),
    }
}

/// The rank whose keys are here after so many steps.
fn source(rank: usize, step: usize, ranks: usize) -> usize {
    (rank + ranks - step) % ranks
}

/// The scratch memory that serves both.
pub(super) fn larger(a: WorkspaceSize, b: WorkspaceSize) -> WorkspaceSize {
    WorkspaceSize { scores: a.scores.max(b.scores), scratch: a.scratch.max(b.scratch) }
}

/// Keys and values of other ranks: those that are here, and room for those that come.
struct Travelling([Buffer<u8>; 2]);

/// A step of the ring.
struct Hop<'a> {
    /// Whose keys are here.
    source: usize,
    /// They and their values.
    here: [&'a [u8]; 2],
    /// Where the next ones go; `None` in the last step.
    room: Option<[&'a mut [u8]; 2]>,
}

impl Travelling {
    fn lens(ring: &Ring) -> [usize; 2] {
        let most = 2 * ring.most_keys_bytes();
        [2, 3].map(|ranks| if ring.kv.ranks() >= ranks { most } else { 0 })
    }

    fn bytes(ring: &Ring) -> u64 {
        Self::lens(ring).iter().sum::<usize>() as u64
    }

    fn new(ring: &Ring, arena: &Arena) -> Result<Self, ArenaError> {
        let [first, second] = Self::lens(ring);
        Ok(Travelling([arena.alloc(Label::Kv, first)?, arena.alloc(Label::Kv, second)?]))
    }

    fn hop<'a>(&'a mut self, ring: &Ring, rank: usize, step: usize, own: [&'a Tensor; 2]) -> Hop<'a> {
        let ranks = ring.kv.ranks();
        let source = source(rank, step, ranks);
        let [even, odd] = &mut self.0;
        let (here, next) = if step.is_multiple_of(2) { (odd, even) } else { (even, odd) };
        let bytes = ring.keys_bytes(source);
        let here = match step {
            0 => own.map(Tensor::bytes),
            _ => here[..2 * bytes].split_at(bytes).into(),
        };
        let room = (step + 1 < ranks).then(|| {
            let bytes = ring.keys_bytes(self::source(rank, step + 1, ranks));
            next[..2 * bytes].split_at_mut(bytes).into()
        });
        Hop { source, here, room }
    }
}

impl<'a> Hop<'a> {
    fn views(&self, ring: &Ring) -> [TensorView<'a>; 2] {
        self.here.map(|bytes| TensorView::contiguous(ring.dtype, ring.keys_dims(self.source), bytes))
    }

    fn messages(self, comm: &Comm) -> (Vec<Sent<'a>>, Vec<Received<'a>>) {
        match self.room {
            None => (Vec::new(), Vec::new()),
            Some(room) => {
                (self.here.map(|bytes| (comm.next(), bytes)).into(), room.map(|bytes| (comm.previous(), bytes)).into())
            }
        }
    }
}

//! The backward pass of a ring.
//!
//! The kernel's backward pass recomputes probabilities from the log-sum-exps of all keys, so that what it gives for a piece is that
//! piece's share of each gradient. Shares by queries are added up where they are. Those by keys and values are added to sums that
//! follow their keys around, one step behind: in step `t` a rank sends on the sums of the keys that it had in step `t - 1`, gets
//! those of the keys that it has, and after the last step each goes home.

use super::{Rank, Ring, Travelling, larger, source};
use crate::attention::{AttentionError, Backward, DenseKv, Forward, Gradients, Kernel, Shape, WorkspaceSize};
use crate::device::Cpu;
use crate::device::simd::loops;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::ranks::RankError;
use crate::ranks::cost::Sending;
use crate::tensor::{DType, Tensor, TensorView};

/// What a rank's backward pass reads besides its keys and values: of its own queries all.
#[derive(Clone, Copy)]
pub struct RingBackward<'a> {
    /// Queries, `[B, Hq, Lq of the rank, D]`.
    pub q: TensorView<'a>,
    /// Output of the forward pass, likewise.
    pub o: TensorView<'a>,
    /// Its log-sum-exps, `[B, Hq, Lq of the rank]`.
    pub lse: &'a [f32],
    /// Gradient of the loss by `o`.
    pub grad_o: TensorView<'a>,
}

impl Ring {
    /// Bytes of the arena that [`Ring::backward`] takes at its peak; `None` when the kernel has no backward pass.
    pub fn backward_bytes(&self, kernel: &dyn Kernel, rank: usize, threads: usize) -> Option<u64> {
        let size = self.backward_workspace(kernel, rank, threads)?;
        let own = self.shape_of(rank);
        let (by_q, sums) = (4 * own.rows() as u64 * own.head_dim as u64, 4 * self.most_sums() as u64);
        let piece = |shape: &Shape| Gradients::bytes(shape, DType::F32) + 4 * shape.rows() as u64;
        let pieces = self.all_pieces(rank).map(|at| piece(&self.part(&at).0)).max().unwrap_or(0);
        let around = 3 * sums + Travelling::bytes(self) + size.bytes() + pieces;
        Some(by_q + around.max(sums + Gradients::bytes(&own, self.dtype)))
    }

    /// Bytes that a rank sends in [`Ring::backward`]: keys and values as in the forward pass, and `N` times sums in f32.
    pub fn backward_sent_bytes(&self, rank: usize) -> u64 {
        let ranks = self.kv.ranks();
        let sums = |step| 4 * self.sums(source(rank, step, ranks)) as u64;
        let of_sums: u64 = if ranks == 1 { 0 } else { (0..ranks).map(sums).sum() };
        self.forward_sent_bytes(rank) + of_sums
    }

    /// What [`Ring::backward`] sends: keys and values, both with sums, and sums alone, twice.
    pub fn backward_sending(&self) -> Sending {
        let Sending { exchanges, mut rooms, .. } = self.forward_sending();
        let sums = 4 * self.most_sums() as u64;
        rooms.extend([sums; 3]);
        let exchanges = match exchanges[..] {
            [] => Vec::new(),
            [keys, ..] => [vec![keys], vec![keys + sums; exchanges.len() - 1], vec![sums; 2]].concat(),
        };
        Sending { exchanges, rooms, merges: 0 }
    }

    /// Gradients by this rank's queries, and by its keys and values over all queries.
    ///
    /// # Errors
    /// When another rank ended, the kernel has no backward pass, or the arena has no room.
    pub fn backward(&self, on: Rank<'_>, call: RingBackward<'_>, own: [&Tensor; 2]) -> Result<Gradients, RankError> {
        let rank = on.comm.rank();
        let shape = self.shape_of(rank);
        let mut by_q: Buffer<f32> = on.arena.alloc(Label::Activations, shape.rows() * shape.head_dim)?;
        let by_kv = {
            let size = self.backward_workspace(on.kernel, rank, on.cpu.threads());
            let size = size.ok_or(AttentionError::Unsupported {
                kernel: on.kernel.name(),
                what: "backward pass",
                instead: "tiled",
            })?;
            let mut workspace = size.allocate(on.arena)?;
            self.rotate_with_sums(on, own, |source, [k, v], share| {
                share.fill(0.0);
                let (by_k, by_v) = share.split_at_mut(share.len() / 2);
                for piece in self.pieces(rank, source) {
                    let (part, params) = self.part(&piece);
                    let kv = DenseKv::new(k.tokens(piece.k.clone()), v.tokens(piece.k.clone()))?;
                    let forward =
                        Forward { shape: part, params, q: call.q.tokens(piece.q.clone()), kv: &kv, cpu: on.cpu };
                    let lse = rows_of(call.lse, shape.q_len, &piece.q, on.arena)?;
                    let mut gradients = Gradients::allocate(on.arena, &part, DType::F32)?;
                    let call = Backward {
                        forward,
                        o: call.o.tokens(piece.q.clone()),
                        lse: &lse,
                        grad_o: call.grad_o.tokens(piece.q.clone()),
                    };
                    on.kernel.backward(&call, &mut gradients, &mut workspace)?;
                    add(on.cpu, &mut by_q, shape.q_len, piece.q.start, &gradients.q);
                    let len = self.kv.len(source);
                    add(on.cpu, by_k, len, piece.k.start, &gradients.k);
                    add(on.cpu, by_v, len, piece.k.start, &gradients.v);
                }
                Ok(())
            })?
        };
        let mut gradients = Gradients::allocate(on.arena, &shape, self.dtype)?;
        let (by_k, by_v) = by_kv[..self.sums(rank)].split_at(self.sums(rank) / 2);
        for (sum, gradient) in [(&*by_q, &mut gradients.q), (by_k, &mut gradients.k), (by_v, &mut gradients.v)] {
            self.dtype.encode(sum, gradient.bytes_mut());
        }
        Ok(gradients)
    }

    /// Sends what [`Ring::backward`] sends, and computes nothing.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn send_backward_alone(&self, on: Rank<'_>, own: [&Tensor; 2]) -> Result<(), RankError> {
        self.rotate_with_sums(on, own, |_, _, _| Ok(())).map(drop)
    }

    /// Takes keys and values once around the ring, and sums behind them: `work` is called with each rank's number, keys and
    /// values, and writes this rank's share of their sums, `[2, B, Hkv, Lk of a rank, D]`. What comes home is the sum of all shares
    /// by this rank's own.
    fn rotate_with_sums(
        &self,
        on: Rank<'_>,
        own: [&Tensor; 2],
        mut work: impl FnMut(usize, [TensorView<'_>; 2], &mut [f32]) -> Result<(), AttentionError> + Send,
    ) -> Result<Buffer<f32>, RankError> {
        let (rank, ranks, comm) = (on.comm.rank(), self.kv.ranks(), on.comm);
        let sums = || on.arena.alloc::<f32>(Label::Activations, self.most_sums());
        // Of the keys that were here, which are sent on; of those that are here, which come; and this step's share.
        let (mut behind, mut coming, mut share) = (sums()?, sums()?, sums()?);
        let mut travelling = Travelling::new(self, on.arena)?;
        for step in 0..ranks {
            let hop = travelling.hop(self, rank, step, own);
            let (source, kv) = (hop.source, hop.views(self));
            let (mut send, mut receive) = hop.messages(comm);
            if step > 0 {
                let before = self.sums(super::source(rank, step - 1, ranks));
                send.push((comm.next(), bytemuck::cast_slice(&behind[..before])));
                receive.push((comm.previous(), bytemuck::cast_slice_mut(&mut coming[..self.sums(source)])));
            }
            let share = &mut share[..self.sums(source)];
            comm.exchange(on.cpu, &send, &mut receive, || work(source, kv, share))??;
            drop((send, receive));
            if step > 0 {
                loops::add_scaled(on.cpu.isa(), &mut coming[..share.len()], 1.0, share);
                std::mem::swap(&mut behind, &mut coming);
            } else {
                behind[..share.len()].copy_from_slice(share);
            }
        }
        if ranks > 1 {
            let last = self.sums(source(rank, ranks - 1, ranks));
            let send = [(comm.next(), bytemuck::cast_slice(&behind[..last]))];
            let home = &mut coming[..self.sums(rank)];
            comm.transfer(&send, &mut [(comm.previous(), bytemuck::cast_slice_mut(home))])?;
            std::mem::swap(&mut behind, &mut coming);
        }
        Ok(behind)
    }

    fn backward_workspace(&self, kernel: &dyn Kernel, rank: usize, threads: usize) -> Option<WorkspaceSize> {
        let mut size = WorkspaceSize::default();
        for piece in self.all_pieces(rank) {
            let (shape, params) = self.part(&piece);
            size = larger(size, kernel.backward_workspace(&shape, &params, DType::F32, threads)?);
        }
        Some(size)
    }

    /// Elements of the gradients by a rank's keys and values.
    fn sums(&self, source: usize) -> usize {
        2 * self.keys_dims(source).iter().product::<usize>()
    }

    fn most_sums(&self) -> usize {
        (0..self.kv.ranks()).map(|rank| self.sums(rank)).max().unwrap_or(0)
    }
}

/// The log-sum-exps of some queries of each head.
fn rows_of(
    lse: &[f32],
    q_len: usize,
    queries: &std::ops::Range<usize>,
    arena: &Arena,
) -> Result<Buffer<f32>, ArenaError> {
    let mut rows = arena.alloc(Label::Workspace, lse.len() / q_len * queries.len())?;
    for (head, rows) in lse.chunks_exact(q_len).zip(rows.chunks_exact_mut(queries.len())) {
        rows.copy_from_slice(&head[queries.clone()]);
    }
    Ok(rows)
}

/// Adds the rows of `from` to those from `first` on of each head of `sum`, `[heads, len, D]`.
fn add(cpu: &Cpu, sum: &mut [f32], len: usize, first: usize, from: &Tensor) {
    let [.., count, width] = from.dims();
    let from: &[f32] = bytemuck::cast_slice(from.bytes());
    for (sum, from) in sum.chunks_exact_mut(len * width).zip(from.chunks_exact(count * width)) {
        loops::add_scaled(cpu.isa(), &mut sum[first * width..][..count * width], 1.0, from);
    }
}

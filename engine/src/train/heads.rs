//! Between rows of tokens in f32 and heads in attention's type: `[B * L, q | k | v]` to `[B, H, L, D]` with the norms of heads
//! and RoPE, and back.

use crate::device::Cpu;
use crate::model::Config;
use crate::model::norm::Norm;
use crate::model::rope::{angles, rotate};
use crate::tensor::Tensor;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use std::ops::Range;

/// The turns of every position of a sequence, forth and back, `[L, D]` each.
pub(super) struct Turns {
    forth: Vec<f32>,
    back: Vec<f32>,
    /// Pairs of channels that turn.
    pairs: usize,
}

impl Turns {
    /// The turns of positions `0..len`.
    pub fn new(config: &Config, len: usize) -> Self {
        let (rope, dim) = (&config.rope, config.head_dim);
        let frequencies = rope.frequencies(dim, config.max_positions, len);
        let (pairs, mut forth) = (rope.pairs(dim), vec![0.0; len * dim]);
        for (at, row) in forth.chunks_exact_mut(dim).enumerate() {
            angles(&frequencies, at, rope.attention_factor(), row);
        }
        let mut back = forth.clone();
        back.chunks_exact_mut(dim).for_each(|row| row[pairs..2 * pairs].iter_mut().for_each(|sine| *sine = -*sine));
        Turns { forth, back, pairs }
    }
}

/// Where q, k and v lie in a token's row.
pub(super) fn columns(config: &Config) -> [Range<usize>; 3] {
    let (q, kv) = (config.q_width(), config.kv_width());
    [0..q, q..q + kv, q + kv..q + 2 * kv]
}

/// Cuts rows `[B * L, qkv_width]`, of each sequence those from `first` on, into `[B, H, L, D]` for q, k and v; normalises the heads of q and k where there are
/// `norms`, and turns them to their positions.
pub(super) fn split(
    cpu: &Cpu,
    config: &Config,
    turns: &Turns,
    norms: Option<[Norm<'_>; 2]>,
    (rows, first): (&[f32], usize),
    heads: [&mut Tensor; 3],
) {
    let (dim, width) = (config.head_dim, config.qkv_width());
    let len = turns.forth.len() / dim;
    cpu.install(|| {
        for (part, (columns, target)) in columns(config).into_iter().zip(heads).enumerate() {
            let (heads, norm) = (columns.len() / dim, norms.as_ref().and_then(|norms| norms.get(part)));
            let dtype = target.dtype();
            let row_bytes = dim * dtype.bytes();
            target.bytes_mut().par_chunks_mut(len * row_bytes).enumerate().for_each(|(index, target)| {
                let (batch, head) = (index / heads, index % heads);
                let (column, mut row) = (columns.start + head * dim, vec![0.0; dim]);
                for (at, to) in target.chunks_exact_mut(row_bytes).enumerate().skip(first) {
                    row.copy_from_slice(&rows[(batch * len + at) * width + column..][..dim]);
                    if let Some(norm) = norm {
                        norm.row(cpu.isa(), &mut row);
                    }
                    if part < 2 {
                        rotate(&mut row, &turns.forth[at * dim..][..dim], turns.pairs);
                    }
                    dtype.encode(&row, to);
                }
            });
        }
    });
}

/// The gradient of [`split`] but for the norms: turns those by q and k back and puts the heads of a token side by side. Those by q are
/// `[B, H, L - first, D]`.
pub(super) fn merge(
    cpu: &Cpu,
    config: &Config,
    turns: &Turns,
    heads: [&Tensor; 3],
    (rows, first): (&mut [f32], usize),
) {
    let dim = config.head_dim;
    let len = turns.back.len() / dim;
    cpu.install(|| {
        rows.par_chunks_mut(config.qkv_width()).enumerate().skip(first).for_each(|(row, to)| {
            let (batch, at) = (row / len, row % len);
            for (part, (columns, heads)) in columns(config).into_iter().zip(heads).enumerate() {
                let ([_, count, long, _], dtype) = (heads.dims(), heads.dtype());
                let place = at + long - len;
                for (head, to) in to[columns].chunks_exact_mut(dim).enumerate() {
                    let bytes = dim * dtype.bytes();
                    dtype.decode(&heads.bytes()[((batch * count + head) * long + place) * bytes..][..bytes], to);
                    if part < 2 {
                        rotate(to, &turns.back[at * dim..][..dim], turns.pairs);
                    }
                }
            }
        });
    });
}

/// Puts the heads of `[B, H, Lq, D]` side by side, in the last `Lq` rows of each sequence of `rows`, `[B * len, H * D]`.
pub(super) fn side_by_side(cpu: &Cpu, heads: &Tensor, len: usize, rows: &mut [f32]) {
    each_row(cpu, heads, len, rows, |_, row, to| to.copy_from_slice(row));
}

/// Hands every row of the heads `[B, H, Lq, D]` to `put`, with its head and its place in the last `Lq` rows of each sequence of `rows`,
/// `[B * len, H * D]`.
pub(super) fn each_row(
    cpu: &Cpu,
    heads: &Tensor,
    len: usize,
    rows: &mut [f32],
    put: impl Fn(usize, &[f32], &mut [f32]) + Sync,
) {
    let [_, count, long, dim] = heads.dims();
    cpu.install(|| {
        rows.par_chunks_mut(count * dim).enumerate().skip(len - long).for_each_init(
            || vec![0.0; dim],
            |of_head, (row, to)| {
                for (head, to) in to.chunks_exact_mut(dim).enumerate() {
                    row_of(heads, (row / len, head, row % len + long - len), of_head);
                    put(head, of_head, to);
                }
            },
        );
    });
}

/// A row of heads `[B, H, L, D]`, by sequence, head and place.
pub(super) fn row_of(heads: &Tensor, (batch, head, at): (usize, usize, usize), to: &mut [f32]) {
    let ([_, count, long, dim], dtype) = (heads.dims(), heads.dtype());
    let bytes = dim * dtype.bytes();
    dtype.decode(&heads.bytes()[((batch * count + head) * long + at) * bytes..][..bytes], to);
}

/// Rounds to bf16, into the first elements of `to`.
pub(super) fn round<'t>(cpu: &Cpu, from: &[f32], to: &'t mut [bf16]) -> &'t [bf16] {
    const PIECE: usize = 1 << 14;
    let to = &mut to[..from.len()];
    cpu.install(|| {
        let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
        pieces.for_each(|(to, from)| to.convert_from_f32_slice(from));
    });
    to
}

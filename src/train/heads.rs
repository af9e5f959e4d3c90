//! Between rows of tokens and heads: `[B * L, q | k | v]` to `[B, H, L, D]` with the norms of heads and RoPE, and back.

use crate::device::Cpu;
use crate::model::Config;
use crate::model::norm::Norm;
use crate::model::rope::{angles, rotate};
use rayon::prelude::*;
use std::ops::Range;

/// The turns of every position of a sequence, forth and back, `[L, D]` each.
pub(super) struct Turns {
    forth: Vec<f32>,
    back: Vec<f32>,
}

impl Turns {
    /// The turns of positions `0..len`.
    pub fn new(config: &Config, len: usize) -> Self {
        let (rope, dim) = (&config.rope, config.head_dim);
        let frequencies = rope.frequencies(dim, config.max_positions, len);
        let mut forth = vec![0.0; len * dim];
        for (at, row) in forth.chunks_exact_mut(dim).enumerate() {
            angles(&frequencies, at, rope.attention_factor(), row);
        }
        let mut back = forth.clone();
        back.chunks_exact_mut(dim).for_each(|row| row[dim / 2..].iter_mut().for_each(|sine| *sine = -*sine));
        Turns { forth, back }
    }
}

/// Where q, k and v lie in a token's row.
pub(super) fn columns(config: &Config) -> [Range<usize>; 3] {
    let (q, kv) = (config.q_width(), config.kv_width());
    [0..q, q..q + kv, q + kv..q + 2 * kv]
}

/// Cuts rows `[B * L, qkv_width]` into `[B, H, L, D]` for q, k and v; normalises the heads of q and k where there are
/// `norms`, and turns them to their positions.
pub(super) fn split(
    cpu: &Cpu,
    config: &Config,
    turns: &Turns,
    norms: Option<[Norm<'_>; 2]>,
    rows: &[f32],
    heads: [&mut [f32]; 3],
) {
    let (dim, width) = (config.head_dim, config.qkv_width());
    let len = turns.forth.len() / dim;
    cpu.install(|| {
        for (part, (columns, target)) in columns(config).into_iter().zip(heads).enumerate() {
            let (heads, norm) = (columns.len() / dim, norms.as_ref().and_then(|norms| norms.get(part)));
            target.par_chunks_mut(len * dim).enumerate().for_each(|(index, target)| {
                let (batch, head) = (index / heads, index % heads);
                let column = columns.start + head * dim;
                for (at, to) in target.chunks_exact_mut(dim).enumerate() {
                    to.copy_from_slice(&rows[(batch * len + at) * width + column..][..dim]);
                    if let Some(norm) = norm {
                        norm.row(cpu.isa(), to);
                    }
                    if part < 2 {
                        rotate(to, &turns.forth[at * dim..][..dim]);
                    }
                }
            });
        }
    });
}

/// The gradient of [`split`] but for the norms: turns those by q and k back and puts the heads of a token side by side.
pub(super) fn merge(cpu: &Cpu, config: &Config, turns: &Turns, heads: [&[f32]; 3], rows: &mut [f32]) {
    let dim = config.head_dim;
    let len = turns.back.len() / dim;
    cpu.install(|| {
        rows.par_chunks_mut(config.qkv_width()).enumerate().for_each(|(row, to)| {
            let (batch, at) = (row / len, row % len);
            for (part, (columns, heads)) in columns(config).into_iter().zip(heads).enumerate() {
                let count = columns.len() / dim;
                for (head, to) in to[columns].chunks_exact_mut(dim).enumerate() {
                    to.copy_from_slice(&heads[((batch * count + head) * len + at) * dim..][..dim]);
                    if part < 2 {
                        rotate(to, &turns.back[at * dim..][..dim]);
                    }
                }
            }
        });
    });
}

/// Puts the heads of `[B, H, L, D]` side by side: `[B * L, H * D]`.
pub(super) fn side_by_side(cpu: &Cpu, heads: &[f32], [count, len, dim]: [usize; 3], rows: &mut [f32]) {
    cpu.install(|| {
        rows.par_chunks_mut(count * dim).enumerate().for_each(|(row, to)| {
            let (batch, at) = (row / len, row % len);
            for (head, to) in to.chunks_exact_mut(dim).enumerate() {
                to.copy_from_slice(&heads[((batch * count + head) * len + at) * dim..][..dim]);
            }
        });
    });
}

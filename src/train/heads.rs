//! Between rows of tokens and heads: `[B * L, q | k | v]` to `[B, H, L, D]` with RoPE, and back.

use super::parameters::ModelSpec;
use crate::attention::rope::{Frequencies, Rotation};
use crate::device::Cpu;
use rayon::prelude::*;

/// The turns of every position of a sequence, forth and back.
pub(super) struct Turns {
    forth: Vec<Rotation>,
    back: Vec<Rotation>,
}

impl Turns {
    /// The turns of positions `0..len`.
    pub fn new(spec: &ModelSpec, len: usize) -> Self {
        let frequencies = Frequencies::new(spec.head_dim, spec.rope_theta);
        let turns = |sign: i64| (0..len as i64).map(|at| Rotation::new(&frequencies, sign * at)).collect();
        Turns { forth: turns(1), back: turns(-1) }
    }
}

/// One of q, k and v: where it begins in a token's row, its heads, and whether RoPE turns it.
struct Part {
    start: usize,
    heads: usize,
    turned: bool,
}

fn parts(spec: &ModelSpec) -> [Part; 3] {
    let (q, kv) = (spec.q_width(), spec.kv_width());
    [
        Part { start: 0, heads: spec.q_heads, turned: true },
        Part { start: q, heads: spec.kv_heads, turned: true },
        Part { start: q + kv, heads: spec.kv_heads, turned: false },
    ]
}

/// Cuts rows `[B * L, qkv_width]` into `[B, H, L, D]` for q, k and v, and turns q and k to their positions.
pub(super) fn split(cpu: &Cpu, spec: &ModelSpec, turns: &Turns, rows: &[f32], heads: [&mut [f32]; 3]) {
    let (len, dim, width) = (turns.forth.len(), spec.head_dim, spec.qkv_width());
    cpu.install(|| {
        for (part, target) in parts(spec).into_iter().zip(heads) {
            target.par_chunks_mut(len * dim).enumerate().for_each(|(index, target)| {
                let (batch, head) = (index / part.heads, index % part.heads);
                let column = part.start + head * dim;
                for (at, to) in target.chunks_exact_mut(dim).enumerate() {
                    to.copy_from_slice(&rows[(batch * len + at) * width + column..][..dim]);
                    if part.turned {
                        turns.forth[at].turn(to);
                    }
                }
            });
        }
    });
}

/// The gradient of [`split`]: turns those by q and k back and puts the heads of a token side by side.
pub(super) fn merge(cpu: &Cpu, spec: &ModelSpec, turns: &Turns, heads: [&[f32]; 3], rows: &mut [f32]) {
    let (len, dim, width) = (turns.back.len(), spec.head_dim, spec.qkv_width());
    cpu.install(|| {
        rows.par_chunks_mut(width).enumerate().for_each(|(row, to)| {
            let (batch, at) = (row / len, row % len);
            for (part, heads) in parts(spec).into_iter().zip(heads) {
                let to = &mut to[part.start..][..part.heads * dim];
                for (head, to) in to.chunks_exact_mut(dim).enumerate() {
                    to.copy_from_slice(&heads[((batch * part.heads + head) * len + at) * dim..][..dim]);
                    if part.turned {
                        turns.back[at].turn(to);
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

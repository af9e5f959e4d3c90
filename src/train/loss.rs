//! Cross-entropy of the rows that have a target, by blocks of rows: the logits of a whole batch are never there at
//! once.
//!
//! Rows without weight are left out before the product with the output matrix, so that sparse supervision costs what
//! it uses.

use super::activations::Extents;
use super::linear;
use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::loops;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::Config;
use rayon::prelude::*;
use std::f32::consts::LOG2_E;

/// Rows whose logits are there at once.
const BLOCK_ROWS: usize = 1024;
/// Rows of a block that one thread does.
const PIECE_ROWS: usize = 128;

/// A row to be judged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Target {
    /// The row, `sequence * L + position`.
    pub row: usize,
    /// The token that should follow.
    pub token: u32,
    /// Its share of the loss; the weights of a batch's targets add up to 1.
    pub weight: f32,
}

fn block_rows(extents: &Extents<'_>) -> usize {
    BLOCK_ROWS.min(extents.rows())
}

/// f32 elements of a [`Loss`].
pub(super) fn scratch(extents: &Extents<'_>) -> usize {
    block_rows(extents) * (extents.config().vocab + 2 * extents.config().hidden + 2)
}

/// Scratch memory of the loss.
pub(super) struct Loss {
    /// `[block, vocab]`: logits, then their gradients.
    logits: Buffer<f32>,
    /// The block's rows, and the gradients by them, `[block, hidden]` each.
    x: Buffer<f32>,
    dx: Buffer<f32>,
    /// Negative log-likelihood, and likeliest token, of each row.
    judged: Buffer<[f32; 2]>,
}

/// The output matrix, its gradient unless it is frozen, and the soft-cap of logits.
pub(super) struct Head<'a> {
    pub weights: &'a [f32],
    pub gradient: Option<&'a mut [f32]>,
    pub softcap: Option<f32>,
}

impl Loss {
    pub fn allocate(arena: &Arena, extents: &Extents<'_>) -> Result<Self, ArenaError> {
        let rows = block_rows(extents);
        let floats = |width: usize| arena.alloc(Label::Workspace, rows * width);
        let Config { vocab, hidden, .. } = *extents.config();
        let (logits, x, dx) = (floats(vocab)?, floats(hidden)?, floats(hidden)?);
        Ok(Loss { logits, x, dx, judged: arena.alloc(Label::Workspace, rows)? })
    }

    /// Room for logits `[block, vocab]`, and the extents `hidden` and `vocab`.
    pub(super) fn room(&mut self) -> (&mut [f32], usize, usize) {
        let rows = self.judged.len();
        let (hidden, vocab) = (self.x.len() / rows, self.logits.len() / rows);
        (&mut self.logits, hidden, vocab)
    }

    /// The weighted loss over `targets`. `n` `[rows, hidden]` is the last norm's output, and the gradient by it is
    /// written to `dn`, if that is wanted; a gradient in `head` is then added to. Tells `judge` each target's likeliest
    /// token and its own negative log-likelihood.
    pub fn run(
        &mut self,
        cpu: &Cpu,
        n: &[f32],
        targets: &[Target],
        head: Head<'_>,
        mut dn: Option<&mut [f32]>,
        mut judge: impl FnMut(&Target, u32, f32),
    ) -> f64 {
        let Head { weights, mut gradient, softcap } = head;
        let rows = self.judged.len();
        let (hidden, vocab) = (self.x.len() / rows, self.logits.len() / rows);
        if let Some(dn) = &mut dn {
            dn.fill(0.0);
        }
        let mut loss = 0.0;
        for targets in targets.chunks(rows) {
            let count = targets.len();
            let (logits, x) = (&mut self.logits[..count * vocab], &mut self.x[..count * hidden]);
            let (dx, judged) = (&mut self.dx[..count * hidden], &mut self.judged[..count]);
            for (target, x) in targets.iter().zip(x.chunks_exact_mut(hidden)) {
                x.copy_from_slice(&n[target.row * hidden..][..hidden]);
            }
            let piece = Piece { cpu, weights, hidden, vocab, softcap, wanted: dn.is_some() };
            cpu.install(|| {
                logits
                    .par_chunks_mut(PIECE_ROWS * vocab)
                    .zip(x.par_chunks(PIECE_ROWS * hidden))
                    .zip(dx.par_chunks_mut(PIECE_ROWS * hidden))
                    .zip(judged.par_chunks_mut(PIECE_ROWS).zip(targets.par_chunks(PIECE_ROWS)))
                    .for_each(|(((logits, x), dx), (judged, targets))| piece.run(logits, x, dx, judged, targets));
            });
            if let Some(gradient) = &mut gradient {
                linear::weight_gradient(cpu, logits, x, gradient, [hidden, vocab]);
            }
            if let Some(dn) = &mut dn {
                for (target, dx) in targets.iter().zip(dx.chunks_exact(hidden)) {
                    dn[target.row * hidden..][..hidden].copy_from_slice(dx);
                }
            }
            for (target, [nll, likeliest]) in targets.iter().zip(&*judged) {
                loss += f64::from(target.weight) * f64::from(*nll);
                judge(target, *likeliest as u32, *nll);
            }
        }
        loss
    }
}

/// What the pieces of a block share.
struct Piece<'a> {
    cpu: &'a Cpu,
    weights: &'a [f32],
    hidden: usize,
    vocab: usize,
    softcap: Option<f32>,
    /// Whether gradients are.
    wanted: bool,
}

impl Piece<'_> {
    fn run(&self, logits: &mut [f32], x: &[f32], dx: &mut [f32], judged: &mut [[f32; 2]], targets: &[Target]) {
        let (isa, count) = (self.cpu.isa(), targets.len());
        let weights = Matrix::new(self.weights, self.vocab, self.hidden);
        product(logits, self.vocab, Matrix::new(x, count, self.hidden), weights.transposed(), false, 1);
        let mut capped = Vec::new();
        for ((row, judged), target) in logits.chunks_exact_mut(self.vocab).zip(judged).zip(targets) {
            if let Some(cap) = self.softcap {
                loops::soft_cap(isa, row, 1.0, cap);
                capped.clear();
                capped.extend_from_slice(row);
            }
            let token = target.token as usize;
            let wanted_logit = row[token];
            // A NaN is never the largest, but must reach the loss: it does, through the sum.
            let (mut likeliest, mut most) = (0, f32::NEG_INFINITY);
            for (index, &logit) in row.iter().enumerate() {
                if logit > most {
                    (likeliest, most) = (index, logit);
                }
            }
            loops::scale(isa, row, LOG2_E);
            let sum = loops::exp2_sum(isa, row, most * LOG2_E);
            *judged = [sum.ln() + most - wanted_logit, likeliest as f32];
            if self.wanted {
                loops::scale(isa, row, target.weight / sum);
                row[token] -= target.weight;
                if let Some(cap) = self.softcap {
                    loops::cap_slope(isa, row, &capped, cap);
                }
            }
        }
        if self.wanted {
            product(dx, self.hidden, Matrix::new(logits, count, self.vocab), weights, false, 1);
        }
    }
}

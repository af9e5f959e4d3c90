//! Cross-entropy of the rows that have a target, by blocks of rows: the logits of a whole batch are never there at
//! once.
//!
//! Rows without weight are left out before the product with the output matrix, so that sparse supervision costs what
//! it uses.

use super::activations::Extents;
use super::linear::{self, Product};
use crate::device::Cpu;
use crate::device::simd::loops;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::Config;
use crate::tensor::Rows;
use rayon::prelude::*;
use std::f32::consts::LOG2_E;

/// Rows whose logits are there at once.
const BLOCK_ROWS: usize = 1024;

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
    pub weights: Rows<'a>,
    /// Whether coded rows are rounded to bf16.
    pub rounds: bool,
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
    /// token and its own negative log-likelihood. `scratch` is that of products.
    pub fn run(
        &mut self,
        cpu: &Cpu,
        (n, mut dn): (&[f32], Option<&mut [f32]>),
        targets: &[Target],
        head: Head<'_>,
        scratch: &mut [f32],
        mut judge: impl FnMut(&Target, u32, f32),
    ) -> f64 {
        let Head { weights: w, rounds, mut gradient, softcap } = head;
        let rows = self.judged.len();
        let (hidden, vocab) = (self.x.len() / rows, self.logits.len() / rows);
        if let Some(dn) = &mut dn {
            dn.fill(0.0);
        }
        let outputs = [0, vocab];
        let mut loss = 0.0;
        for targets in targets.chunks(rows) {
            let count = targets.len();
            let (logits, x) = (&mut self.logits[..count * vocab], &mut self.x[..count * hidden]);
            let (dx, judged) = (&mut self.dx[..count * hidden], &mut self.judged[..count]);
            for (target, x) in targets.iter().zip(x.chunks_exact_mut(hidden)) {
                x.copy_from_slice(&n[target.row * hidden..][..hidden]);
            }
            Product { x, w, transposed: false, outputs, rounds, bias: None, add: false }.write(cpu, logits, scratch);
            let wanted = dn.is_some();
            cpu.install(|| {
                let rows = logits.par_chunks_exact_mut(vocab).zip(&mut *judged).zip(targets);
                rows.for_each(|((row, judged), target)| *judged = surprise(cpu, row, target, softcap, wanted));
            });
            if let Some(gradient) = &mut gradient {
                linear::weight_gradient(cpu, logits, x, gradient, [hidden, vocab]);
            }
            if let Some(dn) = &mut dn {
                Product { x: logits, w, transposed: true, outputs, rounds, bias: None, add: false }
                    .write(cpu, dx, scratch);
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

/// The negative log-likelihood of a row's target, and the row's likeliest token; the row of logits becomes its gradient, if that is
/// wanted.
fn surprise(cpu: &Cpu, row: &mut [f32], target: &Target, softcap: Option<f32>, wanted: bool) -> [f32; 2] {
    let (isa, token) = (cpu.isa(), target.token as usize);
    let mut capped = Vec::new();
    if let Some(cap) = softcap {
        loops::soft_cap(isa, row, 1.0, cap);
        capped.extend_from_slice(row);
    }
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
    if wanted {
        loops::scale(isa, row, target.weight / sum);
        row[token] -= target.weight;
        if let Some(cap) = softcap {
            loops::cap_slope(isa, row, &capped, cap);
        }
    }
    [sum.ln() + most - wanted_logit, likeliest as f32]
}

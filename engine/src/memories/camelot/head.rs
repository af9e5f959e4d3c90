//! The modes of one KV head: how a token is written, where modes are read, and which are nearest to a key.

use crate::attention::rope::ModelRope;
use crate::device::simd::{Isa, loops};
use crate::memories::largest;

/// What is known of a mode besides its means.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Mode {
    /// Where it is read.
    pub position: f64,
    /// Position of the last token that was written to it.
    pub last: u32,
    /// Tokens that it is the mean of.
    pub tokens: u32,
    /// One over the norm of its key; 0 of a key that is 0.
    inverse_norm: f32,
    /// Mean cosine with it of the keys that were taken in, each before it was; 0 while there is one token.
    pub likeness: f32,
}

impl Mode {
    /// Whether it is read at position `oldest` or later.
    pub fn sees(&self, oldest: usize) -> bool {
        self.position >= oldest as f64
    }
}

fn inverse_norm(isa: Isa, key: &[f32]) -> f32 {
    let norm = loops::dot(isa, key, key).sqrt();
    if norm > 0.0 { 1.0 / norm } else { 0.0 }
}

/// Cosines of a key with those of `modes`.
fn similarities(isa: Isa, key: &[f32], keys: &[f32], modes: &[Mode], scores: &mut [f32]) {
    loops::row_dots(isa, key, keys, scores);
    let own = inverse_norm(isa, key);
    scores.iter_mut().zip(modes).for_each(|(score, mode)| *score *= own * mode.inverse_norm);
}

/// The slots of up to `most` modes at position `oldest` or later whose keys are most similar to a key, ascending; of equal
/// ones the first, and before all others those of the first `sink` tokens. `scores` and `order` are as long as `modes` and are overwritten.
pub fn nearest<'o>(
    isa: Isa,
    modes: &[Mode],
    oldest: usize,
    (key, keys): (&[f32], &[f32]),
    (most, sink): (usize, usize),
    scores: &mut [f32],
    order: &'o mut [u32],
) -> &'o [u32] {
    let mut seen = 0;
    for (slot, _) in modes.iter().enumerate().filter(|(_, mode)| mode.sees(oldest)) {
        order[seen] = slot as u32;
        seen += 1;
    }
    let order = &mut order[..seen];
    if seen <= most {
        return order;
    }
    similarities(isa, key, keys, modes, scores);
    scores[..sink.min(modes.len())].fill(f32::INFINITY);
    largest(order, most, scores)
}

/// The modes of a head, with room for similarities.
pub struct Head<'a> {
    pub head_dim: usize,
    /// Mean keys before RoPE, and rotated to where they are read; mean values; `[slots, D]`.
    pub before: &'a mut [f32],
    pub rotated: &'a mut [f32],
    pub values: &'a mut [f32],
    pub modes: &'a mut [Mode],
    /// Modes that there are.
    pub count: &'a mut usize,
    pub scores: &'a mut [f32],
    /// The first so many tokens are the modes of the first slots, and stay so.
    pub sink: usize,
    pub isa: Isa,
}

impl Head<'_> {
    /// Takes a token into the nearest mode, if its similarity is above `threshold`; else makes it a mode. `mean` is whether
    /// the mode is read at the mean of its tokens' positions.
    pub fn write(&mut self, key: &[f32], value: &[f32], position: usize, threshold: f32, mean: bool) {
        let (count, width) = (*self.count, self.head_dim);
        let scores = &mut self.scores[..count];
        similarities(self.isa, key, &self.before[..count * width], &self.modes[..count], scores);
        let nearer = |best: usize, slot: usize| if scores[slot] > scores[best] { slot } else { best };
        let others = if position < self.sink { count..count } else { self.sink..count };
        let nearest = others.reduce(nearer).map(|slot| (slot, scores[slot])).filter(|(_, score)| *score > threshold);
        let slot = nearest.map_or_else(|| self.free_slot(), |(slot, _)| slot);
        let row = slot * width..(slot + 1) * width;
        let mode = &mut self.modes[slot];
        match nearest {
            Some((_, score)) => mode.likeness += (score - mode.likeness) / mode.tokens as f32,
            None => (mode.tokens, mode.position, mode.likeness) = (0, 0.0, 0.0),
        }
        mode.tokens += 1;
        mode.last = position as u32;
        // A first token replaces what was there; later ones move the mean by their share.
        let share = 1.0 / f64::from(mode.tokens);
        mode.position = match mean {
            // By the sum, a whole number: a mean that is one is exactly one, so that a window ends where it should.
            true => (position as f64 + (mode.position * f64::from(mode.tokens - 1)).round()) / f64::from(mode.tokens),
            false => position as f64,
        };
        for (means, new) in [(&mut *self.before, key), (&mut *self.values, value)] {
            let means = &mut means[row.clone()];
            match mode.tokens {
                1 => means.copy_from_slice(new),
                _ => means.iter_mut().zip(new).for_each(|(mean, x)| *mean += (x - *mean) * share as f32),
            }
        }
        mode.inverse_norm = inverse_norm(self.isa, &self.before[row]);
    }

    /// A slot that was never used, or else that of the mode that was written to the longest ago.
    fn free_slot(&mut self) -> usize {
        if *self.count < self.modes.len() {
            *self.count += 1;
            return *self.count - 1;
        }
        let oldest = self.modes.iter().enumerate().skip(self.sink).min_by_key(|(_, mode)| mode.last);
        oldest.map_or(0, |(slot, _)| slot)
    }

    fn turn(&mut self, slot: usize, rope: &ModelRope) {
        let row = slot * self.head_dim..(slot + 1) * self.head_dim;
        let rotated = &mut self.rotated[row.clone()];
        rotated.copy_from_slice(&self.before[row]);
        rope.rotate(rotated, self.modes[slot].position);
    }

    /// Turns the keys of the modes that were written to at position `since` or later.
    pub fn turn_since(&mut self, since: usize, rope: &ModelRope) {
        for slot in 0..*self.count {
            if self.modes[slot].last as usize >= since {
                self.turn(slot, rope);
            }
        }
    }

    /// Puts all modes into the places just before position `next`, those that were written to last nearest.
    pub fn place_near(&mut self, next: usize, rope: &ModelRope, order: &mut [u32]) {
        let order = &mut order[..*self.count];
        order.iter_mut().zip(0..).for_each(|(slot, index)| *slot = index);
        order.sort_unstable_by_key(|&slot| self.modes[slot as usize].last);
        for (position, &mut slot) in (next - order.len()..).zip(order) {
            self.modes[slot as usize].position = position as f64;
            self.turn(slot as usize, rope);
        }
    }
}

//! Frequencies of a model's RoPE with the scaling of its configuration, and the rotation of many rows.
//!
//! The formulas are those of `transformers` (`modeling_rope_utils.py`), in f64.

use super::config::{Rope, RopeScaling};
use crate::attention::rope::Frequencies;
use std::f64::consts::PI;

/// Channels that are rotated where that is the fraction `part` of a head's, rounded down.
fn rotated(part: f64, head_dim: usize) -> usize {
    // A fraction of a number of channels by that number need not be the former to the last bit.
    (part * head_dim as f64 + 1e-6) as usize
}

/// Pairs of them.
pub(super) fn pairs(part: f64, head_dim: usize) -> usize {
    rotated(part, head_dim) / 2
}

/// Whether one of them has no other to be a pair with.
pub(super) fn is_odd(part: f64, head_dim: usize) -> bool {
    !rotated(part, head_dim).is_multiple_of(2)
}

impl Rope {
    /// Pairs of channels that are rotated, of a head of `head_dim` channels: `i` and `i` + their number, from the first on.
    pub fn pairs(&self, head_dim: usize) -> usize {
        pairs(self.part, head_dim)
    }

    /// Frequencies of a head of `head_dim` channels in a sequence of `tokens` tokens, of a model made for
    /// `max_positions`. Only [`RopeScaling::Dynamic`] looks at the two, and [`RopeScaling::Long`] at the number of tokens.
    pub fn frequencies(&self, head_dim: usize, max_positions: usize, tokens: usize) -> Frequencies {
        let head_dim = 2 * self.pairs(head_dim);
        let plain = |theta: f64| {
            (0..head_dim / 2).map(move |pair| theta.powf(-2.0 * pair as f64 / head_dim as f64)).collect::<Vec<f64>>()
        };
        let scaled = match self.scaling {
            RopeScaling::None => plain(self.theta),
            RopeScaling::Linear { factor } => plain(self.theta).into_iter().map(|x| x / factor).collect(),
            RopeScaling::Dynamic { factor } => {
                let longer = tokens.max(max_positions) as f64 / max_positions as f64;
                let d = head_dim as f64;
                plain(self.theta * (factor * longer - (factor - 1.0)).powf(d / (d - 2.0)))
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_positions, truncate, .. } => {
                let d = head_dim as f64;
                // Pair that turns so many times over the original context.
                let pair =
                    |turns: f64| d * (original_positions as f64 / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (low, high) = match truncate {
                    true => (pair(beta_fast).floor(), pair(beta_slow).ceil()),
                    false => (pair(beta_fast), pair(beta_slow)),
                };
                let (low, high) = (low.max(0.0), high.min(d - 1.0));
                let width = if low == high { 0.001 } else { high - low };
                let ramp = |(pair, x): (usize, f64)| {
                    let slow = ((pair as f64 - low) / width).clamp(0.0, 1.0);
                    x / factor * slow + x * (1.0 - slow)
                };
                plain(self.theta).into_iter().enumerate().map(ramp).collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let scale = |x: f64| {
                    // Turns over the original context.
                    let turns = original_positions as f64 * x / (2.0 * PI);
                    if turns > high_freq_factor {
                        x
                    } else if turns < low_freq_factor {
                        x / factor
                    } else {
                        let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * x / factor + smooth * x
                    }
                };
                plain(self.theta).into_iter().map(scale).collect()
            }
            RopeScaling::Long { ref short, ref long, original_positions, .. } => {
                let factors = if tokens > original_positions { long } else { short };
                plain(self.theta).into_iter().zip(factors).map(|(x, factor)| x / f64::from(*factor)).collect()
            }
        };
        Frequencies::from_rad_per_token(scaled)
    }

    /// The number of tokens by which the frequencies of `tokens` tokens are, of a model made for `max_positions`, where they were those of
    /// `before` tokens: as `transformers` has it, those of [`RopeScaling::Dynamic`] only grow, until the sequence is one that the model was
    /// made for.
    pub fn turned_tokens(&self, max_positions: usize, before: usize, tokens: usize) -> usize {
        match self.scaling {
            RopeScaling::Dynamic { .. } if tokens >= max_positions => tokens.max(before),
            _ => tokens,
        }
    }

    /// Whether frequencies depend on the length of the sequence.
    pub fn is_dynamic(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. } | RopeScaling::Long { .. })
    }

    /// Factor of rotated queries and keys.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            RopeScaling::Long { attention_factor, .. } => f64::from(attention_factor),
            _ => 1.0,
        }
    }
}

/// Writes the cosines and then the sines of a position's angles, times a factor, into a row as long as a head, or to its start where a
/// part of a head is rotated.
pub(crate) fn angles(frequencies: &Frequencies, position: usize, factor: f64, row: &mut [f32]) {
    let (cosines, sines) = row.split_at_mut(frequencies.rad_per_token().len());
    for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(frequencies.rad_per_token()) {
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        (*cosine, *sine) = ((cos * factor) as f32, (sin * factor) as f32);
    }
}

/// Rotates `pairs` pairs of channels of each head of a token, side by side, by the angles of its position.
pub(crate) fn rotate(heads: &mut [f32], angles: &[f32], pairs: usize) {
    let (cosines, sines) = angles.split_at(pairs);
    for head in heads.chunks_exact_mut(angles.len()) {
        let (first, second) = head.split_at_mut(pairs);
        for (((x, y), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
            (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
        }
    }
}

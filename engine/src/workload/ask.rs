//! How strongly a query must ask for its needle: solved on the keys themselves, so that the mass is exact.

use crate::device::simd::{Isa, loops};
use crate::tensor::{DType, TensorView};

/// Keys whose scores are computed at a time.
const BLOCK: usize = 256;

/// The keys of one head, and room for the logits of one query.
pub(super) struct Asker<'a> {
    keys: TensorView<'a>,
    width: usize,
    block: Vec<f32>,
    base: Vec<f32>,
    slope: Vec<f32>,
}

impl<'a> Asker<'a> {
    /// Over the `tokens` keys of one head, as they are stored.
    pub fn new(dtype: DType, keys: &'a [u8], tokens: usize, width: usize) -> Self {
        let keys = TensorView::contiguous(dtype, [1, 1, tokens, width], keys);
        Asker { keys, width, block: vec![0.0; BLOCK * width], base: vec![0.0; tokens], slope: vec![0.0; tokens] }
    }

    /// Adds to `query` (token `at`) so much of `direction` that the key at `needle` gets `mass` of its softmax over
    /// the keys `0..=at`. False when no amount does.
    pub fn ask(&mut self, query: &mut [f32], at: usize, direction: &[f32], needle: usize, mass: f64) -> bool {
        // Without what the query's noise has of the direction already, so that the amount says everything.
        let overlap: f32 = query.iter().zip(direction).map(|(x, c)| x * c).sum();
        query.iter_mut().zip(direction).for_each(|(x, c)| *x -= overlap * c);
        self.logits(query, direction, at + 1);
        let Some(amount) = self.amount(at + 1, needle, (mass / (1.0 - mass)).ln()) else { return false };
        query.iter_mut().zip(direction).for_each(|(x, c)| *x += amount * c);
        true
    }

    /// Logits of the first `count` keys as `base + amount * slope`.
    fn logits(&mut self, query: &[f32], direction: &[f32], count: usize) {
        let (isa, scale) = (Isa::fastest(), 1.0 / (self.width as f32).sqrt());
        for start in (0..count).step_by(BLOCK) {
            let end = count.min(start + BLOCK);
            let rows = self.keys.rows(0, 0, start, end - start, &mut self.block);
            for (vector, logits) in [(query, &mut self.base), (direction, &mut self.slope)] {
                loops::row_dots(isa, vector, rows, &mut logits[start..end]);
                loops::scale(isa, &mut logits[start..end], scale);
            }
        }
    }

    /// The amount for which the needle's logit exceeds the log-sum-exp of the others by `odds`.
    ///
    /// That excess is a concave function of the amount, so Newton's steps from 0 never overshoot its first root, and
    /// where they meet a slope that is not positive there is none.
    fn amount(&self, count: usize, needle: usize, odds: f64) -> Option<f32> {
        let mut amount = 0f32;
        for _ in 0..64 {
            let (mut sum, mut slope_sum) = (0f64, 0f64);
            let own = self.base[needle] + amount * self.slope[needle];
            for (index, (base, slope)) in self.base[..count].iter().zip(&self.slope).enumerate() {
                if index != needle {
                    // Relative to the needle: never far above 0 once it is near its mass, so nothing overflows.
                    let weight = f64::from(base + amount * slope - own).exp();
                    sum += weight;
                    slope_sum += weight * f64::from(*slope);
                }
            }
            let missing = odds + sum.ln();
            if missing <= 1e-3 {
                // In steps of 1/1024: vector units of different widths then agree to the last bit.
                return Some((amount * 1024.0).round() / 1024.0);
            }
            let slope = f64::from(self.slope[needle]) - slope_sum / sum;
            let step = missing / slope;
            if slope <= 0.0 || step > 1e4 {
                return None;
            }
            amount += step as f32;
        }
        None
    }
}

//! A function with an inner layer, `W gelu(U x + c) + b`, that is fitted to samples by AdamW: the recipe of KVzap's authors (kvpress,
//! `evaluation/kvzap/train.py`), 15 epochs of batches of 512 samples in another order each time, from a learning rate of 5e-3 along half a cosine to 0, gradients
//! clipped to 1, the mean square as loss.
//!
//! Inputs and targets are brought to mean 0 and deviation 1 first, which the authors do not do, and both are folded into the weights
//! afterwards: hidden states have elements that are hundreds of times the others.

use super::samples::OfLayer;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::Isa;
use crate::memory::{Arena, ArenaError, Label};
use crate::policy::network::{gelu, gelu_slope};
use crate::train::adamw::{Constants, Update};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

const EPOCHS: usize = 15;
const BATCH: usize = 512;
const ADAMW: Constants = Constants {
    learning_rate: 5e-3,
    warmup_steps: 0,
    final_share: 0.0,
    weight_decay: 0.01,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    clip: 1.0,
};

/// A fitted function of a layer.
pub(super) struct Mlp {
    layout: Layout,
    weights: Vec<f32>,
}

/// Extents `[hidden, inner, KV heads]`, and where `U`, `c`, `W` and `b` lie in one array.
#[derive(Clone, Copy)]
struct Layout([usize; 3]);

impl Layout {
    fn count(self) -> usize {
        self.ranges()[3].end
    }

    fn ranges(self) -> [Range<usize>; 4] {
        let [inputs, inner, outputs] = self.0;
        let mut end = 0;
        [inner * inputs, inner, outputs * inner, outputs].map(|len| {
            end += len;
            end - len..end
        })
    }
}

/// Means and deviations of columns.
struct Standard {
    mean: Vec<f32>,
    deviation: Vec<f32>,
}

impl Standard {
    fn of(rows: &[f32], columns: usize) -> Self {
        let count = (rows.len() / columns).max(1) as f64;
        let mut sums = vec![[0.0; 2]; columns];
        for row in rows.chunks_exact(columns) {
            for ([sum, square], &x) in sums.iter_mut().zip(row) {
                *sum += f64::from(x);
                *square += f64::from(x) * f64::from(x);
            }
        }
        let mean = |[sum, _]: &[f64; 2]| sum / count;
        let variance = |sums: &[f64; 2]| (sums[1] / count - mean(sums).powi(2)).max(1e-12);
        Standard {
            mean: sums.iter().map(|sums| mean(sums) as f32).collect(),
            deviation: sums.iter().map(|sums| variance(sums).sqrt() as f32).collect(),
        }
    }

    fn apply(&self, rows: &mut [f32]) {
        for row in rows.chunks_exact_mut(self.mean.len()) {
            row.iter_mut().zip(self.mean.iter().zip(&self.deviation)).for_each(|(x, (mean, by))| *x = (*x - mean) / by);
        }
    }
}

impl Mlp {
    /// Bytes of weights, gradient and averages while a layer is fitted, for extents `[hidden, inner, KV heads]`.
    pub fn bytes(extents: [usize; 3]) -> u64 {
        4 * 4 * Layout(extents).count() as u64
    }

    /// Fits `inner` inner elements to samples of a layer, by one thread, and says which part of the variance of each KV head's scores
    /// they explain.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn fit(
        mut samples: OfLayer,
        inner: usize,
        seed: u64,
        isa: Isa,
        arena: &Arena,
    ) -> Result<(Self, Vec<f64>), ArenaError> {
        let (count, [inputs, heads]) = (samples.count(), samples.widths());
        let [hidden, scores] = samples.both_mut();
        let (of_inputs, of_targets) = (Standard::of(hidden, inputs), Standard::of(scores, heads));
        of_inputs.apply(hidden);
        of_targets.apply(scores);
        let layout = Layout([inputs, inner, heads]);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let numbers = |label| arena.alloc::<f32>(label, layout.count());
        let mut weights = numbers(Label::Weights)?;
        initial(layout, &mut rng, &mut weights);
        let mut averages = [numbers(Label::Optimizer)?, numbers(Label::Optimizer)?];
        let mut gradient = numbers(Label::Gradients)?;
        let mut order: Vec<usize> = (0..count).collect();
        let (mut step, steps) = (0, EPOCHS * count.div_ceil(BATCH));
        for _ in 0..EPOCHS {
            order.shuffle(&mut rng);
            for picked in order.chunks(BATCH) {
                let gather = |rows: &[f32], width: usize| -> Vec<f32> {
                    picked.iter().flat_map(|&row| &rows[row * width..][..width]).copied().collect()
                };
                let [hidden, scores] = samples.both();
                let batch = [gather(hidden, inputs), gather(scores, heads)];
                slope(layout, &weights, [&batch[0], &batch[1]], &mut gradient);
                let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                let [mean, square] = &mut averages;
                let update = Update::new(&ADAMW, (step, ADAMW.rate(step, steps)), norm);
                update.piece(isa, true, &mut weights, &gradient, [mean, square]);
                step += 1;
            }
        }
        // What is explained does not depend on the scale of the targets.
        let learned = explained(layout, &weights, &samples);
        Ok((folded(layout, weights.to_vec(), &of_inputs, &of_targets), learned))
    }

    /// `U` `[inner, hidden]`, `c` `[inner]`, `W` `[KV heads, inner]` and `b` `[KV heads]`.
    pub fn parts(&self) -> [&[f32]; 4] {
        self.layout.ranges().map(|range| &self.weights[range])
    }

    /// Part of the variance of each KV head's scores that is explained.
    pub fn explained(&self, samples: &OfLayer) -> Vec<f64> {
        explained(self.layout, &self.weights, samples)
    }
}

/// Part of the variance of each KV head's scores that weights explain.
fn explained(layout: Layout, weights: &[f32], samples: &OfLayer) -> Vec<f64> {
    let ([inputs, heads], [hidden, scores]) = (samples.widths(), samples.both());
    let mut missed = vec![0.0; heads];
    for (hidden, scores) in hidden.chunks(BATCH * inputs).zip(scores.chunks(BATCH * heads)) {
        let found = outputs(layout, weights, hidden).2;
        for (index, (found, score)) in found.iter().zip(scores).enumerate() {
            missed[index % heads] += f64::from(found - score).powi(2);
        }
    }
    let whole = Standard::of(scores, heads).deviation;
    let whole = whole.iter().map(|&deviation| samples.count() as f64 * f64::from(deviation).powi(2));
    missed.iter().zip(whole).map(|(missed, whole)| 1.0 - missed / whole).collect()
}

/// Weights and biases within one over the root of their inputs, as PyTorch draws them.
fn initial(layout: Layout, rng: &mut ChaCha8Rng, weights: &mut [f32]) {
    let [inputs, inner, _] = layout.0;
    for (range, inputs) in layout.ranges().into_iter().zip([inputs, inputs, inner, inner]) {
        let most = 1.0 / (inputs as f32).sqrt();
        weights[range].iter_mut().for_each(|weight| *weight = rng.random_range(-most..most));
    }
}

/// The inner layer before and behind its activation, and what comes out, of rows `x`.
fn outputs(layout: Layout, weights: &[f32], x: &[f32]) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let [inputs, inner, _] = layout.0;
    let [u, c, w, b] = layout.ranges().map(|range| &weights[range]);
    let rows = x.len() / inputs;
    let linear = |x: &[f32], inputs: usize, weight: &[f32], bias: &[f32]| {
        let mut y = bias.repeat(rows);
        let (x, weight) = (Matrix::new(x, rows, inputs), Matrix::new(weight, bias.len(), inputs).transposed());
        product(&mut y, bias.len(), x, weight, true, 1);
        y
    };
    let before = linear(x, inputs, u, c);
    let behind: Vec<f32> = before.iter().map(|&z| gelu(z)).collect();
    let out = linear(&behind, inner, w, b);
    (before, behind, out)
}

/// The gradient of the mean square over samples `[x, y]`, which is told.
fn slope(layout: Layout, weights: &[f32], [x, y]: [&[f32]; 2], gradient: &mut [f32]) -> f64 {
    let [inputs, inner, heads] = layout.0;
    let (before, behind, mut out) = outputs(layout, weights, x);
    let (rows, [u, c, w, b]) = (x.len() / inputs, layout.ranges());
    let share = 2.0 / y.len() as f32;
    let mut loss = 0.0;
    for (out, y) in out.iter_mut().zip(y) {
        let off = *out - y;
        loss += f64::from(off * off);
        *out = share * off;
    }
    let mut d = vec![0.0; rows * inner];
    let out_rows = Matrix::new(&out, rows, heads);
    product(&mut d, inner, out_rows, Matrix::new(&weights[w.clone()], heads, inner), false, 1);
    d.iter_mut().zip(&before).for_each(|(d, &z)| *d *= gelu_slope(z));
    product(&mut gradient[w], inner, out_rows.transposed(), Matrix::new(&behind, rows, inner), false, 1);
    let d_rows = Matrix::new(&d, rows, inner);
    product(&mut gradient[u], inputs, d_rows.transposed(), Matrix::new(x, rows, inputs), false, 1);
    for (range, rows) in [(b, &out), (c, &d)] {
        let sums = &mut gradient[range];
        sums.fill(0.0);
        for row in rows.chunks_exact(sums.len()) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
    loss / y.len() as f64
}

/// The same function of inputs and targets as they are.
fn folded(layout: Layout, mut weights: Vec<f32>, of_inputs: &Standard, of_targets: &Standard) -> Mlp {
    let ([inputs, inner, _], [u, c, w, b]) = (layout.0, layout.ranges());
    let [u, c, w, b] = weights.get_disjoint_mut([u, c, w, b]).expect("they lie one behind another");
    for (row, c) in u.chunks_exact_mut(inputs).zip(c) {
        for (u, (mean, by)) in row.iter_mut().zip(of_inputs.mean.iter().zip(&of_inputs.deviation)) {
            *u /= by;
            *c -= *u * mean;
        }
    }
    let heads = w.chunks_exact_mut(inner).zip(b).zip(of_targets.mean.iter().zip(&of_targets.deviation));
    for ((row, b), (mean, by)) in heads {
        row.iter_mut().for_each(|w| *w *= by);
        *b = *b * by + mean;
    }
    Mlp { layout, weights }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_distr::{Distribution, StandardNormal};

    fn drawn(count: usize, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..count).map(|_| StandardNormal.sample(&mut rng)).collect()
    }

    #[test]
    fn the_slope_is_that_of_finite_differences() {
        let layout = Layout([5, 7, 2]);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut weights = vec![0.0; layout.count()];
        initial(layout, &mut rng, &mut weights);
        let (x, y) = (drawn(5 * 40, 2), drawn(2 * 40, 3));
        let mut gradient = vec![0.0; weights.len()];
        slope(layout, &weights, [&x, &y], &mut gradient);
        let mut scratch = gradient.clone();
        for range in layout.ranges() {
            let norm = gradient[range.clone()].iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let mut at = |step: f64| {
                let mut moved = weights.clone();
                let by = moved[range.clone()].iter_mut().zip(&gradient[range.clone()]);
                by.for_each(|(w, g)| *w += (step * f64::from(*g) / norm) as f32);
                slope(layout, &moved, [&x, &y], &mut scratch)
            };
            let found = (at(1e-2) - at(-1e-2)) / 2e-2;
            assert!((found - norm).abs() < 1e-2 * norm, "{range:?}: {found}, gradient {norm}");
        }
    }

    /// A function that no linear one comes near is found, whatever the inputs' scales and the targets' means are.
    #[test]
    fn what_is_not_linear_is_fitted_and_explained() {
        let samples = |seed: u64| {
            let mut all = OfLayer::with_room(&Arena::unlimited(), 16000, [4, 2]).unwrap();
            for x in drawn(4 * 16000, seed).chunks_exact(4) {
                let (scaled, scores) =
                    ([300.0 * x[0] + 50.0, x[1], 0.01 * x[2], x[3]], [x[0].abs() - 6.0, x[1] * x[2] + 3.0]);
                all.add(scaled.into_iter(), scores.into_iter());
            }
            all
        };
        let arena = Arena::unlimited();
        let (mlp, learned) = Mlp::fit(samples(4), 32, 5, Isa::fastest(), &arena).unwrap();
        assert_eq!(arena.usage().peak.values().sum::<u64>(), Mlp::bytes([4, 32, 2]));
        let explained = mlp.explained(&samples(6));
        assert!(explained.iter().chain(&learned).all(|part| *part > 0.8), "{explained:?} {learned:?}");
        let again = mlp.explained(&samples(4));
        assert!(learned.iter().zip(&again).all(|(a, b)| (a - b).abs() < 1e-3), "{learned:?} {again:?}");
    }
}

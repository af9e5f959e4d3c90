//! AdamW with decoupled decay (arXiv 1711.05101), after clipping by the norm of the whole gradient.

use super::PIECE_ROWS;
use super::checkpoint::Array;
use super::parameters::Parameter;
use crate::device::Cpu;
use crate::device::simd::Isa;
use crate::device::simd::loops::vectorised;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Elements that one thread updates at a time.
const PIECE: usize = 64 * PIECE_ROWS;

/// Constants of the update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Largest learning rate, after warmup.
    pub learning_rate: f32,
    /// Steps over which the rate rises from 0.
    pub warmup_steps: usize,
    /// The rate towards which it falls, which the step behind the last would have, as a fraction of the largest.
    pub final_share: f32,
    /// Decay of matrices, times the learning rate; norms and biases do not decay.
    pub weight_decay: f32,
    /// Memory of the mean.
    pub beta1: f32,
    /// Memory of the mean square.
    pub beta2: f32,
    /// Added to the root of the mean square.
    pub eps: f32,
    /// Largest norm of the gradient; a longer one is scaled down to it.
    pub clip: f32,
}

impl Constants {
    /// The learning rate of step `step` (from 0) of `steps`: linear warmup, then half a cosine.
    pub fn rate(&self, step: usize, steps: usize) -> f32 {
        if step < self.warmup_steps {
            return self.learning_rate * (step + 1) as f32 / self.warmup_steps as f32;
        }
        let (done, whole) = (step - self.warmup_steps, steps.saturating_sub(self.warmup_steps).max(1));
        let cosine = (std::f64::consts::PI * done as f64 / whole as f64).cos() as f32;
        self.learning_rate * (self.final_share + (1.0 - self.final_share) * 0.5 * (1.0 + cosine))
    }

    /// Says what is wrong, if anything.
    ///
    /// # Errors
    /// One line with the field, its value and what would be right.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: f32, right: bool, range: &str| {
            if right { Ok(()) } else { Err(format!("optimizer.{name} is {value}; it must be {range}")) }
        };
        let finite = |value: f32| value.is_finite() && value >= 0.0;
        let rate = self.learning_rate;
        within("learning_rate", rate, finite(rate) && rate > 0.0, "finite and above 0")?;
        within("final_share", self.final_share, (0.0..=1.0).contains(&self.final_share), "0 to 1")?;
        within("weight_decay", self.weight_decay, finite(self.weight_decay), "finite and not negative")?;
        within("beta1", self.beta1, (0.0..1.0).contains(&self.beta1), "0 to below 1")?;
        within("beta2", self.beta2, (0.0..1.0).contains(&self.beta2), "0 to below 1")?;
        within("eps", self.eps, finite(self.eps) && self.eps > 0.0, "finite and above 0")?;
        within("clip", self.clip, finite(self.clip) && self.clip > 0.0, "finite and above 0")
    }
}

/// The optimizer's averages.
pub struct AdamW {
    /// Mean of the gradients, laid out as the parameters.
    pub mean: Buffer<f32>,
    /// Mean of their squares.
    pub square: Buffer<f32>,
}

impl AdamW {
    /// Bytes of the averages of `count` numbers.
    pub fn bytes(count: usize) -> u64 {
        8 * count as u64
    }

    /// Averages of zero, of `count` numbers that are trained.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, count: usize) -> Result<Self, ArenaError> {
        let zeros = || arena.alloc(Label::Optimizer, count);
        Ok(AdamW { mean: zeros()?, square: zeros()? })
    }

    /// An array of a checkpoint of `weights` and these.
    pub(super) fn array<'t>(&'t mut self, weights: &'t mut [f32], array: Array) -> &'t mut [f32] {
        match array {
            Array::Weights => weights,
            Array::Mean => &mut self.mean,
            Array::Square => &mut self.square,
        }
    }

    /// Changes `weights` by one step (`step` from 0) at learning rate `rate`, and gives the norm of the gradient before
    /// it was clipped.
    pub fn update(
        &mut self,
        cpu: &Cpu,
        constants: &Constants,
        parameters: &[Parameter],
        (step, rate): (usize, f32),
        weights: &mut [f32],
        gradients: &[f32],
    ) -> f64 {
        let norm = sum_of_squares(cpu, [gradients]).sqrt();
        let update = Update::new(constants, (step, rate), norm);
        for parameter in parameters {
            let Some(range) = parameter.gradient.clone() else { continue };
            let averages = [&mut self.mean[range.clone()], &mut self.square[range.clone()]];
            update.apply(
                cpu,
                parameter.role.decays(),
                &mut weights[parameter.range.clone()],
                &gradients[range],
                averages,
            );
        }
        norm
    }
}

/// The update of a step, of any of its numbers.
pub(super) struct Update {
    constants: Constants,
    rate: f32,
    /// What the gradient is scaled by.
    scale: f32,
    /// What the averages have of their final size.
    corrections: [f32; 2],
}

impl Update {
    /// That of step `step` (from 0) at learning rate `rate`, where the whole gradient has this norm.
    pub fn new(constants: &Constants, (step, rate): (usize, f32), norm: f64) -> Self {
        let clip = f64::from(constants.clip);
        let scale = if norm > clip { (clip / norm) as f32 } else { 1.0 };
        // In f64: 1 - 0.999 loses four digits in f32.
        let correction = |beta: f32| (1.0 - f64::from(beta).powi(step as i32 + 1)) as f32;
        let corrections = [constants.beta1, constants.beta2].map(correction);
        Update { constants: *constants, rate, scale, corrections }
    }

    /// Changes weights, of matrices that decay or of what does not, and their averages `[mean, square]`.
    pub fn apply(&self, cpu: &Cpu, decays: bool, weights: &mut [f32], gradients: &[f32], averages: [&mut [f32]; 2]) {
        let [mean, square] = averages;
        cpu.install(|| {
            weights
                .par_chunks_mut(PIECE)
                .zip(gradients.par_chunks(PIECE))
                .zip(mean.par_chunks_mut(PIECE).zip(square.par_chunks_mut(PIECE)))
                .for_each(|((w, g), (m, v))| self.piece(cpu.isa(), decays, w, g, [m, v]));
        });
    }

    /// The same of a piece, by one thread.
    pub fn piece(&self, isa: Isa, decays: bool, w: &mut [f32], g: &[f32], [m, v]: [&mut [f32]; 2]) {
        let Update { rate, scale, corrections: [correction1, correction2], .. } = *self;
        let Constants { beta1, beta2, eps, .. } = self.constants;
        let decay = self.decay(decays);
        vectorised(
            isa,
            #[inline(always)]
            || {
                for (((w, g), m), v) in w.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
                    let g = g * scale;
                    *m = beta1 * *m + (1.0 - beta1) * g;
                    *v = beta2 * *v + (1.0 - beta2) * g * g;
                    let step = *m / correction1 / ((*v / correction2).sqrt() + eps);
                    *w = *w * decay - rate * step;
                }
            },
        )
    }

    /// What the gradient is scaled by.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// What weights are multiplied by before a step.
    pub fn decay(&self, decays: bool) -> f32 {
        if decays { 1.0 - self.rate * self.constants.weight_decay } else { 1.0 }
    }
}

/// The sum of the squares of numbers in several places, in f64, piece by piece.
pub(super) fn sum_of_squares<'a>(cpu: &Cpu, places: impl IntoIterator<Item = &'a [f32]>) -> f64 {
    let square = |piece: &[f32]| piece.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
    let pieces: Vec<&[f32]> = places.into_iter().flat_map(|place| place.chunks(PIECE)).collect();
    let sums: Vec<f64> = cpu.install(|| pieces.par_iter().map(|piece| square(piece)).collect());
    sums.iter().sum()
}

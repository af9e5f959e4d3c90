//! Factors of inputs that leave a block what it is: the columns of what reads an input are multiplied by them, and what the input comes out
//! of is divided: a norm, the MLP's first half, or values where each query head has its own. Outliers move so from where rounding them
//! costs much to where it costs little: [`super::awq`] moves them out of weights, [`super::smooth`] out of activations.

use super::moments::INPUTS;
use crate::model::Config;
use crate::model::parameters::{Make, Role};
use std::convert::Infallible;

/// What the columns of matrices that read each of [`INPUTS`] are multiplied by, and that input is divided by.
pub type Factors = [Option<Vec<f32>>; INPUTS.len()];

/// The last part of a parameter's name but `weight` or `bias`.
pub fn part(name: &str) -> &str {
    name.rsplit('.').nth(1).unwrap_or_default()
}

/// Which of [`INPUTS`] a matrix reads.
pub fn input_of(name: &str) -> usize {
    match part(name) {
        "o_proj" => 1,
        "gate_proj" | "up_proj" | "gate_up_proj" => 2,
        "down_proj" => 3,
        _ => 0,
    }
}

/// A matrix's name and shape.
pub type Shaped = (String, [usize; 2]);

/// The matrices of block `index` that read an input, for each of [`INPUTS`] that comes out of something that can be
/// divided.
pub fn readers(config: &Config, index: usize) -> Vec<(usize, Vec<Shaped>)> {
    let mut shapes = Shapes(Vec::new());
    let Ok(_) = config.block(index, &mut shapes);
    let can_be = |input: &usize| *input != 1 || config.q_heads == config.kv_heads;
    let of = |input| shapes.0.iter().filter(|(name, _)| input_of(name) == input).cloned().collect();
    (0..INPUTS.len()).filter(can_be).map(|input| (input, of(input))).collect()
}

/// A block under factors.
pub struct Fold<'c> {
    config: &'c Config,
    factors: Factors,
}

impl<'c> Fold<'c> {
    /// Of the model's blocks.
    pub fn new(config: &'c Config, factors: Factors) -> Self {
        Fold { config, factors }
    }

    /// The largest number of one of [`INPUTS`] whose channels are as large as this without factors.
    pub fn largest(&self, input: usize, channels: &[f32]) -> f32 {
        let factors = self.factors[input].as_deref();
        let divided = channels.iter().enumerate().map(|(at, x)| factors.map_or(*x, |factors| x / factors[at]));
        divided.fold(0.0, f32::max)
    }

    /// What the outputs of a layer are divided by, and the first of them that is: those of values and of the MLP's first half.
    fn divided(&self, name: &str) -> Option<(usize, &[f32])> {
        let Config { ffn, .. } = *self.config;
        let (first, input) = match part(name) {
            "v_proj" => (0, 1),
            "qkv_proj" => (self.config.q_width() + self.config.kv_width(), 1),
            "up_proj" => (0, 3),
            "gate_up_proj" => (ffn, 3),
            _ => return None,
        };
        Some((first, self.factors[input].as_deref()?))
    }

    /// Scales rows of a matrix, from `first` on, by the factors of its inputs and outputs.
    pub fn matrix(&self, name: &str, first: usize, rows: &mut [f32], width: usize) {
        if let Some(factors) = &self.factors[input_of(name)] {
            for row in rows.chunks_exact_mut(width) {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            }
        }
        if let Some((divided, factors)) = self.divided(name) {
            for (at, row) in (first..).zip(rows.chunks_exact_mut(width)) {
                if let Some(factor) = at.checked_sub(divided).map(|at| factors[at]) {
                    row.iter_mut().for_each(|x| *x /= factor);
                }
            }
        }
    }

    /// Scales a norm or a bias likewise.
    pub fn vector(&self, name: &str, role: Role, vector: &mut [f32]) {
        let norms = [("input_layernorm", 0), (self.config.before_mlp(), 2)];
        let norm = norms.iter().find(|(norm, _)| role == Role::Norm && part(name) == *norm);
        if let Some(factors) = norm.and_then(|(_, input)| self.factors[*input].as_ref()) {
            let shift = self.config.norm_shift();
            vector.iter_mut().zip(factors).for_each(|(x, factor)| *x = (*x + shift) / factor - shift);
        }
        if let Some((first, factors)) = self.divided(name).filter(|_| role == Role::Bias) {
            vector[first..].iter_mut().zip(factors).for_each(|(x, factor)| *x /= factor);
        }
    }
}

/// Names and shapes of a block's matrices.
struct Shapes(Vec<Shaped>);

impl Make for Shapes {
    type Matrix = ();
    type Vector = ();
    type Error = Infallible;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<(), Infallible> {
        self.0.push((name, shape));
        Ok(())
    }

    fn vector(&mut self, _: String, _: Role, _: usize) -> Result<(), Infallible> {
        Ok(())
    }
}

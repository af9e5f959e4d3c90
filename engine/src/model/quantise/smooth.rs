//! SmoothQuant ([arXiv 2211.10438](https://arxiv.org/abs/2211.10438)): activations have channels that are a hundred times as large as
//! others, for which one scale of bytes leaves the others few steps; weights have none. Inputs are divided by
//! `max|x|^a / max|w|^(1-a)` channel by channel, and the weights that read them multiplied, so that both have some.
//!
//! The authors do so behind norms, whose weights take the division in. Here it is done wherever something can ([`super::fold`]): what a gated
//! MLP's second half reads has the largest channels of all.

use super::fold::{Factors, Fold, readers};
use super::inputs::Channels;
use super::moments::INPUTS;
use crate::model::weights::Found;
use crate::model::{Config, ModelError};

/// Least magnitude, as in the authors' code.
const LEAST: f32 = 1e-5;

/// What smooths block `index`, whose inputs are as large as this, with a strength from 0 to 1: all of it leaves no input above 1.
///
/// # Errors
/// When a tensor cannot be read.
pub fn smooth<'c>(
    found: &mut Found<'_>,
    config: &'c Config,
    index: usize,
    inputs: &[Channels; INPUTS.len()],
    strength: f32,
) -> Result<Fold<'c>, ModelError> {
    let mut factors = Factors::default();
    for (input, names) in readers(config, index) {
        let mut largest = vec![0.0f32; inputs[input].largest.len()];
        let mut row = vec![0.0; largest.len()];
        for (name, [rows, width]) in names {
            let matrix = found.tensor(&name, &[rows, width])?;
            for at in 0..rows {
                matrix.widen(at, &mut row);
                largest.iter_mut().zip(&row).for_each(|(largest, x)| *largest = largest.max(x.abs()));
            }
        }
        let each = inputs[input].largest.iter().zip(&largest);
        factors[input] = Some(each.map(|(&x, &w)| factor(x, w, strength)).collect());
    }
    Ok(Fold::new(config, factors))
}

/// Of a channel with these largest inputs and weights.
fn factor(input: f32, weight: f32, strength: f32) -> f32 {
    (input.max(LEAST).powf(strength) / weight.max(LEAST).powf(1.0 - strength)).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::factor;

    #[test]
    fn a_factor_by_hand() {
        // Half of both: inputs of 8 and weights of 2 become 4 and 4.
        assert_eq!(factor(8.0, 2.0, 0.5), 2.0);
        // All of it: inputs become 1. None of it: weights do.
        assert_eq!((factor(8.0, 2.0, 1.0), factor(8.0, 0.5, 0.0)), (8.0, 2.0));
        assert!(factor(0.0, 0.0, 0.5).is_finite() && factor(0.0, 1e9, 0.0) > 0.0);
    }
}

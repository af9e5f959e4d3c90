//! Factors of RoPE's frequencies, which GGUF files have as tensors: the two lists of LongRoPE, and one in place of Llama 3.1's scaling.
//!
//! Of the latter, llama.cpp's conversion works out once what each frequency is divided by; the numbers of the
//! configuration that it follows from are not in the file. They are found again here, so that a model is the same thing whether it
//! comes from a folder or from a file, and a file can become a folder. In all published models waves longer than the
//! original context are divided, and those shorter than a quarter of it are kept; the factor is that of the longest wave, and the
//! original context follows from any frequency between. What the found numbers give is compared with what is in the file.

use crate::model::config::{Rope, RopeScaling};
use serde_json::{Value, json};
use std::f64::consts::PI;

/// What Llama 3.1 divides frequencies by.
pub(super) const FACTORS: &str = "rope_freqs.weight";
/// What LongRoPE divides them by in short sequences.
pub(super) const SHORT: &str = "rope_factors_short.weight";
/// What it divides them by in long ones.
pub(super) const LONG: &str = "rope_factors_long.weight";
/// All of these.
pub(super) const TENSORS: [&str; 3] = [FACTORS, SHORT, LONG];

/// `low_freq_factor` and `high_freq_factor` of all published models: turns over the original context.
const TURNS: [f64; 2] = [1.0, 4.0];
/// `original_max_position_embeddings` of the same, where no frequency lies between.
const ORIGINAL: usize = 8192;
/// How far from a factor of a file, as a part of it, the one that is found may be: they were worked out in f32.
const TOLERANCE: f64 = 1e-4;

fn frequencies(rope: &Rope, head_dim: usize) -> Vec<f64> {
    rope.frequencies(head_dim, 1, 1).rad_per_token().to_vec()
}

/// What a scaling as Llama 3.1's divides each frequency by, `[D / 2]`.
fn divided(rope: &Rope, head_dim: usize) -> Vec<f32> {
    let plain = frequencies(&Rope { scaling: RopeScaling::None, ..*rope }, head_dim);
    plain.iter().zip(frequencies(rope, head_dim)).map(|(plain, scaled)| (plain / scaled) as f32).collect()
}

/// The tensors that a file needs for the RoPE of a head of `head_dim` channels: names and elements, `[D / 2]` each.
pub fn tensors(rope: &Rope, head_dim: usize) -> Vec<(&'static str, Vec<f32>)> {
    match &rope.scaling {
        RopeScaling::Llama3 { .. } => vec![(FACTORS, divided(rope, head_dim))],
        RopeScaling::Long { short, long, .. } => vec![(SHORT, short.clone()), (LONG, long.clone())],
        _ => Vec::new(),
    }
}

/// The `rope_scaling` of a `config.json` that gives these factors, of a RoPE with base `theta`.
///
/// # Errors
/// In words, when they are not those of a scaling as Llama 3.1's.
pub(super) fn of_factors(factors: &[f32], theta: f64) -> Result<Value, String> {
    let [low_freq_factor, high_freq_factor] = TURNS;
    let factor = factors.iter().copied().fold(1.0, f32::max);
    let rope = |scaling| Rope { theta, part: 1.0, scaling };
    let plain = frequencies(&rope(RopeScaling::None), 2 * factors.len());
    // `1 / divided = (1 - smooth) / factor + smooth`, and `smooth` grows from 0 to 1 between the two numbers of turns.
    let between = factors.iter().zip(&plain).find(|&(&divided, _)| 1.0 < divided && divided < factor);
    let original = between.map(|(&divided, frequency)| {
        let [divided, factor] = [divided, factor].map(f64::from);
        let smooth = (1.0 / divided - 1.0 / factor) / (1.0 - 1.0 / factor);
        (low_freq_factor + smooth * (high_freq_factor - low_freq_factor)) * 2.0 * PI / frequency
    });
    let original_positions = original.map_or(ORIGINAL, |original| original.round() as usize);
    let factor = f64::from(factor);
    let scaling = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions };
    let found = divided(&rope(scaling), 2 * factors.len());
    let is_same = |(found, wanted): (&f32, &f32)| f64::from((found - wanted).abs()) <= TOLERANCE * f64::from(*wanted);
    if !factor.is_finite() || original_positions == 0 || !found.iter().zip(factors).all(is_same) {
        return Err(format!("it divides RoPE's frequencies by '{FACTORS}', which is none of Llama 3.1's scalings"));
    }
    Ok(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_positions,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_that_factors_were_made_of_are_found_again() {
        // Llama 3.1, 3.2, and small ones.
        for (factor, theta, head_dim, original_positions) in [
            (8.0, 5e5, 128, 8192),
            (32.0, 5e5, 64, 8192),
            (32.0, 5e5, 128, 8192),
            (8.0, 1e4, 8, 64),
            (4.0, 1e4, 64, 2048),
        ] {
            let scaling =
                RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions };
            let [(FACTORS, factors)] = &tensors(&Rope { theta, part: 1.0, scaling }, head_dim)[..] else {
                panic!("one tensor")
            };
            assert_eq!(factors.len(), head_dim / 2);
            let found = of_factors(factors, theta).unwrap();
            assert_eq!(found["factor"], factor);
            assert_eq!(found["original_max_position_embeddings"], original_positions);
        }
    }

    #[test]
    fn other_factors_are_refused() {
        for factors in [&[0.0, 1.0][..], &[f32::NAN; 4], &[1.0, 7.0, 2.0, 8.0], &[-1.0; 4], &[f32::INFINITY; 4]] {
            assert!(of_factors(factors, 1e4).unwrap_err().contains("none of Llama 3.1's"), "{factors:?}");
        }
        let linear = RopeScaling::Linear { factor: 2.0 };
        assert!(tensors(&Rope { theta: 1e4, part: 1.0, scaling: linear }, 8).is_empty());
    }
}

//! Affine maps of hidden states, fitted in closed form: a whitening that keeps what differs between groups of states and turns
//! down what differs within them.
//!
//! States of one group say the same in other words (a key in several questions, a value behind several keys). With `B` the
//! covariance of the groups' means and `W` that of states around their group's mean, `B + γ W + λ I = L Lᵀ`, and a state `h` becomes
//! `G L⁻¹ (h - m)`. Between groups every direction then has a variance of at most 1, and within them of at most `1/γ`. `G` is the
//! identity where the map is not to be narrower than the state, and else random rows that keep lengths on average.

use crate::episodic::matrix::{Matrix, dot, solve};
use crate::memory::{Arena, ArenaError, Label};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// `γ`.
const WITHIN: f64 = 30.0;
/// `λ` as a part of the mean diagonal of `B + γ W`.
const RIDGE: f64 = 1e-4;

/// `y = A (x - m)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Affine {
    /// `m` `[inputs]`.
    pub mean: Vec<f32>,
    /// `A` `[outputs, inputs]`.
    pub matrix: Vec<f32>,
}

impl Affine {
    /// Fits a map to `outputs` numbers to states in groups of `group`, one behind the other.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When there are no states, or more outputs than numbers of a state.
    pub fn fit(states: &[Vec<f32>], group: usize, outputs: usize, arena: &Arena) -> Result<Self, ArenaError> {
        let inputs = states[0].len();
        assert!(outputs <= inputs, "a map that is not wider than what it reads");
        let mean = mean(states);
        let mut covariance = Matrix::zeros(arena, Label::Workspace, inputs, inputs)?;
        let groups = states.len() / group;
        for of_group in states.chunks_exact(group) {
            let centre = self::mean(of_group);
            let apart: Vec<f64> = centre.iter().zip(&mean).map(|(centre, mean)| centre - mean).collect();
            add_outer(&mut covariance, &apart, 1.0 / groups as f64);
            for state in of_group.iter().filter(|_| group > 1) {
                let apart: Vec<f64> =
                    state.iter().zip(&centre).map(|(state, centre)| f64::from(*state) - centre).collect();
                add_outer(&mut covariance, &apart, WITHIN / (groups * (group - 1)) as f64);
            }
        }
        let ridge = RIDGE * (0..inputs).map(|at| covariance.row(at)[at]).sum::<f64>() / inputs as f64;
        (0..inputs).for_each(|at| covariance.row_mut(at)[at] += ridge);
        // The lower half becomes the factor `L`; what is solved for besides is not asked for.
        assert!(solve(&mut covariance, &mut vec![0.0; inputs]), "a ridge makes the covariance positive definite");
        let mut matrix = vec![0.0; outputs * inputs];
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        for (output, row) in matrix.chunks_exact_mut(inputs).enumerate() {
            let mut mixed: Vec<f64> = if outputs == inputs {
                (0..inputs).map(|at| f64::from(u8::from(at == output))).collect()
            } else {
                let scale = (inputs as f64).sqrt();
                (0..inputs)
                    .map(|_| {
                        let normal: f64 = StandardNormal.sample(&mut rng);
                        normal / scale
                    })
                    .collect()
            };
            // `row L = mixed`, from the last number to the first.
            for at in (0..inputs).rev() {
                let behind: f64 = (at + 1..inputs).map(|other| mixed[other] * covariance.row(other)[at]).sum();
                mixed[at] = (mixed[at] - behind) / covariance.row(at)[at];
            }
            row.iter_mut().zip(&mixed).for_each(|(row, value)| *row = *value as f32);
        }
        Ok(Affine { mean: mean.iter().map(|mean| *mean as f32).collect(), matrix })
    }

    /// Numbers that it reads.
    pub fn inputs(&self) -> usize {
        self.mean.len()
    }

    /// Numbers that it gives.
    pub fn outputs(&self) -> usize {
        self.matrix.len() / self.mean.len()
    }

    /// What a state becomes.
    pub fn apply(&self, state: &[f32]) -> Vec<f64> {
        let apart: Vec<f64> = state.iter().zip(&self.mean).map(|(x, mean)| f64::from(x - mean)).collect();
        let row = |row: &[f32]| {
            let row: Vec<f64> = row.iter().map(|&value| value.into()).collect();
            dot(&row, &apart)
        };
        self.matrix.chunks_exact(self.mean.len()).map(row).collect()
    }
}

fn mean(states: &[Vec<f32>]) -> Vec<f64> {
    let mut mean = vec![0.0; states[0].len()];
    for state in states {
        mean.iter_mut().zip(state).for_each(|(mean, value)| *mean += f64::from(*value) / states.len() as f64);
    }
    mean
}

/// Adds `factor x xᵀ`.
fn add_outer(to: &mut Matrix, x: &[f64], factor: f64) {
    for (at, &value) in x.iter().enumerate() {
        to.row_mut(at).iter_mut().zip(x).for_each(|(to, other)| *to += factor * value * other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt;

    /// Groups of states that differ in three numbers, and within a group in a fourth, all far above the ridge.
    #[test]
    fn what_groups_differ_in_gets_variance_one_and_what_varies_within_them_next_to_none() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut drawn = |scale: f32| rng.random_range(-1.0..1.0f32) * scale;
        let groups: Vec<[f32; 3]> = (0..400).map(|_| [drawn(50.0), drawn(50.0), drawn(20.0)]).collect();
        let mut states = Vec::new();
        for [a, b, c] in &groups {
            (0..3).for_each(|_| states.push(vec![7.0 + a, *b, b + c, drawn(20.0)]));
        }
        let map = Affine::fit(&states, 3, 4, &Arena::unlimited()).unwrap();
        let mapped: Vec<Vec<f64>> = states.iter().map(|state| map.apply(state)).collect();
        let (mut between, mut within) = (0.0, 0.0);
        for of_group in mapped.chunks_exact(3) {
            for at in 0..4 {
                let centre: f64 = of_group.iter().map(|state| state[at]).sum::<f64>() / 3.0;
                between += centre * centre / 400.0;
                within += of_group.iter().map(|state| (state[at] - centre).powi(2)).sum::<f64>() / 800.0;
            }
        }
        assert!((2.9..3.1).contains(&between), "{between}");
        assert!(within < 1.1 / WITHIN, "{within}");
    }
}

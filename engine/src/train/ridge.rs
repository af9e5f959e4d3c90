//! Linear regression of several targets with ridge, from sums alone: no sample is kept.
//!
//! A sample's row is `z = [x | 1 | y]`, and all that is ever asked of the samples is `sum z z^T`: the weights that minimise
//! `sum |y - W x - b|^2 + ridge |W|^2` (the intercept is not penalised, as in scikit-learn's `Ridge`), and how much of the
//! targets' variance any weights explain, on these samples or on others that were summed likewise.

use crate::device::gemm::{Matrix as Rows, product};
use crate::episodic::matrix::{Matrix, solve};
use crate::memory::{Arena, ArenaError, Buffer, Label};

/// Weights of a linear function.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Linear {
    /// `[inputs]`.
    pub weight: Vec<f64>,
    /// What is added.
    pub bias: f64,
}

/// Sums over samples.
pub(super) struct Moments {
    inputs: usize,
    targets: usize,
    /// `sum z z^T`, `[inputs + 1 + targets, inputs + 1 + targets]`.
    sums: Buffer<f64>,
}

impl Moments {
    /// Of no sample yet.
    pub fn new(arena: &Arena, inputs: usize, targets: usize) -> Result<Self, ArenaError> {
        let width = inputs + 1 + targets;
        Ok(Moments { inputs, targets, sums: arena.alloc(Label::Workspace, width * width)? })
    }

    /// Elements of a row `[x | 1 | y]`.
    pub fn width(&self) -> usize {
        self.inputs + 1 + self.targets
    }

    /// Adds samples, rows `[x | 1 | y]`. `scratch` has a square of the width.
    pub fn add(&mut self, rows: &[f32], scratch: &mut [f32], threads: usize) {
        let width = self.width();
        let rows = Rows::new(rows, rows.len() / width, width);
        product(scratch, width, rows.transposed(), rows, false, threads);
        self.sums.iter_mut().zip(scratch).for_each(|(sum, more)| *sum += f64::from(*more));
    }

    /// The sums, to be written down and read back.
    pub fn sums(&mut self) -> &mut [f64] {
        &mut self.sums
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.sums[row * self.width() + column]
    }

    /// Samples so far.
    fn count(&self) -> f64 {
        self.at(self.inputs, self.inputs)
    }

    /// Sum of products of deviations from the mean.
    fn deviations(&self, row: usize, column: usize) -> f64 {
        self.at(row, column) - self.at(row, self.inputs) * self.at(column, self.inputs) / self.count()
    }

    /// The best linear function for a target; `None` where there are too few samples for the ridge to help.
    pub fn fit(&self, target: usize, ridge: f64, arena: &Arena) -> Result<Option<Linear>, ArenaError> {
        let target = self.inputs + 1 + target;
        let mut squares = Matrix::zeros(arena, Label::Workspace, self.inputs, self.inputs)?;
        for row in 0..self.inputs {
            (0..=row).for_each(|column| squares.row_mut(row)[column] = self.deviations(row, column));
            squares.row_mut(row)[row] += ridge;
        }
        let mut weight: Vec<f64> = (0..self.inputs).map(|input| self.deviations(input, target)).collect();
        if !(self.count() > 0.0 && solve(&mut squares, &mut weight)) {
            return Ok(None);
        }
        let mean = |index| self.at(index, self.inputs) / self.count();
        let explained: f64 = weight.iter().enumerate().map(|(input, weight)| weight * mean(input)).sum();
        Ok(Some(Linear { bias: mean(target) - explained, weight }))
    }

    /// Part of a target's variance over these samples that a function explains (R²): 1 is all, 0 what the mean does.
    pub fn explained(&self, target: usize, linear: &Linear) -> f64 {
        let target = self.inputs + 1 + target;
        let mut coefficients = vec![0.0; self.width()];
        coefficients[..self.inputs].copy_from_slice(&linear.weight);
        (coefficients[self.inputs], coefficients[target]) = (linear.bias, -1.0);
        let along =
            |row: usize| (0..self.width()).map(|column| self.at(row, column) * coefficients[column]).sum::<f64>();
        let missed: f64 = (0..self.width()).map(|row| coefficients[row] * along(row)).sum();
        1.0 - missed / self.deviations(target, target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_fit_is_where_the_penalised_error_has_no_slope(
            rows in prop::collection::vec((prop::collection::vec(-3f32..3.0, 3), -2f32..2.0), 8..40),
            ridge in 0.1f64..5.0,
        ) {
            let arena = Arena::unlimited();
            let mut moments = Moments::new(&arena, 3, 1).unwrap();
            let flat: Vec<f32> = rows.iter().flat_map(|(x, y)| [x[0], x[1], x[2], 1.0, *y]).collect();
            let (first, second) = flat.split_at(5 * (rows.len() / 2));
            [first, second].into_iter().for_each(|part| moments.add(part, &mut [0.0; 25], 1));
            let Linear { weight, bias } = moments.fit(0, ridge, &arena).unwrap().unwrap();
            let missed = |(x, y): &(Vec<f32>, f32)| {
                bias + x.iter().zip(&weight).map(|(x, w)| f64::from(*x) * w).sum::<f64>() - f64::from(*y)
            };
            for input in 0..3 {
                let slope: f64 = rows.iter().map(|row| missed(row) * f64::from(row.0[input])).sum();
                prop_assert!((slope + ridge * weight[input]).abs() < 1e-3, "{slope} {weight:?}");
            }
            prop_assert!(rows.iter().map(missed).sum::<f64>().abs() < 1e-3);
            let mean = rows.iter().map(|row| f64::from(row.1)).sum::<f64>() / rows.len() as f64;
            let (all, left): (f64, f64) = rows.iter().fold((0.0, 0.0), |(all, left), row| {
                (all + (f64::from(row.1) - mean).powi(2), left + missed(row).powi(2))
            });
            let explained = moments.explained(0, &Linear { weight, bias });
            prop_assert!((explained - (1.0 - left / all)).abs() < 1e-3, "{explained}");
        }
    }

    #[test]
    fn nothing_is_fitted_to_no_samples() {
        let arena = Arena::unlimited();
        assert_eq!(Moments::new(&arena, 2, 1).unwrap().fit(0, 1.0, &arena).unwrap(), None);
    }
}

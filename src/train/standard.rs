//! Means and deviations of columns, by which inputs are brought to mean 0 and deviation 1 before a function of them is fitted, and which
//! are then folded into its weights: hidden states have elements that are hundreds of times the others.

/// Means and deviations of columns.
pub(super) struct Standard {
    pub mean: Vec<f32>,
    pub deviation: Vec<f32>,
}

impl Standard {
    /// Of rows of that many columns.
    pub fn of(rows: &[f32], columns: usize) -> Self {
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

    /// Brings rows to mean 0 and deviation 1.
    pub fn apply(&self, rows: &mut [f32]) {
        for row in rows.chunks_exact_mut(self.mean.len()) {
            row.iter_mut().zip(self.mean.iter().zip(&self.deviation)).for_each(|(x, (mean, by))| *x = (*x - mean) / by);
        }
    }

    /// Weights and bias of a function of rows as [`Standard::apply`] brings them become those of the same function of rows as they are.
    pub fn fold(&self, weights: &mut [f32], bias: &mut f32) {
        for (weight, (mean, by)) in weights.iter_mut().zip(self.mean.iter().zip(&self.deviation)) {
            *weight /= by;
            *bias -= *weight * mean;
        }
    }
}

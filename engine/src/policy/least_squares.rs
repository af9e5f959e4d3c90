//! Least squares with a ridge towards a prior, in f64: what is fitted to few equations with many unknowns.
//!
//! A design matrix lies by columns: column `j`, of unknown `j`, is `n` numbers, one for each equation. Unknowns may be far more than
//! equations, so that everything is solved in the space of the equations: `x = prior + A' (A A' + ridge)^-1 (y - A prior)` is the
//! minimum of `|A x - y|^2 + ridge |x - prior|^2`, whichever of the two there are more of. Sums have one order, whatever the
//! number of threads.

use rayon::prelude::*;

/// Passes over the unknowns of [`bounded`] at most, and the step that is too small for another.
const PASSES: usize = 1000;
const LEAST_STEP: f64 = 1e-9;

/// A matrix by columns of `n` numbers, and how strongly unknowns are held to their prior.
#[derive(Clone, Copy)]
pub struct Design<'a> {
    /// `[unknowns, n]`.
    pub columns: &'a [f64],
    /// Equations.
    pub n: usize,
    /// Part of the mean squared length of a column.
    pub ridge: f64,
}

impl Design<'_> {
    fn each(&self) -> impl Iterator<Item = &[f64]> {
        self.columns.chunks_exact(self.n)
    }

    /// The ridge as it is added to squares; 0 for a matrix of zeros.
    fn penalty(&self) -> f64 {
        let squares: f64 = self.each().map(|column| dot(column, column)).sum();
        self.ridge * squares / (self.columns.len() / self.n) as f64
    }

    /// Replaces `right` `[n, width]`, what a prior leaves of the right sides, by numbers `z` of which `column . z` is to be
    /// added to an unknown's prior. `gram` is `[n, n]` of scratch.
    pub fn solve(&self, right: &mut [f64], gram: &mut [f64]) {
        let (n, width, penalty) = (self.n, right.len() / self.n, self.penalty());
        if penalty == 0.0 {
            return right.fill(0.0);
        }
        gram.fill(0.0);
        gram.par_chunks_exact_mut(n).enumerate().for_each(|(i, row)| {
            for column in self.each() {
                add(&mut row[..=i], column[i], &column[..=i]);
            }
            row[i] += penalty;
        });
        for i in 0..n {
            let (above, rest) = gram.split_at_mut(i * n);
            for j in 0..i {
                let factor = &above[j * n..=j * n + j];
                rest[j] = (rest[j] - dot(&rest[..j], &factor[..j])) / factor[j];
            }
            // What is left of the diagonal is never below the penalty, but for rounding.
            rest[i] = (rest[i] - dot(&rest[..i], &rest[..i])).max(penalty).sqrt();
        }
        for i in 0..n {
            let (above, rest) = right.split_at_mut(i * width);
            for (j, above) in above.chunks_exact(width).enumerate() {
                add(&mut rest[..width], -gram[i * n + j], above);
            }
            rest[..width].iter_mut().for_each(|x| *x /= gram[i * n + i]);
        }
        for i in (0..n).rev() {
            let (rest, below) = right.split_at_mut((i + 1) * width);
            let row = &mut rest[i * width..];
            for (j, below) in (i + 1..n).zip(below.chunks_exact(width)) {
                add(row, -gram[j * n + i], below);
            }
            row.iter_mut().for_each(|x| *x /= gram[i * n + i]);
        }
    }

    /// Unknowns within `bounds` that minimise `|A x - right|^2` with the ridge towards 1: those without bounds, clamped, and then
    /// coordinate by coordinate until none moves. `right` becomes what they leave of it; `scratch` is `[n + n * n]`.
    pub fn bounded(&self, right: &mut [f64], bounds: [f64; 2], x: &mut [f64], scratch: &mut [f64]) {
        let (penalty, (z, gram)) = (self.penalty(), scratch.split_at_mut(self.n));
        self.each().for_each(|column| add(right, -1.0, column));
        z.copy_from_slice(right);
        self.solve(z, gram);
        for (x, column) in x.iter_mut().zip(self.each()) {
            *x = (1.0 + dot(column, z)).clamp(bounds[0], bounds[1]);
            add(right, 1.0 - *x, column);
        }
        for _ in 0..PASSES {
            let mut longest = 0.0f64;
            for (x, column) in x.iter_mut().zip(self.each()) {
                let square = dot(column, column) + penalty;
                if square == 0.0 {
                    continue;
                }
                let slope = dot(column, right) + penalty * (1.0 - *x);
                let to = (*x + slope / square).clamp(bounds[0], bounds[1]);
                add(right, *x - to, column);
                longest = longest.max((to - *x).abs());
                *x = to;
            }
            if longest < LEAST_STEP {
                break;
            }
        }
    }
}

/// Inner product, in four sums.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<4>(), b.as_chunks::<4>());
    let mut sums = [0.0; 4];
    for (a, b) in a.iter().zip(b) {
        (0..4).for_each(|lane| sums[lane] += a[lane] * b[lane]);
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// `to += factor * of`.
pub fn add(to: &mut [f64], factor: f64, of: &[f64]) {
    to.iter_mut().zip(of).for_each(|(to, of)| *to += factor * of);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_solution_has_no_slope_and_a_bounded_one_none_that_leads_inside(
            (n, unknowns) in (1usize..12, 1usize..12),
            numbers in prop::collection::vec(0.01f64..1.0, 12 * 13),
            ridge in prop::sample::select(vec![1e-4, 1e-2, 0.3]),
        ) {
            let (columns, right) = (&numbers[..n * unknowns], &numbers[12 * 12..][..n]);
            let right: Vec<f64> = right.iter().map(|x| 4.0 * x).collect();
            let design = Design { columns, n, ridge };
            let (mut scratch, penalty) = (vec![f64::NAN; n + n * n], design.penalty());
            // What the unknowns leave, and the slope of each.
            let slopes = |x: &[f64]| -> Vec<f64> {
                let mut left = right.clone();
                x.iter().zip(design.each()).for_each(|(x, column)| add(&mut left, -x, column));
                x.iter().zip(design.each()).map(|(x, column)| dot(column, &left) + penalty * (1.0 - x)).collect()
            };
            let mut z = right.clone();
            design.each().for_each(|column| add(&mut z, -1.0, column));
            design.solve(&mut z, &mut scratch[..n * n]);
            let free: Vec<f64> = design.each().map(|column| 1.0 + dot(column, &z)).collect();
            prop_assert!(slopes(&free).iter().all(|slope| slope.abs() < 1e-8), "{:?}", slopes(&free));

            let (mut x, mut left) = (vec![0.0; unknowns], right.clone());
            let bounds = [0.5, 1.5];
            design.bounded(&mut left, bounds, &mut x, &mut scratch);
            for (slope, x) in slopes(&x).into_iter().zip(&x) {
                // Towards less loss: nothing inside, outwards at a bound.
                let left = if *x == bounds[0] { slope } else if *x == bounds[1] { -slope } else { slope.abs() };
                prop_assert!(left < 1e-4, "slope {slope} at {x}");
            }
            let mut wanted = right.clone();
            x.iter().zip(design.each()).for_each(|(x, column)| add(&mut wanted, -x, column));
            prop_assert!(left.iter().zip(&wanted).all(|(got, wanted)| (got - wanted).abs() < 1e-9));
        }
    }
}

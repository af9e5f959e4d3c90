//! Pseudo-inverses: exact, and by iteration as in Larimar's reference code.
//!
//! **Iteration** (Ben-Israel and Cohen 1966; the matrix form of Newton's method, also called Newton-Schulz):
//! `X <- 2 X - X A X` from `X = c Aᵀ`. A singular value `s` of `A` becomes `(1 - (1 - c s²)^(2^n)) / s` after `n` steps: large
//! ones come first, small ones are still near 0 when it stops, which keeps noise from being blown up. It needs `c s² < 2` for the
//! largest.
//!
//! **Exact** (Moore and Penrose): the rows of the matrix, or of its transpose where that has fewer, are turned in pairs until all
//! are orthogonal (one-sided Jacobi, Hestenes 1958); their lengths are the singular values. Those that are nothing but rounding
//! are left out.

use super::EpisodicError;
use super::matrix::{Matrix, add_scaled, dot, norm};
use crate::memory::{Arena, Label};

/// What the iteration starts from, times the transpose: `min(e⁻⁵, 5·10⁻⁴)` in the reference code.
const START: f64 = 5e-4;
/// Rounds of the power method that look for the largest singular value.
const POWER_ROUNDS: usize = 40;
/// Rounds of Jacobi; about ten are needed.
const MOST_SWEEPS: usize = 60;

/// How a pseudo-inverse is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inverse {
    /// By singular values.
    Exact,
    /// By iteration.
    Newton {
        /// Iterations.
        steps: usize,
    },
}

impl Inverse {
    /// Bytes that [`Inverse::of`] takes for a matrix `[rows, columns]`, its result among them.
    pub fn bytes(self, rows: usize, columns: usize) -> u64 {
        let (few, many) = (rows.min(columns), rows.max(columns));
        let result = Matrix::bytes(rows, columns);
        match self {
            Inverse::Exact => 2 * result + Matrix::bytes(few, few),
            Inverse::Newton { .. } => 2 * result + Matrix::bytes(few, few) + Matrix::bytes(1, few + many),
        }
    }

    /// The pseudo-inverse `[columns, rows]` of a matrix.
    ///
    /// # Errors
    /// When the arena has no room, or the iteration cannot converge.
    pub fn of(self, a: &Matrix, arena: &Arena) -> Result<Matrix, EpisodicError> {
        match self {
            Inverse::Exact => exact(a, arena),
            Inverse::Newton { steps } => newton(a, steps, arena),
        }
    }
}

fn newton(a: &Matrix, steps: usize, arena: &Arena) -> Result<Matrix, EpisodicError> {
    let workspace = |rows, columns| Matrix::zeros(arena, Label::Workspace, rows, columns);
    let (rows, columns) = (a.rows(), a.columns());
    let mut x = workspace(columns, rows)?;
    let mut product = workspace(columns, rows)?;
    let few = rows.min(columns);
    let mut inner = workspace(few, few)?;
    let mut vectors = workspace(1, rows + columns)?;
    let largest = largest_singular_value(a, &mut vectors);
    if largest.is_nan() || START * largest * largest >= 2.0 {
        return Err(EpisodicError::Diverges { largest, most: (2.0 / START).sqrt() });
    }
    x.set_transposed(a, START);
    for _ in 0..steps {
        if rows <= columns {
            inner.set_product(a, &x);
            product.set_product(&x, &inner);
        } else {
            inner.set_product(&x, a);
            product.set_product(&inner, &x);
        }
        x.iter_mut().zip(product.iter()).for_each(|(x, product)| *x = 2.0 * *x - product);
    }
    // The power method may have fallen short of the largest. What converges is from below a projection, whose diagonal is 0 to 1.
    match rows <= columns {
        true => inner.set_product(a, &x),
        false => inner.set_product(&x, a),
    }
    let converges = (0..few).all(|index| (-0.01..=1.01).contains(&inner.row(index)[index]));
    if !converges {
        return Err(EpisodicError::Diverges { largest, most: (2.0 / START).sqrt() });
    }
    Ok(x)
}

/// The largest singular value, from below, by the power method.
fn largest_singular_value(a: &Matrix, vectors: &mut Matrix) -> f64 {
    let (right, left) = vectors.split_at_mut(a.columns());
    // Not all alike, so that no symmetry of the matrix hides its largest direction.
    right.iter_mut().enumerate().for_each(|(index, value)| *value = 1.0 + (index as f64 * 0.7).sin() / 2.0);
    let mut found = 0.0;
    for _ in 0..POWER_ROUNDS {
        let length = norm(right);
        left.iter_mut().enumerate().for_each(|(index, value)| *value = dot(a.row(index), right) / length);
        found = norm(left);
        right.fill(0.0);
        left.iter().enumerate().for_each(|(index, &value)| add_scaled(right, value, a.row(index)));
        if found == 0.0 || !found.is_finite() {
            break;
        }
    }
    found
}

fn exact(a: &Matrix, arena: &Arena) -> Result<Matrix, EpisodicError> {
    let workspace = |rows, columns| Matrix::zeros(arena, Label::Workspace, rows, columns);
    let (rows, columns) = (a.rows(), a.columns());
    let (few, many) = (rows.min(columns), rows.max(columns));
    let mut inverse = workspace(columns, rows)?;
    let mut orthogonal = workspace(few, many)?;
    let mut turned = workspace(few, few)?;
    if rows <= columns {
        orthogonal.copy_from_slice(a)
    } else {
        orthogonal.set_transposed(a, 1.0)
    }
    turned.set_identity();
    for _ in 0..MOST_SWEEPS {
        let mut is_done = true;
        for first in 0..few {
            for second in first + 1..few {
                let (one, other) = (orthogonal.row(first), orthogonal.row(second));
                let (long, short, common) = (dot(one, one), dot(other, other), dot(one, other));
                if common == 0.0 || common.abs() <= f64::EPSILON * (long * short).sqrt() {
                    continue;
                }
                is_done = false;
                let zeta = (short - long) / (2.0 * common);
                let tangent = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
                let cosine = 1.0 / tangent.hypot(1.0);
                turn(&mut orthogonal, (first, second), cosine, cosine * tangent);
                turn(&mut turned, (first, second), cosine, cosine * tangent);
            }
        }
        if is_done {
            break;
        }
    }
    let squares = |index: usize| dot(orthogonal.row(index), orthogonal.row(index));
    let largest = (0..few).map(squares).fold(0.0, f64::max).sqrt();
    let least = many as f64 * f64::EPSILON * largest;
    for index in (0..few).filter(|&index| squares(index).sqrt() > least) {
        // A = Σ j s vᵀ with s v the turned row, so its part of the inverse is (s v) jᵀ / s².
        for outer in 0..columns {
            let factor = if rows <= columns { orthogonal.row(index)[outer] } else { turned.row(index)[outer] };
            let row = if rows <= columns { turned.row(index) } else { orthogonal.row(index) };
            add_scaled(inverse.row_mut(outer), factor / squares(index), row);
        }
    }
    Ok(inverse)
}

/// Turns two rows into one another.
fn turn(matrix: &mut Matrix, (first, second): (usize, usize), cosine: f64, sine: f64) {
    let columns = matrix.columns();
    let (head, tail) = matrix.split_at_mut(second * columns);
    for (one, other) in head[first * columns..][..columns].iter_mut().zip(&mut tail[..columns]) {
        (*one, *other) = (cosine * *one - sine * *other, sine * *one + cosine * *other);
    }
}

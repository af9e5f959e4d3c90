//! Matrices of f64 in the arena, and the few products that a memory of facts needs.
//!
//! A product's rows are computed apart from one another, each in one order, so that its bits do not depend on how many threads
//! share them.

use crate::memory::{Arena, ArenaError, Buffer, Label};
use rayon::prelude::*;
use std::ops::{Deref, DerefMut};

/// Multiplications from which on a product's rows are shared by threads.
const SHARED: usize = 1 << 18;

/// A row-major matrix.
pub struct Matrix {
    rows: usize,
    columns: usize,
    values: Buffer<f64>,
}

impl Matrix {
    /// A matrix of zeros.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn zeros(arena: &Arena, label: Label, rows: usize, columns: usize) -> Result<Self, ArenaError> {
        Ok(Matrix { rows, columns, values: arena.alloc(label, rows * columns)? })
    }

    /// Bytes of a matrix.
    pub fn bytes(rows: usize, columns: usize) -> u64 {
        (rows as u64) * (columns as u64) * size_of::<f64>() as u64
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// A row.
    pub fn row(&self, index: usize) -> &[f64] {
        &self.values[index * self.columns..][..self.columns]
    }

    /// A row, to be changed.
    pub fn row_mut(&mut self, index: usize) -> &mut [f64] {
        &mut self.values[index * self.columns..][..self.columns]
    }

    /// Ones on the diagonal, zeros elsewhere.
    pub fn set_identity(&mut self) {
        self.values.fill(0.0);
        for index in 0..self.rows.min(self.columns) {
            self.row_mut(index)[index] = 1.0;
        }
    }

    /// Puts the transpose of `source` times `factor` here.
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn set_transposed(&mut self, source: &Matrix, factor: f64) {
        assert_eq!((self.rows, self.columns), (source.columns, source.rows), "a transpose of another shape");
        for row in 0..self.rows {
            for column in 0..self.columns {
                self.values[row * self.columns + column] = factor * source.row(column)[row];
            }
        }
    }

    /// Puts `left * right` here.
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn set_product(&mut self, left: &Matrix, right: &Matrix) {
        assert_eq!(
            (left.columns, left.rows, right.columns),
            (right.rows, self.rows, self.columns),
            "a product's shapes"
        );
        let fill = |(index, target): (usize, &mut [f64])| {
            target.fill(0.0);
            for (&factor, row) in left.row(index).iter().zip(right.values.chunks_exact(right.columns)) {
                add_scaled(target, factor, row);
            }
        };
        let work = left.rows * left.columns * right.columns;
        let columns = self.columns;
        if work < SHARED {
            self.values.chunks_exact_mut(columns).enumerate().for_each(fill);
        } else {
            self.values.par_chunks_exact_mut(columns).enumerate().for_each(fill);
        }
    }

    /// Puts `left * leftᵀ` here.
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn set_gram(&mut self, left: &Matrix) {
        assert_eq!((self.rows, self.columns), (left.rows, left.rows), "a Gram matrix's shape");
        for row in 0..left.rows {
            for column in 0..=row {
                let value = dot(left.row(row), left.row(column));
                self.row_mut(row)[column] = value;
                self.row_mut(column)[row] = value;
            }
        }
    }
}

impl Deref for Matrix {
    type Target = [f64];
    fn deref(&self) -> &[f64] {
        &self.values
    }
}

impl DerefMut for Matrix {
    fn deref_mut(&mut self) -> &mut [f64] {
        &mut self.values
    }
}

/// `target += factor * row`.
pub fn add_scaled(target: &mut [f64], factor: f64, row: &[f64]) {
    target.iter_mut().zip(row).for_each(|(target, value)| *target += factor * value);
}

/// Inner product, in eight sums that are added at the end.
pub fn dot(left: &[f64], right: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (left, right) = (left.chunks_exact(8), right.chunks_exact(8));
    let rest: f64 = left.remainder().iter().zip(right.remainder()).map(|(a, b)| a * b).sum();
    for (left, right) in left.zip(right) {
        sums.iter_mut().zip(left.iter().zip(right)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f64>() + rest
}

/// Length of a vector.
pub fn norm(vector: &[f64]) -> f64 {
    dot(vector, vector).sqrt()
}

/// Cosine of two vectors; 0 where one of them is nothing.
pub fn cosine(left: &[f64], right: &[f64]) -> f64 {
    let lengths = norm(left) * norm(right);
    if lengths > 0.0 { dot(left, right) / lengths } else { 0.0 }
}

/// Solves `a x = b` for a symmetric positive definite `a`, whose lower half becomes its Cholesky factor; `b` becomes `x`.
/// `false` where a pivot is nothing but rounding: `a` is singular.
pub fn solve(a: &mut Matrix, b: &mut [f64]) -> bool {
    let least = a.rows as f64 * f64::EPSILON * (0..a.rows).map(|index| a.row(index)[index]).fold(0.0, f64::max);
    for column in 0..a.rows {
        for row in column..a.rows {
            let rest = a.row(row)[column] - dot(&a.row(row)[..column], &a.row(column)[..column]);
            if row == column && (rest.is_nan() || rest <= least) {
                return false;
            }
            let value = if row == column { rest.sqrt() } else { rest / a.row(column)[column] };
            a.row_mut(row)[column] = value;
        }
    }
    for row in 0..a.rows {
        b[row] = (b[row] - dot(&a.row(row)[..row], &b[..row])) / a.row(row)[row];
    }
    for row in (0..a.rows).rev() {
        let below: f64 = (row + 1..a.rows).map(|other| a.row(other)[row] * b[other]).sum();
        b[row] = (b[row] - below) / a.row(row)[row];
    }
    true
}

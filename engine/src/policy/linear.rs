//! Small dense linear algebra for scorers: products with the rows of a list, sums of outer products, Cholesky.
//!
//! Rows are what a list has many of, in f32, and go through the kernels' own matrix product. A matrix is at most 256 by
//! 256 and lies by rows of [`padded`] columns, so that the product reads it as it is. What is done once per head, the
//! decomposition, is f64.

use super::List;
use crate::attention::Shape;
use crate::device::simd::product::{Extents, Left, ROWS, Right, product};
use crate::device::simd::{Isa, Simd, SimdOp};

const MAX: usize = Shape::MAX_HEAD_DIM;
/// Widest vector of any instruction path.
const LANES: usize = 16;
/// Attempts at a decomposition, each with ten times the diagonal of the one before.
const ATTEMPTS: usize = 12;

/// Columns of a stored matrix of `width` columns.
pub fn padded(width: usize) -> usize {
    width.next_multiple_of(LANES)
}

/// Elements of a stored matrix of `rows` rows and `columns` columns, with the whole register tiles of [`Moments`].
pub fn matrix_len(rows: usize, columns: usize) -> usize {
    rows.next_multiple_of(ROWS) * padded(columns)
}

/// `c (+)= a b`: `a` with its two strides, `b` and `c` with rows of `columns`.
struct Multiply<'a, const ADD: bool> {
    a: Left<'a, f32>,
    rows: usize,
    steps: usize,
    b: &'a [f32],
    stride: usize,
    columns: usize,
    c: &'a mut [f32],
}

impl<const ADD: bool> SimdOp for Multiply<'_, ADD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let extents = Extents { rows: self.rows, columns: self.columns, steps: self.steps };
        let right = Right { units: self.b, stride: self.stride };
        product::<S, f32, ADD>(simd, extents, self.a, right, self.c, self.columns);
    }
}

/// Calls `visit(row, row * matrix)` for every row of `rows` (`width` elements each, at most [`List::BLOCK`] of them).
/// `matrix` has `width` rows of `padded(columns)`; the products have as many elements.
pub fn times(
    isa: Isa,
    rows: &[f32],
    width: usize,
    matrix: &[f32],
    columns: usize,
    mut visit: impl FnMut(usize, &[f32], &[f32]),
) {
    let (count, columns) = (rows.len() / width, padded(columns));
    let mut products = [0.0; List::BLOCK * MAX];
    let whole = count / ROWS * ROWS;
    let mut multiply = |a: &[f32], first: usize, count: usize| {
        let c = &mut products[first * columns..];
        let a = Left { units: a, row_stride: width, step_stride: 1 };
        isa.run(Multiply::<false> { a, rows: count, steps: width, b: matrix, stride: columns, columns, c });
    };
    if whole > 0 {
        multiply(&rows[..whole * width], 0, whole);
    }
    if whole < count {
        let mut last = [0.0; ROWS * MAX];
        last[..(count - whole) * width].copy_from_slice(&rows[whole * width..]);
        multiply(&last[..ROWS * width], whole, ROWS);
    }
    for (index, (row, product)) in rows.chunks_exact(width).zip(products.chunks_exact(columns)).enumerate() {
        visit(index, row, product);
    }
}

/// Sum of products, in lanes.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let (a_whole, a_rest) = a.as_chunks::<LANES>();
    let (b_whole, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a_whole.iter().zip(b_whole) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

/// Mean and sum of outer products of rows. Rows are shifted by the first one, so that a large mean costs no digits.
pub struct Moments<'a> {
    isa: Isa,
    width: usize,
    rows: usize,
    shift: [f32; MAX],
    sum: [f64; MAX],
    /// `D` rows of `padded(D)`.
    outer: &'a mut [f32],
    block: [f32; List::BLOCK * (MAX + LANES)],
    filled: usize,
}

impl<'a> Moments<'a> {
    /// Of no row yet; `outer` has `matrix_len(width, width)` elements.
    pub fn new(isa: Isa, width: usize, outer: &'a mut [f32]) -> Self {
        outer.fill(0.0);
        let block = [0.0; List::BLOCK * (MAX + LANES)];
        Moments { isa, width, rows: 0, shift: [0.0; MAX], sum: [0.0; MAX], outer, block, filled: 0 }
    }

    /// Distance of rows in the block: as a left operand it is read in whole register tiles.
    fn stride(&self) -> usize {
        padded(self.width.next_multiple_of(ROWS))
    }

    /// Adds a row, shifted.
    pub fn add_shifted(&mut self, row: &[f32]) {
        if self.rows == 0 {
            self.shift[..self.width].copy_from_slice(row);
        }
        let to = &mut self.block[self.filled * padded(self.width.next_multiple_of(ROWS))..][..self.width];
        to.iter_mut().zip(row.iter().zip(&self.shift)).for_each(|(to, (x, shift))| *to = x - shift);
        self.added();
    }

    /// Adds `factor * row`, not shifted.
    pub fn add_scaled(&mut self, row: &[f32], factor: f32) {
        let to = &mut self.block[self.filled * padded(self.width.next_multiple_of(ROWS))..][..self.width];
        to.iter_mut().zip(row).for_each(|(to, x)| *to = factor * x);
        self.added();
    }

    fn added(&mut self) {
        self.rows += 1;
        self.filled += 1;
        if self.filled == List::BLOCK {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.filled == 0 {
            return;
        }
        let (stride, columns) = (self.stride(), padded(self.width));
        let block = &self.block[..self.filled * stride];
        for row in block.chunks_exact(stride) {
            self.sum[..self.width].iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        let a = Left { units: block, row_stride: 1, step_stride: stride };
        let rows = self.width.next_multiple_of(ROWS);
        let steps = self.filled;
        self.isa.run(Multiply::<true> { a, rows, steps, b: block, stride, columns, c: &mut *self.outer });
        self.filled = 0;
    }

    /// Rows added.
    pub fn finish(mut self) -> usize {
        self.flush();
        self.rows
    }

    /// Takes the mean out of the outer products; returns the rows added and their mean.
    pub fn centre(mut self) -> (usize, [f32; MAX]) {
        self.flush();
        let (count, width) = (self.rows.max(1) as f64, self.width);
        let mut mean = [0.0f32; MAX];
        for (i, mean) in mean[..width].iter_mut().enumerate() {
            *mean = (f64::from(self.shift[i]) + self.sum[i] / count) as f32;
        }
        for (i, row) in self.outer.chunks_exact_mut(padded(width)).take(width).enumerate() {
            for (x, sum) in row.iter_mut().zip(&self.sum[..width]) {
                *x = (f64::from(*x) - self.sum[i] * sum / count) as f32;
            }
        }
        (self.rows, mean)
    }
}

/// Replaces a symmetric positive matrix plus `diagonal` times the identity by the inverse of its lower Cholesky factor
/// (`n` rows of `n`). Where it is not positive, `diagonal` is multiplied by ten. A matrix that holds no numbers becomes
/// NaN. `matrix` and `inverse` have `n * n` elements.
pub fn inverse_factor(matrix: &[f64], n: usize, mut diagonal: f64, inverse: &mut [f64]) {
    for _ in 0..ATTEMPTS {
        inverse.copy_from_slice(matrix);
        (0..n).for_each(|i| inverse[i * n + i] += diagonal);
        if factorise(inverse, n) {
            invert(inverse, n);
            return;
        }
        diagonal = (10.0 * diagonal).max(1e-12);
    }
    inverse.fill(f64::NAN);
}

/// The lower Cholesky factor in place; whether the matrix was positive.
fn factorise(a: &mut [f64], n: usize) -> bool {
    for i in 0..n {
        let (above, row) = a.split_at_mut(i * n);
        let row = &mut row[..n];
        for j in 0..i {
            let other = &above[j * n..][..n];
            let inner: f64 = row[..j].iter().zip(&other[..j]).map(|(x, y)| x * y).sum();
            row[j] = (row[j] - inner) / other[j];
        }
        let rest = row[i] - row[..i].iter().map(|x| x * x).sum::<f64>();
        // Written so that a NaN is not positive.
        if rest > 0.0 && rest.is_finite() {
            row[i] = rest.sqrt();
        } else {
            return false;
        }
        row[i + 1..].fill(0.0);
    }
    true
}

/// The inverse of a lower triangle in place, row by row: row `i` is the unit row less what the rows above explain.
fn invert(a: &mut [f64], n: usize) {
    let mut row = [0.0f64; MAX];
    for i in 0..n {
        let pivot = a[i * n + i];
        row[..n].fill(0.0);
        for k in 0..i {
            let factor = a[i * n + k];
            row[..=k].iter_mut().zip(&a[k * n..]).for_each(|(to, x)| *to -= factor * x);
        }
        row[i] = 1.0;
        a[i * n..][..n].iter_mut().zip(&row).for_each(|(to, x)| *to = x / pivot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matrix(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        let mut stored = vec![0.0; matrix_len(rows, columns)];
        for (stored, values) in stored.chunks_exact_mut(padded(columns)).zip(values.chunks_exact(columns)) {
            stored[..columns].copy_from_slice(values);
        }
        stored
    }

    proptest! {
        #[test]
        fn products_moments_and_factors_equal_their_definitions(
            width in 1usize..40,
            columns in 1usize..30,
            count in 1usize..48,
            which in 0usize..4,
            offset in -50f32..50.0,
            values in prop::collection::vec(-2f32..2.0, 48 * 40 + 40 * 30),
        ) {
            let isa = Isa::available().nth(which % Isa::available().count()).unwrap();
            let (rows, rest) = values.split_at(48 * 40);
            let rows = &rows[..count * width];
            let right = &rest[..width * columns];
            let mut visited = 0;
            times(isa, rows, width, &matrix(right, width, columns), columns, |index, row, got| {
                visited += 1;
                assert_eq!(row, &rows[index * width..][..width]);
                for (column, got) in got[..columns].iter().enumerate() {
                    let exact: f32 = (0..width).map(|d| row[d] * right[d * columns + column]).sum();
                    assert!((got - exact).abs() < 1e-3, "{got} {exact}");
                }
            });
            prop_assert_eq!(visited, count);

            let far: Vec<f32> = rows.iter().map(|x| x + offset).collect();
            let mut outer = vec![f32::NAN; matrix_len(width, width)];
            let mut moments = Moments::new(isa, width, &mut outer);
            // Three times over, so that blocks fill up.
            (0..3).for_each(|_| far.chunks_exact(width).for_each(|row| moments.add_shifted(row)));
            let (added, mean) = moments.centre();
            prop_assert_eq!(added, 3 * count);
            let exact: Vec<f64> = (0..width)
                .map(|d| far.chunks_exact(width).map(|row| f64::from(row[d])).sum::<f64>() / count as f64).collect();
            for (mean, exact) in mean.iter().zip(&exact) {
                prop_assert!((f64::from(*mean) - exact).abs() < 1e-4);
            }
            let mut square = vec![0.0; width * width];
            for i in 0..width {
                for j in 0..width {
                    let product = |row: &[f32]| (f64::from(row[i]) - exact[i]) * (f64::from(row[j]) - exact[j]);
                    let wanted = 3.0 * far.chunks_exact(width).map(product).sum::<f64>();
                    prop_assert!((f64::from(outer[i * padded(width) + j]) - wanted).abs() < 1e-3 * (1.0 + wanted.abs()));
                    square[i * width + j] = wanted;
                }
            }

            // The inverse factor takes the matrix to the identity: W (S + I) W^T = I.
            let mut inverse = vec![0.0; width * width];
            inverse_factor(&square, width, 1.0, &mut inverse);
            let at = |i: usize, j: usize| square[i * width + j] + if i == j { 1.0 } else { 0.0 };
            for i in 0..width {
                let row = |j: usize| (0..width).map(|k| inverse[i * width + k] * at(k, j)).sum::<f64>();
                let left: Vec<f64> = (0..width).map(row).collect();
                for j in 0..width {
                    let got: f64 = left.iter().zip(&inverse[j * width..]).map(|(x, y)| x * y).sum();
                    let wanted = if i == j { 1.0 } else { 0.0 };
                    prop_assert!((got - wanted).abs() < 1e-6, "{i} {j} {got}");
                }
            }
        }
    }

    #[test]
    fn scaled_rows_add_up_without_a_shift() {
        let mut outer = vec![0.0; matrix_len(2, 2)];
        let mut moments = Moments::new(Isa::PORTABLE, 2, &mut outer);
        moments.add_scaled(&[1.0, 2.0], 2.0);
        moments.add_scaled(&[0.0, 1.0], 1.0);
        assert_eq!(moments.finish(), 2);
        assert_eq!((&outer[..2], &outer[16..18]), (&[4.0, 8.0][..], &[8.0, 17.0][..]));
    }

    #[test]
    fn what_is_not_positive_gets_a_larger_diagonal_and_what_is_no_number_stays_none() {
        // Rank one: with the diagonal it has a factor; the indefinite one needs more than 0.01.
        for matrix in [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]] {
            let mut inverse = [0.0; 4];
            inverse_factor(&matrix, 2, 0.01, &mut inverse);
            assert!(inverse.iter().all(|x| x.is_finite()), "{inverse:?}");
        }
        let mut inverse = [0.0; 4];
        inverse_factor(&[f64::NAN; 4], 2, 0.01, &mut inverse);
        assert!(inverse.iter().all(|x| x.is_nan()));
    }
}

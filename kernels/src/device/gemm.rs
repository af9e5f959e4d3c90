//! Matrix products of f32 by the `gemm-f32` crate, behind a safe interface that checks every bound.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

/// A strided matrix of f32 for [`product`]: element `(row, column)` lies at `row * row_stride + column * column_stride`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix `[rows, columns]` at the start of `data`.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Matrix { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The same memory with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// The same matrix when its rows lie further apart than they are long.
    pub fn with_row_stride(self, row_stride: usize) -> Self {
        Matrix { row_stride, ..self }
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    fn end(&self) -> usize {
        match (self.rows, self.columns) {
            (0, _) | (_, 0) => 0,
            (rows, columns) => (rows - 1) * self.row_stride + (columns - 1) * self.column_stride + 1,
        }
    }
}

/// `target = left * right`, or `target += left * right` with `add`; `target` is row-major `[m, n]` with rows
/// `row_stride` apart. `threads` above 1 uses that many of the current pool.
///
/// # Panics
/// When the shapes do not fit together or reach past the end of a slice.
pub fn product(target: &mut [f32], row_stride: usize, left: Matrix<'_>, right: Matrix<'_>, add: bool, threads: usize) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    assert_eq!(k, right.rows, "inner extents of a product differ");
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * row_stride + n <= target.len() && n <= row_stride.max(n), "product reaches past its target");
    assert!(m == 1 || n <= row_stride, "rows of a product's target overlap");
    assert!(left.end() <= left.data.len() && right.end() <= right.data.len(), "product reaches past its operands");
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let own_part = if add { 1.0 } else { 0.0 };
    // The crate's kernels write columns, so they are asked for the transpose: `targetᵀ = rightᵀ leftᵀ`.
    // SAFETY: the asserts above keep every element that the three strided matrices address inside their slices, and
    // the rows of `target` apart; `target` is borrowed mutably, so nothing aliases it.
    unsafe {
        get_gemm_fn()(
            n,
            m,
            k,
            target.as_mut_ptr(),
            row_stride as isize,
            1,
            add,
            right.data.as_ptr(),
            right.row_stride as isize,
            right.column_stride as isize,
            left.data.as_ptr(),
            left.row_stride as isize,
            left.column_stride as isize,
            own_part,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_with_strides_and_transposes_equal_the_sum_of_products() {
        let left: Vec<f32> = (0..12).map(|x| x as f32).collect();
        let right: Vec<f32> = (0..20).map(|x| 0.5 * x as f32 - 3.0).collect();
        let expected = |i: usize, j: usize| -> f32 { (0..4).map(|p| left[i * 4 + p] * right[j * 4 + p]).sum() };
        let mut target = vec![1.0; 3 * 7];
        let right = Matrix::new(&right, 5, 4).transposed();
        product(&mut target, 7, Matrix::new(&left, 3, 4), right, false, 1);
        product(&mut target, 7, Matrix::new(&left, 3, 4), right, true, 2);
        for i in 0..3 {
            for j in 0..5 {
                assert_eq!(target[i * 7 + j], 2.0 * expected(i, j));
            }
            assert_eq!(target[i * 7 + 5], 1.0);
        }
    }

    #[test]
    #[should_panic(expected = "past its operands")]
    fn a_product_past_the_end_of_an_operand_panics() {
        product(&mut [0.0; 4], 2, Matrix::new(&[0.0; 3], 2, 2), Matrix::new(&[0.0; 4], 2, 2), false, 1);
    }
}

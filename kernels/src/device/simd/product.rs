//! The matrix product of all tiled kernels: `C (+)= A B` on tiles that stay in the caches.
//!
//! A register tile is [`ROWS`] rows by up to [`Simd::COLUMNS`] vectors: with AVX-512 6 x 4 = 24 accumulators, so that
//! each step along the inner extent loads 4 vectors of `B`, broadcasts 6 elements of `A`, and keeps both multiply-add
//! pipes busy through their latency. `B` is packed by [`super::pack`] into rows of units, `A` is read where it lies,
//! with any two strides: the same code multiplies by `P` and by its transpose. Operands are f32, or pairs of bf16
//! where the processor multiplies those ([`Unit`]). A matrix unit reads the same two layouts, and takes the whole product
//! ([`Unit::multiply_tiles`]).

use super::vector::each;
use super::{Simd, Unit};

/// Rows of a register tile: extents of `C` and `A` are multiples of it.
pub const ROWS: usize = 6;

/// The left operand: unit `(row, step)` lies at `row * row_stride + step * step_stride`.
#[derive(Clone, Copy)]
pub struct Left<'a, U> {
    /// The units.
    pub units: &'a [U],
    /// Distance of neighbouring rows.
    pub row_stride: usize,
    /// Distance of neighbours along the inner extent.
    pub step_stride: usize,
}

/// The right operand: unit `(step, column)` lies at `step * stride + column`.
#[derive(Clone, Copy)]
pub struct Right<'a, U> {
    /// The units.
    pub units: &'a [U],
    /// Distance of neighbouring steps.
    pub stride: usize,
}

/// Extents of a product: `rows` a multiple of [`ROWS`], `columns` of [`Simd::LANES`], `steps` in units.
#[derive(Clone, Copy)]
pub struct Extents {
    /// Rows of `A` and `C`.
    pub rows: usize,
    /// Columns of `B` and `C`.
    pub columns: usize,
    /// Units along the inner extent.
    pub steps: usize,
}

/// `C = A B`, or with `ADD` `C += A B`; row `i` of `C` begins at `i * c_stride`.
///
/// # Panics
/// When extents are no multiples as [`Extents`] says, or reach past the end of a slice.
#[inline(always)]
pub fn product<S: Simd, U: Unit<S>, const ADD: bool>(
    simd: S,
    extents: Extents,
    a: Left<'_, U>,
    b: Right<'_, U>,
    c: &mut [f32],
    c_stride: usize,
) {
    let Extents { rows, columns, steps } = extents;
    if rows == 0 || columns == 0 || steps == 0 {
        assert!(ADD || rows == 0 || columns == 0, "an empty sum is not written");
        return;
    }
    assert!(rows.is_multiple_of(ROWS) && columns.is_multiple_of(S::LANES), "whole register tiles");
    assert!((rows - 1) * a.row_stride + (steps - 1) * a.step_stride < a.units.len(), "A is too short");
    assert!((steps - 1) * b.stride + columns <= b.units.len(), "B is too short");
    assert!((rows - 1) * c_stride + columns <= c.len() && columns <= c_stride, "C is too short");
    // SAFETY: the assertions keep the extents inside the three slices.
    if unsafe { U::multiply_tiles(simd, extents, a, b, c, c_stride, ADD) } {
        return;
    }
    let vectors = columns / S::LANES;
    let panels = vectors.div_ceil(S::COLUMNS);
    for panel in 0..panels {
        let (first, end) = (panel * vectors / panels, (panel + 1) * vectors / panels);
        for row in (0..rows).step_by(ROWS) {
            // SAFETY: the assertions keep rows `row ..+ ROWS`, columns `LANES * first .. LANES * end` and all steps
            // inside the three slices; `c` is borrowed mutably, so nothing aliases it.
            unsafe {
                let tile = Tile {
                    a: a.units.as_ptr().add(row * a.row_stride),
                    a_row: a.row_stride,
                    a_step: a.step_stride,
                    b: b.units.as_ptr().add(first * S::LANES),
                    b_step: b.stride,
                    c: c.as_mut_ptr().add(row * c_stride + first * S::LANES),
                    c_row: c_stride,
                    steps,
                };
                match end - first {
                    1 => tile.multiply::<S, 1, ADD>(simd),
                    2 => tile.multiply::<S, 2, ADD>(simd),
                    3 => tile.multiply::<S, 3, ADD>(simd),
                    _ => tile.multiply::<S, 4, ADD>(simd),
                }
            }
        }
    }
}

/// A register tile: where its operands begin, and their strides in elements.
struct Tile<U> {
    a: *const U,
    a_row: usize,
    a_step: usize,
    b: *const U,
    b_step: usize,
    c: *mut f32,
    c_row: usize,
    steps: usize,
}

impl<U> Tile<U> {
    /// # Safety
    /// `ROWS` rows and `VECTORS` vectors of columns exist in all three operands, for every step.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const VECTORS: usize, const ADD: bool>(self, simd: S)
    where
        U: Unit<S>,
    {
        let mut sums = [[simd.splat(0.0); VECTORS]; ROWS];
        let (mut a, mut b) = (self.a, self.b);
        for _ in 0..self.steps {
            // SAFETY: the caller's promise; `wrapping_add` below may leave the slice after the last step only.
            unsafe {
                let right: [U::Operand; VECTORS] = each(
                    U::load(simd, b),
                    #[inline(always)]
                    |column| U::load(simd, b.add(column * S::LANES)),
                );
                for (row, sums) in sums.iter_mut().enumerate() {
                    let left = U::broadcast(simd, a.add(row * self.a_row));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = U::mul_add(simd, left, right, *sum);
                    }
                }
            }
            a = a.wrapping_add(self.a_step);
            b = b.wrapping_add(self.b_step);
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (column, sum) in sums.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let at = self.c.add(row * self.c_row + column * S::LANES);
                    // Added at the end: many short sums round less than a long one.
                    simd.store(at, if ADD { simd.add(simd.load(at), sum) } else { sum });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, Native, SimdBf16Op};
    use super::*;
    use half::bf16;

    struct Check(Extents);

    impl SimdBf16Op for Check {
        type Output = ();

        #[inline(always)]
        fn run<S: Native>(self, simd: S) {
            check::<S, f32>(simd, self.0);
            check::<S, S::Bf16>(simd, self.0);
        }
    }

    /// Units of small whole numbers, and the numbers.
    fn units<S: Simd, U: Unit<S>>(count: usize, modulus: usize) -> (Vec<U>, Vec<f32>) {
        let numbers: Vec<f32> = (0..count * U::DEPTH).map(|at| (at * 7 % modulus) as f32 - 3.0).collect();
        let units = numbers.chunks(U::DEPTH).map(|unit| match unit {
            [even, odd] => bytemuck::cast([bf16::from_f32(*even), bf16::from_f32(*odd)]),
            unit => bytemuck::cast(unit[0]),
        });
        (units.collect(), numbers)
    }

    fn check<S: Simd, U: Unit<S>>(simd: S, extents: Extents) {
        let Extents { rows, columns, steps } = extents;
        let ((along, a), (right, b)) = (units::<S, U>(rows * steps, 11), units::<S, U>(steps * columns, 13));
        let apart = rows + 5;
        let mut across = vec![bytemuck::cast(f32::NAN); steps * apart];
        for (at, unit) in along.iter().enumerate() {
            across[at % steps * apart + at / steps] = *unit;
        }
        for left in [
            Left { units: &along, row_stride: steps, step_stride: 1 },
            Left { units: &across, row_stride: 1, step_stride: apart },
        ] {
            let mut c = vec![1.0; rows * columns];
            let right = Right { units: &right, stride: columns };
            product::<S, U, false>(simd, extents, left, right, &mut c, columns);
            product::<S, U, true>(simd, extents, left, right, &mut c, columns);
            for (at, sum) in c.iter().enumerate() {
                let (row, column, depth) = (at / columns, at % columns, U::DEPTH);
                let terms = (0..steps * depth)
                    .map(|k| a[row * steps * depth + k] * b[(k / depth * columns + column) * depth + k % depth]);
                assert_eq!(*sum, 2.0 * terms.sum::<f32>(), "({row}, {column}) of {rows} x {columns} x {steps}");
            }
        }
    }

    /// Sums of whole numbers are exact: with tiles of the unit that are whole and not, on every path, and with either order of
    /// the left operand.
    #[test]
    fn products_are_sums_of_products() {
        for (rows, columns, steps) in
            [(6, 16, 1), (18, 80, 3), (54, 16, 17), (48, 48, 40), (102, 64, 48), (96, 32, 70), (66, 32, 150)]
        {
            for isa in Isa::available() {
                isa.run_bf16(Check(Extents { rows, columns, steps }));
            }
        }
    }
}

//! Products of many rows with a matrix of weights, plain or coded, `y = x wᵀ`, or with its transpose, `y = x w`: the forward and the
//! backward pass of a layer.
//!
//! A [`Part`] is some rows and at most [`PANEL`] columns of `y`. It packs what it needs of `w`, and of `x`, some terms
//! at a time into the layouts of [`super::product`]; where `w` is bf16, or coded and to be rounded, and the processor multiplies pairs of bf16, `x` is rounded
//! to bf16 there. Every element of `y` is one sum in one order, which depends neither on the other rows of a part nor on
//! who computes it.

use super::linear::Stripes;
use super::pack::{Packed, stacked, transposed, units_along};
use super::product::{Extents, Left, ROWS, Right, product};
use super::{Native, Simd, SimdBf16Op};
use crate::tensor::Rows;

/// Most columns of `y` in a part.
pub const PANEL: usize = 192;
/// Most rows of `x` in a part: whole register tiles, whose sums stay in the second-level cache beside what is packed.
pub const PART_ROWS: usize = 43 * ROWS;
/// Units of a sum for which operands are packed at a time: 64 columns of them fit into the first-level cache.
const STEPS: usize = 96;

/// Scratch elements of a [`Part`].
pub const SCRATCH: usize = PANEL * STEPS + PART_ROWS * (STEPS + PANEL);

/// Some rows and columns of `y`.
pub struct Part<'a> {
    /// Rows of `x`, at most [`PART_ROWS`].
    pub x: &'a [f32],
    /// Elements of each, and from one to the next.
    pub depth: usize,
    pub stride: usize,
    /// What these columns of `y` take of `w`: its rows, `[columns, depth]`, or with `transposed` its columns, `[depth, columns]`.
    pub w: Rows<'a>,
    /// Whether columns of `y` are columns of `w`.
    pub transposed: bool,
    /// Whether `x` and coded rows of `w` are rounded to bf16 where the processor multiplies pairs of it; with `w` in bf16 they are.
    pub rounds: bool,
    /// Added to every row of `y`.
    pub bias: Option<&'a [f32]>,
    /// Whether `y` is added to.
    pub add: bool,
    /// All of `y`.
    pub y: &'a Stripes<'a>,
    /// Its first row and column of this part. No other thread writes any of the part meanwhile.
    pub first: [usize; 2],
    /// [`SCRATCH`] elements.
    pub scratch: &'a mut [f32],
}

impl SimdBf16Op for Part<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        match self.w {
            Rows::Bf16(_) => self.over::<S, S::Bf16>(simd),
            Rows::Coded(_) if self.rounds => self.over::<S, S::Bf16>(simd),
            _ => self.over::<S, f32>(simd),
        }
    }
}

impl Part<'_> {
    #[inline(always)]
    fn over<S: Simd, U: Packed<S>>(self, simd: S) {
        let Part { x, depth, stride, w, transposed: is_transposed, .. } = self;
        let rows = x.len().div_ceil(stride);
        let (columns, terms) = if is_transposed { (w.width(), w.count()) } else { (w.count(), w.width()) };
        assert!(columns <= PANEL && rows <= PART_ROWS, "a part of {rows} rows and {columns} columns");
        assert!(terms == depth && x.len() >= (rows - 1) * stride + depth, "inner extents of a product differ");
        let padded = rows.next_multiple_of(ROWS);
        let (packed, scratch) = self.scratch.split_at_mut(PANEL * STEPS);
        let (units, sums) = scratch.split_at_mut(PART_ROWS * STEPS);
        let (packed, units): (&mut [U], &mut [U]) = (bytemuck::cast_slice_mut(packed), bytemuck::cast_slice_mut(units));
        let whole = columns.next_multiple_of(16);
        for start in (0..depth).step_by(STEPS * U::DEPTH) {
            let width = (STEPS * U::DEPTH).min(depth - start);
            if is_transposed {
                stacked::<S, U>(simd, |row| w.skip(start + row), width, packed, PANEL);
            } else {
                let w = w.columns(start..start + width);
                transposed::<S, U>(simd, |row| w.skip(row), columns, width, whole, packed, PANEL);
            }
            for (from, to) in x.chunks(stride).zip(units.chunks_exact_mut(STEPS)) {
                units_along::<S, U>(simd, &from[start..start + width], to);
            }
            let extents = Extents { rows: padded, columns: whole, steps: width.div_ceil(U::DEPTH) };
            let left = Left { units: &*units, row_stride: STEPS, step_stride: 1 };
            let right = Right { units: &*packed, stride: PANEL };
            match start {
                0 => product::<S, U, false>(simd, extents, left, right, sums, PANEL),
                _ => product::<S, U, true>(simd, extents, left, right, sums, PANEL),
            }
        }
        let [row, column] = self.first;
        for (index, sums) in sums.chunks_exact(PANEL).take(rows).enumerate() {
            // SAFETY: this part of `y` is this task's alone, by the promise of `Part::first`.
            let to = unsafe { self.y.row(row + index, column..column + columns) };
            match self.add {
                true => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum),
                false => to.copy_from_slice(&sums[..columns]),
            }
            if let Some(bias) = self.bias {
                to.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;
    use crate::tensor::Strided;
    use half::bf16;

    /// Both products of small whole numbers, whose sums are exact in either type, on all instruction paths.
    #[test]
    fn products_equal_sums_of_products() {
        let number = |index: usize, modulus: usize| (index * 7 % modulus) as f32 - 2.0;
        for (rows, depth, columns) in [(1, 1, 1), (7, 40, 24), (6, 300, 128), (258, 33, 17), (13, 513, 100)] {
            // Rows that lie apart, but for what the last one does not need.
            let stride = depth + 3;
            let x: Vec<f32> = (0..rows * stride - 3).map(|index| number(index, 5)).collect();
            let wide: Vec<f32> = (0..columns * depth).map(|index| number(index, 11)).collect();
            let narrow: Vec<bf16> = wide.iter().map(|w| bf16::from_f32(*w)).collect();
            for is_transposed in [false, true] {
                let [count, width] = if is_transposed { [depth, columns] } else { [columns, depth] };
                let element = |column: usize, term: usize| match is_transposed {
                    true => wide[term * width + column],
                    false => wide[column * width + term],
                };
                let bias: Vec<f32> = (0..columns).map(|column| number(column, 3)).collect();
                for isa in Isa::available() {
                    for is_narrow in [false, true] {
                        let mut y = vec![1.0; (rows + 1) * (columns + 2)];
                        let w = match is_narrow {
                            true => Rows::Bf16(Strided::new(&narrow, [width, 1], count, width)),
                            false => Rows::F32(Strided::new(&wide, [width, 1], count, width)),
                        };
                        let stripes = Stripes::new(&mut y, columns + 2, rows + 1, columns + 2);
                        for add in [false, true] {
                            // What is read beside the operands must not matter.
                            let mut scratch = vec![f32::NAN; SCRATCH];
                            isa.run_bf16(Part {
                                x: &x,
                                depth,
                                stride,
                                w,
                                transposed: is_transposed,
                                rounds: false,
                                bias: Some(&bias),
                                add,
                                y: &stripes,
                                first: [1, 2],
                                scratch: &mut scratch,
                            });
                        }
                        for row in 0..rows {
                            for column in 0..columns {
                                let sum: f32 =
                                    (0..depth).map(|term| x[row * stride + term] * element(column, term)).sum();
                                let found = y[(row + 1) * (columns + 2) + column + 2];
                                assert_eq!(found, 2.0 * (sum + bias[column]), "{rows} {depth} {columns} {isa:?}");
                            }
                        }
                        assert_eq!((y[0], y[columns + 2], y[columns + 3]), (1.0, 1.0, 1.0));
                    }
                }
            }
        }
    }
}

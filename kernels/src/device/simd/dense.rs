//! Products of many rows with a matrix of weights, plain or coded, `y = x wᵀ`, or with its transpose, `y = x w`: the forward and the
//! backward pass of a layer.
//!
//! A [`Part`] is some rows and at most [`PANEL`] columns of `y`. It packs what it needs of `w`, `SPAN` units of the inner extent at
//! a time, into the layout of [`super::product`], and takes all its rows of `x` with that, `BLOCK` of them together; where `w` is bf16, or
//! coded and to be rounded, and the processor multiplies pairs of bf16, `x` is rounded to bf16 there. Every element of `y` is one sum in one
//! order, which depends neither on the other rows of a part nor on who computes it.

use super::linear::Stripes;
use super::pack::{Packed, odd_lines, stacked, transposed, units_along};
use super::product::{Extents, Left, ROWS, Right, product};
use super::{Native, Simd, SimdBf16Op};
use crate::tensor::Rows;

/// Most columns of `y` in a part.
pub const PANEL: usize = 192;
/// Rows of `x` that are multiplied at a time: whole register tiles, and whole tiles of a matrix unit, three by three.
const BLOCK: usize = 16 * ROWS;
/// Units of a sum for which `w` is packed at a time; the sums of longer ones are added up in `y`.
const SPAN: usize = 768;
/// Units that are multiplied at a time, but for a matrix unit: 64 columns of them fit into the first-level cache.
const STEPS: usize = 96;
/// The distance of packed steps.
const STEP_STRIDE: usize = odd_lines(PANEL);
/// The distance of rows of units.
const ROW_STRIDE: usize = odd_lines(SPAN);

/// Scratch elements of a [`Part`].
pub const SCRATCH: usize = SPAN * STEP_STRIDE + BLOCK * (ROW_STRIDE + PANEL);

/// Some rows and columns of `y`.
pub struct Part<'a> {
    /// Rows of `x`.
    pub x: &'a [f32],
    /// Elements of each.
    pub depth: usize,
    /// Elements from one to the next.
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
        assert!(columns <= PANEL, "a part of {columns} columns");
        assert!(terms == depth && x.len() >= (rows - 1) * stride + depth, "inner extents of a product differ");
        let (packed, scratch) = self.scratch.split_at_mut(SPAN * STEP_STRIDE);
        let (units, sums) = scratch.split_at_mut(BLOCK * ROW_STRIDE);
        let (packed, units): (&mut [U], &mut [U]) = (bytemuck::cast_slice_mut(packed), bytemuck::cast_slice_mut(units));
        let whole = columns.next_multiple_of(16);
        // Tiles are summed in the same order, whatever is taken at a time, and hold their sums all along.
        let at_once = if U::has_tiles(simd) { SPAN } else { STEPS };
        let [row, column] = self.first;
        for start in (0..depth).step_by(SPAN * U::DEPTH) {
            let span = start..depth.min(start + SPAN * U::DEPTH);
            let steps = span.len().div_ceil(U::DEPTH);
            let pieces = (0..steps).step_by(STEPS).map(|step| step..steps.min(step + STEPS));
            for piece in pieces {
                let terms = start + piece.start * U::DEPTH..span.end.min(start + piece.end * U::DEPTH);
                let to = &mut packed[piece.start * STEP_STRIDE..piece.end * STEP_STRIDE];
                if is_transposed {
                    stacked::<S, U>(simd, |row| w.skip(terms.start + row), terms.len(), to, STEP_STRIDE);
                } else {
                    let w = w.columns(terms.clone());
                    transposed::<S, U>(simd, |row| w.skip(row), columns, terms.len(), whole, to, STEP_STRIDE);
                }
            }
            for block in (0..rows).step_by(BLOCK) {
                let count = BLOCK.min(rows - block);
                let from = x[block * stride..].chunks(stride);
                for (from, to) in from.zip(units.chunks_exact_mut(ROW_STRIDE)).take(count) {
                    units_along::<S, U>(simd, &from[span.clone()], to);
                }
                for step in (0..steps).step_by(at_once) {
                    let rows = count.next_multiple_of(ROWS);
                    let extents = Extents { rows, columns: whole, steps: at_once.min(steps - step) };
                    let left = Left { units: &units[step..], row_stride: ROW_STRIDE, step_stride: 1 };
                    let right = Right { units: &packed[step * STEP_STRIDE..], stride: STEP_STRIDE };
                    match step {
                        0 => product::<S, U, false>(simd, extents, left, right, sums, PANEL),
                        _ => product::<S, U, true>(simd, extents, left, right, sums, PANEL),
                    }
                }
                for (index, sums) in sums.chunks_exact(PANEL).take(count).enumerate() {
                    // SAFETY: this part of `y` is this task's alone, by the promise of `Part::first`.
                    let to = unsafe { self.y.row(row + block + index, column..column + columns) };
                    match self.add || start > 0 {
                        true => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum),
                        false => to.copy_from_slice(&sums[..columns]),
                    }
                    if let (0, Some(bias)) = (start, self.bias) {
                        to.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias);
                    }
                }
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
        for (rows, depth, columns) in [
            (1, 1, 1),
            (7, 40, 24),
            (6, 300, 128),
            (258, 33, 17),
            (13, 2 * SPAN + 33, 100),
            (BLOCK + 17, 2 * SPAN + 33, 17),
        ] {
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

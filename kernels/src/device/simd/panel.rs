//! Products of many rows of `x` with rows of `w`, which are packed and then shared by all of `x`.
//!
//! A task takes at most [`PANEL`] rows of `w` and lays them out as [`super::product`] reads them, up to `SPAN` elements of each. It
//! then takes all of `x`, `BLOCK` rows at a time: few enough that their sums stay near while the inner extent is walked,
//! `DEPTH` elements at a time, and are finished or go to `y` once. Each element of `y` is one sum in one order, whoever computes it.
//!
//! Where the processor multiplies pairs of bf16 and `w` is bf16, or coded, `x` may be rounded to bf16 too ([`Rounded`]), once for
//! all panels: twice the speed or more, and what GPUs and other libraries do with such weights.

use super::linear::{Columns, Stripes};
use super::pack::{Packed, odd_lines, transposed, units_along};
use super::product::{Extents, Left, ROWS, Right, product};
use super::{Isa, Native, Simd, SimdBf16Op, Unit};
use crate::tensor::{DType, Rows};
use std::ops::Range;

/// Most rows of `w` that are packed together.
pub const PANEL: usize = 128;
/// The distance of packed steps.
const STEP_STRIDE: usize = odd_lines(PANEL);
/// Elements of these rows that are packed before they are multiplied.
const SPAN: usize = 2048;
/// Elements that are packed, and but for a matrix unit multiplied, at a time.
const DEPTH: usize = 256;
/// Rows of `x` that are multiplied at a time: whole register tiles, and whole tiles of a matrix unit.
const BLOCK: usize = 8 * ROWS;

/// Rows of `x` that must be readable for so many to be multiplied.
pub fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(ROWS)
}

/// Scratch elements of a [`Panel`] with rows of so many elements.
pub fn panel_scratch(width: usize) -> usize {
    STEP_STRIDE * SPAN.min(width.next_multiple_of(16)) + PANEL * (DEPTH + BLOCK)
}

/// Scratch elements of so many rows, rounded.
pub fn rounded_scratch(rows: usize, width: usize) -> usize {
    padded_rows(rows) * rounded_stride(width)
}

/// Words from one rounded row to the next.
pub fn rounded_stride(width: usize) -> usize {
    odd_lines(width.next_multiple_of(32) / 2)
}

/// Whether a path multiplies pairs of bf16, so that there is something to round `x` for.
pub fn rounds(isa: Isa) -> bool {
    struct Pairs;

    impl SimdBf16Op for Pairs {
        type Output = bool;

        #[inline(always)]
        fn run<S: Native>(self, _: S) -> bool {
            <S::Bf16 as Unit<S>>::DEPTH == 2
        }
    }
    isa.run_bf16(Pairs)
}

/// Some rows of `x`, rounded to units of two.
pub struct Rounded<'a> {
    /// Rows, each followed by zeros up to whole vectors.
    pub x: &'a [f32],
    /// Their distance, a multiple of 16.
    pub stride: usize,
    /// As many rows of [`rounded_scratch`].
    pub to: &'a mut [f32],
}

impl SimdBf16Op for Rounded<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        let Rounded { x, stride, to } = self;
        for (row, to) in x.chunks_exact(stride).zip(to.chunks_exact_mut(rounded_stride(stride))) {
            units_along::<S, S::Bf16>(simd, row, bytemuck::cast_slice_mut(to));
        }
    }
}

/// Whether sums over so many elements are whole when they are first written, so that they can be [`Finish`]ed.
pub fn is_one_span(width: usize) -> bool {
    width <= SPAN
}

/// Widens columns of the coded rows of a panel's first matrix (0) or second (1) to elements of a type, as a
/// [`Widen`](super::widen::Widen) does.
pub type WidenColumns<'a> = dyn Fn(usize, Range<usize>, DType, &mut [u8]) + 'a;
/// What becomes of some columns of a row of `y` by their sums, those of a second matrix behind those of the first.
pub type Finish<'a> = dyn Fn(&mut [f32], &mut [f32]) + 'a;

/// At most [`PANEL`] columns of `y`, packed, or half as many beside those of a second matrix that they are finished with. `x` holds
/// [`padded_rows`] rows.
pub struct Panel<'a> {
    /// What is multiplied.
    pub columns: Columns<'a>,
    /// The second matrix: other rows of `w` for the same `x`.
    pub beside: Option<Columns<'a>>,
    /// Rows of `x` as [`Rounded`] leaves them, where they are.
    pub rounded: Option<&'a [f32]>,
    /// Widens some columns of `w` where it is coded, to elements of a type, one behind another.
    pub widen: &'a WidenColumns<'a>,
    /// [`panel_scratch`] elements.
    pub scratch: &'a mut [f32],
    /// All of `y`.
    pub y: &'a Stripes<'a>,
    /// Takes the sums while they are near, in place of their being written; of rows of [`is_one_span`].
    pub finish: Option<&'a Finish<'a>>,
}

impl SimdBf16Op for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        match self.rounded {
            Some(rounded) => {
                let stride = rounded_stride(self.columns.stride);
                self.over::<S, S::Bf16>(simd, bytemuck::cast_slice(rounded), stride);
            }
            None => {
                let (x, stride) = (self.columns.x, self.columns.stride);
                self.over::<S, f32>(simd, x, stride);
            }
        }
    }
}

impl Panel<'_> {
    #[inline(always)]
    fn over<S: Simd, U: Packed<S>>(self, simd: S, x: &[U], stride: usize) {
        let Panel { columns: part, beside, widen, scratch, y, finish, .. } = self;
        let width = part.w.width();
        assert!(
            finish.is_none() || is_one_span(width),
            "sums of {width} elements are not whole when they are finished"
        );
        assert!(beside.is_none() || finish.is_some(), "what becomes of sums of two matrices");
        // Without a second matrix, none of the rows of the first again.
        let (beside, beside_bias) = beside.map_or((part.w.first(0), None), |beside| (beside.w, beside.bias));
        assert_eq!(beside.width(), width, "inner extents of two matrices");
        let counts = [part.w.count(), beside.count()];
        let count = counts[0] + counts[1];
        assert!(count <= PANEL, "{count} rows of w");
        part.check(padded_rows(part.rows));
        let (widened, scratch) = scratch.split_at_mut(PANEL * DEPTH);
        let (sums, packed) = scratch.split_at_mut(PANEL * BLOCK);
        let packed: &mut [U] = bytemuck::cast_slice_mut(packed);
        let dtype = if U::DEPTH == 1 { DType::F32 } else { DType::Bf16 };
        let columns = count.next_multiple_of(16);
        for first in (0..width).step_by(SPAN) {
            let end = width.min(first + SPAN);
            let depths = |of: usize| (first..end).step_by(of).map(move |start| start..end.min(start + of));
            let packed_at = |depth: &Range<usize>| (depth.start - first) / U::DEPTH * STEP_STRIDE;
            for depth in depths(DEPTH) {
                let (widened, widened_beside) =
                    bytemuck::cast_slice_mut(widened).split_at_mut(counts[0] * depth.len() * dtype.bytes());
                let [w, beside] =
                    [(0, part.w, widened), (1, beside, widened_beside)].map(|(side, rows, widened)| match rows {
                        Rows::Coded(_) if rows.count() > 0 => {
                            let widened = &mut widened[..rows.count() * depth.len() * dtype.bytes()];
                            widen(side, depth.clone(), dtype, widened);
                            Rows::contiguous(dtype, widened, [rows.count(), depth.len()])
                        }
                        rows => rows.columns(depth.clone()),
                    });
                let row = |row: usize| match row.checked_sub(counts[0]) {
                    None => w.skip(row),
                    Some(row) => beside.skip(row),
                };
                let to = &mut packed[packed_at(&depth)..];
                transposed::<S, U>(simd, row, count, depth.len(), columns, to, STEP_STRIDE);
            }
            for block in (0..part.rows).step_by(BLOCK) {
                let rows = BLOCK.min(part.rows - block);
                // Tiles are summed in the same order, whatever is taken at a time, and hold their sums all along.
                for depth in depths(if U::has_tiles(simd) { SPAN } else { DEPTH }) {
                    let extents = Extents { rows: padded_rows(rows), columns, steps: depth.len().div_ceil(U::DEPTH) };
                    let units = &x[block * stride + depth.start / U::DEPTH..];
                    let x = Left { units, row_stride: stride, step_stride: 1 };
                    let w = Right { units: &packed[packed_at(&depth)..], stride: STEP_STRIDE };
                    match depth.start == first {
                        true => product::<S, U, false>(simd, extents, x, w, sums, PANEL),
                        false => product::<S, U, true>(simd, extents, x, w, sums, PANEL),
                    }
                }
                for (row, sums) in sums.chunks_exact_mut(PANEL).take(rows).enumerate() {
                    // SAFETY: these columns are this task's alone, by the promise of `Columns::first`.
                    let to = unsafe { y.row(block + row, part.first..part.first + counts[0]) };
                    let sums = &mut sums[..count];
                    let (own, others) = sums.split_at_mut(counts[0]);
                    for (sums, bias) in [(own, part.bias), (others, beside_bias)] {
                        if let (0, Some(bias)) = (first, bias) {
                            sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
                        }
                    }
                    match (first, finish) {
                        (_, Some(finish)) => finish(to, sums),
                        (0, None) => to.copy_from_slice(sums),
                        _ => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += *sum),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small whole numbers, whose sums are exact in every order and in bf16.
    fn number(index: usize, modulus: usize) -> f32 {
        (index * 7 % modulus) as f32 - 3.0
    }

    /// Products of `rows` rows of `x` with `count` rows of `w`, of `width` elements, beside their definition. Where they are finished,
    /// the last `others` of these rows are a second matrix.
    fn check(isa: Isa, dtype: DType, [rows, width, count]: [usize; 3], biased: bool, finished: Option<usize>) {
        let stride = width.next_multiple_of(16);
        let (mut x, mut w) = (vec![0.0; padded_rows(rows) * stride], vec![0; count * width * dtype.bytes()]);
        for (row, x) in x.chunks_exact_mut(stride).enumerate() {
            x[..width].iter_mut().enumerate().for_each(|(column, x)| *x = number(row * width + column, 11));
        }
        let numbers: Vec<f32> = (0..count * width).map(|index| number(index, 13)).collect();
        dtype.encode(&numbers, &mut w);
        let mut rounded = vec![f32::NAN; rounded_scratch(rows, width)];
        let is_rounded = rounds(isa) && dtype == DType::Bf16;
        if is_rounded {
            isa.run_bf16(Rounded { x: &x, stride, to: &mut rounded });
        }
        let bias: Vec<f32> = (0..count).map(|index| index as f32).collect();
        let (first, y_stride, own) = (3, count + 5, count - finished.unwrap_or(0));
        let columns = |of: Range<usize>| Columns {
            x: &x,
            stride,
            rows,
            w: Rows::contiguous(dtype, &w, [count, width]).skip(of.start).first(of.len()),
            bias: biased.then_some(&bias[of]),
            first,
        };
        let mut y = vec![f32::NAN; rows * y_stride];
        isa.run_bf16(Panel {
            columns: columns(0..own),
            beside: (own < count).then(|| columns(own..count)),
            rounded: is_rounded.then_some(&rounded),
            widen: &|_, _, _, _| unreachable!("plain elements"),
            scratch: &mut vec![f32::NAN; panel_scratch(width)],
            y: &Stripes::new(&mut y, y_stride, rows, y_stride),
            finish: finished.is_some().then_some(&|to, sums| {
                let (own, others) = sums.split_at(to.len());
                for (column, (to, sum)) in to.iter_mut().zip(own).enumerate() {
                    *to = 2.0 * sum + others.get(column).unwrap_or(&0.0);
                }
            }),
        });
        for (index, got) in y.iter().enumerate() {
            let (row, column) = (index / y_stride, index % y_stride);
            let Some(column) = column.checked_sub(first).filter(|column| *column < own) else {
                assert!(got.is_nan(), "{}: ({row}, {column}) is not this panel's", isa.name());
                continue;
            };
            let sum = |column: usize| {
                let terms = x[row * stride..][..width].iter().zip(&numbers[column * width..]).map(|(x, w)| x * w);
                terms.sum::<f32>() + if biased { bias[column] } else { 0.0 }
            };
            let other = (own + column < count).then(|| sum(own + column));
            let expected = finished.map_or(1.0, |_| 2.0) * sum(column) + other.unwrap_or(0.0);
            assert_eq!(*got, expected, "{} {dtype:?}: ({row}, {column}) of {rows}, {width}, {count}", isa.name());
        }
    }

    #[test]
    fn products_are_what_they_say_on_every_path() {
        for shape in [[9, 1, 1], [9, 16, 5], [50, 300, 128], [97, 47, 33], [48, 2 * SPAN, 32], [13, SPAN + 271, 70]] {
            for isa in Isa::available() {
                for (dtype, biased) in [(DType::F32, false), (DType::Bf16, true), (DType::F16, true)] {
                    check(isa, dtype, shape, biased, None);
                    if is_one_span(shape[1]) {
                        [0, shape[2] / 2].into_iter().for_each(|others| check(isa, dtype, shape, biased, Some(others)));
                    }
                }
            }
        }
    }
}

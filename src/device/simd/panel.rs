//! Products of many rows of `x` with rows of `w`, which are packed and then shared by all of `x`.
//!
//! A task takes at most [`PANEL`] rows of `w` and lays them out as [`super::product`] reads them, up to [`SPAN`] elements of each. It
//! then takes all of `x`, [`BLOCK`] rows at a time: few enough that their sums stay near while the inner extent is walked,
//! [`DEPTH`] elements at a time, and go to `y` once. Each element of `y` is one sum in one order, whoever computes it.
//!
//! Where the processor multiplies pairs of bf16 and `w` is bf16, or coded, `x` may be rounded to bf16 too ([`Rounded`]), once for
//! all panels: twice the speed or more, and what GPUs and other libraries do with such weights.

use super::linear::{Columns, Stripes};
use super::pack::{Packed, transposed, units_along};
use super::product::{Extents, Left, ROWS, Right, product};
use super::reader::RowReader;
use super::{Isa, Native, Simd, SimdBf16Op, SimdOp, Unit, narrow};
use crate::tensor::{DType, Rows};
use std::ops::Range;

/// Most rows of `w` that are packed together.
pub const PANEL: usize = 128;
/// Elements of these rows that are packed before they are multiplied.
const SPAN: usize = 2048;
/// Elements that are multiplied at a time.
const DEPTH: usize = 256;
/// Rows of `x` that are multiplied at a time: whole register tiles, and whole tiles of a matrix unit.
const BLOCK: usize = 8 * ROWS;

/// Rows of `x` that must be readable for so many to be multiplied.
pub fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(ROWS)
}

/// Scratch elements of a [`Panel`] with rows of so many elements.
pub fn panel_scratch(width: usize) -> usize {
    PANEL * (SPAN.min(width.next_multiple_of(16)) + DEPTH + BLOCK)
}

/// Scratch elements of so many rows, rounded.
pub fn rounded_scratch(rows: usize, width: usize) -> usize {
    padded_rows(rows) * rounded_stride(width)
}

/// Units from one rounded row to the next: no power of two, so that neighbours fall into different sets of a cache.
fn rounded_stride(width: usize) -> usize {
    width.next_multiple_of(32) / 2 + 16
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

/// Widens columns of coded rows to elements of a type, as a [`Widen`] does.
pub type WidenColumns<'a> = dyn Fn(Range<usize>, DType, &mut [u8]) + 'a;
/// What becomes of some columns of a row of `y` by their sums.
pub type Finish<'a> = dyn Fn(&mut [f32], &[f32]) + 'a;

/// At most [`PANEL`] columns of `y`, packed. `x` holds [`padded_rows`] rows.
pub struct Panel<'a> {
    /// What is multiplied.
    pub columns: Columns<'a>,
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
        let Panel { columns: part, widen, scratch, y, finish, .. } = self;
        let (count, width) = (part.w.count(), part.w.width());
        assert!(
            finish.is_none() || is_one_span(width),
            "sums of {width} elements are not whole when they are finished"
        );
        assert!(count <= PANEL, "{count} rows of w");
        part.check(padded_rows(part.rows));
        let (widened, scratch) = scratch.split_at_mut(PANEL * DEPTH);
        let (sums, packed) = scratch.split_at_mut(PANEL * BLOCK);
        let packed: &mut [U] = bytemuck::cast_slice_mut(packed);
        let dtype = if U::DEPTH == 1 { DType::F32 } else { DType::Bf16 };
        let columns = count.next_multiple_of(16);
        for first in (0..width).step_by(SPAN) {
            let end = width.min(first + SPAN);
            let depths = (first..end).step_by(DEPTH).map(|start| start..end.min(start + DEPTH));
            let packed_at = |depth: &Range<usize>| (depth.start - first) / U::DEPTH * PANEL;
            for depth in depths.clone() {
                let w = match part.w {
                    Rows::Coded(_) => {
                        let widened = &mut bytemuck::cast_slice_mut(widened)[..count * depth.len() * dtype.bytes()];
                        widen(depth.clone(), dtype, widened);
                        Rows::contiguous(dtype, widened, [count, depth.len()])
                    }
                    plain => plain.columns(depth.clone()),
                };
                let to = &mut packed[packed_at(&depth)..];
                transposed::<S, U>(simd, |row| w.skip(row), count, depth.len(), columns, to, PANEL);
            }
            for block in (0..part.rows).step_by(BLOCK) {
                let rows = BLOCK.min(part.rows - block);
                for depth in depths.clone() {
                    let extents = Extents { rows: padded_rows(rows), columns, steps: depth.len().div_ceil(U::DEPTH) };
                    let units = &x[block * stride + depth.start / U::DEPTH..];
                    let x = Left { units, row_stride: stride, step_stride: 1 };
                    let w = Right { units: &packed[packed_at(&depth)..], stride: PANEL };
                    match depth.start == first {
                        true => product::<S, U, false>(simd, extents, x, w, sums, PANEL),
                        false => product::<S, U, true>(simd, extents, x, w, sums, PANEL),
                    }
                }
                for (row, sums) in sums.chunks_exact_mut(PANEL).take(rows).enumerate() {
                    // SAFETY: these columns are this task's alone, by the promise of `Columns::first`.
                    let to = unsafe { y.row(block + row, part.first..part.first + count) };
                    let sums = &mut sums[..count];
                    if let (0, Some(bias)) = (first, part.bias) {
                        sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
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

/// Some columns of coded rows, widened.
pub struct Widen<'a, R> {
    /// The rows, whole.
    pub rows: Rows<'a>,
    /// What reads them.
    pub reader: R,
    /// The columns; the first is a multiple of 256.
    pub columns: Range<usize>,
    /// What becomes of elements.
    pub dtype: DType,
    /// Room for all of them.
    pub to: &'a mut [u8],
}

impl<R: RowReader> SimdOp for Widen<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        /// Vectors that are read together.
        const MANY: usize = 8;
        let Widen { rows, reader, columns, dtype, to } = self;
        let (span, stride_bytes) = rows.span().expect("rows of a matrix lie along it");
        assert!(columns.end <= rows.width() && rows.count() * columns.len() * dtype.bytes() == to.len());
        let mut lanes = [0.0; MANY * 16];
        for (row, to) in to.chunks_exact_mut(columns.len() * dtype.bytes()).enumerate() {
            let row = span[row * stride_bytes..][..reader.row_bytes(rows.width())].as_ptr();
            // SAFETY: the row holds the bytes of its width.
            let scale = simd.splat(if R::SCALED { unsafe { reader.scale(row) } } else { 1.0 });
            for (part, to) in to.chunks_mut(MANY * S::LANES * dtype.bytes()).enumerate() {
                let (column, count) = (columns.start + part * MANY * S::LANES, to.len() / dtype.bytes());
                let mut put = |index: usize, vector: S::Vector| {
                    let vector = if R::SCALED { simd.mul(scale, vector) } else { vector };
                    simd.write(&mut lanes[index * S::LANES..], vector);
                };
                // SAFETY: the row has these columns by the assertion above, and the last vector those that are left.
                unsafe {
                    if count == MANY * S::LANES {
                        let vectors = reader.load_many::<S, MANY>(simd, row, column);
                        vectors.into_iter().enumerate().for_each(|(index, vector)| put(index, vector));
                    } else {
                        for index in 0..count.div_ceil(S::LANES) {
                            let (at, left) = (column + index * S::LANES, S::LANES.min(count - index * S::LANES));
                            put(index, reader.load_part(simd, row, at, left));
                        }
                    }
                }
                narrow(simd, dtype, &lanes[..count], to);
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

    /// Products of `rows` rows of `x` with `count` rows of `w`, of `width` elements, beside their definition.
    fn check(isa: Isa, dtype: DType, [rows, width, count]: [usize; 3], biased: bool, finished: bool) {
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
        let (first, y_stride) = (3, count + 5);
        let mut y = vec![f32::NAN; rows * y_stride];
        isa.run_bf16(Panel {
            columns: Columns {
                x: &x,
                stride,
                rows,
                w: Rows::contiguous(dtype, &w, [count, width]),
                bias: biased.then_some(&bias),
                first,
            },
            rounded: is_rounded.then_some(&rounded),
            widen: &|_, _, _| unreachable!("plain elements"),
            scratch: &mut vec![f32::NAN; panel_scratch(width)],
            y: &Stripes::new(&mut y, y_stride, rows, y_stride),
            finish: finished.then_some(&|to, sums| to.iter_mut().zip(sums).for_each(|(to, sum)| *to = 2.0 * sum)),
        });
        for (index, got) in y.iter().enumerate() {
            let (row, column) = (index / y_stride, index % y_stride);
            let Some(column) = column.checked_sub(first).filter(|column| *column < count) else {
                assert!(got.is_nan(), "{}: ({row}, {column}) is not this panel's", isa.name());
                continue;
            };
            let terms = x[row * stride..][..width].iter().zip(&numbers[column * width..]).map(|(x, w)| x * w);
            let sum = terms.sum::<f32>() + if biased { bias[column] } else { 0.0 };
            let expected = if finished { 2.0 * sum } else { sum };
            assert_eq!(*got, expected, "{} {dtype:?}: ({row}, {column}) of {rows}, {width}, {count}", isa.name());
        }
    }

    #[test]
    fn products_are_what_they_say_on_every_path() {
        for shape in [[9, 1, 1], [9, 16, 5], [50, 300, 128], [97, 47, 33], [48, 2 * SPAN, 32], [13, SPAN + 271, 70]] {
            for isa in Isa::available() {
                for (dtype, biased) in [(DType::F32, false), (DType::Bf16, true), (DType::F16, true)] {
                    check(isa, dtype, shape, biased, false);
                    if is_one_span(shape[1]) {
                        check(isa, dtype, shape, biased, true);
                    }
                }
            }
        }
    }
}

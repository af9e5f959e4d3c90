//! Rows of any element type into the layouts that [`super::product`] reads, zeros where there is nothing.
//!
//! The left operand lies along its rows ([`Packed::along`]). The right operand is packed by steps of the inner extent:
//! a transpose where rows are keys and the inner extent is the head dim ([`transposed`]), and row by row where they are
//! values and the inner extent is the keys ([`stacked`]).

use super::{Element, Simd, Unit};
use crate::tensor::{Rows, Strided};
use half::bf16;

/// Largest [`Simd::LANES`], and the widest row in elements.
const MAX_LANES: usize = 16;
const MAX_WIDTH: usize = 256;

/// Elements of a cache line.
const LINE: usize = 16;

/// The distance of rows of so many words: an odd number of cache lines, lest rows of an operand meet in few sets of the
/// first-level cache.
pub const fn odd_lines(words: usize) -> usize {
    (words.div_ceil(LINE) | 1) * LINE
}

/// Words of parts of scratch, each in whole cache lines, lest vectors and tiles lie across two.
pub fn whole_lines<const N: usize>(parts: [usize; N]) -> [usize; N] {
    parts.map(|words| words.next_multiple_of(LINE))
}

/// A unit that rows can be packed into. The rows handed over are single ones.
pub trait Packed<S: Simd>: Unit<S> {
    /// The row's elements as units along it; the rest of `to` becomes zero.
    fn along(simd: S, row: Rows<'_>, to: &mut [Self]);

    /// Units that hold an element of each row; the rest of `to`, and the place of a row that is not there, become
    /// zero. A unit of one element takes no `odd` row.
    fn across(simd: S, even: Rows<'_>, odd: Option<Rows<'_>>, to: &mut [Self]);

    /// All rows as [`stacked`] would pack them, if they lie in memory so.
    fn stacked_in_place<'a>(rows: &Rows<'a>) -> Option<&'a [Self]>;

    /// Turns the sign of every element.
    fn negate(units: &mut [Self]);

    /// Units from the first row on, and the distance of rows in them, if whole units already lie in memory as
    /// [`Packed::along`] would write them.
    fn in_place<'a>(rows: &Rows<'a>) -> Option<(&'a [Self], usize)>;
}

/// A row of f32 as units along it, rounded where they are narrower. Of a last double vector that is not whole the rest becomes zero.
///
/// # Panics
/// When `to` has no room for whole double vectors.
#[inline(always)]
pub fn units_along<S: Simd, U: Unit<S>>(simd: S, row: &[f32], to: &mut [U]) {
    let (elements, units) = (2 * S::LANES, 2 * S::LANES / U::DEPTH);
    assert!(to.len() >= row.len().div_ceil(elements) * units, "room for whole vectors");
    // Counted, for the sake of its speed: of zipped chunks a call is left in every turn.
    for index in 0..row.len().div_ceil(elements) {
        // SAFETY: each load reads no more than there is.
        let (low, high) = unsafe {
            let at = row.as_ptr().add(index * elements);
            match row.len() - index * elements {
                all if all >= elements => (simd.load(at), simd.load(at.add(S::LANES))),
                part if part > S::LANES => (simd.load(at), simd.load_part(at.add(S::LANES), part - S::LANES)),
                part => (simd.load_part(at, part), simd.splat(0.0)),
            }
        };
        U::put(simd, &mut to[index * units..][..units], low, high);
    }
}

/// Widens a row into the start of `to`.
#[inline(always)]
fn widen<S: Simd, T: Element>(simd: S, row: &Strided<'_, T>, to: &mut [f32]) {
    let to = &mut to[..row.width()];
    match row.row(0) {
        Some(from) => {
            let (whole, tail) = to.split_at_mut(to.len() - to.len() % S::LANES);
            for (to, from) in whole.chunks_exact_mut(S::LANES).zip(from.chunks_exact(S::LANES)) {
                // SAFETY: `from` holds `LANES` elements.
                simd.write(to, unsafe { T::load(simd, from.as_ptr()) });
            }
            tail.iter_mut().zip(&from[whole.len()..]).for_each(|(to, from)| *to = from.widen());
        }
        None => to.iter_mut().enumerate().for_each(|(column, to)| *to = row.element(0, column).widen()),
    }
}

impl<S: Simd> Packed<S> for f32 {
    #[inline(always)]
    fn along(simd: S, row: Rows<'_>, to: &mut [f32]) {
        match &row {
            Rows::F32(row) => widen(simd, row, to),
            Rows::Bf16(row) => widen(simd, row, to),
            Rows::F16(row) => widen(simd, row, to),
            Rows::Coded(_) => row.widen(to),
        }
        to[row.width()..].fill(0.0);
    }

    #[inline(always)]
    fn across(simd: S, even: Rows<'_>, _odd: Option<Rows<'_>>, to: &mut [f32]) {
        Self::along(simd, even, to);
    }

    #[inline(always)]
    fn stacked_in_place<'a>(rows: &Rows<'a>) -> Option<&'a [f32]> {
        rows.as_f32()
    }

    #[inline(always)]
    fn negate(units: &mut [f32]) {
        units.iter_mut().for_each(|x| *x = -*x);
    }

    #[inline(always)]
    fn in_place<'a>(rows: &Rows<'a>) -> Option<(&'a [f32], usize)> {
        match rows {
            Rows::F32(rows) => rows.lines(),
            _ => None,
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod pairs {
    use super::super::avx512::{Avx512, Bf16Pair};
    use super::*;

    /// An element as bf16, whatever type it is kept in.
    #[inline(always)]
    fn narrow(row: &Rows<'_>, column: usize) -> bf16 {
        match row {
            Rows::Bf16(row) => row.element(0, column),
            Rows::F32(row) => bf16::from_f32(row.element(0, column)),
            Rows::F16(row) => bf16::from_f32(row.element(0, column).to_f32()),
            Rows::Coded(_) => {
                let mut element = [0.0];
                row.columns(column..column + 1).widen(&mut element);
                bf16::from_f32(element[0])
            }
        }
    }

    /// Rounds a row to bf16, into the front of an array of zeros.
    #[inline(always)]
    fn round(simd: Avx512<true>, row: &Rows<'_>, to: &mut [bf16; MAX_WIDTH]) {
        let mut wide = [0.0; MAX_WIDTH];
        row.widen(&mut wide);
        units_along::<_, Bf16Pair>(simd, &wide[..row.width()], bytemuck::cast_slice_mut(to));
    }

    impl Packed<Avx512<true>> for Bf16Pair {
        #[inline(always)]
        fn along(simd: Avx512<true>, row: Rows<'_>, to: &mut [Self]) {
            let (elements, width) = (bytemuck::cast_slice_mut::<Self, bf16>(to), row.width());
            match row {
                Rows::Bf16(row) if row.row(0).is_some() => {
                    elements[..width].copy_from_slice(row.row(0).unwrap_or_default());
                }
                Rows::Coded(_) => {
                    let mut rounded = [bf16::ZERO; MAX_WIDTH];
                    round(simd, &row, &mut rounded);
                    elements[..width].copy_from_slice(&rounded[..width]);
                }
                _ => elements[..width].iter_mut().enumerate().for_each(|(column, to)| *to = narrow(&row, column)),
            }
            elements[width..].fill(bf16::ZERO);
        }

        #[inline(always)]
        fn across(simd: Avx512<true>, even: Rows<'_>, odd: Option<Rows<'_>>, to: &mut [Self]) {
            let width = even.width();
            if let Rows::Coded(_) = even {
                let [mut first, mut second] = [[bf16::ZERO; MAX_WIDTH]; 2];
                round(simd, &even, &mut first);
                odd.iter().for_each(|odd| round(simd, odd, &mut second));
                let whole = Self::interleave(simd, &first, &second, to);
                let pairs = first.iter().zip(&second).map(|(&even, &odd)| bytemuck::cast([even, odd])).skip(whole);
                to[whole..].iter_mut().zip(pairs).for_each(|(to, pair)| *to = pair);
                return;
            }
            let mut column = 0;
            if let (Rows::Bf16(first), Some(Rows::Bf16(second))) = (even, odd)
                && let (Some(first), Some(second)) = (first.row(0), second.row(0))
            {
                column = Self::interleave(simd, &first[..width], &second[..width], to);
            }
            for (column, to) in to.iter_mut().enumerate().skip(column) {
                let element = |row: &Rows<'_>| if column < width { narrow(row, column) } else { bf16::ZERO };
                *to = bytemuck::cast([element(&even), odd.as_ref().map_or(bf16::ZERO, element)]);
            }
        }

        #[inline(always)]
        fn stacked_in_place<'a>(_: &Rows<'a>) -> Option<&'a [Self]> {
            None
        }

        #[inline(always)]
        fn negate(units: &mut [Self]) {
            bytemuck::cast_slice_mut::<Self, bf16>(units).iter_mut().for_each(|x| *x = -*x);
        }

        #[inline(always)]
        fn in_place<'a>(rows: &Rows<'a>) -> Option<(&'a [Self], usize)> {
            let Rows::Bf16(rows) = rows else { return None };
            let (elements, stride) = rows.lines()?;
            let are_pairs = rows.width().is_multiple_of(2) && stride.is_multiple_of(2);
            let whole = &elements[..elements.len() - elements.len() % 2];
            Some((bytemuck::try_cast_slice(whole).ok().filter(|_| are_pairs)?, stride / 2))
        }
    }
}

/// Packs `count` rows as columns: unit `(step, row)` at `step * stride + row` of `to`, for `width / DEPTH` steps rounded
/// up. `rows(i)` gives row `i` and as many after it as are uniformly strided. Rows up to `columns`, a multiple of
/// [`Simd::LANES`], become zero.
#[inline(always)]
pub fn transposed<'a, S: Simd, U: Packed<S>>(
    simd: S,
    rows: impl Fn(usize) -> Rows<'a>,
    count: usize,
    width: usize,
    columns: usize,
    to: &mut [U],
    stride: usize,
) {
    let steps = width.div_ceil(U::DEPTH);
    assert!(width <= MAX_WIDTH && columns.is_multiple_of(S::LANES) && columns <= stride);
    assert!(steps * stride <= to.len(), "a packed tile is too short");
    let mut block = [U::zeroed(); MAX_LANES * MAX_WIDTH];
    for first in (0..columns).step_by(S::LANES) {
        let lie_evenly = first + S::LANES <= count && steps.is_multiple_of(S::LANES);
        let in_place = lie_evenly.then(|| rows(first)).filter(|rows| rows.count() >= S::LANES && rows.width() == width);
        let (from, stride_bytes) = match in_place.and_then(|rows| U::in_place(&rows)) {
            Some((units, stride)) => {
                assert!((S::LANES - 1) * stride + steps <= units.len(), "rows of whole units");
                (units.as_ptr().cast::<u8>(), 4 * stride)
            }
            None => {
                for (row, to) in (first..first + S::LANES).zip(block.chunks_exact_mut(MAX_WIDTH)) {
                    match row < count {
                        true => U::along(simd, rows(row).first(1), &mut to[..steps.next_multiple_of(S::LANES)]),
                        false => to.fill(U::zeroed()),
                    }
                }
                (block.as_ptr().cast(), 4 * MAX_WIDTH)
            }
        };
        for step in (0..steps).step_by(S::LANES) {
            let mut square = [0.0f32; MAX_LANES * MAX_LANES];
            // SAFETY: `from` is the start of `LANES` rows of at least `steps` units of 4 bytes, rounded up to whole
            // squares; a square that is not whole is written aside, a whole one lies inside `to` by the assertions.
            unsafe {
                let from = from.add(4 * step);
                if step + S::LANES <= steps {
                    simd.transpose(from, stride_bytes, to.as_mut_ptr().add(step * stride + first).cast(), stride);
                } else {
                    simd.transpose(from, stride_bytes, square.as_mut_ptr(), S::LANES);
                    for (step, words) in (step..steps).zip(square.chunks_exact(S::LANES)) {
                        to[step * stride + first..][..S::LANES].copy_from_slice(bytemuck::cast_slice(words));
                    }
                }
            }
        }
    }
}

/// Packs `count` rows as rows: unit `(step, column)` at `step * stride + column` of `to`, a step being [`Unit::DEPTH`]
/// rows. Columns up to `stride` become zero.
#[inline(always)]
pub fn stacked<'a, S: Simd, U: Packed<S>>(
    simd: S,
    rows: impl Fn(usize) -> Rows<'a>,
    count: usize,
    to: &mut [U],
    stride: usize,
) {
    let (mut run, mut first) = (rows(0), 0);
    for (step, to) in to.chunks_exact_mut(stride).take(count.div_ceil(U::DEPTH)).enumerate() {
        let row = step * U::DEPTH;
        let depth = U::DEPTH.min(count - row);
        // Asked for once a run, not for each row.
        if row - first + depth > run.count() {
            (run, first) = (rows(row), row);
        }
        let even = run.skip(row - first).first(1);
        let odd = match depth {
            1 => None,
            _ if row + 1 - first < run.count() => Some(run.skip(row + 1 - first).first(1)),
            _ => Some(rows(row + 1).first(1)),
        };
        U::across(simd, even, odd, to);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, Native, SimdBf16Op};
    use super::*;
    use crate::format::RowFormat;
    use half::f16;

    /// Packs both ways and compares with the definition.
    struct Check<'a>(Rows<'a>, usize);

    impl SimdBf16Op for Check<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Native>(self, simd: S) {
            check::<S, f32>(simd, self.0, self.1);
            if matches!(self.0, Rows::Bf16(_) | Rows::Coded(_)) {
                check::<S, S::Bf16>(simd, self.0, self.1);
            }
        }
    }

    fn element(rows: &Rows<'_>, row: usize, column: usize) -> f32 {
        if row >= rows.count() || column >= rows.width() {
            return 0.0;
        }
        let mut element = [0.0];
        rows.skip(row).first(1).columns(column..column + 1).widen(&mut element);
        element[0]
    }

    /// The elements of a unit.
    fn elements<S: Simd, U: Packed<S>>(unit: U) -> Vec<f32> {
        match U::DEPTH {
            1 => vec![*bytemuck::from_bytes(bytemuck::bytes_of(&unit))],
            _ => bytemuck::cast_slice::<U, bf16>(&[unit]).iter().map(|x| x.to_f32()).collect(),
        }
    }

    fn check<S: Simd, U: Packed<S>>(simd: S, rows: Rows<'_>, run: usize) {
        let kept = |x: f32| if U::DEPTH == 2 { bf16::from_f32(x).to_f32() } else { x };
        let (count, width) = (rows.count(), rows.width());
        // Rows in runs of `run`, as pages have them.
        let source = |row: usize| rows.skip(row).first(run - row % run);
        let columns = count.next_multiple_of(S::LANES);
        let stride = columns + 16;
        let mut to = vec![bytemuck::cast::<f32, u32>(f32::NAN); width.div_ceil(U::DEPTH) * stride];
        let to: &mut [U] = bytemuck::cast_slice_mut(&mut to);
        transposed::<S, U>(simd, source, count, width, columns, to, stride);
        for row in 0..columns {
            for step in 0..width.div_ceil(U::DEPTH) {
                for (offset, got) in elements::<S, U>(to[step * stride + row]).into_iter().enumerate() {
                    let expected = kept(element(&rows, row, step * U::DEPTH + offset));
                    assert_eq!(got, expected, "key {row}, step {step}");
                }
            }
        }
        let stride = width.next_multiple_of(S::LANES);
        let mut to = vec![bytemuck::cast::<f32, u32>(f32::NAN); count.div_ceil(U::DEPTH) * stride];
        let to: &mut [U] = bytemuck::cast_slice_mut(&mut to);
        stacked::<S, U>(simd, source, count, to, stride);
        for (index, unit) in to.iter().enumerate() {
            for (offset, got) in elements::<S, U>(*unit).into_iter().enumerate() {
                let row = index / stride * U::DEPTH + offset;
                let expected = kept(element(&rows, row, index % stride));
                assert_eq!(got, expected, "value {row}, column {}", index % stride);
            }
        }
    }

    #[test]
    fn packed_rows_are_where_the_product_reads_them() {
        let wide: Vec<f32> = (0..40_000).map(|x| (x % 251) as f32 - 100.0).collect();
        let bf16s: Vec<bf16> = wide.iter().map(|&x| bf16::from_f32(x)).collect();
        let f16s: Vec<f16> = wide.iter().map(|&x| f16::from_f32(x)).collect();
        for (count, width) in [(1, 1), (5, 8), (16, 16), (33, 40), (48, 64), (50, 128), (17, 33), (20, 111), (6, 256)] {
            for format in ["int8", "fp8-e4m3", "int4", "int3:zero=true", "int4:hadamard=true"] {
                let format: RowFormat = format.parse().unwrap();
                if format.check("a row", width).is_err() {
                    continue;
                }
                let mut bytes = vec![0; count * format.row_bytes(width)];
                format.encode(&wide[..count * width], width, &mut bytes);
                let rows = format.rows(&bytes, [count, width]);
                Isa::available().for_each(|isa| [16, 1000].into_iter().for_each(|run| isa.run_bf16(Check(rows, run))));
            }
            for strides in [[width, 1], [width + 3, 1], [1, count]] {
                for isa in Isa::available() {
                    for run in [16, 1000] {
                        isa.run_bf16(Check(Rows::F32(Strided::new(&wide, strides, count, width)), run));
                        isa.run_bf16(Check(Rows::Bf16(Strided::new(&bf16s, strides, count, width)), run));
                        isa.run_bf16(Check(Rows::F16(Strided::new(&f16s, strides, count, width)), run));
                    }
                }
            }
        }
    }
}

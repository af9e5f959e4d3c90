//! What is computed with rows of any format, on the instruction path that is asked for: the one place where vector code
//! is made for each of them.

use super::{RowFormat, with_codec};
use crate::device::simd::Isa;
use crate::device::simd::linear::{Columns, Few, Stripes};
use crate::device::simd::pairs::{PairDots, are_bf16};
use crate::device::simd::rows::{Accumulate, Dots, RowList};
use crate::device::simd::widen::Widen;
use crate::tensor::{DType, Rows};
use std::ops::Range;

impl RowFormat {
    /// [`Few`]: some columns of `y = x wᵀ + b`, where `w` is kept so.
    ///
    /// # Panics
    /// As [`Few`] does.
    pub fn multiply_few(self, isa: Isa, columns: Columns<'_>, y: &Stripes<'_>) {
        with_codec!(self, reader => isa.run(Few { columns, reader, y }));
    }

    /// [`Widen`]: some columns of rows that are kept so, as elements of `dtype`.
    ///
    /// # Panics
    /// As [`Widen`] does.
    pub fn widen(self, isa: Isa, rows: Rows<'_>, columns: Range<usize>, dtype: DType, to: &mut [u8]) {
        with_codec!(self, reader => isa.run(Widen { rows, reader, columns, dtype, to }));
    }

    /// [`Dots`]: inner products of queries, which begin `stride` elements apart, with a range of a list's rows.
    ///
    /// # Panics
    /// As [`Dots`] does.
    pub fn dots(
        self,
        isa: Isa,
        rows: &RowList<'_>,
        range: Range<usize>,
        (queries, stride): (&[f32], usize),
        scores: &mut [f32],
    ) {
        if self == RowFormat::plain(DType::Bf16) && PairDots::are_for(isa, rows.width()) && are_bf16(queries) {
            return isa.run_bf16(PairDots { rows, range, queries, stride, scores });
        }
        with_codec!(self, reader => isa.run(Dots { reader, rows, range, queries, stride, scores }));
    }

    /// [`Accumulate`]: weighted sums of a list's rows onto outputs, which begin `stride` elements apart.
    ///
    /// # Panics
    /// As [`Accumulate`] does.
    pub(crate) fn accumulate(
        self,
        isa: Isa,
        rows: &RowList<'_>,
        weights: &mut [f32],
        (outputs, stride): (&mut [f32], usize),
    ) {
        with_codec!(self, reader => isa.run(Accumulate { reader, rows, weights, outputs, stride }));
    }
}

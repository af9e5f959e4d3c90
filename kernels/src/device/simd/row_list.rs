//! Addresses of rows that are read once: those of pages and those of one tensor are the same thing here, and give the same
//! bits. Behind the rows to be read stand addresses of what will be read after them, so that cache lines can be asked for a
//! fixed way ahead.

use super::Simd;
use super::reader::RowReader;
use crate::tensor::Rows;
use std::marker::PhantomData;
use std::ops::Range;

/// Most rows of a list.
pub const BLOCK: usize = 256;
/// How far ahead of the row that is read cache lines are asked for: what memory delivers in about twice its latency.
const AHEAD_BYTES: usize = 8192;
/// The same in rows, at most.
const AHEAD: usize = 128;
/// Bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;

/// Room for the addresses of a list: three kilobytes, which one list after another uses.
pub struct Addresses([*const u8; BLOCK + AHEAD]);

impl Default for Addresses {
    fn default() -> Self {
        Addresses([std::ptr::null(); BLOCK + AHEAD])
    }
}

/// Addresses of up to [`BLOCK`] rows, and of the rows that will be read after them.
pub struct RowList<'a> {
    /// `count` rows that may be read; behind them, addresses that may only be asked for.
    at: &'a [*const u8; BLOCK + AHEAD],
    count: usize,
    width: usize,
    /// Rows from one that is read to one that is asked for.
    ahead: usize,
    /// Whether an element takes a byte or more, so that reading takes the time. What is read next is taken to be alike.
    is_wide: bool,
    rows: PhantomData<&'a [u8]>,
}

impl<'a> RowList<'a> {
    /// Lists, in the room `at`, the rows `range`, `width` elements in `row_bytes` each, that will be followed by the rows `next_range` of `next`.
    /// `rows(i)` gives row `i` and as many after it as are uniformly strided. Rows whose elements are no neighbours are
    /// copied to `copies`, which holds as many elements in f32.
    ///
    /// # Panics
    /// When there are more than [`BLOCK`] rows, rows of other bytes or of another width, or no room for copies.
    pub fn collect<'r: 'a>(
        Addresses(at): &'a mut Addresses,
        [width, row_bytes]: [usize; 2],
        rows: &dyn Fn(usize) -> Rows<'r>,
        range: Range<usize>,
        next: &dyn Fn(usize) -> Rows<'r>,
        next_range: Range<usize>,
        copies: &'a mut [f32],
    ) -> Self {
        let count = range.len();
        let ahead = (AHEAD_BYTES / row_bytes).clamp(1, AHEAD);
        let mut copies: &mut [u8] = bytemuck::cast_slice_mut(copies);
        let mut listed = 0;
        while listed < count {
            let run = rows(range.start + listed).first(count - listed);
            assert!(run.width() == width && run.count() > 0, "rows of {} elements, not {width}", run.width());
            assert_eq!(run.row_bytes(), row_bytes, "rows are of the format that their source names");
            let at = &mut at[..BLOCK][listed..][..run.count()];
            match run.span() {
                Some((span, stride_bytes)) => spread(span, stride_bytes, at),
                None => {
                    for (index, at) in at.iter_mut().enumerate() {
                        let (copy, rest) = copies.split_at_mut(row_bytes);
                        run.copy_row(index, copy);
                        (*at, copies) = (copy.as_ptr(), rest);
                    }
                }
            }
            listed += run.count();
        }
        let wanted = ahead.min(next_range.len());
        let mut listed = 0;
        while listed < wanted {
            let run = next(next_range.start + listed).first(wanted - listed);
            let Some((span, stride_bytes)) = run.span() else { break };
            spread(span, stride_bytes, &mut at[count + listed..][..run.count()]);
            listed += run.count();
        }
        // Where nothing follows, what is there already is asked for.
        let first = at[0];
        at[count + listed..count + ahead].fill(first);
        RowList { at, count, width, ahead, is_wide: row_bytes >= width, rows: PhantomData }
    }

    /// Rows that may be read.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Elements of a row.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Multiplies numbers of some of the rows, `BLOCK` for each of some queries, by the factors that the rows carry.
    #[inline(always)]
    pub(super) fn scale<R: RowReader>(&self, reader: R, range: Range<usize>, numbers: &mut [f32]) {
        if !R::SCALED {
            return;
        }
        assert!(range.end <= self.count, "rows {range:?} of {}", self.count);
        let mut factors = [0.0; BLOCK];
        for index in range.clone() {
            // SAFETY: `index` is below `count`; a listed row may be read.
            factors[index] = unsafe { reader.scale(self.row(index)) };
        }
        for numbers in numbers.chunks_exact_mut(BLOCK) {
            let factors = &factors[range.clone()];
            numbers[range.clone()].iter_mut().zip(factors).for_each(|(number, factor)| *number *= factor);
        }
    }

    /// Where a row begins, or would be asked for.
    ///
    /// # Safety
    /// `index` is below `count + ahead`.
    #[inline(always)]
    pub(super) unsafe fn row(&self, index: usize) -> *const u8 {
        debug_assert!(index < self.count + self.ahead);
        // SAFETY: the caller's promise; `count` is at most `BLOCK`, `ahead` at most `AHEAD`.
        unsafe { *self.at.get_unchecked(index) }
    }

    /// Asks for the `ROWS` rows, of `row_bytes` each, that are read some way after those from `index` on.
    ///
    /// # Safety
    /// `index + ROWS` is at most `count`.
    #[inline(always)]
    pub(super) unsafe fn prefetch_rows<S: Simd, const ROWS: usize>(&self, simd: S, index: usize, row_bytes: usize) {
        // SAFETY: the caller's promise.
        let ahead = |row: usize| unsafe { self.row(index + row + self.ahead) };
        // Where they lie one behind another, no line is asked for twice.
        if ahead(ROWS - 1).addr().wrapping_sub(ahead(0).addr()) == (ROWS - 1) * row_bytes {
            return self.ask(simd, ahead(0), ROWS * row_bytes);
        }
        for row in 0..ROWS {
            self.ask(simd, ahead(row), row_bytes);
        }
    }

    /// Asks for `len_bytes` from byte `first` on of the row that is read some way after row `index`.
    ///
    /// # Safety
    /// `index` is below `count`.
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd>(&self, simd: S, index: usize, first: usize, len_bytes: usize) {
        // SAFETY: the caller's promise.
        self.ask(simd, unsafe { self.row(index + self.ahead) }.wrapping_add(first), len_bytes);
    }

    /// Asks for the lines of some bytes; those that begin on no line may lie in one more, which the row behind them asks
    /// for.
    #[inline(always)]
    fn ask<S: Simd>(&self, simd: S, from: *const u8, len_bytes: usize) {
        for line in (0..len_bytes).step_by(LINE_BYTES) {
            match self.is_wide {
                true => simd.prefetch_for_reading(from.wrapping_add(line)),
                false => simd.prefetch_for_work(from.wrapping_add(line)),
            }
        }
    }
}

/// The addresses of rows that are uniformly strided.
fn spread(span: &[u8], stride_bytes: usize, at: &mut [*const u8]) {
    for (index, at) in at.iter_mut().enumerate() {
        *at = span.as_ptr().wrapping_add(index * stride_bytes);
    }
}

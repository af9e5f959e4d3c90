//! Rows of a tensor or cache as they are kept, for code that reads each type itself.

use super::DType;
use super::dtype::widen_bf16;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use std::ops::Range;

/// Some rows that lie at one distance from each other.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// Of f32.
    F32(Strided<'a, f32>),
    /// Of bf16.
    Bf16(Strided<'a, bf16>),
    /// Of f16.
    F16(Strided<'a, f16>),
    /// In bytes that a format gives a meaning.
    Coded(Coded<'a>),
}

/// What bytes of coded rows mean.
pub trait RowCode: Sync + fmt::Debug {
    /// Reads the elements from `first` on, as many as `to` holds, from the bytes of a row.
    fn decode(&self, from: &[u8], first: usize, to: &mut [f32]);
}

/// `count` rows of coded bytes, one behind another, of which `width` elements from `first` on are meant.
#[derive(Debug, Clone, Copy)]
pub struct Coded<'a> {
    code: &'a dyn RowCode,
    bytes: &'a [u8],
    row_bytes: usize,
    first: usize,
    width: usize,
    channels: Option<ChannelScales<'a>>,
}

/// What rows of a group of tokens share, `[D]` each: an element is `scale * x + minimum` of its channel.
#[derive(Debug, Clone, Copy)]
pub struct ChannelScales<'a> {
    /// Factors.
    pub scales: &'a [f16],
    /// What is added.
    pub minimums: &'a [f16],
}

impl ChannelScales<'_> {
    /// Whole numbers of the channels from `first` on become what they stand for.
    pub fn apply(&self, first: usize, row: &mut [f32]) {
        /// Channels at a time.
        const MANY: usize = 64;
        for (part, row) in row.chunks_mut(MANY).enumerate() {
            let [scales, minimums] = self.widened::<MANY>(first + part * MANY, row.len());
            let channels = scales.iter().zip(&minimums);
            row.iter_mut().zip(channels).for_each(|(x, (scale, minimum))| *x = scale * *x + minimum);
        }
    }

    /// Scales and minimums of `count` channels from `first` on, at most `N`, which is faster than one by one.
    pub fn widened<const N: usize>(&self, first: usize, count: usize) -> [[f32; N]; 2] {
        [self.scales, self.minimums].map(|halves| {
            let mut wide = [0.0; N];
            halves[first..first + count].convert_to_f32_slice(&mut wide[..count]);
            wide
        })
    }
}

/// `count` rows of `width` elements.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T> {
    elements: &'a [T],
    row_stride: usize,
    column_stride: usize,
    count: usize,
    width: usize,
}

/// The same for each variant.
macro_rules! each {
    ($rows:expr, $strided:ident => $result:expr) => {
        match $rows {
            Rows::F32($strided) => $result,
            Rows::Bf16($strided) => $result,
            Rows::F16($strided) => $result,
            Rows::Coded($strided) => $result,
        }
    };
}

/// A change that makes rows of one kind rows of the same kind.
macro_rules! map {
    ($rows:expr, $part:ident => $result:expr) => {
        match $rows {
            Rows::F32($part) => Rows::F32($result),
            Rows::Bf16($part) => Rows::Bf16($result),
            Rows::F16($part) => Rows::F16($result),
            Rows::Coded($part) => Rows::Coded($result),
        }
    };
}

impl<'a> Rows<'a> {
    /// Number of rows.
    pub fn count(&self) -> usize {
        each!(self, rows => rows.count())
    }

    /// Contiguous raw rows, `[count, width]`.
    ///
    /// # Panics
    /// When `bytes` is shorter, or not aligned to the elements.
    #[inline]
    pub fn contiguous(dtype: DType, bytes: &'a [u8], [count, width]: [usize; 2]) -> Self {
        let strides = [width, 1];
        match dtype {
            DType::F32 => Rows::F32(Strided::new(bytemuck::cast_slice(bytes), strides, count, width)),
            DType::Bf16 => Rows::Bf16(Strided::new(bytemuck::cast_slice(bytes), strides, count, width)),
            DType::F16 => Rows::F16(Strided::new(bytemuck::cast_slice(bytes), strides, count, width)),
        }
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        each!(self, rows => rows.width())
    }

    /// All rows, if they are contiguous f32.
    pub fn as_f32(&self) -> Option<&'a [f32]> {
        match self {
            Rows::F32(rows) => rows.contiguous(),
            _ => None,
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        match self {
            Rows::F32(rows) => 4 * rows.width,
            Rows::Bf16(rows) => 2 * rows.width,
            Rows::F16(rows) => 2 * rows.width,
            Rows::Coded(rows) => rows.row_bytes,
        }
    }

    /// The bytes from the first row's first to the last row's last, and from one row to the next, if those of a row are
    /// neighbours and are whole.
    #[inline(always)]
    pub fn span(&self) -> Option<(&'a [u8], usize)> {
        match self {
            Rows::F32(rows) => Some((bytemuck::cast_slice(rows.span()?), 4 * rows.row_stride)),
            Rows::Bf16(rows) => Some((bytemuck::cast_slice(rows.span()?), 2 * rows.row_stride)),
            Rows::F16(rows) => Some((bytemuck::cast_slice(rows.span()?), 2 * rows.row_stride)),
            Rows::Coded(rows) => (rows.first == 0).then_some((rows.bytes, rows.row_bytes)),
        }
    }

    /// Type of plain elements.
    #[inline(always)]
    pub fn dtype(&self) -> Option<DType> {
        match self {
            Rows::F32(_) => Some(DType::F32),
            Rows::Bf16(_) => Some(DType::Bf16),
            Rows::F16(_) => Some(DType::F16),
            Rows::Coded(_) => None,
        }
    }

    /// What the rows share for each channel.
    pub fn channels(&self) -> Option<ChannelScales<'a>> {
        match self {
            Rows::Coded(rows) => rows.channels,
            _ => None,
        }
    }

    /// Coded rows that share something for each channel.
    pub fn with_channels(self, channels: ChannelScales<'a>) -> Self {
        match self {
            Rows::Coded(rows) => Rows::Coded(Coded { channels: Some(channels), ..rows }),
            plain => plain,
        }
    }

    /// Copies the elements of a row, as they are kept, one behind another.
    ///
    /// # Panics
    /// When `to` has another length than the row's bytes, or is not aligned to its elements.
    pub fn copy_row(&self, index: usize, to: &mut [u8]) {
        fn copy<T: bytemuck::Pod>(rows: &Strided<'_, T>, index: usize, to: &mut [u8]) {
            let to: &mut [T] = bytemuck::cast_slice_mut(to);
            to.iter_mut().enumerate().for_each(|(column, to)| *to = rows.element(index, column));
        }
        match self {
            Rows::F32(rows) => copy(rows, index, to),
            Rows::Bf16(rows) => copy(rows, index, to),
            Rows::F16(rows) => copy(rows, index, to),
            Rows::Coded(rows) => to.copy_from_slice(&rows.bytes[index * rows.row_bytes..][..rows.row_bytes]),
        }
    }

    /// Copies all rows into the start of `target` as f32.
    ///
    /// # Panics
    /// When `target` is shorter.
    pub fn widen(&self, target: &mut [f32]) {
        match self {
            Rows::F32(rows) => rows.convert(target, |from, to| to.copy_from_slice(from)),
            Rows::Bf16(rows) => rows.convert(target, widen_bf16),
            Rows::F16(rows) => rows.convert(target, |from, to| from.convert_to_f32_slice(to)),
            Rows::Coded(rows) => rows.widen(target),
        }
    }

    /// The first `count` rows, or all if there are fewer.
    #[inline(always)]
    pub fn first(self, count: usize) -> Self {
        map!(self, rows => rows.first(count))
    }

    /// The columns `range` of every row.
    ///
    /// # Panics
    /// When rows are not so wide.
    #[inline(always)]
    pub fn columns(self, range: Range<usize>) -> Self {
        map!(self, rows => rows.columns(range))
    }

    /// The rows from `start` on.
    ///
    /// # Panics
    /// When there are not so many.
    #[inline(always)]
    pub fn skip(self, start: usize) -> Self {
        map!(self, rows => rows.skip(start))
    }
}

impl<'a> Coded<'a> {
    /// Rows of `width` elements in `bytes`, `row_bytes` each.
    ///
    /// # Panics
    /// When there is no whole number of rows.
    #[inline]
    pub fn new(code: &'a dyn RowCode, bytes: &'a [u8], row_bytes: usize, width: usize) -> Self {
        assert!(bytes.len().is_multiple_of(row_bytes), "{} bytes are no whole rows of {row_bytes}", bytes.len());
        Coded { code, bytes, row_bytes, first: 0, width, channels: None }
    }

    fn count(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    fn width(&self) -> usize {
        self.width
    }

    fn first(self, count: usize) -> Self {
        Coded { bytes: &self.bytes[..self.count().min(count) * self.row_bytes], ..self }
    }

    fn skip(self, start: usize) -> Self {
        Coded { bytes: &self.bytes[start * self.row_bytes..], ..self }
    }

    fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.width, "columns {range:?} of {}", self.width);
        Coded { first: self.first + range.start, width: range.len(), ..self }
    }

    /// Copies all rows into the start of `target` as f32.
    fn widen(&self, target: &mut [f32]) {
        let rows = self
            .bytes
            .chunks_exact(self.row_bytes)
            .zip(target[..self.count() * self.width].chunks_exact_mut(self.width));
        rows.for_each(|(from, to)| {
            self.code.decode(from, self.first, to);
            if let Some(channels) = &self.channels {
                channels.apply(self.first, to);
            }
        });
    }
}

impl<'a, T: Copy> Strided<'a, T> {
    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Rows whose elements `(row, column)` lie at `row * row_stride + column * column_stride`.
    ///
    /// # Panics
    /// When they reach past the end of `elements`.
    #[inline]
    pub fn new(elements: &'a [T], [row_stride, column_stride]: [usize; 2], count: usize, width: usize) -> Self {
        let end = count.saturating_sub(1) * row_stride + width.saturating_sub(1) * column_stride;
        assert!(count == 0 || width == 0 || end < elements.len(), "rows reach past their elements");
        Strided { elements, row_stride, column_stride, count, width }
    }

    fn contiguous(&self) -> Option<&'a [T]> {
        (self.column_stride == 1 && self.row_stride == self.width).then(|| &self.elements[..self.count * self.width])
    }

    /// Converts in one piece, row by row, or element by element, as the strides allow.
    fn convert(&self, target: &mut [f32], convert: impl Fn(&[T], &mut [f32])) {
        let target = &mut target[..self.count * self.width];
        if let Some(all) = self.contiguous() {
            return convert(all, target);
        }
        for (index, to) in target.chunks_exact_mut(self.width).enumerate() {
            match self.row(index) {
                Some(row) => convert(row, to),
                None => to.iter_mut().enumerate().for_each(|(column, to)| {
                    convert(&[self.element(index, column)], std::slice::from_mut(to));
                }),
            }
        }
    }

    /// The first `count` rows, or all if there are fewer.
    #[inline(always)]
    pub fn first(self, count: usize) -> Self {
        Strided { count: self.count.min(count), ..self }
    }

    fn skip(self, start: usize) -> Self {
        assert!(start <= self.count, "row {start} of {}", self.count);
        let elements = if start == self.count { &[] } else { &self.elements[start * self.row_stride..] };
        Strided { elements, count: self.count - start, ..self }
    }

    #[inline(always)]
    fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.width, "columns {range:?} of {}", self.width);
        let elements = if self.count == 0 { &[] } else { &self.elements[range.start * self.column_stride..] };
        Strided { elements, width: range.len(), ..self }
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The elements from the first row's first to the last row's last, if those of a row are neighbours.
    #[inline(always)]
    pub fn span(&self) -> Option<&'a [T]> {
        let end = if self.count == 0 { 0 } else { (self.count - 1) * self.row_stride + self.width };
        (self.column_stride == 1).then(|| &self.elements[..end])
    }

    /// A row, if its elements are neighbours.
    #[inline(always)]
    pub fn row(&self, index: usize) -> Option<&'a [T]> {
        assert!(index < self.count, "row {index} of {}", self.count);
        (self.column_stride == 1).then(|| &self.elements[index * self.row_stride..][..self.width])
    }

    /// What lies from the first row's first element on, and the distance of rows in it, if elements of a row are neighbours.
    #[inline(always)]
    pub fn lines(&self) -> Option<(&'a [T], usize)> {
        (self.column_stride == 1).then_some((self.elements, self.row_stride))
    }

    /// An element.
    #[inline(always)]
    pub fn element(&self, row: usize, column: usize) -> T {
        debug_assert!(row < self.count && column < self.width);
        self.elements[row * self.row_stride + column * self.column_stride]
    }
}

//! How a row is read, a vector at a time, from the bytes in which it is kept.

use super::vector::each;
use super::{Element, Simd};
use std::marker::PhantomData;

/// What turns the bytes of a row into vectors of f32.
pub trait RowReader: Copy + Send + Sync {
    /// Whether what is read must still be multiplied by [`RowReader::scale`]: a number for the whole row, which costs
    /// less when it is multiplied with a sum.
    const SCALED: bool;
    /// Whether 32 elements are read together at less cost than vector by vector.
    const TOGETHER: bool = false;
    /// Whether 32 elements read as [`RowReader::load_affine`] does cost less than themselves.
    const AFFINE: bool = false;
    /// Whether nothing but weights is kept so, because blocks are longer than most heads: no attention is compiled for it.
    const OF_WEIGHTS: bool = false;

    /// Bytes of a row of `width` elements, with all that belongs to it.
    fn row_bytes(self, width: usize) -> usize;

    /// Reads the elements from `column` on as f32.
    ///
    /// # Safety
    /// `row` is the start of a row's bytes, of any alignment, with at least `column + S::LANES` elements.
    unsafe fn load<S: Simd>(self, simd: S, row: *const u8, column: usize) -> S::Vector;

    /// Reads `N` vectors from `column` on, one behind another; `column` is a multiple of their elements.
    ///
    /// # Safety
    /// As [`RowReader::load`], of all these elements.
    #[inline(always)]
    unsafe fn load_many<S: Simd, const N: usize>(self, simd: S, row: *const u8, column: usize) -> [S::Vector; N] {
        each(
            simd.splat(0.0),
            #[inline(always)]
            |vector| {
                // SAFETY: the caller's promise.
                unsafe { self.load(simd, row, column + vector * S::LANES) }
            },
        )
    }

    /// Reads 32 elements from `column` on, a multiple of 32, as `factor x + more`: the vectors of `x`, and what is returned, `[factor, more]`. For a
    /// product with few other numbers, which factor and what is added can wait for.
    ///
    /// # Safety
    /// As [`RowReader::load`], of all these elements.
    #[inline(always)]
    unsafe fn load_affine<S: Simd>(
        self,
        simd: S,
        row: *const u8,
        column: usize,
        x: &mut [S::Vector],
    ) -> [S::Vector; 2] {
        for (index, x) in x.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *x = unsafe { self.load(simd, row, column + index * S::LANES) };
        }
        [simd.splat(1.0), simd.splat(0.0)]
    }

    /// Reads `count` elements from `column` on; the other lanes become zero.
    ///
    /// # Safety
    /// As [`RowReader::load`], with at least `column + count` elements; `count` is at most `S::LANES`.
    unsafe fn load_part<S: Simd>(self, simd: S, row: *const u8, column: usize, count: usize) -> S::Vector;

    /// The factor of a row.
    ///
    /// # Safety
    /// `row` is the start of a row's bytes.
    unsafe fn scale(self, row: *const u8) -> f32;
}

/// Elements of a type, one behind another.
#[derive(Debug, Clone, Copy)]
pub struct Plain<T>(PhantomData<T>);

/// There is one of each type, so that it equals itself whatever its elements do.
impl<T> PartialEq for Plain<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for Plain<T> {}

impl<T> Plain<T> {
    /// It.
    pub const NEW: Self = Plain(PhantomData);
}

impl<T: Element> RowReader for Plain<T> {
    const SCALED: bool = false;

    #[inline(always)]
    fn row_bytes(self, width: usize) -> usize {
        width * size_of::<T>()
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, row: *const u8, column: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { T::load(simd, row.cast::<T>().add(column)) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(self, simd: S, row: *const u8, column: usize, count: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { T::load_part(simd, row.cast::<T>().add(column), count) }
    }

    #[inline(always)]
    unsafe fn scale(self, _row: *const u8) -> f32 {
        1.0
    }
}

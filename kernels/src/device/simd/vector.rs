//! The traits that kernels are written over: vectors of f32, the elements that they are loaded from, and the units of
//! which packed operands of a matrix product are made.

use super::product::{Extents, Left, Right};
use crate::tensor::{DType, Rows, Strided};
use bytemuck::Pod;
use half::{bf16, f16};

/// What a code of four bits is raised by to be the mantissa of a number: those from 16 to 32 have whole numbers in its upper four bits.
pub const RAISED: f32 = 16.0;

/// What the codes of four bits stand for.
#[derive(Debug, Clone, Copy)]
pub struct Levels {
    /// As numbers of f32.
    pub values: [f32; 16],
    /// As bytes, where they are whole.
    pub whole: Option<[i8; 16]>,
}

impl Levels {
    /// Levels that are no whole numbers.
    pub const fn new(values: [f32; 16]) -> Self {
        Levels { values, whole: None }
    }

    /// Levels that are.
    pub const fn whole(whole: [i8; 16]) -> Self {
        let (mut values, mut code) = ([0.0; 16], 0);
        while code < 16 {
            values[code] = whole[code] as f32;
            code += 1;
        }
        Levels { values, whole: Some(whole) }
    }
}

/// Vectors of f32 in the registers of one instruction set. A value of an implementing type is the proof that the
/// processor has it.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Elements of a vector: at most 16.
    const LANES: usize;
    /// Vectors in a row of the register tile of a product: what the number of registers allows.
    const COLUMNS: usize;
    /// A vector.
    type Vector: Copy;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::Vector;
    /// Reads a vector.
    ///
    /// # Safety
    /// `from` is the start of [`Simd::LANES`] readable elements, of any alignment.
    unsafe fn load(self, from: *const f32) -> Self::Vector;
    /// Widens a vector of bf16.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_bf16(self, from: *const bf16) -> Self::Vector;
    /// Widens a vector of f16.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_f16(self, from: *const f16) -> Self::Vector;
    /// Widens a vector of signed bytes.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_i8(self, from: *const i8) -> Self::Vector;
    /// The f16 at `from` in every lane.
    ///
    /// # Safety
    /// `from` is readable, of any alignment.
    unsafe fn splat_f16(self, from: *const f16) -> Self::Vector;
    /// What `values` has for four bits of each byte: `values[from[lane] >> shift & 15]`.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_nibbles(self, from: *const u8, shift: u32, values: &[f32; 16]) -> Self::Vector;
    /// What `levels` has for both halves of 16 bytes, times `scale`, plus `least` if there is one: of the low four bits of all bytes,
    /// then of the high ones, as 32 elements of the vectors `to`.
    ///
    /// # Safety
    /// 16 bytes at `from` are readable.
    #[inline(always)]
    unsafe fn load_32_nibbles(
        self,
        from: *const u8,
        levels: &Levels,
        (scale, least): (Self::Vector, Option<Self::Vector>),
        to: &mut [Self::Vector],
    ) {
        for (index, to) in to.iter_mut().enumerate() {
            let offset = index * Self::LANES;
            // SAFETY: the caller's promise.
            let x = unsafe { self.load_nibbles(from.add(offset % 16), (offset / 16 * 4) as u32, &levels.values) };
            let x = self.mul(scale, x);
            *to = if let Some(least) = least { self.add(x, least) } else { x };
        }
    }
    /// Both halves of 16 bytes, plus [`RAISED`]: the low four bits of all bytes, then the high ones, as 32 elements of the vectors `to`.
    ///
    /// # Safety
    /// 16 bytes at `from` are readable.
    #[inline(always)]
    unsafe fn load_32_raised(self, from: *const u8, to: &mut [Self::Vector]) {
        const LEVELS: Levels = Levels::whole([16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]);
        // SAFETY: the caller's promise.
        unsafe { self.load_32_nibbles(from, &LEVELS, (self.splat(1.0), None), to) }
    }
    /// What `values` has for codes of `BITS` bits, 2 or 3, from the code `first` on, a multiple of [`Simd::LANES`]. Eight codes
    /// are in so many bytes, the first in the lowest bits.
    ///
    /// # Safety
    /// The bytes of the codes are readable, and two more.
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8, first: usize, values: &[f32; 8]) -> Self::Vector;
    /// What `values` has for four bits, from `shift` on, of each of 32 bytes, times `scale`, plus `least`, as 32 elements of the vectors
    /// `to`.
    ///
    /// # Safety
    /// 32 bytes at `from` are readable.
    #[inline(always)]
    unsafe fn load_32_of_bytes(
        self,
        from: *const u8,
        shift: u32,
        values: &[f32; 16],
        (scale, least): (Self::Vector, Self::Vector),
        to: &mut [Self::Vector],
    ) {
        for (index, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let x = unsafe { self.load_nibbles(from.add(index * Self::LANES), shift, values) };
            *to = self.mul_add(scale, x, least);
        }
    }
    /// The bits of each byte from `shift` on that `mask`, at most 127, has.
    ///
    /// # Safety
    /// As [`Simd::load`].
    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, shift: u32, mask: u8) -> Self::Vector {
        let mut codes = [0i8; 16];
        for (lane, code) in codes[..Self::LANES].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *code = (unsafe { *from.add(lane) } >> shift & mask).cast_signed();
        }
        // SAFETY: there are 16 codes, and no path has more lanes.
        unsafe { self.load_i8(codes.as_ptr()) }
    }
    /// Reads the first `count` lanes; the others become zero.
    ///
    /// # Safety
    /// `from` is the start of `count` readable elements, of any alignment, at most [`Simd::LANES`].
    unsafe fn load_part(self, from: *const f32, count: usize) -> Self::Vector;
    /// As [`Simd::load_part`], of bf16.
    ///
    /// # Safety
    /// As [`Simd::load_part`].
    unsafe fn load_bf16_part(self, from: *const bf16, count: usize) -> Self::Vector;
    /// As [`Simd::load_part`], of f16.
    ///
    /// # Safety
    /// As [`Simd::load_part`].
    unsafe fn load_f16_part(self, from: *const f16, count: usize) -> Self::Vector;
    /// As [`Simd::load_part`], of signed bytes.
    ///
    /// # Safety
    /// As [`Simd::load_part`].
    unsafe fn load_i8_part(self, from: *const i8, count: usize) -> Self::Vector;
    /// Writes a vector.
    ///
    /// # Safety
    /// `to` is the start of [`Simd::LANES`] writable elements, of any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::Vector);
    /// Rounds a vector to bf16, to the nearest, ties to even.
    ///
    /// # Safety
    /// `to` is the start of [`Simd::LANES`] writable elements, of any alignment.
    unsafe fn store_bf16(self, to: *mut bf16, x: Self::Vector);
    /// Rounds a vector to f16, to the nearest, ties to even.
    ///
    /// # Safety
    /// As [`Simd::store_bf16`].
    unsafe fn store_f16(self, to: *mut f16, x: Self::Vector);
    /// `a + b`.
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a - b`.
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b`.
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `a / b`.
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `x` in lanes where `a < b`, else `y`.
    fn select_less(self, a: Self::Vector, b: Self::Vector, x: Self::Vector, y: Self::Vector) -> Self::Vector;
    /// The larger of each lane; either where one is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The nearest integer.
    fn round(self, x: Self::Vector) -> Self::Vector;
    /// `x * 2^exponent` for a whole `exponent` from -126 to 127, and zero where `x` belongs to a `limit` below -126.
    /// A NaN in either stays one.
    fn scale_or_zero(self, x: Self::Vector, exponent: Self::Vector, limit: Self::Vector) -> Self::Vector;
    /// Sum of the lanes.
    fn sum(self, x: Self::Vector) -> f32;
    /// Sums of the lanes of four vectors.
    fn sums(self, x: [Self::Vector; 4]) -> [f32; 4];
    /// `x`, and `more` on top in each lane whose bit of `bits` is set.
    fn add_where(self, x: Self::Vector, bits: u32, more: f32) -> Self::Vector;
    /// The largest lane.
    fn largest(self, x: Self::Vector) -> f32;
    /// Exchanges rows and columns of a square of `LANES x LANES` 32-bit words.
    ///
    /// # Safety
    /// `LANES` readable rows of `LANES` words begin at `from`, `from_stride_bytes` apart; likewise the writable rows
    /// at `to`, `to_stride` words apart.
    unsafe fn transpose(self, from: *const u8, from_stride_bytes: usize, to: *mut f32, to_stride: usize);
    /// Asks for the cache line at `at`, which need not be readable, where the work on it takes longer than reading it.
    fn prefetch_for_work(self, at: *const u8);
    /// The same where reading takes the time.
    fn prefetch_for_reading(self, at: *const u8);

    /// The first [`Simd::LANES`] elements of a slice.
    #[inline(always)]
    fn read(self, from: &[f32]) -> Self::Vector {
        assert!(from.len() >= Self::LANES);
        // SAFETY: the assertion above.
        unsafe { self.load(from.as_ptr()) }
    }

    /// Writes the first [`Simd::LANES`] elements of a slice.
    #[inline(always)]
    fn write(self, to: &mut [f32], x: Self::Vector) {
        assert!(to.len() >= Self::LANES);
        // SAFETY: the assertion above.
        unsafe { self.store(to.as_mut_ptr(), x) }
    }
}

/// Rounds a row to raw elements of a type.
///
/// # Panics
/// When `to` is not as long as the row, or not aligned to its elements.
#[inline(always)]
pub(crate) fn narrow<S: Simd>(simd: S, dtype: DType, row: &[f32], to: &mut [u8]) {
    assert_eq!(row.len() * dtype.bytes(), to.len(), "a row and its place differ in length");
    let (whole, tail) = row.split_at(row.len() - row.len() % S::LANES);
    let (to, to_tail) = to.split_at_mut(whole.len() * dtype.bytes());
    for (from, to) in whole.chunks_exact(S::LANES).zip(to.chunks_exact_mut(S::LANES * dtype.bytes())) {
        let (x, to) = (simd.read(from), to.as_mut_ptr());
        // SAFETY: `to` is the start of `LANES` elements.
        unsafe {
            match dtype {
                DType::F32 => simd.store(to.cast(), x),
                DType::Bf16 => simd.store_bf16(to.cast(), x),
                DType::F16 => simd.store_f16(to.cast(), x),
            }
        }
    }
    dtype.encode(tail, to_tail);
}

/// What `of` gives for each index; `empty` is overwritten. In place of `std::array::from_fn`, which is no more than a hint to
/// inline, so that vectors of the closure would pass through memory.
#[inline(always)]
pub(crate) fn each<T: Copy, const N: usize>(empty: T, of: impl Fn(usize) -> T) -> [T; N] {
    let mut all = [empty; N];
    let mut index = 0;
    while index < N {
        all[index] = of(index);
        index += 1;
    }
    all
}

/// An instruction path with the unit in which it multiplies bf16.
pub trait Native: Simd {
    /// A pair of bf16 where the processor has dot products of them, else f32.
    type Bf16: super::pack::Packed<Self>;
}

/// An element type that rows are kept in.
pub trait Element: Pod + Send + Sync {
    /// Reads a vector of elements as f32.
    ///
    /// # Safety
    /// `from` is the start of `S::LANES` readable elements, of any alignment.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::Vector;
    /// Reads the first `count` lanes; the others become zero.
    ///
    /// # Safety
    /// `from` is the start of `count` readable elements, of any alignment, at most `S::LANES`.
    unsafe fn load_part<S: Simd>(simd: S, from: *const Self, count: usize) -> S::Vector;
    /// The element as f32.
    fn widen(self) -> f32;
    /// The rows, if they are of this type.
    fn rows(rows: Rows<'_>) -> Option<Strided<'_, Self>>;
}

macro_rules! element {
    ($type:ty, $variant:ident, $load:ident, $load_part:ident) => {
        impl Element for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::Vector {
                // SAFETY: the caller's promise.
                unsafe { simd.$load(from) }
            }

            #[inline(always)]
            unsafe fn load_part<S: Simd>(simd: S, from: *const Self, count: usize) -> S::Vector {
                // SAFETY: the caller's promise.
                unsafe { simd.$load_part(from, count) }
            }

            #[inline(always)]
            fn widen(self) -> f32 {
                f32::from(self)
            }

            #[inline(always)]
            fn rows(rows: Rows<'_>) -> Option<Strided<'_, Self>> {
                match rows {
                    Rows::$variant(rows) => Some(rows),
                    _ => None,
                }
            }
        }
    };
}

element!(f32, F32, load, load_part);
element!(bf16, Bf16, load_bf16, load_bf16_part);
element!(f16, F16, load_f16, load_f16_part);

/// What a packed operand of a product is made of: 32 bits that hold [`Unit::DEPTH`] neighbours along the inner extent.
pub trait Unit<S: Simd>: Pod + Send + Sync {
    /// Elements in a unit.
    const DEPTH: usize;
    /// A vector of units.
    type Operand: Copy;

    /// Reads a vector of units.
    ///
    /// # Safety
    /// `from` is the start of `S::LANES` readable units.
    unsafe fn load(simd: S, from: *const Self) -> Self::Operand;
    /// One unit in every lane.
    ///
    /// # Safety
    /// `from` is readable.
    unsafe fn broadcast(simd: S, from: *const Self) -> Self::Operand;
    /// `acc` plus the products of the units' elements.
    fn mul_add(simd: S, a: Self::Operand, b: Self::Operand, acc: S::Vector) -> S::Vector;
    /// Rounds `2 * LANES` neighbours along the inner extent into `2 * LANES / DEPTH` units at the start of `to`.
    fn put(simd: S, to: &mut [Self], low: S::Vector, high: S::Vector);
    /// Rounds `LANES` elements of each of [`Unit::DEPTH`] rows into units that hold one element of each row, at the
    /// start of `to`; `odd` counts where a unit holds two.
    fn put_rows(simd: S, to: &mut [Self], even: S::Vector, odd: S::Vector);

    /// Whether a matrix unit takes products of these units, in tiles of 16 rows.
    #[inline(always)]
    fn has_tiles(_: S) -> bool {
        false
    }

    /// The whole of a product of panels (`product::product`) by a matrix unit; false, and nothing done, where there is none or neither rows
    /// nor steps of `a` are neighbours.
    ///
    /// # Safety
    /// The extents are inside the three slices.
    #[inline(always)]
    unsafe fn multiply_tiles(
        _: S,
        _extents: Extents,
        _a: Left<'_, Self>,
        _b: Right<'_, Self>,
        _c: &mut [f32],
        _c_stride: usize,
        _add: bool,
    ) -> bool {
        false
    }
}

impl<S: Simd> Unit<S> for f32 {
    const DEPTH: usize = 1;
    type Operand = S::Vector;

    #[inline(always)]
    unsafe fn load(simd: S, from: *const Self) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }

    #[inline(always)]
    unsafe fn broadcast(simd: S, from: *const Self) -> S::Vector {
        // SAFETY: the caller's promise.
        simd.splat(unsafe { *from })
    }

    #[inline(always)]
    fn mul_add(simd: S, a: S::Vector, b: S::Vector, acc: S::Vector) -> S::Vector {
        simd.mul_add(a, b, acc)
    }

    #[inline(always)]
    fn put(simd: S, to: &mut [Self], low: S::Vector, high: S::Vector) {
        simd.write(to, low);
        simd.write(&mut to[S::LANES..], high);
    }

    #[inline(always)]
    fn put_rows(simd: S, to: &mut [Self], even: S::Vector, _odd: S::Vector) {
        simd.write(to, even);
    }
}

//! Vectors of four f32 that any target's compiler can place in registers (SSE2 and NEON have them).

use super::vector::each;
use super::{Element, Native, Simd};
use half::{bf16, f16};

/// The path without extensions.
#[derive(Clone, Copy)]
pub struct Portable;

type Lanes = [f32; 4];

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    each(0.0, |lane| f(a[lane], b[lane]))
}

/// The first `count` elements, zeros after them.
///
/// # Safety
/// `count` elements are readable.
#[inline(always)]
unsafe fn part<T: Element>(from: *const T, count: usize) -> Lanes {
    // SAFETY: the caller's promise.
    each(0.0, |lane| if lane < count { unsafe { from.add(lane).read_unaligned() }.widen() } else { 0.0 })
}

/// Adding it rounds an f32 below 2^22 to the nearest integer.
const ROUND: f32 = 12_582_912.0;

impl Simd for Portable {
    const LANES: usize = 4;
    const COLUMNS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
    type Vector = Lanes;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; 4]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Lanes {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Lanes>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Lanes {
        // SAFETY: the caller's promise.
        let bits = unsafe { from.cast::<[u16; 4]>().read_unaligned() };
        each(0.0, |lane| f32::from_bits(u32::from(bits[lane]) << 16))
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Lanes {
        // SAFETY: the caller's promise.
        let halves = unsafe { from.cast::<[f16; 4]>().read_unaligned() };
        each(0.0, |lane| halves[lane].to_f32())
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Lanes {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[i8; 4]>().read_unaligned() };
        each(0.0, |lane| f32::from(bytes[lane]))
    }

    #[inline(always)]
    unsafe fn splat_f16(self, from: *const f16) -> Lanes {
        // SAFETY: the caller's promise.
        [unsafe { from.read_unaligned() }.to_f32(); 4]
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, shift: u32, values: &[f32; 16]) -> Lanes {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
        each(0.0, |lane| values[usize::from(bytes[lane] >> shift & 15)])
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8, first: usize, values: &[f32; 8]) -> Lanes {
        // SAFETY: the caller's promise: eight codes are followed by two bytes.
        let bytes = unsafe { from.add(first / 8 * BITS).cast::<[u8; 4]>().read_unaligned() };
        let word = u32::from_le_bytes(bytes);
        each(0.0, |lane| values[(word >> ((first % 8 + lane) * BITS)) as usize & ((1 << BITS) - 1)])
    }

    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> Lanes {
        // SAFETY: the caller's promise.
        unsafe { part(from, count) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(self, from: *const bf16, count: usize) -> Lanes {
        // SAFETY: the caller's promise.
        unsafe { part(from, count) }
    }

    #[inline(always)]
    unsafe fn load_f16_part(self, from: *const f16, count: usize) -> Lanes {
        // SAFETY: the caller's promise.
        unsafe { part(from, count) }
    }

    #[inline(always)]
    unsafe fn load_i8_part(self, from: *const i8, count: usize) -> Lanes {
        // SAFETY: the caller's promise.
        each(0.0, |lane| if lane < count { f32::from(unsafe { *from.add(lane) }) } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Lanes>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[bf16; 4]>().write_unaligned(each(bf16::ZERO, |lane| bf16::from_f32(x[lane]))) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, x: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f16; 4]>().write_unaligned(each(f16::ZERO, |lane| f16::from_f32(x[lane]))) }
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn add_where(self, x: Lanes, bits: u32, more: f32) -> Lanes {
        let set = |lane: u32| if bits >> lane & 1 == 1 { more } else { 0.0 };
        zip(x, [set(0), set(1), set(2), set(3)], |x, more| x + more)
    }

    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        // Without the instruction a fused multiply-add is a call of the C library.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            each(0.0, |lane| a[lane].mul_add(b[lane], c[lane]))
        } else {
            each(0.0, |lane| a[lane] * b[lane] + c[lane])
        }
    }

    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn select_less(self, a: Lanes, b: Lanes, x: Lanes, y: Lanes) -> Lanes {
        each(0.0, |lane| if a[lane] < b[lane] { x[lane] } else { y[lane] })
    }

    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn round(self, x: Lanes) -> Lanes {
        each(0.0, |lane| (x[lane] + ROUND) - ROUND)
    }

    #[inline(always)]
    fn scale_or_zero(self, x: Lanes, exponent: Lanes, limit: Lanes) -> Lanes {
        each(0.0, |lane| {
            let bits = (exponent[lane] + ROUND).to_bits() << 23;
            let scaled = x[lane] * f32::from_bits(bits.wrapping_add(127 << 23));
            if limit[lane] < -126.0 { 0.0 } else { scaled }
        })
    }

    #[inline(always)]
    fn sum(self, x: Lanes) -> f32 {
        (x[0] + x[2]) + (x[1] + x[3])
    }

    #[inline(always)]
    fn sums(self, x: [Lanes; 4]) -> [f32; 4] {
        each(0.0, |row| self.sum(x[row]))
    }

    #[inline(always)]
    fn largest(self, x: Lanes) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const u8, from_stride_bytes: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise, for each row.
        let rows: [Lanes; 4] = each([0.0; 4], |row| unsafe { self.load(from.add(row * from_stride_bytes).cast()) });
        let columns: [Lanes; 4] = each([0.0; 4], |column| each(0.0, |row| rows[row][column]));
        for (column, lanes) in columns.into_iter().enumerate() {
            // SAFETY: likewise.
            unsafe { self.store(to.add(column * to_stride), lanes) };
        }
    }

    #[inline(always)]
    fn prefetch_for_work(self, _at: *const u8) {}

    #[inline(always)]
    fn prefetch_for_reading(self, _at: *const u8) {}
}

impl Native for Portable {
    type Bf16 = f32;
}

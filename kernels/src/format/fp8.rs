//! Eight-bit floats, OCP's `E4M3` and `E5M2`: a sign, four or five bits of exponent, three or two of mantissa, no scale.
//!
//! What vLLM's caches hold with scales of 1. `E4M3` reaches from 2^-9 to 448 in steps of 1/8 of a power of two, so that an element is
//! off by at most 1/16 of itself; `E5M2`, the upper byte of an f16, from 2^-16 to 57344 and 1/8. Rounded to the nearest, ties to
//! even; what is larger becomes the largest, as conversions with saturation do it. `E4M3` has no infinity: an element that
//! is not finite becomes its NaN.

use super::RowCodec;
use crate::device::simd::Simd;
use crate::device::simd::reader::RowReader;
use crate::named::{Named, NamedError};
use half::f16;

/// A byte with so many bits of mantissa: 3 for E4M3, 2 for E5M2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8<const MANTISSA: u32>;

impl<const MANTISSA: u32> Fp8<MANTISSA> {
    /// Exponent of the smallest normal number.
    const LEAST: i32 = if MANTISSA == 3 { -6 } else { -14 };
    /// Code of the largest number.
    const MOST: u8 = if MANTISSA == 3 { 0x7e } else { 0x7b };
    /// An f16 of the same exponent bits is so much smaller.
    const FACTOR: f32 = if MANTISSA == 3 { 256.0 } else { 1.0 };

    /// The bits of an f16 that is the number, but for `FACTOR`.
    #[inline(always)]
    fn half_bits(code: u8) -> u16 {
        let (sign, magnitude) = (u16::from(code & 0x80) << 8, u16::from(code & 0x7f));
        match MANTISSA {
            3 if magnitude == 0x7f => sign | 0x7e00,
            _ => sign | magnitude << (10 - MANTISSA),
        }
    }

    /// The code of the nearest number.
    pub(super) fn code(x: f32) -> u8 {
        let (sign, bits) = ((x.to_bits() >> 24) as u8 & 0x80, x.to_bits() & 0x7fff_ffff);
        // Of a normal number the bits behind the mantissa's are rounded, ties to even, and what is carried counts up the exponent.
        let behind = 23 - MANTISSA;
        let normal = ((bits + (1 << (behind - 1)) - 1 + (bits >> behind & 1)) >> behind) as i32;
        let normal = normal - ((126 + Self::LEAST) << MANTISSA);
        // A number whose last bit counts the smallest steps rounds to these what is added to it.
        let steps = f32::from_bits(((150 + Self::LEAST - MANTISSA as i32) as u32) << 23);
        let small = (f32::from_bits(bits) + steps).to_bits() as i32 - steps.to_bits() as i32;
        let is_small = bits < ((127 + Self::LEAST) as u32) << 23;
        let finite = (if is_small { small } else { normal }).min(Self::MOST.into()) as u8;
        let infinite = if MANTISSA == 3 { 0x7f } else { Self::MOST + 1 };
        let infinity = f32::INFINITY.to_bits();
        sign | if bits > infinity {
            0x7f
        } else if bits == infinity {
            infinite
        } else {
            finite
        }
    }
}

impl<const MANTISSA: u32> RowReader for Fp8<MANTISSA> {
    const SCALED: bool = false;

    #[inline(always)]
    fn row_bytes(self, width: usize) -> usize {
        width.next_multiple_of(4)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, row: *const u8, column: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { self.load_part(simd, row, column, S::LANES) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(self, simd: S, row: *const u8, column: usize, count: usize) -> S::Vector {
        let mut halves = [0u16; 16];
        for (lane, half) in halves[..count].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *half = Self::half_bits(unsafe { *row.add(column + lane) });
        }
        // SAFETY: there are 16 halves, and no path has more lanes.
        let vector = unsafe { simd.load_f16(halves.as_ptr().cast()) };
        if MANTISSA == 3 { simd.mul(vector, simd.splat(Self::FACTOR)) } else { vector }
    }

    #[inline(always)]
    unsafe fn scale(self, _row: *const u8) -> f32 {
        1.0
    }
}

impl<const MANTISSA: u32> RowCodec for Fp8<MANTISSA> {
    const NAME: &'static str = if MANTISSA == 3 { "fp8-e4m3" } else { "fp8-e5m2" };
    const ABOUT: &'static str = match MANTISSA {
        3 => "8-bit floats: 4 bits of precision, up to 448",
        _ => "8-bit floats: 3 bits of precision, up to 57344",
    };

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Fp8)
    }

    fn encode(self, row: &[f32], to: &mut [u8]) {
        let (codes, padding) = to.split_at_mut(row.len());
        codes.iter_mut().zip(row).for_each(|(code, &x)| *code = Self::code(x));
        padding.fill(0);
    }

    fn decode(self, from: &[u8], first: usize, to: &mut [f32]) {
        let widen = |code| f16::from_bits(Self::half_bits(code)).to_f32() * Self::FACTOR;
        to.iter_mut().zip(&from[first..]).for_each(|(x, &code)| *x = widen(code));
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn elements_by_hand() {
        // 17 lies between 16 and 18, a tie, and 16 is even; 19 between 18 and 20; 2^-9 is the smallest; 500 is cut off.
        let row = [1.0, 17.0, 19.0, -0.1, 2f32.powi(-9), 2f32.powi(-10), 500.0, -448.0];
        let e4m3 = [1.0, 16.0, 20.0, -0.1015625, 2f32.powi(-9), 0.0, 448.0, -448.0];
        assert_eq!(there_and_back("fp8-e4m3", &row.repeat(2)), e4m3.repeat(2));
        let e5m2 = [1.0, 16.0, 20.0, -0.09375, 2f32.powi(-9), 2f32.powi(-10), 512.0, -448.0];
        assert_eq!(there_and_back("fp8-e5m2", &row.repeat(2)), e5m2.repeat(2));
        let strangers = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e9].repeat(4);
        let back = there_and_back("fp8-e4m3", &strangers);
        assert!(back[..3].iter().all(|x| x.is_nan()) && back[3] == 448.0, "{back:?}");
        let back = there_and_back("fp8-e5m2", &strangers);
        assert!(back[..2] == strangers[..2] && back[2].is_nan() && back[3] == 57344.0, "{back:?}");
    }

    /// Every code is the nearest of what it stands for.
    #[test]
    fn codes_stand_for_themselves() {
        fn check<const MANTISSA: u32>() {
            for code in 0..=255u8 {
                let mut x = [0.0];
                Fp8::<MANTISSA>.decode(&[code], 0, &mut x);
                assert!(x[0].is_nan() || Fp8::<MANTISSA>::code(x[0]) == code, "code {code} is {}", x[0]);
            }
        }
        check::<3>();
        check::<2>();
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_step_at_most(row in prop::collection::vec(-448f32..448.0, 32), power in -12i32..1) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(power)).collect();
            for (format, relative, least) in [("fp8-e4m3", 1.0 / 16.0, -10), ("fp8-e5m2", 1.0 / 8.0, -17)] {
                for (x, back) in row.iter().zip(there_and_back(format, &row)) {
                    let bound = (x.abs() * relative).max(2f32.powi(least));
                    prop_assert!((x - back).abs() <= bound, "{format}: {x} became {back}");
                }
            }
        }
    }
}

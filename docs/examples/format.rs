use super::RowCodec;
use crate::device::simd::Simd;
use crate::device::simd::reader::RowReader;
use crate::named::{Named, NamedError};
use half::f16;

/// The upper byte of an f16: a sign, five bits of exponent, two of mantissa (OCP's E5M2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct E5m2;

fn widen(code: u8) -> f32 {
    f16::from_bits(u16::from(code) << 8).to_f32()
}

impl RowReader for E5m2 {
    const SCALED: bool = false;

    fn row_bytes(self, width: usize) -> usize {
        width
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, row: *const u8, column: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { self.load_part(simd, row, column, S::LANES) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(self, simd: S, row: *const u8, column: usize, count: usize) -> S::Vector {
        let mut halves = [f16::ZERO; 16];
        for (index, half) in halves[..count].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *half = f16::from_bits(u16::from(unsafe { *row.add(column + index) }) << 8);
        }
        // SAFETY: there are 16 halves, and no path has more lanes.
        unsafe { simd.load_f16(halves.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn scale(self, _row: *const u8) -> f32 {
        1.0
    }
}

impl RowCodec for E5m2 {
    const NAME: &'static str = "e5m2";
    const ABOUT: &'static str = "8-bit floats: the range of f16, 3 bits of precision";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(E5m2)
    }

    fn encode(self, row: &[f32], to: &mut [u8]) {
        // To the nearest of the two neighbours that the upper byte can hold.
        let upper = |x: f32| (f16::from_f32(x).to_bits() >> 8) as u8;
        let nearest = |x: f32| match (upper(x), upper(x).saturating_add(1)) {
            (low, high) if (widen(high) - x).abs() < (x - widen(low)).abs() => high,
            (low, _) => low,
        };
        to.iter_mut().zip(row).for_each(|(code, &x)| *code = nearest(x));
    }

    fn decode(self, from: &[u8], first: usize, to: &mut [f32]) {
        to.iter_mut().zip(&from[first..]).for_each(|(x, &code)| *x = widen(code));
    }
}

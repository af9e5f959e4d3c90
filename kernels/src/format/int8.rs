//! A signed byte for each element, and one scale for each row, that is for each token of each KV head.
//!
//! `scale = max |x| / 127`, `code = round(x / scale)`: symmetric quantisation without a zero point, as vLLM's and
//! TensorRT-LLM's INT8 caches do it, but with a scale of each token's own, so that nothing has to be calibrated and a
//! token of large norm costs its neighbours nothing. Codes are whole numbers from -127 to 127; an element is off by at
//! most half a scale. The row begins with its scale in f32, so that a head of D elements takes D + 4 bytes, rounded up to
//! whole words: 132 of 256 in bf16 at D 128. Elements that are not finite make the row's scale so, and the row NaN.

use super::RowCodec;
use super::blocks::{byte, largest, nearest_even};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::device::simd::reader::RowReader;
use crate::named::{Named, NamedError};

/// Bytes of the scale in front of the codes.
const SCALE_BYTES: usize = 4;

/// Bytes with a scale for each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int8;

impl Int8 {
    /// Largest code.
    pub const MOST: f32 = 127.0;

    /// Writes a row under a scale that is not its own: elements beyond -128 or 127 of it become these, as compressed-tensors has it. One that
    /// is not finite makes the row NaN.
    pub fn encode_under(self, scale: f32, row: &[f32], to: &mut [u8]) {
        let kept = if row.iter().all(|x| x.is_finite()) { scale } else { f32::NAN };
        Int8::put(kept, row.iter().map(|x| byte(nearest_even((x / scale).clamp(-Int8::MOST - 1.0, Int8::MOST)))), to);
    }

    /// Writes a row of these codes.
    pub fn put(scale: f32, codes: impl ExactSizeIterator<Item = i8>, to: &mut [u8]) {
        let (head, bytes) = to.split_at_mut(SCALE_BYTES);
        head.copy_from_slice(&scale.to_ne_bytes());
        let (bytes, padding) = bytes.split_at_mut(codes.len());
        bytes.iter_mut().zip(codes).for_each(|(byte, code)| *byte = code.cast_unsigned());
        padding.fill(0);
    }
}

impl RowReader for Int8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn row_bytes(self, width: usize) -> usize {
        (SCALE_BYTES + width).next_multiple_of(SCALE_BYTES)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, row: *const u8, column: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { simd.load_i8(row.add(SCALE_BYTES + column).cast()) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(self, simd: S, row: *const u8, column: usize, count: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { simd.load_i8_part(row.add(SCALE_BYTES + column).cast(), count) }
    }

    #[inline(always)]
    unsafe fn scale(self, row: *const u8) -> f32 {
        // SAFETY: the caller's promise; a row begins with its scale.
        unsafe { row.cast::<f32>().read_unaligned() }
    }
}

impl RowCodec for Int8 {
    const NAME: &'static str = "int8";
    const ABOUT: &'static str = "a signed byte for each element and an f32 scale for each token of each KV head";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Int8)
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Row)
    }

    fn encode(self, row: &[f32], to: &mut [u8]) {
        let scale = largest(row) / Int8::MOST;
        // Zeros are divided by 1. Not a product with the reciprocal: that of a subnormal scale is infinite.
        let by = if scale == 0.0 { 1.0 } else { scale };
        Int8::put(scale, row.iter().map(|x| byte(nearest_even(x / by))), to);
    }

    fn decode(self, from: &[u8], first: usize, to: &mut [f32]) {
        let (scale, codes) = from.split_at(SCALE_BYTES);
        let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        to.iter_mut().zip(&codes[first..]).for_each(|(x, &code)| *x = scale * f32::from(code as i8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn there_and_back(row: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0xff; Int8.row_bytes(row.len())];
        Int8.encode(row, &mut bytes);
        let mut back = vec![f32::NAN; row.len()];
        Int8.decode(&bytes, 0, &mut back);
        back
    }

    #[test]
    fn a_row_by_hand() {
        // The largest is 2.54, so the scale is 0.02: 1.0 is 50 scales, 0.031 is 1.55 and becomes 2 of them.
        let back = there_and_back(&[2.54, -1.0, 0.031, 0.0, -2.54]);
        for (got, expected) in back.iter().zip([2.54, -1.0, 0.04, 0.0, -2.54]) {
            assert!((got - expected).abs() < 1e-6, "{back:?}");
        }
        assert_eq!(there_and_back(&[0.0; 5]), [0.0; 5]);
        // A scale without a reciprocal: 1.27e-38 is 127 of it, -5e-39 is -50.
        let tiny = there_and_back(&[1.27e-38, -5e-39]);
        assert!((tiny[0] / 1.27e-38 - 1.0).abs() < 1e-4 && (tiny[1] / -5e-39 - 1.0).abs() < 1e-4, "{tiny:?}");
        assert!(there_and_back(&[1.0, f32::NAN]).iter().all(|x| x.is_nan()));
        assert!(there_and_back(&[1.0, f32::INFINITY]).iter().any(|x| !x.is_finite()));
    }

    #[test]
    fn a_row_under_another_scale_by_hand() {
        let under = |scale, row: &[f32]| {
            let (mut bytes, mut back) = (vec![0xff; Int8.row_bytes(row.len())], vec![0.0; row.len()]);
            Int8.encode_under(scale, row, &mut bytes);
            Int8.decode(&bytes, 0, &mut back);
            back
        };
        // 0.3 is 1.2 of the scale, 0.375 a half more than 1, and ties go to the even one; 31.75 is the most that it holds, -32 the least.
        assert_eq!(under(0.25, &[0.3, 0.375, -0.6, 31.75, 1e30, -40.0]), [0.25, 0.5, -0.5, 31.75, 31.75, -32.0]);
        for x in [f32::NAN, f32::INFINITY] {
            assert!(under(0.25, &[1.0, x]).iter().all(|x| x.is_nan()));
        }
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_scale_at_most(row in prop::collection::vec(-1e3f32..1e3, 1..200), power in -30i32..30) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(power)).collect();
            let most = row.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            for (x, back) in row.iter().zip(there_and_back(&row)) {
                prop_assert!((x - back).abs() <= most / Int8::MOST * 0.501, "{x} became {back}, largest {most}");
            }
        }
    }
}

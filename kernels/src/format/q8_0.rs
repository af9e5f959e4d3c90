//! llama.cpp's `q8_0`: a signed byte for each element and an f16 scale for each 32 neighbours, `x = d q`.
//!
//! `d = max |x| / 127`, and `q = round(x / d)`, halves away from zero, before `d` itself is rounded to f16: what is kept is, bit
//! by bit, what ggml keeps. An element is off by at most half a scale and what f16 rounds of it, 0.563 `d` in all. 34 bytes for 32
//! elements: 8.5 bits.

use super::blocks::{Blocks, byte, half_at, largest, nearest, put_half};
use crate::device::simd::Simd;
use crate::device::simd::integers::Codes;
use crate::named::{Named, NamedError};

/// Bytes with a scale for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Q8_0;

impl Blocks for Q8_0 {
    const NAME: &'static str = "q8_0";
    const ABOUT: &'static str = "as llama.cpp: a signed byte for each element, an f16 scale for each 32";

    fn build(_: &Named) -> Result<Self, NamedError> {
        Ok(Q8_0)
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        34
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale.
        unsafe { simd.mul(simd.splat_f16(block.cast()), simd.load_i8(block.add(2 + offset).cast())) }
    }

    fn codes(self) -> Option<Codes> {
        Some(Codes::Bytes)
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let d = largest(block) / 127.0;
        put_half(to, 0, d);
        let per = if d == 0.0 { 0.0 } else { 1.0 / d };
        to[2..].iter_mut().zip(block).for_each(|(code, x)| *code = byte(nearest(x * per)).cast_unsigned());
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let d = half_at(block, 0);
        to.iter_mut().zip(&block[2..]).for_each(|(x, &code)| *x = d * f32::from(code.cast_signed()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use proptest::prelude::*;

    #[test]
    fn a_block_by_hand() {
        // The largest is 63.5, so d is 0.5: 1.3 is 2.6 of it, and 0.25 is a half, which goes away from zero.
        let mut row = [0.0; 32];
        row[..4].copy_from_slice(&[-63.5, 1.3, 0.25, -0.25]);
        assert_eq!(there_and_back("q8_0", &row)[..5], [-63.5, 1.5, 0.5, -0.5, 0.0]);
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_scale_and_what_f16_rounds(row in prop::collection::vec(-1e3f32..1e3, 64)) {
            for (block, back) in row.chunks(32).zip(there_and_back("q8_0", &row).chunks(32)) {
                let d = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
                for (x, back) in block.iter().zip(back) {
                    prop_assert!((x - back).abs() <= 0.565 * d, "{x} became {back}, scale {d}");
                }
            }
        }
    }
}

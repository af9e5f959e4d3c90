//! Eight-bit floats `E4M3` with an f32 scale for each group of neighbours in a row.
//!
//! What folders of fp8 weights hold (DeepSeek's and Qwen3's with a scale for each 128 x 128 block, others with one for each row or one
//! for all), with the scale beside each row's part of a block: `x = scale * code`, rounded to f32 once. The encoder takes `scale = max
//! |x| / 448`, the largest that the codes reach; an element is off by 1/16 of itself ([`super::fp8`]). 132 bytes for 128 elements: 8.25
//! bits.

use super::RowCodec;
use super::blocks::{self, Blocks, largest};
use super::fp8::Fp8;
use crate::device::simd::Simd;
use crate::device::simd::reader::RowReader;
use crate::named::{Named, NamedError, Parameter};
use std::fmt;

/// Elements of a group, where nothing else is asked for.
const GROUP: usize = 128;
/// Bytes of the scale in front of the codes.
const SCALE_BYTES: usize = 4;
/// Largest number of the codes.
const MOST: f32 = 448.0;

/// Eight-bit floats with a scale for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Scaled {
    group: usize,
}

impl Fp8Scaled {
    /// Groups of so many elements: a power of two from 32 to 256.
    pub fn new(group: usize) -> Self {
        Fp8Scaled { group }
    }

    /// Writes a block of these codes.
    pub fn put(scale: f32, codes: &[u8], to: &mut [u8]) {
        let (head, bytes) = to.split_at_mut(SCALE_BYTES);
        head.copy_from_slice(&scale.to_le_bytes());
        bytes.copy_from_slice(codes);
    }
}

impl Blocks for Fp8Scaled {
    const NAME: &'static str = "fp8-scaled";
    const ABOUT: &'static str = "weights: 8-bit floats of 4 bits of precision and an f32 scale for each group";
    const PARAMETERS: &'static [Parameter] =
        &[Parameter { name: "group", default: "128", about: "elements that share a scale: 32, 64, 128 or 256" }];
    const OF_WEIGHTS: bool = true;

    fn build(named: &Named) -> Result<Self, NamedError> {
        Ok(Fp8Scaled { group: blocks::group(named, GROUP)? })
    }

    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        write!(to, "{}:group={}", <Self as Blocks>::NAME, self.group)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        self.group
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        SCALE_BYTES + self.group
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale.
        unsafe {
            let scale = f32::from_bits(u32::from_le(block.cast::<u32>().read_unaligned()));
            simd.mul(simd.splat(scale), Fp8::<3>.load(simd, block.add(SCALE_BYTES), offset))
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        // An element that is not finite makes the scale so, and the block.
        let scale = largest(block) / MOST;
        let (head, codes) = to.split_at_mut(SCALE_BYTES);
        head.copy_from_slice(&scale.to_le_bytes());
        // 0 / 0 is NaN: a block of zeros is zeros all the same.
        let code = |x: f32| if scale == 0.0 { 0 } else { Fp8::<3>::code(x / scale) };
        codes.iter_mut().zip(block).for_each(|(to, &x)| *to = code(x));
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (scale, codes) = block.split_at(SCALE_BYTES);
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        RowCodec::decode(Fp8::<3>, codes, 0, to);
        to.iter_mut().for_each(|x| *x *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use proptest::prelude::*;

    #[test]
    fn a_group_by_hand() {
        // The largest is 44.8, so the scale is 0.1: 1.7 is 17 of it, a tie between 16 and 18, and 16 is even.
        let mut row = [0.0; 128];
        row[..3].copy_from_slice(&[44.8, 1.0, -1.9]);
        for (got, expected) in there_and_back("fp8-scaled", &row).iter().zip([44.8, 1.0, -2.0, 0.0]) {
            assert!((got - expected).abs() < 1e-5, "{got} is not {expected}");
        }
        assert_eq!(there_and_back("fp8-scaled", &[0.0; 128]), [0.0; 128]);
        for x in [f32::NAN, f32::INFINITY] {
            let mut row = [1.0; 256];
            row[200] = x;
            let back = there_and_back("fp8-scaled", &row);
            assert!(!back[200].is_finite() && back[..128] == row[..128], "{back:?}");
        }
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_a_sixteenth_at_most(row in prop::collection::vec(-1f32..1.0, 256), power in -30i32..30) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(power)).collect();
            for group in [32, 64, 128, 256] {
                let back = there_and_back(&format!("fp8-scaled:group={group}"), &row);
                for (block, back) in row.chunks(group).zip(back.chunks(group)) {
                    let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    for (x, back) in block.iter().zip(back) {
                        let bound = (x.abs() / 15.9).max(most / 448.0 / 1023.0);
                        prop_assert!((x - back).abs() <= bound, "{x} became {back}");
                    }
                }
            }
        }
    }
}

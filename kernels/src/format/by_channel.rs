//! Keys by channel: tokens in groups, and for each channel of a group an f16 scale and an f16 minimum of its own.
//!
//! Keys have channels that are large in every token. A scale along the channel gives each of them its own steps, where a scale along
//! the token gives all its neighbours theirs. `scale = (max - min) / (2^bits - 1)` with the minimum as f16 has it, and
//! `x = scale * code + min` for codes from 0 on, as KIVI has it for keys (arXiv 2402.02750; quant/new_pack.py of its code). An element is
//! off by at most half a scale, besides what f16 rounds of scale and minimum. A token's row is its codes alone; what its group shares lies apart, so that a token that moves in the
//! cache keeps its codes and stays with its group ([`ChannelScales`]).

use super::blocks::{self, Blocks, LEAST, MOST, UNSIGNED, code, codes, nearest_even, put_codes};
use crate::device::simd::Simd;
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::ChannelScales;
use half::f16;
use std::fmt;

/// Tokens of a group, where nothing else is asked for.
const GROUP: usize = 32;

/// Codes of so many bits, whose scales groups of tokens share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByChannel<const BITS: usize> {
    group: usize,
}

impl<const BITS: usize> Blocks for ByChannel<BITS> {
    const NAME: &'static str = match BITS {
        2 => "int2-channel",
        4 => "int4-channel",
        _ => "int8-channel",
    };
    const ABOUT: &'static str = match BITS {
        2 => "keys: two bits, an f16 scale and minimum for each channel of a group of tokens",
        4 => "keys: four bits, an f16 scale and minimum for each channel of a group of tokens",
        _ => "keys: a byte, an f16 scale and minimum for each channel of a group of tokens",
    };
    const PARAMETERS: &'static [Parameter] =
        &[Parameter { name: "group", default: "32", about: "tokens that share a scale: 32, 64, 128 or 256" }];

    fn build(named: &Named) -> Result<Self, NamedError> {
        Ok(ByChannel { group: blocks::group(named, GROUP)? })
    }

    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        write!(to, "{}:group={}", <Self as Blocks>::NAME, self.group)
    }

    fn group_tokens(self) -> Option<usize> {
        Some(self.group)
    }

    fn steps(self) -> f32 {
        ((1 << BITS) - 1) as f32
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        LEAST / 8 * BITS
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise. Codes of two bits are read two bytes further, where the next row or values are.
        unsafe {
            match BITS {
                8 => simd.add(simd.load_i8(block.add(offset).cast()), simd.splat(128.0)),
                _ => codes::<S, BITS>(simd, block, offset, &UNSIGNED.values),
            }
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            match BITS {
                4 => simd.load_32_nibbles(block, &UNSIGNED, (simd.splat(1.0), None), to),
                _ => {
                    for (index, to) in to.iter_mut().enumerate() {
                        *to = self.vector(simd, block, offset + index * S::LANES);
                    }
                }
            }
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        match BITS {
            // A signed byte is what registers are filled from.
            8 => to.iter_mut().zip(block).for_each(|(to, &x)| *to = x as u8 ^ 0x80),
            _ => put_codes(BITS, block, |x| x as u8, to),
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        match BITS {
            8 => to.iter_mut().zip(block).for_each(|(x, &code)| *x = f32::from(code ^ 0x80)),
            _ => to.iter_mut().enumerate().for_each(|(index, x)| *x = f32::from(code(BITS, block, index))),
        }
    }
}

/// Scales and minimums of the channels of a group of tokens `[tokens, D]`, whose `steps` are codes less one; `scales` and `minimums`
/// hold `D`. A channel with an element that is not finite has such a minimum.
pub fn measure(group: &[f32], steps: f32, scales: &mut [f16], minimums: &mut [f16]) {
    let width = scales.len();
    let (mut least, mut most, mut magnitude) = ([f32::INFINITY; MOST], [f32::NEG_INFINITY; MOST], [0; MOST]);
    for key in group.chunks_exact(width) {
        for (((x, least), most), magnitude) in key.iter().zip(&mut least).zip(&mut most).zip(&mut magnitude) {
            (*least, *most) = (least.min(*x), most.max(*x));
            *magnitude = (x.abs().to_bits().cast_signed()).max(*magnitude);
        }
    }
    let bounds = least.iter().zip(&most).zip(&magnitude);
    for ((scale, minimum), ((least, most), &magnitude)) in scales.iter_mut().zip(minimums).zip(bounds) {
        let is_finite = f32::from_bits(magnitude.cast_unsigned()).is_finite();
        *minimum = f16::from_f32(if is_finite { *least } else { f32::NAN });
        *scale = f16::from_f32((most - minimum.to_f32()) / steps);
    }
}

/// Tokens' keys `[tokens, D]` become codes, whole numbers up to `steps`: outside what the group spans, the nearest that there is.
pub fn to_codes(keys: &mut [f32], steps: f32, channels: ChannelScales<'_>) {
    let width = channels.scales.len();
    let [scales, minimums] = channels.widened::<MOST>(0, width);
    for key in keys.chunks_exact_mut(width) {
        for (x, (scale, minimum)) in key.iter_mut().zip(scales.iter().zip(&minimums)) {
            // 0 / 0 is NaN, and `max` makes it 0.
            *x = nearest_even(((*x - minimum) / scale).max(0.0).min(steps));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whole_numbers_are_kept_as_they_are() {
        for (format, codes) in [("int4-channel", 16), ("int8-channel", 256)] {
            let row: Vec<f32> = (0..64).map(|x| (x * 37 % codes) as f32).collect();
            assert_eq!(there_and_back(format, &row), row, "{format}");
        }
    }

    #[test]
    fn a_group_by_hand() {
        // Channel 0 goes from 1 to 8.5 in 15 steps of 0.5, channel 1 is the same in all tokens.
        let mut group: Vec<f32> =
            (0..32).flat_map(|token| [if token == 31 { 8.5 } else { 1.0 + token as f32 * 0.2 }, -3.0]).collect();
        let (mut scales, mut minimums) = ([f16::ZERO; 2], [f16::ZERO; 2]);
        measure(&group, 15.0, &mut scales, &mut minimums);
        assert_eq!((scales.map(f16::to_f32), minimums.map(f16::to_f32)), ([0.5, 0.0], [1.0, -3.0]));
        let channels = ChannelScales { scales: &scales, minimums: &minimums };
        group.chunks_exact_mut(2).for_each(|key| to_codes(key, 15.0, channels));
        // 1, 1.2, 1.4, 1.6 are 0, 0.4, 0.8, 1.2 steps above the minimum.
        assert_eq!((&group[..8], &group[62..]), (&[0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0][..], &[15.0, 0.0][..]));
        channels.apply(0, &mut group[62..]);
        assert_eq!(group[62..], [8.5, -3.0]);
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_scale_at_most(
            numbers in prop::collection::vec(-1e3f32..1e3, 32 * 8),
            shift in -500f32..500.0,
            bits in prop::sample::select(vec![2, 4, 8]),
        ) {
            let group: Vec<f32> = numbers.iter().map(|x| x + shift).collect();
            let (mut scales, mut minimums) = ([f16::ZERO; 8], [f16::ZERO; 8]);
            let steps = ((1 << bits) - 1) as f32;
            measure(&group, steps, &mut scales, &mut minimums);
            let channels = ChannelScales { scales: &scales, minimums: &minimums };
            for key in group.chunks_exact(8) {
                let mut back = key.to_vec();
                to_codes(&mut back, steps, channels);
                channels.apply(0, &mut back);
                for (channel, (x, back)) in key.iter().zip(back).enumerate() {
                    // What f16 rounds of the minimum and of `steps` scales comes on top.
                    let bound = scales[channel].to_f32() * (0.5 + steps / 2048.0) + 1500.0 / 2048.0;
                    prop_assert!((x - back).abs() <= bound, "{x} became {back}, at most {bound} off");
                }
            }
        }
    }
}

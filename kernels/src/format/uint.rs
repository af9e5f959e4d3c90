//! Four or eight bits for each element without a sign, and an f16 scale and a whole zero point for each group of neighbours in a row.
//!
//! `x = scale * (code - zero)`: asymmetric quantisation as GPTQ and AWQ keep weights (arXiv 2210.17323, 2306.00978), whose folders are
//! repacked into these rows without a change of any number. Codes are 0 to 15 (255), and so is the zero point, so that zero itself is
//! exact. The encoder takes `scale = (max - min) / 15` over the group and zero, rounded to nearest: an element is off by half a
//! scale, besides what f16 rounds of it. A group of 128 takes 67 bytes, 4.1875 bits an element, of eight bits 131, 8.1875.
//! Products of an f16 and a difference of two codes have at most 20 bits, so that nothing is rounded in f32, in whichever order.

use super::RowFormat;
use super::blocks::{self, Blocks, UNSIGNED, half_at, largest, nibble, nibbles, put_nibbles};
use crate::device::simd::Simd;
use crate::named::{Named, NamedError, Parameter};
use half::f16;
use std::fmt;

/// Which codes there are, and how many neighbours of a row share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Of a code: 4 or 8.
    pub bits: u32,
    /// Elements that share a scale and a zero point.
    pub group: usize,
    /// Whether zero is in the middle of the codes, whatever the elements.
    pub symmetric: bool,
    /// The least zero point: 1 where files hold it less one, which programs read differently of a zero point of 0.
    pub least_zero: u8,
}

/// What a group's codes stand for: `x = scale (code - zero)`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Step {
    /// Of one code.
    pub scale: f16,
    /// The code of zero.
    pub zero: u8,
}

impl Grid {
    fn most(self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }

    /// The scale and the zero point whose codes reach over a group and zero. The scale is no finite number where an element is none, or f16
    /// holds none.
    pub fn step(self, group: &[f32]) -> Step {
        let (least, most) = group.iter().fold((0.0f32, 0.0f32), |(least, most), &x| (least.min(x), most.max(x)));
        let (least, most) = match self.symmetric {
            true => (-most.max(-least), most.max(-least)),
            false => (least, most),
        };
        // What lies above zero reaches to the last code from the least zero point too.
        let least_zero = f32::from(self.least_zero);
        let scale = ((most - least) / self.most()).max(most / (self.most() - least_zero));
        // Comparisons pass over a NaN.
        let scale = if largest(group).is_finite() { scale } else { f32::NAN };
        let scale = f16::from_f32(scale);
        let zero = match self.symmetric {
            true => (self.most() + 1.0) / 2.0,
            // 0 / 0 is NaN, and becomes the least.
            false => (-least / scale.to_f32()).round_ties_even().max(least_zero).min(self.most()),
        };
        Step { scale, zero: zero as u8 }
    }
}

impl Step {
    /// The code nearest to an element. Of a scale of 0 any stands for 0.
    pub fn code(self, grid: Grid, x: f32) -> u8 {
        ((x / self.scale.to_f32()).round_ties_even() + f32::from(self.zero)).clamp(0.0, grid.most()) as u8
    }

    /// What a code stands for.
    pub fn element(self, code: u8) -> f32 {
        self.scale.to_f32() * (f32::from(code) - f32::from(self.zero))
    }

    /// What the code nearest to an element stands for.
    pub fn nearest(self, grid: Grid, x: f32) -> f32 {
        self.element(self.code(grid, x))
    }
}

/// Elements of a group, where nothing else is asked for: those of most published folders.
const GROUP: usize = 128;
/// Bytes of the scale and the zero point in front of the codes.
const HEAD_BYTES: usize = 3;

/// Codes of so many bits with a scale and a zero point for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uint<const BITS: usize> {
    group: usize,
}

impl<const BITS: usize> Uint<BITS> {
    /// Groups of so many elements: a power of two from 32 to 256.
    pub fn new(group: usize) -> Self {
        Uint { group }
    }

    /// Bytes of a block of so many elements.
    #[inline(always)]
    pub fn block_bytes(elements: usize) -> usize {
        HEAD_BYTES + elements / 8 * BITS
    }

    /// Writes a block whose elements have these codes.
    pub fn put(scale: f16, zero: u8, codes: impl Fn(usize) -> u8, to: &mut [u8]) {
        let (head, bytes) = to.split_at_mut(HEAD_BYTES);
        head[..2].copy_from_slice(&scale.to_le_bytes());
        head[2] = zero;
        for (part, to) in bytes.chunks_exact_mut(4 * BITS).enumerate() {
            let codes = std::array::from_fn(|index| codes(32 * part + index));
            match BITS {
                4 => put_nibbles(&codes, to),
                // A signed byte is what registers are filled from.
                _ => to.iter_mut().zip(codes).for_each(|(byte, code)| *byte = code ^ 0x80),
            }
        }
    }

    /// What code 0 of the registers stands for, of a scale of 1: bytes are read with a sign.
    #[inline(always)]
    fn least(zero: u8) -> f32 {
        if BITS == 4 { -f32::from(zero) } else { 128.0 - f32::from(zero) }
    }
}

impl From<Uint<4>> for RowFormat {
    fn from(format: Uint<4>) -> Self {
        RowFormat::Uint4(format)
    }
}

impl From<Uint<8>> for RowFormat {
    fn from(format: Uint<8>) -> Self {
        RowFormat::Uint8(format)
    }
}

impl<const BITS: usize> Blocks for Uint<BITS> {
    const NAME: &'static str = if BITS == 4 { "uint4" } else { "uint8" };
    const ABOUT: &'static str = if BITS == 4 {
        "weights: as GPTQ and AWQ: four bits for each element, an f16 scale and a whole zero point for each group"
    } else {
        "weights: as GPTQ: a byte for each element, an f16 scale and a whole zero point for each group"
    };
    const PARAMETERS: &'static [Parameter] =
        &[Parameter { name: "group", default: "128", about: "elements that share a scale: 32, 64, 128 or 256" }];
    const OF_WEIGHTS: bool = true;

    fn build(named: &Named) -> Result<Self, NamedError> {
        Ok(Uint { group: blocks::group(named, GROUP)? })
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
        Self::block_bytes(self.group)
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale and the zero point.
        unsafe {
            let (scale, codes) = (simd.splat_f16(block.cast()), block.add(HEAD_BYTES));
            let least = simd.mul(scale, simd.splat(Self::least(*block.add(2))));
            let code = match BITS {
                4 => nibbles(simd, codes, offset, &UNSIGNED.values),
                _ => simd.load_i8(codes.add(offset).cast()),
            };
            simd.add(simd.mul(scale, code), least)
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            if BITS == 4 {
                let scale = simd.splat_f16(block.cast());
                let least = simd.mul(scale, simd.splat(Self::least(*block.add(2))));
                simd.load_32_nibbles(block.add(HEAD_BYTES + offset / 2), &UNSIGNED, (scale, Some(least)), to);
            } else {
                for (index, to) in to.iter_mut().enumerate() {
                    *to = self.vector(simd, block, offset + index * S::LANES);
                }
            }
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let grid = Grid { bits: BITS as u32, group: self.group, symmetric: false, least_zero: 0 };
        let step = grid.step(block);
        Self::put(step.scale, step.zero, |index| step.code(grid, block[index]), to);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (scale, codes) = (half_at(block, 0), &block[HEAD_BYTES..]);
        let least = scale * Self::least(block[2]);
        let code = |index: usize| match BITS {
            4 => f32::from(nibble(codes, index)),
            _ => f32::from(codes[index].cast_signed()),
        };
        to.iter_mut().enumerate().for_each(|(index, x)| *x = scale * code(index) + least);
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use super::super::{RowFormat, Uint};
    use crate::tensor::RowCode;
    use half::f16;
    use proptest::prelude::*;

    #[test]
    fn a_group_by_hand() {
        // From -2 to 5.5 in 15 steps of 0.5: zero is code 4. 1.1 is 2.2 steps, -0.8 is -1.6 of them.
        let mut row = [0.0; 32];
        row[..4].copy_from_slice(&[5.5, 1.1, -0.8, -2.0]);
        let back = there_and_back("uint4:group=32", &row);
        assert_eq!((&back[..4], &back[4..]), (&[5.5, 1.0, -1.0, -2.0][..], &[0.0; 28][..]));
        // Codes to one side of zero have it as their end.
        assert_eq!(there_and_back("uint4:group=32", &[7.5; 32]), [7.5; 32]);
        assert_eq!(there_and_back("uint8", &[0.0; 128]), [0.0; 128]);
        for format in ["uint4", "uint8"] {
            for x in [f32::NAN, f32::INFINITY, 1e9] {
                let mut row = [1.0; 256];
                row[200] = x;
                let back = there_and_back(format, &row);
                assert!(!back[200].is_finite() && back[..128].iter().all(|x| x.is_finite()), "{format}: {x}");
            }
        }
    }

    #[test]
    fn every_code_stands_for_its_distance_from_every_zero_point() {
        let scale = f16::from_f32(0.0371);
        for zero in 0..=255u8 {
            let (mut bytes, mut values) = ([0; 259], [0.0; 256]);
            Uint::<8>::put(scale, zero, |index| index as u8, &mut bytes);
            "uint8:group=256".parse::<RowFormat>().unwrap().decode(&bytes, 0, &mut values);
            for (code, value) in values.iter().enumerate() {
                assert_eq!(*value, scale.to_f32() * (code as f32 - f32::from(zero)), "{code} from {zero}");
            }
            if zero < 16 {
                Uint::<4>::put(scale, zero, |index| (index % 16) as u8, &mut bytes[..131]);
                "uint4:group=256".parse::<RowFormat>().unwrap().decode(&bytes[..131], 0, &mut values);
                for (code, value) in values.iter().enumerate() {
                    assert_eq!(*value, scale.to_f32() * ((code % 16) as f32 - f32::from(zero)), "{code} from {zero}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_scale_at_most(
            row in prop::collection::vec(-1e2f32..1e2, 256),
            shift in -100f32..100.0,
        ) {
            let row: Vec<f32> = row.iter().map(|x| x + shift).collect();
            for (bits, group) in [4, 8].into_iter().flat_map(|bits| [32, 64, 128, 256].map(|group| (bits, group))) {
                let back = there_and_back(&format!("uint{bits}:group={group}"), &row);
                let steps = ((1 << bits) - 1) as f32;
                for (x, (row, back)) in row.chunks(group).zip(back.chunks(group)).flat_map(|(row, back)| {
                    row.iter().zip(row.iter().zip(back).map(move |(_, back)| (row, back)))
                }) {
                    let (least, most) = row.iter().fold((0.0f32, 0.0f32), |(least, most), &x| (least.min(x), most.max(x)));
                    // The zero point is rounded too, and what f16 rounds of the scale grows with the codes.
                    let bound = (most - least) / steps * (1.01 + steps / 2048.0);
                    prop_assert!((x - back).abs() <= bound, "{x} became {back}, at most {bound} off");
                }
            }
        }
    }
}

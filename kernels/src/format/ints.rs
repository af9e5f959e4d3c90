//! Two, three or four bits for each element, and an f16 scale, perhaps with a zero point, for each group of neighbours in a row.
//!
//! Symmetric, of four bits: `scale = max |x| / 7`, codes are whole numbers from -7 to 7, kept as 1 to 15; zero is exact. Three
//! bits have -3 to 3, two have -1 to 1. With a zero point `scale = (max - min) / 15` (7, 3), with the minimum as f16 has it, and
//! `x = scale * code + min` for codes from 0 on, as KIVI has it for values (arXiv 2402.02750): where the elements of a group lie to
//! one side, no code is lost to the other. An element is off by at most half a scale, besides what f16 rounds of scale and minimum. A group of 32
//! takes 18, 14 or 10 bytes (4.5, 3.5, 2.5 bits an element), or two more with a zero point. With `hadamard=true` the row is
//! rotated before (see `hadamard.rs`), so that a large channel costs its group nothing. Elements that are not finite, or of
//! more than f16 holds times the largest code, make their group so.

use super::blocks::{
    self, Blocks, SIGNED, UNSIGNED, byte, code, codes, half_at, largest, nearest_even, put_codes, put_half, raised,
};
use crate::device::simd::Simd;
use crate::device::simd::nibbles::FourBits;
use crate::named::{Named, NamedError, Parameter};
use std::fmt;

/// Elements of a group, where nothing else is asked for.
const GROUP: usize = 32;

/// What the codes of fewer bits than four stand for, by their bits.
const SIGNED_3: [f32; 16] = [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
const SIGNED_2: [f32; 16] = [-2.0, -1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];

/// Whole numbers of so many bits with a scale for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ints<const BITS: usize> {
    group: usize,
    zero: bool,
    hadamard: bool,
}

impl<const BITS: usize> Ints<BITS> {
    /// The bits of a code. An element that is not finite has any code.
    const MASK: u8 = (1 << BITS) - 1;
    /// Codes that there are with a zero point, less one.
    const STEPS: f32 = ((1 << BITS) - 1) as f32;
    /// Largest code without one.
    const MOST: f32 = ((1 << (BITS - 1)) - 1) as f32;
    /// What stands for zero without one.
    const MIDDLE: f32 = Self::MOST + 1.0;
    /// What the codes are without one.
    const SIGNED: &'static [f32; 16] = match BITS {
        2 => &SIGNED_2,
        3 => &SIGNED_3,
        _ => &SIGNED.values,
    };

    /// Elements of a group and whether it has a minimum, where rows are not rotated.
    pub(super) fn groups(self) -> Option<(usize, bool)> {
        (!self.hadamard).then_some((self.group, self.zero))
    }

    /// Bytes of a group's codes, which stand in front of its scale and its minimum.
    #[inline(always)]
    fn codes(self) -> usize {
        self.group / 8 * BITS
    }
}

impl<const BITS: usize> Blocks for Ints<BITS> {
    const AFFINE: bool = BITS == 4;
    const NAME: &'static str = ["int2", "int3", "int4"][BITS - 2];
    const ABOUT: &'static str = [
        "two bits for each element and an f16 scale for each group of a row",
        "three bits for each element and an f16 scale for each group of a row",
        "four bits for each element and an f16 scale for each group of a row",
    ][BITS - 2];
    const PARAMETERS: &'static [Parameter] = &[
        Parameter { name: "group", default: "32", about: "elements that share a scale: 32, 64, 128 or 256" },
        Parameter { name: "zero", default: "false", about: "whether a group has an f16 minimum too" },
        Parameter {
            name: "hadamard",
            default: "false",
            about: "whether rows are rotated first, so that no element is large",
        },
    ];

    fn build(named: &Named) -> Result<Self, NamedError> {
        Ok(Ints {
            group: blocks::group(named, GROUP)?,
            zero: named.flag("zero", false)?,
            hadamard: named.flag("hadamard", false)?,
        })
    }

    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        let zero = if self.zero { ",zero=true" } else { "" };
        let hadamard = if self.hadamard { ",hadamard=true" } else { "" };
        write!(to, "{}:group={}{zero}{hadamard}", <Self as Blocks>::NAME, self.group)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        self.group
    }

    fn rotated(self) -> bool {
        self.hadamard
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        self.codes() + if self.zero { 4 } else { 2 }
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the scale and the minimum stand behind the codes.
        unsafe {
            let scale = simd.splat_f16(block.add(self.codes()).cast());
            match self.zero {
                true => {
                    let least = simd.splat_f16(block.add(self.codes() + 2).cast());
                    simd.add(simd.mul(scale, codes::<S, BITS>(simd, block, offset, &UNSIGNED.values)), least)
                }
                false => simd.mul(scale, codes::<S, BITS>(simd, block, offset, Self::SIGNED)),
            }
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            if BITS < 4 {
                for (index, to) in to.iter_mut().enumerate() {
                    *to = self.vector(simd, block, offset + index * S::LANES);
                }
                return;
            }
            let (scale, codes) = (simd.splat_f16(block.add(self.codes()).cast()), block.add(offset / 2));
            match self.zero {
                true => {
                    let least = simd.splat_f16(block.add(self.codes() + 2).cast());
                    simd.load_32_nibbles(codes, &UNSIGNED, (scale, Some(least)), to);
                }
                false => simd.load_32_nibbles(codes, &SIGNED, (scale, None), to),
            }
        }
    }

    #[inline(always)]
    unsafe fn affine<S: Simd>(self, simd: S, block: *const u8, offset: usize, x: &mut [S::Vector]) -> [S::Vector; 2] {
        // SAFETY: as above.
        unsafe {
            let scale = simd.splat_f16(block.add(self.codes()).cast());
            let least = match self.zero {
                true => simd.splat_f16(block.add(self.codes() + 2).cast()),
                false => simd.mul(scale, simd.splat(-Self::MIDDLE)),
            };
            raised(simd, block.add(offset / 2), (scale, least), x)
        }
    }

    fn four_bits(self) -> Option<FourBits> {
        let rows = FourBits { elements: self.group, scale_first: false, levels: &SIGNED };
        (BITS == 4 && !self.zero).then_some(rows)
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let (codes, behind) = to.split_at_mut(self.codes());
        // Zeros are divided by 1. Not a product with the reciprocal: that of a subnormal scale is infinite.
        let whole = |x: f32, least: f32, most: f32| byte(nearest_even(x.clamp(least, most)));
        let by = |scale: f32| if scale == 0.0 { 1.0 } else { scale };
        if self.zero {
            let most = largest(block);
            let bounds = (f32::INFINITY, f32::NEG_INFINITY);
            let (least, greatest) = block.iter().fold(bounds, |(least, most), &x| (least.min(x), most.max(x)));
            // The minimum passes a NaN on.
            let least = put_half(behind, 2, if most.is_finite() { least } else { f32::NAN });
            let by = by(put_half(behind, 0, (greatest - least) / Self::STEPS));
            let code = |x: f32| whole((x - least) / by, 0.0, Self::STEPS) as u8 & Self::MASK;
            put_codes(BITS, block, code, codes);
        } else {
            let by = by(put_half(behind, 0, largest(block) / Self::MOST));
            let code =
                |x: f32| whole(x / by, -Self::MOST, Self::MOST).wrapping_add(Self::MIDDLE as i8) as u8 & Self::MASK;
            put_codes(BITS, block, code, codes);
        }
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (codes, behind) = block.split_at(self.codes());
        let scale = half_at(behind, 0);
        let code = |index: usize| f32::from(code(BITS, codes, index));
        match self.zero {
            true => {
                let least = half_at(behind, 2);
                to.iter_mut().enumerate().for_each(|(index, x)| *x = scale * code(index) + least);
            }
            false => to.iter_mut().enumerate().for_each(|(index, x)| *x = scale * (code(index) - Self::MIDDLE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RowFormat;
    use super::super::blocks::there_and_back;
    use crate::tensor::RowCode;

    use proptest::prelude::*;

    #[test]
    fn a_group_by_hand() {
        // The largest is 3.5, so the scale is 0.5, which f16 holds: 1.1 is 2.2 scales, -0.8 is -1.6 of them.
        let mut row = [0.0; 32];
        row[..4].copy_from_slice(&[3.5, 1.1, -0.8, -3.5]);
        let back = there_and_back("int4", &row);
        assert_eq!((&back[..4], &back[4..]), (&[3.5, 1.0, -1.0, -3.5][..], &[0.0; 28][..]));
        // From 1 to 8.5 in 15 steps of 0.5: all fifteen codes are for what is there.
        row.iter_mut()
            .enumerate()
            .for_each(|(index, x)| *x = if index == 31 { 8.5 } else { 1.0 + index as f32 * 0.25 });
        let back = there_and_back("int4:zero=true", &row);
        assert_eq!((&back[..4], &back[28..]), (&[1.0, 1.0, 1.5, 2.0][..], &[8.0, 8.0, 8.5, 8.5][..]));
        assert_eq!(there_and_back("int4:zero=true", &[5.0; 32]), [5.0; 32]);
    }

    #[test]
    fn fewer_bits_by_hand() {
        let mut row = [0.0; 32];
        row[..5].copy_from_slice(&[3.0, 1.1, -0.4, -3.0, 1.6]);
        // Scales of 1 and of 3.
        assert_eq!(there_and_back("int3", &row)[..6], [3.0, 1.0, 0.0, -3.0, 2.0, 0.0]);
        assert_eq!(there_and_back("int2", &row)[..6], [3.0, 0.0, 0.0, -3.0, 3.0, 0.0]);
        // Steps of 6/7 and of 2 from -3 on.
        assert_eq!(there_and_back("int2:zero=true", &row)[..6], [3.0, 1.0, -1.0, -3.0, 1.0, 1.0]);
        let step = half::f16::from_f32(6.0 / 7.0).to_f32();
        assert_eq!(there_and_back("int3:zero=true", &row)[..3], [7.0 * step - 3.0, 5.0 * step - 3.0, 3.0 * step - 3.0]);
    }

    #[test]
    fn parameters_are_read_and_spelled() {
        for (text, spelled) in [
            ("int4", "int4:group=32"),
            ("int4:group=128,zero=false", "int4:group=128"),
            ("int4:zero=true,group=64", "int4:group=64,zero=true"),
            ("int4:hadamard=true,zero=true", "int4:group=32,zero=true,hadamard=true"),
        ] {
            let format: RowFormat = text.parse().unwrap();
            assert_eq!(format.to_string(), spelled);
            assert_eq!(spelled.parse::<RowFormat>().unwrap(), format);
        }
        for text in ["int4:group=48", "int4:group=16", "int4:group=512", "int4:group=0"] {
            let error = text.parse::<RowFormat>().unwrap_err().to_string();
            assert!(error.contains("it must be 32, 64, 128 or 256"), "{error}");
        }
        let error = "int4:group=64".parse::<RowFormat>().unwrap().check("the head dim", 96).unwrap_err().to_string();
        assert_eq!(error, "the head dim is 96; int4:group=64 keeps rows whose width is a multiple of 64");
    }

    #[test]
    fn rotation_rescues_the_neighbours_of_an_outlier() {
        let row: Vec<f32> = (0..64).map(|x| if x == 9 { 12.0 } else { (x * 29 % 64) as f32 / 32.0 - 1.0 }).collect();
        let mut bytes = [0; 40];
        let error = |format: &str, bytes: &mut [u8]| {
            let format: RowFormat = format.parse().unwrap();
            format.encode(&row, 64, bytes);
            let mut back = [0.0; 64];
            format.decode(bytes, 0, &mut back);
            row.iter().zip(back).map(|(x, back)| (x - back).powi(2)).sum::<f32>().sqrt()
        };
        let (plain, rotated) =
            (error("int4:group=64", &mut bytes[..34]), error("int4:group=64,hadamard=true", &mut bytes[..34]));
        assert!(rotated < plain / 2.0, "{plain} without, {rotated} with rotation");
        let error =
            "int4:hadamard=true".parse::<RowFormat>().unwrap().check("the head dim", 96).unwrap_err().to_string();
        assert!(error.ends_with("keeps rows whose width is a power of two up to 256"), "{error}");
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_scale_at_most(
            row in prop::collection::vec(-1e3f32..1e3, 256),
            shift in -500f32..500.0,
        ) {
            let row: Vec<f32> = row.iter().map(|x| x + shift).collect();
            for (bits, group) in [2, 3, 4].into_iter().flat_map(|bits| [32, 64, 128, 256].map(|group| (bits, group))) {
                let symmetric = there_and_back(&format!("int{bits}:group={group}"), &row);
                let zero = there_and_back(&format!("int{bits}:group={group},zero=true"), &row);
                let (codes, steps) = (f32::from((1u8 << (bits - 1)) - 1), f32::from((1u8 << bits) - 1));
                for (at, x) in row.iter().enumerate() {
                    let group = &row[at / group * group..][..group];
                    let bounds = (f32::INFINITY, f32::NEG_INFINITY);
                    let (least, most) = group.iter().fold(bounds, |(least, most), &x| (least.min(x), most.max(x)));
                    let largest = most.max(-least);
                    prop_assert!((x - symmetric[at]).abs() <= largest / codes * 0.51, "{x} became {}", symmetric[at]);
                    // What f16 rounds of the minimum comes on top, unless the first code takes it.
                    let bound = (most - least) / steps * 0.51 + largest / 1024.0;
                    prop_assert!((x - zero[at]).abs() <= bound, "{x} became {}", zero[at]);
                }
            }
        }

        #[test]
        fn a_group_with_an_element_that_is_not_finite_says_so(at in 0..32usize, which in 0..3usize) {
            let mut row = [7.0; 64];
            row[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][which];
            for format in ["int4", "int4:zero=true"] {
                let back = there_and_back(format, &row);
                prop_assert!(back[..32].iter().any(|x| !x.is_finite()), "{format}: {back:?}");
                prop_assert!(back[32..].iter().all(|&x| x == 7.0), "{format}: {back:?}");
            }
        }
    }
}

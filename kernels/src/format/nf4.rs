//! NF4: four bits that choose one of 16 levels, dense where a normal distribution is, and an f16 scale for each group.
//!
//! QLoRA's format of weights (arXiv 2305.14314), here for rows of any kind: `scale = max |x|`, and the code is that of the nearest
//! level to `x / scale`. Levels are bitsandbytes' own. They lie close around zero, which is one of them, and are up to 0.304 of the
//! scale apart at the ends: an element is off by at most 0.152 of it, and 0.046 near zero, where `int4` is off by 0.071
//! anywhere. Of 64 elements, 34 bytes: 4.25 bits. With `scale=f32` the scale keeps what bitsandbytes' folders have: 36 bytes, 4.5 bits.

use super::blocks::{self, Blocks, half_at, largest, nearest_level, nibble, nibbles, put_codes, put_half, put_nibbles};
use crate::device::simd::nibbles::FourBits;
use crate::device::simd::{Levels, Simd};
use crate::named::{Named, NamedError, Parameter};
use std::fmt;

/// Elements of a group, where nothing else is asked for: those of QLoRA.
const GROUP: usize = 64;

/// What the codes stand for, of a scale of 1.
pub const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Levels of a normal distribution with a scale for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nf4 {
    group: usize,
    /// Whether scales are f32.
    wide: bool,
}

impl Nf4 {
    /// Groups of so many elements, a power of two from 32 to 256, with scales of f32.
    pub fn wide(group: usize) -> Self {
        Nf4 { group, wide: true }
    }

    /// Writes a block of these codes with a scale of f32.
    pub fn put_wide(scale: f32, codes: impl Fn(usize) -> u8, to: &mut [u8]) {
        let (head, bytes) = to.split_at_mut(4);
        head.copy_from_slice(&scale.to_le_bytes());
        for (part, to) in bytes.chunks_exact_mut(16).enumerate() {
            put_nibbles(&std::array::from_fn(|index| codes(32 * part + index)), to);
        }
    }

    /// Bytes of a scale, which stands in front of the codes.
    #[inline(always)]
    fn head(self) -> usize {
        if self.wide { 4 } else { 2 }
    }

    /// The code of the level nearest to `x`, a fraction of the scale: how many midpoints of neighbouring levels lie below.
    pub fn nearest(x: f32) -> u8 {
        nearest_level(&LEVELS, x)
    }

    /// Reads the scale.
    ///
    /// # Safety
    /// A block's bytes begin at `block`.
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, block: *const u8) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            match self.wide {
                true => simd.splat(f32::from_bits(u32::from_le(block.cast::<u32>().read_unaligned()))),
                false => simd.splat_f16(block.cast()),
            }
        }
    }
}

impl Blocks for Nf4 {
    const NAME: &'static str = "nf4";
    const ABOUT: &'static str =
        "four bits for each element, levels of a normal distribution, an f16 scale for each group";
    const PARAMETERS: &'static [Parameter] = &[
        Parameter { name: "group", default: "64", about: "elements that share a scale: 32, 64, 128 or 256" },
        Parameter { name: "scale", default: "f16", about: "type of scales: f16, or f32 as bitsandbytes has them" },
    ];

    fn build(named: &Named) -> Result<Self, NamedError> {
        let wide = match named.text("scale").unwrap_or("f16") {
            "f16" => false,
            "f32" => true,
            _ => return Err(named.wrong("scale", "f16 or f32".into())),
        };
        Ok(Nf4 { group: blocks::group(named, GROUP)?, wide })
    }

    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        write!(to, "nf4:group={}{}", self.group, if self.wide { ",scale=f32" } else { "" })
    }

    #[inline(always)]
    fn elements(self) -> usize {
        self.group
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        self.head() + self.group / 2
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the codes stand behind the scale.
        unsafe { simd.mul(self.scale(simd, block), nibbles(simd, block.add(self.head()), offset, &LEVELS)) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        // SAFETY: as above.
        unsafe {
            let codes = block.add(self.head() + offset / 2);
            simd.load_32_nibbles(codes, &Levels::new(LEVELS), (self.scale(simd, block), None), to);
        }
    }

    fn four_bits(self) -> Option<FourBits> {
        const ALL: Levels = Levels::new(LEVELS);
        (!self.wide).then_some(FourBits { elements: self.group, scale_first: true, levels: &ALL })
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let (head, codes) = to.split_at_mut(self.head());
        let scale = largest(block);
        let scale = match self.wide {
            true => {
                head.copy_from_slice(&scale.to_le_bytes());
                scale
            }
            false => put_half(head, 0, scale),
        };
        // Of a scale of 0, zero itself.
        put_codes(4, block, |x| Self::nearest(if scale == 0.0 { 0.0 } else { x / scale }), codes);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (head, codes) = block.split_at(self.head());
        let scale = match self.wide {
            true => f32::from_le_bytes([head[0], head[1], head[2], head[3]]),
            false => half_at(head, 0),
        };
        to.iter_mut().enumerate().for_each(|(index, x)| *x = scale * LEVELS[usize::from(nibble(codes, index))]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use proptest::prelude::*;

    #[test]
    fn a_group_by_hand() {
        // Scale 2. 1.0 is 0.5 of it, between 0.4407 and 0.5626 and nearer to the former; -0.05 is -0.025, nearest to zero.
        let mut row = [0.0; 64];
        row[..4].copy_from_slice(&[-2.0, 1.0, -0.05, 2.0]);
        assert_eq!(there_and_back("nf4", &row)[..5], [-2.0, 2.0 * 0.440_709_83, 0.0, 2.0, 0.0]);
        assert_eq!(there_and_back("nf4:scale=f32", &row)[..5], [-2.0, 2.0 * 0.440_709_83, 0.0, 2.0, 0.0]);
        // A scale that f16 rounds, and f32 keeps.
        row[0] = -2.000_123;
        assert_eq!((there_and_back("nf4", &row)[0], there_and_back("nf4:scale=f32", &row)[0]), (-2.0, row[0]));
        assert_eq!(there_and_back("nf4", &[0.0; 64]), [0.0; 64]);
        assert!(there_and_back("nf4", &[f32::NAN; 64]).iter().all(|x| x.is_nan()));
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_the_widest_gap_at_most(row in prop::collection::vec(-1e3f32..1e3, 128)) {
            for group in [32, 64, 128] {
                let back = there_and_back(&format!("nf4:group={group}"), &row);
                for (block, back) in row.chunks(group).zip(back.chunks(group)) {
                    let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    for (x, back) in block.iter().zip(back) {
                        prop_assert!((x - back).abs() <= 0.1525 * scale, "{x} became {back}, scale {scale}");
                        prop_assert!(x.abs() > 0.09 * scale || (x - back).abs() <= 0.0465 * scale, "{x}: {back}, {scale}");
                    }
                }
            }
        }
    }
}

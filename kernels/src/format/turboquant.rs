//! TurboQuant: rows are rotated, so that their elements are spread as a normal distribution whatever they were, and each is
//! kept as the nearest level of the codebook that is best for one.
//!
//! After arXiv 2504.19874 (the variant that minimises the squared error): the length of the row is kept, and a rotated row of
//! length `sqrt(n)` has elements of variance 1. Levels are those of Lloyd and Max for a normal distribution, and need no
//! data: the squared error is 0.1175, 0.0345 and 0.0095 of the row's square for 2, 3 and 4 bits (0.26, 0.060 and 0.0034 of a row with
//! a single element, which becomes one of equal sizes). Here the rotation is a
//! Hadamard matrix with fixed signs (`hadamard.rs`) in place of a random one, and a long row has a length for each group. There is no second
//! code of the residual (QJL), which makes inner products unbiased at one bit more.

use super::blocks::{self, Blocks, code, codes, half_at, nearest_level, put_codes, put_half};
use crate::device::simd::Simd;
use crate::named::{Named, NamedError, Parameter};
use std::fmt;

/// Bits of an element, where nothing else is asked for.
const BITS: usize = 4;
/// Elements of a group, where nothing else is asked for.
const GROUP: usize = 64;

/// What codes of two bits stand for, of a scale of 1.
const LEVELS_2: [f32; 16] =
    [-1.510_417_6, -0.452_78, 0.452_78, 1.510_417_6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
/// Of three.
const LEVELS_3: [f32; 16] = [
    -2.151_945_7,
    -1.343_909_3,
    -0.756_005_3,
    -0.245_094_2,
    0.245_094_2,
    0.756_005_3,
    1.343_909_3,
    2.151_945_7,
    0.0,
    0.0,
    0.0,
    0.0,
    0.0,
    0.0,
    0.0,
    0.0,
];
/// Of four.
const LEVELS_4: [f32; 16] = [
    -2.732_589_6,
    -2.069_017_2,
    -1.618_046_4,
    -1.256_231_2,
    -0.942_340_5,
    -0.656_759_1,
    -0.388_048_3,
    -0.128_395,
    0.128_395,
    0.388_048_3,
    0.656_759_1,
    0.942_340_5,
    1.256_231_2,
    1.618_046_4,
    2.069_017_2,
    2.732_589_6,
];

/// Levels of a normal distribution for rotated rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurboQuant {
    bits: usize,
    group: usize,
}

impl TurboQuant {
    #[inline(always)]
    fn levels(self) -> &'static [f32; 16] {
        match self.bits {
            2 => &LEVELS_2,
            3 => &LEVELS_3,
            _ => &LEVELS_4,
        }
    }

    /// Bytes of a group's codes, which stand in front of its scale.
    #[inline(always)]
    fn codes(self) -> usize {
        self.group / 8 * self.bits
    }
}

impl Blocks for TurboQuant {
    const NAME: &'static str = "turboquant";
    const ABOUT: &'static str = "rotated rows, levels of a normal distribution, an f16 length for each group";
    const PARAMETERS: &'static [Parameter] = &[
        Parameter { name: "bits", default: "4", about: "bits of an element: 2, 3 or 4" },
        Parameter { name: "group", default: "64", about: "elements that share a length: 32, 64, 128 or 256" },
    ];

    fn build(named: &Named) -> Result<Self, NamedError> {
        let bits = named.count("bits", BITS, 0)?;
        match bits {
            2..=4 => Ok(TurboQuant { bits, group: blocks::group(named, GROUP)? }),
            _ => Err(named.wrong("bits", "2, 3 or 4".into())),
        }
    }

    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        write!(to, "turboquant:bits={},group={}", self.bits, self.group)
    }

    #[inline(always)]
    fn elements(self) -> usize {
        self.group
    }

    fn rotated(self) -> bool {
        true
    }

    #[inline(always)]
    fn bytes(self) -> usize {
        self.codes() + 2
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector {
        // SAFETY: the caller's promise; the scale, of two bytes, stands behind the codes.
        unsafe {
            let level = match self.bits {
                2 => codes::<S, 2>(simd, block, offset, &LEVELS_2),
                3 => codes::<S, 3>(simd, block, offset, &LEVELS_3),
                _ => codes::<S, 4>(simd, block, offset, &LEVELS_4),
            };
            simd.mul(simd.splat_f16(block.add(self.codes()).cast()), level)
        }
    }

    fn encode(self, block: &[f32], to: &mut [u8]) {
        let (codes, behind) = to.split_at_mut(self.codes());
        let square = block.iter().map(|x| x * x).sum::<f32>() / block.len() as f32;
        let scale = put_half(behind, 0, square.sqrt());
        let levels = &self.levels()[..1 << self.bits];
        put_codes(self.bits, block, |x| nearest_level(levels, x / scale), codes);
    }

    fn decode(self, block: &[u8], to: &mut [f32]) {
        let (codes, behind) = block.split_at(self.codes());
        let (scale, levels) = (half_at(behind, 0), self.levels());
        let level = |index: usize| levels[usize::from(code(self.bits, codes, index))];
        to.iter_mut().enumerate().for_each(|(index, x)| *x = scale * level(index));
    }
}

#[cfg(test)]
mod tests {
    use super::super::RowFormat;
    use super::*;
    use crate::tensor::RowCode;
    use proptest::prelude::*;

    fn there_and_back(format: &str, row: &[f32]) -> Vec<f32> {
        let format: RowFormat = format.parse().unwrap();
        let mut bytes = vec![0; format.row_bytes(row.len())];
        format.encode(row, row.len(), &mut bytes);
        let mut back = vec![0.0; row.len()];
        format.decode(&bytes, 0, &mut back);
        back
    }

    /// How much of a normal distribution lies between two bounds, and its mean there, by the trapezoidal rule.
    fn between(low: f64, high: f64) -> (f64, f64) {
        const STEPS: i32 = 20_000;
        let step = (high - low) / f64::from(STEPS);
        let at = |index: i32| {
            let x = low + f64::from(index) * step;
            let weight = if index == 0 || index == STEPS { 0.5 } else { 1.0 };
            (x, weight * step * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt())
        };
        let (mass, sum) = (0..=STEPS).map(at).fold((0.0, 0.0), |(mass, sum), (x, part)| (mass + part, sum + x * part));
        (mass, sum / mass)
    }

    #[test]
    fn each_level_is_the_mean_of_what_is_nearest_to_it() {
        for (bits, levels, error) in [(2, LEVELS_2, 0.117_48), (3, LEVELS_3, 0.034_55), (4, LEVELS_4, 0.009_501)] {
            let levels: Vec<f64> = levels[..1 << bits].iter().map(|&level| f64::from(level)).collect();
            let mut square = 0.0;
            for (at, &level) in levels.iter().enumerate() {
                let below = if at == 0 { -12.0 } else { (levels[at - 1] + level) / 2.0 };
                let above = levels.get(at + 1).map_or(12.0, |next| (level + next) / 2.0);
                let (mass, mean) = between(below, above);
                assert!((level - mean).abs() < 1e-5, "{bits} bits, level {level}: {mean}");
                square += level * level * mass;
            }
            assert!((1.0 - square - error).abs() < 1e-4, "{bits} bits: {}", 1.0 - square);
        }
    }

    #[test]
    fn a_row_of_nothing_stays_so_and_what_is_not_finite_is_told() {
        assert!(there_and_back("turboquant:bits=3", &[0.0; 64]).iter().all(|&x| x == 0.0));
        let mut row = [1.0; 64];
        row[7] = f32::NAN;
        assert!(there_and_back("turboquant", &row).iter().all(|x| !x.is_finite()));
        for text in ["turboquant:bits=5", "turboquant:bits=1"] {
            let error = text.parse::<RowFormat>().unwrap_err().to_string();
            assert!(error.contains("it must be 2, 3 or 4"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_error_is_that_of_the_codebook_whatever_the_row(
            row in prop::collection::vec(-1f32..1.0, 128),
            outlier in 0..128usize,
            size in 0f32..50.0,
        ) {
            let mut row = row;
            row[outlier] += size;
            for (bits, most) in [(2, 0.25), (3, 0.1), (4, 0.035)] {
                let back = there_and_back(&format!("turboquant:bits={bits},group=128"), &row);
                let square = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
                let off: Vec<f32> = row.iter().zip(&back).map(|(x, back)| x - back).collect();
                prop_assert!(square(&off) <= most * square(&row), "{bits}: {} of {}", square(&off), square(&row));
            }
        }
    }
}

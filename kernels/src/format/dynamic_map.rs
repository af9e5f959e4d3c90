//! The dynamic map of eight bits (Dettmers et al., arXiv 2110.02861): codes of fractions of a block's largest magnitude.
//!
//! The map has seven decades, `10^-6` to `1`; decade `i` from the smallest on has `2^i` fractions, or twice as many where there is no sign:
//! the middles of as many equal parts of `0.1` to `1`, times `10^(i - 6)`. Small numbers are thus kept coarsely and large ones finely; `0`
//! and `1` make 256. A code is that of the nearest value.

use std::sync::LazyLock;

/// What codes stand for, and how a number finds its own.
pub struct DynamicMap {
    values: [f32; 256],
    /// Between each value and the next.
    middles: [f32; 255],
    /// Of each upper half of the bits of a fraction from 0 to 1, the first code that it may have.
    first: Vec<u8>,
    signed: bool,
}

/// Of fractions from -1 to 1.
pub static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(true));
/// Of fractions from 0 to 1.
pub static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(false));

impl DynamicMap {
    fn new(signed: bool) -> Self {
        let mut values = vec![0.0f64, 1.0];
        for decade in 0..7 {
            let parts = if signed { 1 << decade } else { 2 << decade };
            for part in 0..parts {
                let value = (0.1 + 0.9 * (part as f64 + 0.5) / parts as f64) * 10f64.powi(decade - 6);
                values.push(value);
                values.extend(signed.then_some(-value));
            }
        }
        values.sort_by(f64::total_cmp);
        let values: [f32; 256] = std::array::from_fn(|code| values[code] as f32);
        let middles = std::array::from_fn(|code| 0.5 * (values[code] + values[code + 1]));
        let mut map = DynamicMap { values, middles, first: Vec::new(), signed };
        let ones = 1.0f32.to_bits() >> 16;
        map.first = (0..=ones).map(|bits| map.search(f32::from_bits(bits << 16))).collect();
        map
    }

    /// The nearest code, of two equally near ones the lower.
    fn search(&self, fraction: f32) -> u8 {
        self.middles.partition_point(|middle| *middle < fraction) as u8
    }

    /// What each code stands for, in ascending order.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code of a fraction from -1 to 1.
    pub fn code(&self, fraction: f32) -> u8 {
        if fraction < 0.0 {
            // The mirror of the map has no -1, and of two equally near codes another: searched.
            return if self.signed { self.search(fraction) } else { 0 };
        }
        let mut code = self.first[(fraction.to_bits() >> 16) as usize % self.first.len()];
        while code < 255 && self.middles[code as usize] < fraction {
            code += 1;
        }
        code
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn the_map_has_the_fractions_of_the_paper_and_a_code_is_the_nearest() {
        for (map, smallest, signs) in [(&*SIGNED, 0.55e-6, 1), (&*UNSIGNED, 0.325e-6, 0)] {
            assert!(map.values.is_sorted() && map.values.windows(2).all(|pair| pair[0] < pair[1]));
            assert_eq!((map.values[255], map.values[127 * signs]), (1.0, 0.0));
            assert!((map.values[127 * signs + 1] - smallest).abs() < 1e-12, "{}", map.values[127 * signs + 1]);
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            for _ in 0..20_000 {
                let size = 10f32.powf(rng.random_range(-7.5..0.0));
                let x = if signs == 1 && rng.random_bool(0.5) { -size } else { size };
                let found = map.values[map.code(x) as usize];
                let best = map.values.iter().map(|value| (value - x).abs()).fold(f32::MAX, f32::min);
                assert_eq!((found - x).abs(), best, "{x}");
            }
            assert_eq!([0.0, 1.0].map(|x| map.code(x)), [127 * signs as u8, 255]);
        }
    }
}

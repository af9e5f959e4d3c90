//! Numbers in eight bits: blocks of 2048, each with its largest magnitude, and the codes of a dynamic map (Dettmers et al.,
//! arXiv 2110.02861).
//!
//! A code stands for a fraction of the block's largest magnitude. The map has seven decades, `10^-6` to `1`; decade `i` from the
//! smallest on has `2^i` fractions, or twice as many where there is no sign: the middles of as many equal parts of `0.1` to `1`, times
//! `10^(i - 6)`. Small numbers are thus kept coarsely and large ones finely; `0` and `1` make 256. A code is that of the
//! nearest value, but what has no sign becomes zero only if it is: a second moment of zero under a first that is not would make a
//! step without bounds.

use std::sync::LazyLock;

/// Numbers that share a largest magnitude.
pub(super) const BLOCK: usize = 2048;

/// f32 words of `count` numbers: of each block its largest magnitude, and its codes.
pub(super) fn words(count: usize) -> usize {
    count.div_ceil(BLOCK) + count / BLOCK * (BLOCK / 4) + (count % BLOCK).div_ceil(4)
}

/// f32 words of a whole block.
pub(super) const BLOCK_WORDS: usize = BLOCK / 4 + 1;

/// What codes stand for, and how a number finds its own.
pub(super) struct Map {
    values: [f32; 256],
    /// Between each value and the next.
    middles: [f32; 255],
    /// Of each upper half of the bits of a fraction from 0 to 1, the first code that it may have.
    first: Vec<u8>,
    signed: bool,
}

pub(super) static SIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(true));
pub(super) static UNSIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(false));

impl Map {
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
        let mut map = Map { values, middles, first: Vec::new(), signed };
        let ones = 1.0f32.to_bits() >> 16;
        map.first = (0..=ones).map(|bits| map.search(f32::from_bits(bits << 16))).collect();
        map
    }

    /// The nearest code, of two equally near ones the lower.
    fn search(&self, fraction: f32) -> u8 {
        self.middles.partition_point(|middle| *middle < fraction) as u8
    }

    /// The code of a fraction from -1 to 1.
    fn code(&self, fraction: f32) -> u8 {
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

    /// Reads a block.
    pub fn decode(&self, words: &[f32], to: &mut [f32]) {
        let (most, codes) = (words[0], &bytemuck::cast_slice::<f32, u8>(&words[1..]));
        to.iter_mut().zip(*codes).for_each(|(to, code)| *to = most * self.values[*code as usize]);
    }

    /// Writes a block.
    pub fn encode(&self, from: &[f32], words: &mut [f32]) {
        let most = from.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        words[0] = most;
        let codes = bytemuck::cast_slice_mut::<f32, u8>(&mut words[1..]);
        let per = if most > 0.0 { 1.0 / most } else { 0.0 };
        codes.iter_mut().zip(from).for_each(|(code, x)| {
            let least = u8::from(!self.signed && *x > 0.0);
            *code = self.code((x * per).clamp(-1.0, 1.0)).max(least);
        });
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

    #[test]
    fn a_block_comes_back_to_within_its_steps_and_a_second_time_to_the_bit() {
        for count in [BLOCK, 1, 5, 1000] {
            let mut rng = ChaCha8Rng::seed_from_u64(count as u64);
            let mut x: Vec<f32> = (0..count).map(|_| rng.random_range(-3.0..3.0f32).powi(3)).collect();
            // There is no -1.
            x[0] = 27.0;
            let (mut block, mut again) = (vec![0.0; words(count)], vec![0.0; words(count)]);
            let (mut back, mut twice) = (vec![0.0; count], vec![0.0; count]);
            SIGNED.encode(&x, &mut block);
            SIGNED.decode(&block, &mut back);
            let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            // Of the largest decade a step is 0.9 / 64; below it the steps are as coarse or coarser, relative to the number.
            assert!(x.iter().zip(&back).all(|(x, back)| (x - back).abs() <= 0.9 / 64.0 * 0.51 * most));
            assert!(x.iter().zip(&back).any(|(x, back)| *x != *back) || count == 1);
            SIGNED.encode(&back, &mut again);
            SIGNED.decode(&again, &mut twice);
            assert!(back == twice, "{count} numbers");
        }
        let mut block = vec![0.0; words(3)];
        UNSIGNED.encode(&[1.0, 1e-20, 0.0], &mut block);
        let mut back = [9.0; 3];
        UNSIGNED.decode(&block, &mut back);
        assert!(back[0] == 1.0 && back[1] > 0.0 && back[2] == 0.0, "{back:?}");
    }
}

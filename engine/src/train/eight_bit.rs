//! Numbers in eight bits: blocks of 2048, each with its largest magnitude, and the codes of a [`DynamicMap`]. What has no sign becomes zero
//! only if it is: a second moment of zero under a first that is not would make a step without bounds.

use crate::format::DynamicMap;

/// Numbers that share a largest magnitude.
pub(super) const BLOCK: usize = 2048;

/// f32 words of `count` numbers: of each block its largest magnitude, and its codes.
pub(super) fn words(count: usize) -> usize {
    count.div_ceil(BLOCK) + count / BLOCK * (BLOCK / 4) + (count % BLOCK).div_ceil(4)
}

/// f32 words of a whole block.
pub(super) const BLOCK_WORDS: usize = BLOCK / 4 + 1;

/// Reads a block.
pub(super) fn decode(map: &DynamicMap, words: &[f32], to: &mut [f32]) {
    let (most, codes) = (words[0], &bytemuck::cast_slice::<f32, u8>(&words[1..]));
    to.iter_mut().zip(*codes).for_each(|(to, code)| *to = most * map.values()[usize::from(*code)]);
}

/// Writes a block.
pub(super) fn encode(map: &DynamicMap, from: &[f32], words: &mut [f32]) {
    let most = from.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    words[0] = most;
    let codes = bytemuck::cast_slice_mut::<f32, u8>(&mut words[1..]);
    let per = if most > 0.0 { 1.0 / most } else { 0.0 };
    let has_sign = map.values()[0] < 0.0;
    codes.iter_mut().zip(from).for_each(|(code, x)| {
        let least = u8::from(!has_sign && *x > 0.0);
        *code = map.code((x * per).clamp(-1.0, 1.0)).max(least);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{SIGNED, UNSIGNED};
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn a_block_comes_back_to_within_its_steps_and_a_second_time_to_the_bit() {
        for count in [BLOCK, 1, 5, 1000] {
            let mut rng = ChaCha8Rng::seed_from_u64(count as u64);
            let mut x: Vec<f32> = (0..count).map(|_| rng.random_range(-3.0..3.0f32).powi(3)).collect();
            // There is no -1.
            x[0] = 27.0;
            let (mut block, mut again) = (vec![0.0; words(count)], vec![0.0; words(count)]);
            let (mut back, mut twice) = (vec![0.0; count], vec![0.0; count]);
            encode(&SIGNED, &x, &mut block);
            decode(&SIGNED, &block, &mut back);
            let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            // Of the largest decade a step is 0.9 / 64; below it the steps are as coarse or coarser, relative to the number.
            assert!(x.iter().zip(&back).all(|(x, back)| (x - back).abs() <= 0.9 / 64.0 * 0.51 * most));
            assert!(x.iter().zip(&back).any(|(x, back)| *x != *back) || count == 1);
            encode(&SIGNED, &back, &mut again);
            decode(&SIGNED, &again, &mut twice);
            assert!(back == twice, "{count} numbers");
        }
        let mut block = vec![0.0; words(3)];
        encode(&UNSIGNED, &[1.0, 1e-20, 0.0], &mut block);
        let mut back = [9.0; 3];
        decode(&UNSIGNED, &block, &mut back);
        assert!(back[0] == 1.0 && back[1] > 0.0 && back[2] == 0.0, "{back:?}");
    }
}

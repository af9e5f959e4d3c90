//! CAM: an evicted token's value is added to the values of the retained tokens next after it, with a probability.
//!
//! Cache Merging (ICML 2024). The probability is the attention that the evicted token has received so far, relative to the mean
//! of the next `window` retained tokens, at most 1; then each of them (`m` near the end of the list) is given `1/m` of
//! the evicted token's value. On average the output loses less than by dropping, whatever the query. An evicted token with no retained token
//! behind it is dropped. Draws belong to (list, position), so that threads and the order of evictions do not matter.
//!
//! All evicted tokens between two retained tokens have the same window, so each gap is summed once and then handed to the
//! next `window` retained tokens.

use super::{Action, Fold};
use crate::attention::Shape;
use crate::cache::PagedCache;
use crate::memory::{Buffer, Label};
use crate::named::Parameter;
use crate::policy::{Part, PartEntry, PolicyError, Statistic};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "cam",
    about: "an evicted token's value is shared among the next retained tokens, with a probability by its attention",
    paper: "",
    parameters: &[Parameter { name: "window", default: "32", about: "retained tokens that share the value" }],
    build: |named, _| Ok(Part::Action(Some(Box::new(Cam { window: named.count("window", 32, 1)? })))),
};

/// Of its draws; those of scores are numbered by lists.
const STREAMS: u64 = 1 << 63;

struct Cam {
    window: usize,
}

impl Cam {
    /// Elements of scratch for a list: a sum for each gap of a window, and a row.
    fn scratch(&self, len: usize, width: usize) -> usize {
        (self.window.min(len) + 1) * width
    }
}

/// The probability that an evicted token is merged: its attention over the mean of its window.
fn chance(attention: f32, mean: f32) -> f32 {
    match (attention > 0.0, mean > 0.0) {
        (false, _) => 0.0,
        (true, false) => 1.0,
        (true, true) => (attention / mean).min(1.0),
    }
}

impl Action for Cam {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::AccumulatedAttention]
    }

    fn draws(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * self.scratch(shape.kv_len, shape.head_dim) as u64
    }

    fn fold(&self, fold: &Fold<'_>, cache: &mut PagedCache, list: usize, kept: &[u32]) -> Result<(), PolicyError> {
        let (len, width) = (cache.lens()[list], cache.shape().head_dim);
        let most = self.window.min(len);
        let mut scratch: Buffer<f32> = fold.arena.alloc(Label::Workspace, self.scratch(len, width))?;
        // The sum of gap `g`, which ends at `kept[g]`, is row `g % most`.
        let (gaps, row) = scratch.split_at_mut(most * width);
        let mut rng = ChaCha8Rng::seed_from_u64(fold.seed);
        // A stream of its own: `random` scores by the list's, and what it evicts drew low there.
        rng.set_stream(STREAMS | fold.number as u64);
        let mut draw = |position: usize| match fold.draws {
            Some(draws) => draws[position],
            None => {
                rng.set_word_pos(position as u128);
                (rng.next_u32() >> 8) as f32 / (1 << 24) as f32
            }
        };
        let mut first = 0;
        for (index, &target) in kept.iter().enumerate() {
            let target = target as usize;
            let window = &kept[index..kept.len().min(index + most)];
            let gap = &mut gaps[index % most * width..][..width];
            gap.fill(0.0);
            if first < target {
                let received: f32 = window.iter().map(|&slot| cache.attention(list, slot as usize)).sum();
                let mean = received / window.len() as f32;
                for slot in first..target {
                    if draw(cache.origin(list, slot)) < chance(cache.attention(list, slot), mean) {
                        cache.read_value(list, slot, row);
                        gap.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += x / window.len() as f32);
                    }
                }
            }
            first = target + 1;
            let mut shared = gaps[..width * most.min(index + 1)].chunks_exact(width);
            if shared.clone().any(|gap| gap.iter().any(|&x| x != 0.0)) {
                cache.read_value(list, target, row);
                shared.by_ref().for_each(|gap| row.iter_mut().zip(gap).for_each(|(sum, x)| *sum += x));
                cache.write_value(list, target, row)?;
            }
        }
        Ok(())
    }
}

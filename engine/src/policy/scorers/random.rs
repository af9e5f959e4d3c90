//! `random`: every token draws a number once. A method is worth something above it; some are below.

use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Scorer, Statistic, each_list};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "random",
    about: "keeps a random subset: what a method must be better than",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(Random)),
};

struct Random;

impl Scorer for Random {
    fn is_absolute(&self) -> bool {
        true
    }

    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, &mut [], |list, scores, _| {
            let mut rng = ChaCha8Rng::seed_from_u64(context.seed);
            rng.set_stream(context.list_number(list.index) as u64);
            let mut next = 0;
            for (slot, score) in scores.iter_mut().enumerate() {
                // The number belongs to the position: evicted again, a token has the same importance.
                let position = list.position(slot);
                if position != next {
                    rng.set_word_pos(position as u128);
                }
                next = position + 1;
                *score = (rng.next_u32() >> 8) as f32 / (1 << 24) as f32;
            }
        });
        Ok(())
    }
}

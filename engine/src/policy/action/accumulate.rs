//! An evicted token is merged into the nearest retained token before it, or behind it: keys and values become averages, weighted by
//! how many tokens each stands for, and the weights add up.
//!
//! The memory of Dynamic Memory Compression (DMC, arXiv 2403.09636): there a trained head says of each new token whether
//! it is appended or accumulated into the last slot, `k <- (z k + w k_new) / (z + w)`. Here the policy's evicted tokens are those
//! that are accumulated, and every token begins with the weight 1. `into=later` is the paper's direction: the slot goes on with
//! the new token and stands where that one stands, its key turned to that position first, so that what is averaged are keys
//! before RoPE, as in NVIDIA's code. With `into=earlier` the token that stays is the older one and keys are averaged as they are cached, after
//! RoPE: the further apart two tokens are, the more their fast channels cancel. Evicted tokens beyond the last retained token on that
//! side go into that one, so that the weights of a list always add up to those of the tokens it has seen.

use super::{Action, Fold};
use crate::attention::Shape;
use crate::attention::rope::Rotation;
use crate::cache::{Column, PagedCache};
use crate::named::Parameter;
use crate::policy::network::Network;
use crate::policy::{Part, PartEntry, PolicyError, Statistic};
use std::collections::HashMap;
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "accumulate",
    about: "an evicted token's key and value are averaged into the nearest retained token, weighted by tokens",
    paper: "2403.09636",
    parameters: &[Parameter {
        name: "into",
        default: "earlier",
        about: "earlier: the retained token before it, keys as cached; later: the one behind it, keys turned to its position first, as in DMC",
    }],
    build: |named, _| {
        let into = match named.text("into") {
            None | Some("earlier") => Into::Earlier,
            Some("later") => Into::Later,
            Some(_) => return Err(named.wrong("into", "earlier or later".into()).into()),
        };
        Ok(Part::Action(Some(Box::new(Accumulate { into, weights: None }))))
    },
};

/// The retained token that an evicted one goes into.
#[derive(Clone, Copy, PartialEq)]
pub enum Into {
    /// The nearest before it.
    Earlier,
    /// The nearest behind it.
    Later,
}

/// Averages evicted tokens into retained tokens.
pub struct Accumulate {
    /// Which token takes an evicted one.
    pub into: Into,
    /// What a token weighs at first is the sigmoid of this function of its hidden state; 1 where there is none.
    pub weights: Option<Network>,
}

impl Accumulate {
    /// The slots of a list of `len` tokens that come together in `kept[index]`.
    fn run(&self, kept: &[u32], index: usize, len: usize) -> Range<usize> {
        let (first, end) = match self.into {
            Into::Earlier => (kept[index] as usize, kept.get(index + 1).map_or(len, |&next| next as usize)),
            Into::Later => {
                (index.checked_sub(1).map_or(0, |before| kept[before] as usize + 1), kept[index] as usize + 1)
            }
        };
        let first = if index == 0 { 0 } else { first };
        first..if index + 1 == kept.len() { len } else { end }
    }
}

impl Action for Accumulate {
    fn needs(&self) -> Vec<Statistic> {
        let turns = (self.into == Into::Later).then_some(Statistic::BeforeRope);
        turns.into_iter().chain(self.weights.as_ref().map(|_| Statistic::HiddenStates)).collect()
    }

    fn weighs(&self) -> bool {
        true
    }

    fn weigh(&self, layer: usize, hidden: &[f32], weights: &mut [f32]) {
        if let Some(network) = &self.weights {
            network.gates(layer, hidden, weights);
            // Above 0, as training has them: their sum divides.
            weights.iter_mut().for_each(|weight| *weight = (1.0 / (1.0 + (-*weight).exp())).max(f32::MIN_POSITIVE));
        }
    }

    fn changes_keys(&self) -> bool {
        true
    }

    fn fold(&self, fold: &Fold<'_>, cache: &mut PagedCache, list: usize, kept: &[u32]) -> Result<(), PolicyError> {
        let (len, width) = (cache.lens()[list], cache.shape().head_dim);
        let mut rows = [[0.0; Shape::MAX_HEAD_DIM]; 3];
        let [key, value, row] = rows.each_mut().map(|row| &mut row[..width]);
        let mut turns: HashMap<i64, Rotation> = HashMap::new();
        for (index, &target) in kept.iter().enumerate() {
            let (run, target) = (self.run(kept, index, len), target as usize);
            if run.len() == 1 {
                continue;
            }
            let mut total = 0.0;
            key.fill(0.0);
            value.fill(0.0);
            for slot in run {
                let weight = cache.column(list, slot, Column::Weight);
                total += weight;
                cache.read_key(list, slot, row);
                if self.into == Into::Later && slot != target {
                    let rope = fold.rope.ok_or(NO_ROPE)?;
                    let by = cache.position(list, target) as i64 - cache.position(list, slot) as i64;
                    turns.entry(by).or_insert_with(|| Rotation::new(rope, by)).rotate(row);
                }
                key.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += weight * x);
                cache.read_value(list, slot, row);
                value.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += weight * x);
            }
            key.iter_mut().chain(&mut *value).for_each(|sum| *sum /= total);
            cache.write_key(list, target, key)?;
            cache.write_value(list, target, value)?;
            cache.set_column(list, target, Column::Weight, total)?;
        }
        Ok(())
    }
}

/// Why keys cannot be turned.
const NO_ROPE: PolicyError = PolicyError::Missing {
    policy: "accumulate:into=later",
    what: "rope_theta of the inputs and an even head dim, to turn keys to another position",
};

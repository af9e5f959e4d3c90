//! An evicted token is merged into the nearest retained token before it: keys and values become averages, weighted by how many
//! tokens each stands for, and the weights add up.
//!
//! The memory of Dynamic Memory Compression (DMC, arXiv 2403.09636): there a trained head says of each new token whether
//! it is appended or accumulated into the last slot, `k <- (z k + w k_new) / (z + w)`. Here the policy's evicted tokens are those
//! that accumulate, and every token begins with the weight 1. Evicted tokens before the first retained token go into that one,
//! so that the weights of a list always add up to the tokens it has seen. Keys are averaged as they are cached, after
//! RoPE: the further apart two tokens are, the more their fast channels cancel.

use super::{Action, Fold};
use crate::attention::Shape;
use crate::cache::{Column, PagedCache};
use crate::policy::{Part, PartEntry, PolicyError};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "accumulate",
    about: "an evicted token's key and value are averaged into the nearest retained token before it, weighted by tokens",
    paper: "2403.09636",
    parameters: &[],
    build: |_, _| Ok(Part::Action(Some(Box::new(Accumulate)))),
};

struct Accumulate;

impl Action for Accumulate {
    fn weighs(&self) -> bool {
        true
    }

    fn changes_keys(&self) -> bool {
        true
    }

    fn fold(&self, _: &Fold<'_>, cache: &mut PagedCache, list: usize, kept: &[u32]) -> Result<(), PolicyError> {
        let (len, width) = (cache.lens()[list], cache.shape().head_dim);
        let mut rows = [[0.0; Shape::MAX_HEAD_DIM]; 3];
        let [key, value, row] = rows.each_mut().map(|row| &mut row[..width]);
        for (index, &target) in kept.iter().enumerate() {
            let first = if index == 0 { 0 } else { target as usize };
            let end = kept.get(index + 1).map_or(len, |&next| next as usize);
            if end - first == 1 {
                continue;
            }
            let mut total = 0.0;
            key.fill(0.0);
            value.fill(0.0);
            for slot in first..end {
                let weight = cache.column(list, slot, Column::Weight);
                total += weight;
                cache.read_key(list, slot, row);
                key.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += weight * x);
                cache.read_value(list, slot, row);
                value.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += weight * x);
            }
            key.iter_mut().chain(&mut *value).for_each(|sum| *sum /= total);
            cache.write_key(list, target as usize, key)?;
            cache.write_value(list, target as usize, value)?;
            cache.set_column(list, target as usize, Column::Weight, total)?;
        }
        Ok(())
    }
}

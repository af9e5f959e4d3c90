//! Which weights losses are measured from, and which others are those of another model.
//!
//! Divergences are from the model as its files have it. Weights that take more bytes than that save nothing: they are another
//! model's, such as one that was trained on or has adapters merged into it, and are compared on the same scale.

use super::pools::Pool;
use crate::experiment::weights::OtherWeights;
use crate::memory::Label;

/// A pool's weights; `None` are those of the model's own files.
pub fn weights<'a>(pool: &'a Pool<'_>) -> Option<&'a OtherWeights> {
    pool.records[0].cell.weights.as_ref()
}

/// Bytes of a pool's weights, and of what its policy loads beside them where a sample ran alone.
pub fn weights_bytes(pool: &Pool) -> u64 {
    let record = pool.records[0];
    let counted = record.memory.as_ref().and_then(|memory| memory.peak_by_label.get(&Label::Weights)).copied();
    counted.or(record.answers.as_ref().and_then(|answers| answers.weights_bytes)).unwrap_or(0)
}

/// The weights that a pool's divergences are from: those of the model's own files or, where no pool of its question has these, the
/// widest.
pub fn origin<'a>(pool: &Pool, pools: &'a [Pool<'_>]) -> Option<&'a OtherWeights> {
    let beside = pools.iter().filter(|other| other.is_beside(pool));
    match beside.clone().any(|other| weights(other).is_none()) {
        true => None,
        false => beside.max_by_key(|other| weights_bytes(other)).and_then(weights),
    }
}

/// Whether a pool's weights are those of another model: other files that take more bytes than what divergences are from.
pub fn is_another_model(pool: &Pool, pools: &[Pool]) -> bool {
    let least = |of: Option<&OtherWeights>| {
        let of_weights = pools.iter().filter(|other| other.is_beside(pool) && weights(other) == of);
        of_weights.map(weights_bytes).min().unwrap_or(0)
    };
    let own = weights(pool);
    matches!(own, Some(OtherWeights::Model(_))) && least(own) > least(origin(pool, pools))
}

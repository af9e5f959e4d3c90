//! Ada-KV (arXiv 2407.11550): the heads of a layer compete. A layer keeps its best tokens over all heads together,
//! which bounds the change of its output, but every head keeps at least `floor` of an equal share.
//!
//! The floor is rounded down, but at least one token, as in kvpress; `floor=0` is none at all, where kvpress keeps one.

use super::{OverHeads, lens, pooled};
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "ada",
    about: "a layer keeps its best tokens over all heads together, so heads keep different counts",
    paper: "2407.11550",
    parameters: &[Parameter { name: "floor", default: "0.2", about: "part of an equal share that every head keeps" }],
    build: |named, _| Ok(Part::Heads(Box::new(Ada { floor: named.number("floor", 0.2, 0.0..=1.0)? }))),
};

/// Heads compete for what is above a floor.
pub struct Ada {
    /// Part of an equal share that every head keeps.
    pub floor: f64,
}

impl OverHeads for Ada {
    fn inert(&self, _budget_tokens: usize, kv_heads: usize) -> Option<String> {
        // Without a floor it is a part of what pools layers too.
        (kv_heads == 1 && self.floor > 0.0)
            .then(|| "ada is inert: a layer has one KV head, and none to share with".into())
    }

    fn counts(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        sequence: usize,
        total: usize,
        scratch: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError> {
        let lens = lens(context, sequence);
        let kv_len = context.call.shape.kv_len;
        let first = sequence * lens.len() * kv_len;
        let lists: Vec<&[f32]> =
            lens.iter().enumerate().map(|(head, &len)| &scored.values[first + head * kv_len..][..len]).collect();
        let equal = total / lens.len();
        let floor = if self.floor > 0.0 { ((self.floor * equal as f64) as usize).max(1).min(equal) } else { 0 };
        let counts = pooled(&lists, floor, total, scratch);
        scored.safe.resize(context.lists(), 0);
        scored.safe[sequence * lens.len()..][..lens.len()].fill(floor);
        Ok(counts)
    }
}

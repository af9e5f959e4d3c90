//! One pool for all layers and heads of a sequence, as in KVzip (arXiv 2505.23416): the best tokens of the whole model
//! stay, wherever they are. Asks for scores that mean the same in every layer.
//!
//! With a threshold only those stay that score at least so much, as kvpress's DMSPress has it around any scorer: how many that
//! is depends on the text, and the budget is the most. Asks for scores that mean the same in every text. Where the schedule decides on
//! each token as it leaves a window, tokens that come later are held against the same threshold.

use super::ada::Ada;
use super::{OverLayers, layers_of, pooled, sequence_total};
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "global",
    about: "one pool for all layers and heads: the best tokens of the whole model stay",
    paper: "2505.23416",
    parameters: &[],
    build: |_, _| Ok(Part::Both(Box::new(Global { threshold: None }), Box::new(Ada { floor: 0.0 }))),
};

/// The registry's line of a threshold.
pub const THRESHOLD: PartEntry = PartEntry {
    name: "threshold",
    about: "what scores at least so much stays, in all layers and heads; the budget is the most that stays",
    paper: "2601.07891",
    parameters: &[Parameter { name: "at", default: "0", about: "the least score that stays" }],
    build: |named, _| {
        let at = named.number("at", 0.0, -1e30..=1e30)? as f32;
        Ok(Part::Both(Box::new(Global { threshold: Some(at) }), Box::new(Ada { floor: 0.0 })))
    },
};

/// One pool.
pub struct Global {
    /// The least score that stays.
    pub threshold: Option<f32>,
}

impl OverLayers for Global {
    fn threshold(&self) -> Option<f32> {
        self.threshold
    }

    fn totals(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        scratch: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError> {
        let (heads, kv_len) = (context.call.shape.kv_heads, context.call.shape.kv_len);
        let mut totals = vec![0; context.call.shape.batch];
        for sequence in 0..context.sequences() {
            let layers: Vec<usize> = layers_of(context, sequence).collect();
            let of_layers = layers.iter().flat_map(|layer| layer * heads..(layer + 1) * heads);
            let lists: Vec<&[f32]> =
                of_layers.map(|list| &scored.values[list * kv_len..][..context.len(list)]).collect();
            // What is protected lies above all that is scored, and stays whatever the threshold.
            let least = self.threshold.map(|at| at.min(scored.highest_scored.next_up()));
            let reaches = |score: &&f32| least.is_none_or(|at| **score >= at);
            let reaching = lists.iter().flat_map(|list| list.iter()).filter(reaches).count();
            let counts = pooled(&lists, 0, reaching.min(sequence_total(context, sequence)), scratch);
            for (layer, counts) in layers.into_iter().zip(counts.chunks(heads)) {
                totals[layer] = counts.iter().sum();
            }
        }
        Ok(totals)
    }
}

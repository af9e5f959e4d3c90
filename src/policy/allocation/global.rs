//! One pool for all layers and heads of a sequence, as in KVzip (arXiv 2505.23416): the best tokens of the whole model
//! stay, wherever they are. Asks for scores that mean the same in every layer.

use super::ada::Ada;
use super::{OverLayers, layers_of, pooled, sequence_total};
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "global",
    about: "one pool for all layers and heads: the best tokens of the whole model stay",
    paper: "2505.23416",
    parameters: &[],
    build: |_, _| Ok(Part::Both(Box::new(Global), Box::new(Ada { floor: 0.0 }))),
};

/// One pool.
pub struct Global;

impl OverLayers for Global {
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
            let counts = pooled(&lists, 0, sequence_total(context, sequence), scratch);
            for (layer, counts) in layers.into_iter().zip(counts.chunks(heads)) {
                totals[layer] = counts.iter().sum();
            }
        }
        Ok(totals)
    }
}

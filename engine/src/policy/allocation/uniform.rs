//! The same budget for every layer and every head.

use super::{OverHeads, OverLayers, layers_of, lens, level, sequence_total};
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "uniform",
    about: "the same budget for every layer and head",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Part::Both(Box::new(Uniform), Box::new(Uniform))),
};

/// The same for all.
pub struct Uniform;

impl OverLayers for Uniform {
    fn is_even(&self) -> bool {
        true
    }

    fn reads_scores(&self) -> bool {
        false
    }

    fn totals(&self, context: &Context<'_>, _: &mut Scored, _: &mut [f32]) -> Result<Vec<usize>, PolicyError> {
        let mut totals = vec![0; context.call.shape.batch];
        for sequence in 0..context.sequences() {
            let layers: Vec<usize> = layers_of(context, sequence).collect();
            let caps: Vec<usize> = layers.iter().map(|&layer| lens(context, layer).iter().sum()).collect();
            let wanted = context.budget_tokens * context.call.shape.kv_heads;
            let mut shares: Vec<usize> = caps.iter().map(|&cap| wanted.min(cap)).collect();
            level(sequence_total(context, sequence), &mut shares, &caps);
            layers.into_iter().zip(shares).for_each(|(layer, share)| totals[layer] = share);
        }
        Ok(totals)
    }
}

impl OverHeads for Uniform {
    fn is_even(&self) -> bool {
        true
    }

    fn reads_scores(&self) -> bool {
        false
    }

    fn counts(
        &self,
        context: &Context<'_>,
        _: &mut Scored,
        sequence: usize,
        total: usize,
        _: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError> {
        let caps = lens(context, sequence);
        let mut counts: Vec<usize> = caps.iter().map(|&cap| cap.min(total / caps.len())).collect();
        level(total, &mut counts, &caps);
        Ok(counts)
    }
}

//! The same budget for every layer and every head.

use super::{OverHeads, OverLayers, lens, level, over_layers};
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
        let wanted = context.budget_tokens * context.call.shape.kv_heads;
        over_layers(context, |total, _, caps| {
            let mut shares: Vec<usize> = caps.iter().map(|&cap| wanted.min(cap)).collect();
            level(total, &mut shares, caps);
            Ok(shares)
        })
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

//! PyramidKV (arXiv 2406.02069): attention is broad in low layers and narrow in high ones, so the budget falls from
//! layer to layer by the same step, from `2 b - b / beta` to `b / beta` of an average of `b`. Formula and rounding
//! are those of kvpress, where the protected window is given to every layer first.

use super::{OverLayers, layers_of, lens, level, sequence_total};
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "pyramid",
    about: "more for low layers, less for high ones, by equal steps",
    paper: "2406.02069",
    parameters: &[Parameter { name: "beta", default: "20", about: "the highest layer gets 1/beta of the average" }],
    build: |named| {
        let beta = named.number("beta", 20.0, 1.0..=1e6)?;
        Ok(Part::Layers(Box::new(Pyramid { beta })))
    },
};

struct Pyramid {
    beta: f64,
}

impl OverLayers for Pyramid {
    fn totals(&self, context: &Context<'_>, _: &mut Scored, _: &mut [f32]) -> Result<Vec<usize>, PolicyError> {
        let heads = context.call.shape.kv_heads;
        let mut totals = vec![0; context.call.shape.batch];
        for sequence in 0..context.sequences() {
            let layers: Vec<usize> = layers_of(context, sequence).collect();
            let caps: Vec<usize> = layers.iter().map(|&layer| lens(context, layer).iter().sum()).collect();
            let longest = caps.iter().max().copied().unwrap_or(0) / heads;
            let budgets = budgets(context.budget_tokens as f64, self.beta, longest as f64, layers.len());
            let mut shares: Vec<usize> =
                budgets.iter().zip(&caps).map(|(&budget, &cap)| (budget * heads).min(cap)).collect();
            level(sequence_total(context, sequence), &mut shares, &caps);
            layers.into_iter().zip(shares).for_each(|(layer, share)| totals[layer] = share);
        }
        Ok(totals)
    }
}

/// Tokens per head of each layer, for an average of `average` and lists of `longest`.
fn budgets(average: f64, beta: f64, longest: f64, layers: usize) -> Vec<usize> {
    let (mut least, mut most) = (average / beta, 2.0 * average - average / beta);
    if most > longest {
        (most, least) = (longest, 2.0 * average - longest);
    }
    let step = if layers > 1 { (most - least) / (layers - 1) as f64 } else { 0.0 };
    let first = if layers > 1 { most } else { average };
    (0..layers).map(|layer| (first - layer as f64 * step).round_ties_even() as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::budgets;

    #[test]
    fn budgets_fall_by_equal_steps_around_the_average() {
        assert_eq!(budgets(100.0, 20.0, 1000.0, 3), [195, 100, 5]);
        assert_eq!(budgets(100.0, 20.0, 150.0, 3), [150, 100, 50]);
        assert_eq!(budgets(100.0, 20.0, 1000.0, 1), [100]);
    }
}

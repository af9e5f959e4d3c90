//! PyramidKV (arXiv 2406.02069): attention is broad in low layers and narrow in high ones, so the budget falls from
//! layer to layer by the same step, from `2 b - b / beta` to `b / beta` of an average of `b`.
//!
//! Formula and rounding are those of kvpress for a `b` of whole tokens, to which a fraction is rounded down before. The window
//! that the scorer protects is part of every layer's number: no layer may get more than the list less the window, and where the highest layer would get less than the window, all
//! layers get `b`. With kvpress's window of 64 and `beta` of 20 that is so below 1280 tokens a head, unless the lists
//! are short; give a smaller window. (KVCache-Factory divides whole numbers and adds the window to each.)
//!
//! With `layer` and `layers` the context is one layer of a stack that is scored alone: `b` is the mean of the stack, and
//! what is retained is this layer's number.

use super::{OverLayers, level, over_layers};
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "pyramid",
    about: "more for low layers, less for high ones, by equal steps",
    paper: "2406.02069",
    parameters: &[
        Parameter { name: "beta", default: "20", about: "the highest layer gets 1/beta of the average" },
        Parameter { name: "layer", default: "all", about: "the one layer that is scored, from 0; all: a whole stack" },
        Parameter { name: "layers", default: "all", about: "layers of the stack of which layer is one" },
    ],
    build: |named, _| {
        let beta = named.number("beta", 20.0, 1.0..=1e6)?;
        let text = |key| named.text(key).filter(|text| *text != "all");
        let alone = match (text("layer"), text("layers")) {
            (None, None) => None,
            (Some(_), None) => return Err(named.wrong("layers", "given beside layer".into()).into()),
            (None, Some(_)) => return Err(named.wrong("layer", "given beside layers".into()).into()),
            (Some(_), Some(_)) => {
                let (layer, layers) = (named.count("layer", 0, 0)?, named.count("layers", 1, 1)?);
                if layer >= layers {
                    return Err(named.wrong("layer", format!("less than layers, which is {layers}")).into());
                }
                Some((layer, layers))
            }
        };
        Ok(Part::Layers(Box::new(Pyramid { beta, alone })))
    },
};

struct Pyramid {
    beta: f64,
    alone: Option<(usize, usize)>,
}

impl OverLayers for Pyramid {
    fn reads_scores(&self) -> bool {
        false
    }

    fn inert(&self, budget_tokens: usize, context_tokens: usize, window: usize, layers: usize) -> Option<String> {
        let layers = self.alone.map_or(layers, |(_, layers)| layers);
        let shares = budgets(budget_tokens as f64, self.beta, context_tokens as f64, window as f64, layers);
        let even = shares.iter().all(|share| *share == shares[0]);
        let why = match layers {
            1 => "there is one layer".into(),
            _ => format!(
                "a budget of {budget_tokens} tokens leaves no room for it beside a window of {window} in every layer"
            ),
        };
        even.then(|| format!("the pyramid is inert, all layers have the same: {why}"))
    }

    fn totals(&self, context: &Context<'_>, scored: &mut Scored, _: &mut [f32]) -> Result<Vec<usize>, PolicyError> {
        let (heads, window) = (context.call.shape.kv_heads, scored.protect.window as f64);
        if let (Some((layer, layers)), true) = (self.alone, context.layers > 1) {
            let (policy, found) = (format!("pyramid:layer={layer},layers={layers}"), context.layers);
            let reason = format!("it evicts from one layer alone, and there are {found}; leave both parameters out");
            return Err(PolicyError::Combination { policy, reason });
        }
        over_layers(context, |total, _, caps| {
            let longest = (caps.iter().max().copied().unwrap_or(0) / heads) as f64;
            let stack = self.alone.map_or(caps.len(), |(_, layers)| layers);
            let budgets = budgets(context.budget_tokens as f64, self.beta, longest, window, stack);
            let wanted = |layer: usize| budgets[layer] * heads;
            if let Some((layer, _)) = self.alone {
                return Ok(vec![wanted(layer).min(caps[0])]);
            }
            let mut shares: Vec<usize> = caps.iter().enumerate().map(|(layer, &cap)| wanted(layer).min(cap)).collect();
            level(total, &mut shares, caps);
            Ok(shares)
        })
    }
}

/// Tokens per head of each layer, for an average of `average`, lists of `longest` and a protected `window`.
fn budgets(average: f64, beta: f64, longest: f64, window: f64, layers: usize) -> Vec<usize> {
    let (mut least, mut most) = (average / beta, 2.0 * average - average / beta);
    if most >= longest - window {
        (most, least) = (longest - window, 2.0 * average - (longest - window));
    }
    if !(longest >= most && most >= least && least >= window) || layers == 1 {
        return vec![average.round_ties_even().max(1.0) as usize; layers];
    }
    let step = (most - least) / (layers - 1) as f64;
    (0..layers).map(|layer| (most - layer as f64 * step).round_ties_even() as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::budgets;

    #[test]
    fn budgets_fall_by_equal_steps_around_the_average() {
        assert_eq!(budgets(100.0, 20.0, 1000.0, 0.0, 3), [195, 100, 5]);
        assert_eq!(budgets(100.0, 20.0, 150.0, 0.0, 3), [150, 100, 50]);
        assert_eq!(budgets(100.0, 20.0, 1000.0, 0.0, 1), [100]);
    }

    #[test]
    fn the_window_is_part_of_every_layers_number() {
        assert_eq!(budgets(80.0, 20.0, 160.0, 8.0, 3), [152, 80, 8]);
        // The highest layer would get 5 tokens of a window of 8.
        assert_eq!(budgets(100.0, 20.0, 1000.0, 8.0, 3), [100, 100, 100]);
        assert_eq!(budgets(160.0, 20.0, 1000.0, 8.0, 3), [312, 160, 8]);
    }
}

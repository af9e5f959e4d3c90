//! SimLayerKV (arXiv 2410.13846): some layers are lazy, their latest queries look at the first tokens and the recent
//! ones and at little else. A lazy layer keeps only these; the others share the rest of the sequence's budget equally.
//!
//! As in kvpress: the softmax of the last `last` queries, without the last `last` columns, averaged over heads and
//! queries. A layer is lazy if more than `threshold` of it lies on the first `sink` tokens and the last `recent` of
//! those that are left (1 turns it off, as does a list of at most `sink + recent + last` tokens). A lazy layer keeps the
//! first `sink` and the last `recent - last` tokens, whatever the scorer says. kvpress decides once for a batch; here
//! each sequence decides for itself. kvpress's layers that are not lazy keep everything; here there is a budget, which
//! is met: a lazy layer never gets more than an equal share, unless the others cannot hold the rest.

use super::near::{Near, attention_near, keep_near};
use super::{OverLayers, lens, level, over_layers};
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored, Statistic};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "simlayer",
    about: "layers that look near keep the first and the recent tokens, the others share the rest",
    paper: "2410.13846",
    parameters: &[
        Parameter {
            name: "threshold",
            default: "0.9",
            about: "fraction of attention near above which a layer is lazy",
        },
        Parameter { name: "sink", default: "4", about: "first tokens that a lazy layer keeps" },
        Parameter { name: "recent", default: "1024", about: "recent tokens; a lazy layer keeps as many less last" },
        Parameter { name: "last", default: "1", about: "latest queries that tell" },
    ],
    build: |named, _| {
        let (sink, last) = (named.count("sink", 4, 0)?, named.count("last", 1, 1)?);
        let recent = named.count("recent", 1024, 1)?;
        if recent <= last {
            return Err(named.wrong("recent", format!("more than last, which is {last}")).into());
        }
        let threshold = named.number("threshold", 0.9, 0.0..=1.0)?;
        Ok(Part::Layers(Box::new(SimLayer { threshold, near: Near { sink, recent }, last })))
    },
};

struct SimLayer {
    threshold: f64,
    near: Near,
    last: usize,
}

impl SimLayer {
    fn lazy(&self, context: &Context<'_>, layer: usize) -> bool {
        let (heads, least) = (context.call.shape.kv_heads, self.near.sink + self.near.recent + self.last);
        if self.threshold >= 1.0 || lens(context, layer).iter().any(|&len| len <= least) {
            return false;
        }
        let lists = layer * heads..(layer + 1) * heads;
        let mass: f64 = lists.map(|list| attention_near(context, list, self.near, self.last, self.last)).sum();
        mass / heads as f64 > self.threshold
    }
}

impl OverLayers for SimLayer {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    fn inert(&self, budget_tokens: usize, context_tokens: usize, _window: usize, _layers: usize) -> Option<String> {
        let Near { sink, recent } = self.near;
        let (kept, least) = (sink + recent - self.last, sink + recent + self.last);
        let why = if self.threshold >= 1.0 {
            "with a threshold of 1 no layer is lazy".into()
        } else if context_tokens <= least {
            format!("of a context of at most {least} tokens no layer is lazy")
        } else if budget_tokens <= kept {
            format!("a lazy layer keeps up to {kept} first and recent tokens, and the budget is {budget_tokens} a head")
        } else {
            return None;
        };
        Some(format!("simlayer gives all layers the same: {why}"))
    }

    fn totals(&self, context: &Context<'_>, scored: &mut Scored, _: &mut [f32]) -> Result<Vec<usize>, PolicyError> {
        let heads = context.call.shape.kv_heads;
        let kept = Near { recent: self.near.recent - self.last, ..self.near };
        let most = (kept.sink + kept.recent).min(context.budget_tokens) * heads;
        over_layers(context, |total, layers, caps| {
            let lazy: Vec<bool> = layers.iter().map(|&layer| self.lazy(context, layer)).collect();
            let mut shares: Vec<usize> =
                lazy.iter().zip(caps).map(|(&lazy, &cap)| if lazy { most.min(cap) } else { 0 }).collect();
            // Lazy layers are full already as far as the others can take the rest.
            let rest = total - shares.iter().sum::<usize>();
            let open: Vec<usize> = lazy.iter().zip(caps).map(|(&lazy, &cap)| if lazy { 0 } else { cap }).collect();
            let mut others = vec![0; layers.len()];
            level(rest, &mut others, &open);
            shares.iter_mut().zip(others).for_each(|(share, other)| *share += other);
            level(total, &mut shares, caps);
            for ((&layer, share), _) in layers.iter().zip(&shares).zip(lazy).filter(|(_, lazy)| *lazy) {
                for list in layer * heads..(layer + 1) * heads {
                    keep_near(context, scored, list, kept, share / heads);
                }
            }
            Ok(shares)
        })
    }
}

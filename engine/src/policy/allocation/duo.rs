//! DuoAttention (arXiv 2410.10819): few heads retrieve from far away; the others look at the first tokens and the recent
//! ones, and need no more. These streaming heads keep `sink + recent` tokens by position, whatever the scorer says, and
//! the retrieval heads share the rest of the layer's budget equally.
//!
//! The paper learns which heads retrieve, over a corpus: where a policy file has its gates, `duo.alpha` `[layers, Hkv]`, the
//! fraction `heads` of all heads of the model with the lowest gates (clipped to 0 to 1, rounded to a whole number of
//! heads, of equal gates the first) are streaming heads, as kvpress has it. They may lie in some layers and not in others, so that the retrieval
//! heads of all layers share what is left: a layer gets what its heads do. Without gates it is measured on the context: of a layer's KV heads the
//! fraction `heads` (rounded down) whose last `last` queries put least attention outside sinks and recent tokens are
//! streaming heads. Between decode steps fewer queries may be at hand, as many as the scorer asks for. A streaming head
//! never keeps more than an equal share. What retrieval heads cannot hold goes back to streaming heads, so that the
//! budget is met.

use super::near::{Near, attention_near, keep_near};
use super::{OverHeads, OverLayers, layers_of, lens, level, sequence_total};
use crate::named::Parameter;
use crate::policy::Axis::{KvHeads, Layers};
use crate::policy::published::{self, GATES, folder, from_file, trained_with};
use crate::policy::{Axis, Context, Learned, Part, PartEntry, PolicyError, Scored, Statistic};
use std::sync::Arc;

/// The gates in a policy file.
const ALPHA: (&str, &[Axis]) = ("duo.alpha", &[Layers, KvHeads]);

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "duo",
    about: "heads that look near, or have the lowest gates in duo.alpha [layers, Hkv] of gates or --policy-file, keep the first \
            and the recent tokens, the others share the rest; gates may be a folder of DuoAttention's authors",
    paper: "2410.10819",
    parameters: &[
        Parameter {
            name: "sink",
            default: "auto",
            about: "first tokens that a streaming head keeps; auto: as the file's gates were trained, else 128",
        },
        Parameter {
            name: "recent",
            default: "auto",
            about: "recent tokens that a streaming head keeps; auto: as the file's gates were trained, else 256",
        },
        Parameter {
            name: "heads",
            default: "0.5",
            about: "fraction of a layer's heads, by gates of the model's, that are streaming heads",
        },
        Parameter { name: "last", default: "64", about: "latest queries that tell which" },
        GATES,
    ],
    build: |named, assets| {
        let (heads, last) = (named.number("heads", 0.5, 0.0..=1.0)?, named.count("last", 64, 1)?);
        // A file that the text names is there for these gates; one for all policies may lack them.
        let is_named = !matches!(named.text(GATES.name), None | Some("auto"));
        let mut trained = Near { sink: 128, recent: 256 };
        let alpha = match folder(named) {
            Some(path) => {
                let (alpha, near) = published::duo::read(path, trained)?;
                assets.note(path, &[(ALPHA.0, ALPHA.1, &alpha)])?;
                trained = near;
                Some(alpha)
            }
            None => from_file(named, assets, |assets| {
                let alpha = match is_named {
                    true => assets.needed(ALPHA.0, ALPHA.1)?,
                    false => assets.optional(ALPHA.0, ALPHA.1)?,
                };
                if alpha.is_some() {
                    let said = |key, least, other| trained_with(assets, key, least).map(|found| found.unwrap_or(other));
                    trained = Near { sink: said("sink", 0, trained.sink)?, recent: said("recent", 1, trained.recent)? };
                }
                Ok(alpha)
            })?,
        };
        if alpha.is_some() && named.text("last").is_some() {
            return Err(named.wrong("last", "left out: gates tell which heads stream".into()).into());
        }
        let count = |key, least, trained| match named.text(key) {
            None | Some("auto") => Ok(trained),
            Some(_) => named.count(key, trained, least),
        };
        let near = Near { sink: count("sink", 0, trained.sink)?, recent: count("recent", 1, trained.recent)? };
        let streaming: Option<Arc<[bool]>> = alpha.map(|alpha| lowest(&alpha, heads).into());
        let by_layer = streaming.clone();
        let of_heads = Box::new(Duo { near, heads, last, streaming });
        Ok(match by_layer {
            Some(streaming) => Part::Both(Box::new(Gated { near, streaming }), of_heads),
            None => Part::Heads(of_heads),
        })
    },
};

struct Duo {
    near: Near,
    heads: f64,
    last: usize,
    /// Whether each head of the model is a streaming head, `[layers * Hkv]`, where a file tells.
    streaming: Option<Arc<[bool]>>,
}

/// What layers get where gates tell which heads stream.
struct Gated {
    near: Near,
    streaming: Arc<[bool]>,
}

/// Marks the fraction `share` of all heads that has the lowest gates.
fn lowest(alpha: &Learned, share: f64) -> Vec<bool> {
    let gates: Vec<f32> = alpha.values().iter().map(|gate| gate.clamp(0.0, 1.0)).collect();
    let mut order: Vec<usize> = (0..gates.len()).collect();
    order.sort_by(|&a, &b| gates[a].total_cmp(&gates[b]));
    let mut lowest = vec![false; gates.len()];
    let count = (share * gates.len() as f64).round_ties_even() as usize;
    order[..count].iter().for_each(|&head| lowest[head] = true);
    lowest
}

impl Duo {
    /// Streaming heads of a layer, where no gates tell.
    fn of_a_layer(&self, kv_heads: usize) -> usize {
        (self.heads * kv_heads as f64) as usize
    }
}

impl OverHeads for Duo {
    fn needs(&self) -> Vec<Statistic> {
        if self.streaming.is_some() { Vec::new() } else { vec![Statistic::RecentAttention] }
    }

    fn settles_lists(&self) -> bool {
        true
    }

    fn inert(&self, budget_tokens: usize, kv_heads: usize) -> Option<String> {
        let is_asked = self.streaming.is_none() && self.heads > 0.0;
        if is_asked && self.of_a_layer(kv_heads) == 0 {
            return Some(format!(
                "duo is inert: {} of {kv_heads} KV heads, rounded down, are no streaming heads in any layer",
                self.heads
            ));
        }
        let near = self.near.sink.saturating_add(self.near.recent);
        (self.heads > 0.0 && near >= budget_tokens).then(|| {
            format!(
                "duo gives all heads the same: a streaming head keeps up to {near} first and recent tokens, and the budget is \
                 {budget_tokens} a head"
            )
        })
    }

    fn counts(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        sequence: usize,
        total: usize,
        _: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError> {
        let caps = lens(context, sequence);
        let list = |head: usize| sequence * caps.len() + head;
        let all = 0..caps.len();
        let (streaming, retrieval): (Vec<usize>, Vec<usize>) = match &self.streaming {
            Some(streaming) => {
                let first = context.layer_number(sequence) * caps.len();
                all.partition(|&head| streaming[first + head])
            }
            None => {
                let near = |head| attention_near(context, list(head), self.near, self.last, 0);
                let far: Vec<f64> = all.clone().map(|head| 1.0 - near(head)).collect();
                let mut order: Vec<usize> = all.collect();
                order.sort_by(|&a, &b| far[a].total_cmp(&far[b]));
                let rest = order.split_off(self.of_a_layer(caps.len()));
                (order, rest)
            }
        };

        let counts = divided(total, self.near, &streaming, &retrieval, &caps);
        streaming.iter().for_each(|&head| keep_near(context, scored, list(head), self.near, counts[head]));
        Ok(counts)
    }
}

impl OverLayers for Gated {
    fn reads_scores(&self) -> bool {
        false
    }

    fn totals(&self, context: &Context<'_>, _: &mut Scored, _: &mut [f32]) -> Result<Vec<usize>, PolicyError> {
        let heads = context.call.shape.kv_heads;
        let mut totals = vec![0; context.call.shape.batch];
        for sequence in 0..context.sequences() {
            let layers: Vec<usize> = layers_of(context, sequence).collect();
            let caps: Vec<usize> = layers.iter().flat_map(|&layer| lens(context, layer)).collect();
            let streams =
                |&list: &usize| self.streaming[context.layer_number(layers[list / heads]) * heads + list % heads];
            let (streaming, retrieval): (Vec<usize>, Vec<usize>) = (0..caps.len()).partition(streams);
            let counts = divided(sequence_total(context, sequence), self.near, &streaming, &retrieval, &caps);
            for (&layer, counts) in layers.iter().zip(counts.chunks_exact(heads)) {
                totals[layer] = counts.iter().sum();
            }
        }
        Ok(totals)
    }
}

/// What each list keeps, `total` together: streaming ones what is near, at most an equal share, and retrieval ones the rest; what they cannot
/// hold goes back to the others.
fn divided(total: usize, near: Near, streaming: &[usize], retrieval: &[usize], caps: &[usize]) -> Vec<usize> {
    let most = (near.sink + near.recent).min(total / caps.len());
    let mut counts = vec![0; caps.len()];
    streaming.iter().for_each(|&list| counts[list] = most.min(caps[list]));
    let rest = total.saturating_sub(counts.iter().sum());
    let caps_of_rest: Vec<usize> = retrieval.iter().map(|&list| caps[list]).collect();
    let mut shares = vec![0; retrieval.len()];
    level(rest, &mut shares, &caps_of_rest);
    retrieval.iter().zip(shares).for_each(|(&list, share)| counts[list] = share);
    level(total, &mut counts, caps);
    counts
}

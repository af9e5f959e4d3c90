//! DuoAttention (arXiv 2410.10819): few heads retrieve from far away; the others look at the first tokens and the recent
//! ones, and need no more. These streaming heads keep `sink + recent` tokens by position, whatever the scorer says, and
//! the retrieval heads share the rest of the layer's budget equally.
//!
//! The paper learns which heads retrieve, over a corpus. Here it is measured on the context: of a layer's KV heads the
//! fraction `heads` (rounded down) whose last `last` queries put least attention outside sinks and recent tokens are
//! streaming heads. Between decode steps fewer queries may be at hand, as many as the scorer asks for. A streaming head
//! never keeps more than an equal share. What retrieval heads cannot hold goes back to streaming heads, so that the
//! budget is met.

use super::near::{Near, attention_near, equal_share, keep_near};
use super::{OverHeads, lens, level};
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored, Statistic};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "duo",
    about: "heads that look near keep the first and the recent tokens, the others share the rest",
    paper: "2410.10819",
    parameters: &[
        Parameter { name: "sink", default: "128", about: "first tokens that a streaming head keeps" },
        Parameter { name: "recent", default: "256", about: "recent tokens that a streaming head keeps" },
        Parameter { name: "heads", default: "0.5", about: "fraction of a layer's heads that are streaming heads" },
        Parameter { name: "last", default: "64", about: "latest queries that tell which" },
    ],
    build: |named| {
        let near = Near { sink: named.count("sink", 128, 0)?, recent: named.count("recent", 256, 1)? };
        let (heads, last) = (named.number("heads", 0.5, 0.0..=1.0)?, named.count("last", 64, 1)?);
        Ok(Part::Heads(Box::new(Duo { near, heads, last })))
    },
};

struct Duo {
    near: Near,
    heads: f64,
    last: usize,
}

impl OverHeads for Duo {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
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
        let far: Vec<f64> =
            (0..caps.len()).map(|head| 1.0 - attention_near(context, list(head), self.near, self.last, 0)).collect();
        let mut order: Vec<usize> = (0..caps.len()).collect();
        order.sort_by(|&a, &b| far[a].total_cmp(&far[b]));
        let (streaming, retrieval) = order.split_at((self.heads * caps.len() as f64) as usize);

        let most = (self.near.sink + self.near.recent).min(equal_share(context, sequence, total));
        let mut counts = vec![0; caps.len()];
        streaming.iter().for_each(|&head| counts[head] = most.min(caps[head]));
        let rest = total.saturating_sub(counts.iter().sum());
        let caps_of_rest: Vec<usize> = retrieval.iter().map(|&head| caps[head]).collect();
        let mut shares = vec![0; retrieval.len()];
        level(rest, &mut shares, &caps_of_rest);
        retrieval.iter().zip(shares).for_each(|(&head, share)| counts[head] = share);
        level(total, &mut counts, &caps);
        streaming.iter().for_each(|&head| keep_near(context, scored, list(head), self.near, counts[head]));
        Ok(counts)
    }
}

//! How much of the latest queries' attention stays near: on the first tokens and the recent ones. A list that looks
//! nowhere else needs no more than these.

use crate::attention::few::group_logits;
use crate::policy::{Context, Scored};
use serde::{Deserialize, Serialize};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The first tokens of a sequence and the latest of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Near {
    /// The first, by position.
    pub sink: usize,
    /// The latest.
    pub recent: usize,
}

impl Near {
    /// The slots of a list of `len` tokens that are near, apart from its last `skip`: two ranges without overlap.
    fn slots(&self, context: &Context<'_>, list: usize, skip: usize) -> [Range<usize>; 2] {
        let len = context.len(list).saturating_sub(skip);
        // Lists are in order of position: past the sinks there are none.
        let sinks = (0..len.min(self.sink)).take_while(|&slot| (context.positions)(list, slot) < self.sink).count();
        [0..sinks, len.saturating_sub(self.recent).max(sinks)..len]
    }
}

/// Fraction of the softmax of the last `last` queries that falls on what is near, not counting the last `skip` tokens of
/// the list; mean over the queries that see anything and the query heads of the group.
pub fn attention_near(context: &Context<'_>, list: usize, near: Near, last: usize, skip: usize) -> f64 {
    const BLOCK: usize = 64;
    let (call, (batch, head)) = (&context.call, context.list_at(list));
    let (shape, group) = (call.shape, call.shape.group());
    let mut logits = vec![0.0; group * BLOCK];
    let (mut mass, mut rows) = (0.0, 0);
    let lse_at = |member: usize, query: usize| {
        context.lse[((batch * shape.kv_heads + head) * group + member) * shape.q_len + query] * LOG2_E
    };
    for query in shape.q_len.saturating_sub(last)..shape.q_len {
        let seeing = (0..group).filter(|&member| lse_at(member, query).is_finite());
        rows += seeing.clone().count();
        for slots in near.slots(context, list, skip) {
            for start in slots.clone().step_by(BLOCK) {
                let keys = start..slots.end.min(start + BLOCK);
                let logits = &mut logits[..group * keys.len()];
                group_logits(call, [batch, head], query, keys.clone(), logits);
                for member in seeing.clone() {
                    let lse = lse_at(member, query);
                    let of_member = &logits[member * keys.len()..][..keys.len()];
                    mass += of_member.iter().map(|logit| f64::from((logit - lse).exp2())).sum::<f64>();
                }
            }
        }
    }
    let [first, latest] = near.slots(context, list, skip);
    match rows {
        0 => 0.0,
        // Everything is near: all of it, and not what rounding leaves, by which lists would be told apart.
        _ if skip == 0 && first.end >= latest.start => 1.0,
        _ => mass / rows as f64,
    }
}

/// Gives the lists of a head new scores, so that the `count` best are the first tokens and the latest, whatever the
/// scorer says. Where the count is less than what is near, at most half of it are sinks.
pub fn keep_near(context: &Context<'_>, scored: &mut Scored, list: usize, near: Near, count: usize) {
    scored.settled.insert(list);
    let kv_len = context.call.shape.kv_len;
    let sink = if count < near.sink + near.recent { near.sink.min(count / 2) } else { near.sink };
    let first = scored.highest_scored.max(0.0) + 2.0;
    let len = context.len(list);
    for (slot, score) in scored.values[list * kv_len..][..len].iter_mut().enumerate() {
        *score = if (context.positions)(list, slot) < sink { first } else { -((len - slot) as f32) };
    }
}

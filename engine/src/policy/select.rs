//! From scores and counts to the retained tokens.
//!
//! Higher scores are retained; of equal scores the token later in the list, so that a selection depends on nothing but
//! the scores. How often that rule had to decide between equals is the tie rate.

use super::{Context, Policy, PolicyError, Scored};
use crate::memory::{Buffer, Label};
use rayon::prelude::*;
use std::collections::BTreeSet;

/// Tokens that stay, for each list.
pub struct Selection {
    /// `[lists, kv_len]`: slots that stay, ascending, at the front of each list's part.
    slots: Buffer<u32>,
    kv_len: usize,
    counts: Vec<usize>,
    /// Highest score that was lost in each list; minus infinity where nothing was.
    pub best_lost: Vec<f32>,
}

impl Selection {
    /// Slots of a list that stay, ascending.
    pub fn kept(&self, list: usize) -> &[u32] {
        &self.slots[list * self.kv_len..][..self.counts[list]]
    }

    /// Lets more slots of a list stay, ascending.
    pub fn add(&mut self, list: usize, more: &[u32]) {
        let all: BTreeSet<u32> = self.kept(list).iter().chain(more).copied().collect();
        self.counts[list] = all.len();
        self.slots[list * self.kv_len..].iter_mut().zip(all).for_each(|(to, slot)| *to = slot);
    }
}

/// Bytes that [`select`] takes from the arena for `lists` lists of at most `kv_len` tokens.
pub fn selection_bytes(lists: usize, kv_len: usize) -> u64 {
    8 * (lists * kv_len) as u64
}

/// Divides the budget of an eviction step over its lists and chooses the best of each.
///
/// # Errors
/// When a budget allocation lacks something, or the arena has no room.
pub fn select(policy: &Policy, context: &Context<'_>, scored: &mut Scored) -> Result<Selection, PolicyError> {
    let (lists, kv_len, heads) = (context.lists(), context.call.shape.kv_len, context.call.shape.kv_heads);
    let mut slots: Buffer<u32> = context.arena.alloc(Label::Policy, lists * kv_len)?;
    let mut ranks: Buffer<f32> = context.arena.alloc(Label::Policy, lists * kv_len)?;
    let totals = policy.layers.totals(context, scored, &mut ranks)?;
    let mut counts = Vec::with_capacity(lists);
    for (sequence, &total) in totals.iter().enumerate() {
        let of_heads = policy.heads.counts(context, scored, sequence, total, &mut ranks)?;
        debug_assert_eq!(of_heads.len(), heads);
        counts.extend(of_heads);
    }
    if let Some(scorer) = &policy.scorer {
        scorer.refine(context, scored, &counts, &mut ranks)?;
    }
    scored.lower_again(context);
    let mut best_lost = vec![f32::NEG_INFINITY; lists];
    context.call.cpu.install(|| {
        let lists = slots.par_chunks_mut(kv_len).zip(ranks.par_chunks_mut(kv_len)).zip(&mut best_lost);
        lists.enumerate().for_each(|(list, ((slots, ranks), best_lost))| {
            let scores = &scored.values[list * kv_len..][..context.len(list)];
            *best_lost = keep_best(scores, counts[list], ranks, slots);
        });
    });
    policy.raise_to_threshold(&mut best_lost);
    Ok(Selection { slots, kv_len, counts, best_lost })
}

impl Policy {
    /// Under a threshold, whatever is below it would have been lost: raises the best lost score of each list to it.
    pub(super) fn raise_to_threshold(&self, best_lost: &mut [f32]) {
        if let Some(at) = self.layers.threshold() {
            best_lost.iter_mut().for_each(|lost| *lost = lost.max(at.next_down()));
        }
    }
}

/// Under delayed eviction: of each list only the token that has just left the protected window may go; it stays if it scores
/// above `best_evicted`, the highest score that the list lost before.
///
/// # Errors
/// When the arena has no room.
pub fn select_leaving(context: &Context<'_>, scored: &Scored, best_evicted: &[f32]) -> Result<Selection, PolicyError> {
    let (lists, kv_len) = (context.lists(), context.call.shape.kv_len);
    let mut slots: Buffer<u32> = context.arena.alloc(Label::Policy, lists * kv_len)?;
    let mut counts = Vec::with_capacity(lists);
    for (list, slots) in slots.chunks_mut(kv_len.max(1)).enumerate() {
        let (len, scores) = (context.len(list), &scored.values[list * kv_len..]);
        let leaving = len.checked_sub(scored.protect.window + 1).filter(|&slot| scores[slot] <= best_evicted[list]);
        let retained = (0..len).filter(|&slot| Some(slot) != leaving);
        slots.iter_mut().zip(retained).for_each(|(to, slot)| *to = slot as u32);
        counts.push(len - usize::from(leaving.is_some()));
    }
    Ok(Selection { slots, kv_len, counts, best_lost: best_evicted[..lists].to_vec() })
}

/// Writes the slots of the `count` best scores, ascending; returns the best score that was lost.
pub(super) fn keep_best(scores: &[f32], count: usize, ranks: &mut [f32], slots: &mut [u32]) -> f32 {
    if count >= scores.len() {
        slots.iter_mut().zip(0..scores.len() as u32).for_each(|(target, slot)| *target = slot);
        return f32::NEG_INFINITY;
    }
    let ranks = &mut ranks[..scores.len()];
    ranks.copy_from_slice(scores);
    // The best evicted token: everything above it stays, and of its equals the latest.
    let (_, &mut bar, _) = ranks.select_nth_unstable_by(count, |a, b| b.total_cmp(a));
    let above = scores.iter().filter(|score| score.total_cmp(&bar).is_gt()).count();
    let equal = scores.iter().filter(|score| score.total_cmp(&bar).is_eq()).count();
    let mut lost_equals = equal - (count - above);
    let mut kept = 0;
    for (slot, score) in scores.iter().enumerate() {
        let stays = match score.total_cmp(&bar) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Equal if lost_equals > 0 => {
                lost_equals -= 1;
                false
            }
            std::cmp::Ordering::Equal => true,
        };
        if stays {
            slots[kept] = slot as u32;
            kept += 1;
        }
    }
    bar
}

/// Fraction of scored tokens whose score equals that of another of the same list; protected tokens do not count.
pub fn tie_rate(context: &Context<'_>, scored: &Scored) -> f64 {
    let lists = scored.values.chunks(context.call.shape.kv_len).enumerate();
    tie_rate_of(lists.map(|(list, scores)| &scores[..context.len(list)]), scored.highest_scored)
}

/// As [`tie_rate`], of lists of scores.
pub fn tie_rate_of<'a>(lists: impl Iterator<Item = &'a [f32]>, highest_scored: f32) -> f64 {
    let (mut tied, mut scored_tokens) = (0, 0);
    for scores in lists {
        let mut scores: Vec<f32> = scores.iter().copied().filter(|&score| score <= highest_scored).collect();
        scores.sort_unstable_by(f32::total_cmp);
        tied += scores.chunk_by(|a, b| a == b).filter(|run| run.len() > 1).map(<[f32]>::len).sum::<usize>();
        scored_tokens += scores.len();
    }
    if scored_tokens == 0 { 0.0 } else { tied as f64 / scored_tokens as f64 }
}

#[cfg(test)]
mod tests {
    use super::keep_best;
    use proptest::prelude::*;

    fn kept(scores: &[f32], count: usize) -> (Vec<u32>, f32) {
        let (mut ranks, mut slots) = (vec![0.0; scores.len()], vec![0; scores.len()]);
        let lost = keep_best(scores, count, &mut ranks, &mut slots);
        slots.truncate(count.min(scores.len()));
        (slots, lost)
    }

    #[test]
    fn the_best_stay_and_later_tokens_win_ties() {
        assert_eq!(kept(&[1.0, 3.0, 2.0, 3.0, 9.0], 2), (vec![3, 4], 3.0));
        assert_eq!(kept(&[5.0, 5.0, 5.0], 2), (vec![1, 2], 5.0));
        assert_eq!(kept(&[5.0, 5.0], 3), (vec![0, 1], f32::NEG_INFINITY));
        assert_eq!(kept(&[5.0, 4.0], 0), (vec![], 5.0));
    }

    proptest! {
        #[test]
        fn no_loser_beats_a_keeper(values in prop::collection::vec(0u8..6, 1..40), count in 0usize..40) {
            let scores: Vec<f32> = values.iter().map(|&value| f32::from(value)).collect();
            let (slots, best_lost) = kept(&scores, count);
            prop_assert_eq!(slots.len(), count.min(scores.len()));
            prop_assert!(slots.windows(2).all(|pair| pair[0] < pair[1]));
            let mut order: Vec<u32> = (0..scores.len() as u32).collect();
            order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(b.cmp(&a)));
            let lost = order.get(count).map_or(f32::NEG_INFINITY, |&slot| scores[slot as usize]);
            order.truncate(count);
            order.sort_unstable();
            prop_assert_eq!((slots, best_lost), (order, lost));
        }
    }
}

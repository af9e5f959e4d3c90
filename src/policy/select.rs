//! From scores to the tokens that stay.
//!
//! Higher scores stay; of equal scores the token later in the list stays, so that a selection depends on nothing but
//! the scores. How often that rule had to decide between equals is the tie rate.

use super::{Allotment, Scored};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use std::cmp::Ordering;

/// Tokens that stay, for each list.
pub struct Selection {
    /// Slots that stay, ascending, one after another for all lists.
    slots: Buffer<u32>,
    /// Where each list's slots begin in `slots`, and how many they are.
    spans: Vec<(usize, usize)>,
    /// Smallest score that stayed under [`Allotment::Threshold`], for each sequence.
    pub thresholds: Vec<f32>,
    /// Share of judged tokens whose score equals that of another of the same list; protected tokens do not count.
    pub tie_rate: f64,
}

impl Selection {
    /// Slots of a list that stay, ascending.
    pub fn kept(&self, list: usize) -> &[u32] {
        let (start, count) = self.spans[list];
        &self.slots[start..start + count]
    }
}

/// Bytes that [`select`] takes from the arena for `lists` lists of at most `kv_len` tokens.
pub fn selection_bytes(lists: usize, kv_len: usize) -> u64 {
    4 * (lists * kv_len) as u64
}

/// Chooses `budget_tokens` of each list (uniform), or the best `heads * budget_tokens` of each sequence over all its
/// heads (threshold). Scores are `[sequences, heads, kv_len]`, `lens` `[sequences * heads]`; scores must be numbers.
///
/// # Errors
/// When the arena has no room.
pub fn select(
    arena: &Arena,
    allotment: Allotment,
    scored: &Scored,
    lens: &[usize],
    heads: usize,
    kv_len: usize,
    budget_tokens: usize,
) -> Result<Selection, ArenaError> {
    let mut slots: Buffer<u32> = arena.alloc(Label::Policy, lens.len() * kv_len)?;
    let mut spans = Vec::with_capacity(lens.len());
    let mut thresholds = Vec::new();
    let (mut tied, mut judged) = (0, 0);
    for (sequence, order) in slots.chunks_mut(heads * kv_len).enumerate() {
        // Entries number (head, slot) of the sequence; later is larger, so ties go to the larger number.
        let mut count = 0;
        for head in 0..heads {
            for slot in 0..lens[sequence * heads + head] {
                order[count] = (head * kv_len + slot) as u32;
                count += 1;
            }
        }
        let scores = &scored.values[sequence * heads * kv_len..][..heads * kv_len];
        let best_first =
            |&a: &u32, &b: &u32| -> Ordering { scores[b as usize].total_cmp(&scores[a as usize]).then(b.cmp(&a)) };
        let mut start = 0;
        for head in 0..heads {
            let list = &mut order[start..start + lens[sequence * heads + head]];
            list.sort_unstable_by(best_first);
            start += list.len();
            let list = &list[list.partition_point(|&entry| scores[entry as usize] > scored.highest_judged)..];
            tied += equal_neighbours(list, scores);
            judged += list.len();
        }
        match allotment {
            Allotment::Uniform => {
                let mut start = 0;
                for head in 0..heads {
                    let len = lens[sequence * heads + head];
                    let kept = budget_tokens.min(len);
                    finish(&mut order[start..start + kept], head * kv_len);
                    spans.push((sequence * heads * kv_len + start, kept));
                    start += len;
                }
            }
            Allotment::Threshold => {
                let kept = (budget_tokens * heads).min(count);
                let order = &mut order[..count];
                if kept < count {
                    order.select_nth_unstable_by(kept, best_first);
                }
                let least = order[..kept].iter().map(|&entry| scores[entry as usize]).fold(f32::INFINITY, f32::min);
                thresholds.push(least);
                // By number: heads follow one another, slots ascend.
                order[..kept].sort_unstable();
                let mut start = 0;
                for head in 0..heads {
                    let end = (head + 1) * kv_len;
                    let count = order[start..kept].iter().take_while(|&&entry| (entry as usize) < end).count();
                    finish(&mut order[start..start + count], head * kv_len);
                    spans.push((sequence * heads * kv_len + start, count));
                    start += count;
                }
            }
        }
    }
    let tie_rate = if judged == 0 { 0.0 } else { tied as f64 / judged as f64 };
    Ok(Selection { slots, spans, thresholds, tie_rate })
}

/// Turns entries of one head into ascending slots.
fn finish(entries: &mut [u32], base: usize) {
    entries.iter_mut().for_each(|entry| *entry -= base as u32);
    entries.sort_unstable();
}

/// How many entries of a sorted list have a neighbour with the same score.
fn equal_neighbours(sorted: &[u32], scores: &[f32]) -> usize {
    sorted
        .chunk_by(|&a, &b| scores[a as usize] == scores[b as usize])
        .map(|run| if run.len() > 1 { run.len() } else { 0 })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scored(arena: &Arena, scores: &[f32], highest_judged: f32) -> Scored {
        let mut values = arena.alloc(Label::Policy, scores.len()).unwrap();
        values.copy_from_slice(scores);
        Scored { values, highest_judged }
    }

    #[test]
    fn the_best_stay_and_later_tokens_win_ties() {
        let arena = Arena::unlimited();
        let scores = [1.0, 3.0, 2.0, 3.0, 9.0, /* */ 5.0, 5.0, 5.0, 0.0, 0.0];
        let scored = scored(&arena, &scores, 9.0);
        let selection = select(&arena, Allotment::Uniform, &scored, &[5, 3], 2, 5, 2).unwrap();
        assert_eq!(selection.kept(0), [3, 4]);
        assert_eq!(selection.kept(1), [1, 2]);
        assert_eq!(selection.tie_rate, 5.0 / 8.0);
        let protected = Scored { highest_judged: 2.0, ..scored };
        let selection = select(&arena, Allotment::Threshold, &protected, &[5, 3], 2, 5, 2).unwrap();
        assert_eq!(selection.tie_rate, 0.0);
        assert_eq!((selection.kept(0), selection.kept(1)), (&[4][..], &[0, 1, 2][..]));
        assert_eq!(selection.thresholds, [5.0]);
    }

    proptest! {
        #[test]
        fn budgets_are_met_and_no_loser_beats_a_keeper(
            values in prop::collection::vec(0u8..6, 24),
            lens in prop::collection::vec(0usize..=6, 4),
            budget in 1usize..8,
            threshold in any::<bool>(),
        ) {
            let arena = Arena::unlimited();
            let scores: Vec<f32> = values.iter().map(|&value| f32::from(value)).collect();
            let allotment = if threshold { Allotment::Threshold } else { Allotment::Uniform };
            let selection = select(&arena, allotment, &scored(&arena, &scores, 6.0), &lens, 2, 6, budget).unwrap();
            prop_assert_eq!(arena.usage().peak_bytes - 4 * 24, selection_bytes(4, 6));
            for list in 0..4 {
                let kept = selection.kept(list);
                prop_assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(kept.iter().all(|&slot| (slot as usize) < lens[list]));
                let score = |slot: usize| scores[list * 6 + slot];
                let least = kept.iter().map(|&slot| score(slot as usize)).fold(f32::INFINITY, f32::min);
                let lost = (0..lens[list]).filter(|&slot| !kept.contains(&(slot as u32)));
                let best_lost = lost.map(score).fold(f32::NEG_INFINITY, f32::max);
                prop_assert!(best_lost <= least);
                if !threshold {
                    prop_assert_eq!(kept.len(), budget.min(lens[list]));
                }
            }
            if threshold {
                for sequence in 0..2 {
                    let held = lens[2 * sequence] + lens[2 * sequence + 1];
                    let kept = selection.kept(2 * sequence).len() + selection.kept(2 * sequence + 1).len();
                    prop_assert_eq!(kept, held.min(2 * budget));
                }
            }
        }
    }
}

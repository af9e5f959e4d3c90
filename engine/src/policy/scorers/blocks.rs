//! Selection block by block, as kvpress's BlockPress does: the budget is filled with the first tokens, and then each block
//! of `size` tokens competes with what has stayed so far, scored among each other. It is not prefill in chunks
//! (`+chunks`): all queries and keys are there already. For scorers of keys, values and queries; attention is over the
//! whole list and cannot be had for parts of it.

use crate::attention::{Forward, KvRows, Shape};
use crate::format::KvFormat;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scorer, Statistic};
use crate::tensor::Rows;

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "blocks",
    about: "block after block competes with what has stayed so far; for scores that need no attention",
    paper: "",
    parameters: &[Parameter { name: "size", default: "128", about: "tokens of a block" }],
    build: |named, _| {
        let size = named.count("size", 128, 1)?;
        Ok(Part::Scorer(Box::new(move |scorer| Box::new(Blocks { scorer, size }))))
    },
};

struct Blocks {
    scorer: Box<dyn Scorer>,
    size: usize,
}

impl Scorer for Blocks {
    fn inner(&self) -> Option<&dyn Scorer> {
        Some(&*self.scorer)
    }

    fn check(&self) -> Result<(), &'static str> {
        use Statistic::{
            AccumulatedAttention, FutureAttention, Gradients, HiddenStates, RecentAttention, Reconstruction,
        };
        let of_all = [RecentAttention, AccumulatedAttention, FutureAttention, HiddenStates, Reconstruction, Gradients];
        let why = "'blocks' is for scores of keys, values or queries: attention is over the whole list, and a gate is the same in each \
                   part";
        match self.needs().iter().any(|need| of_all.contains(need)) {
            true => Err(why),
            false => self.scorer.check(),
        }
    }

    fn is_absolute(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Statistic> {
        self.scorer.needs()
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        let slots = (shape.batch * shape.kv_heads * shape.kv_len) as u64;
        12 * slots + self.scorer.scratch_bytes(shape, threads)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let (lists, kv_len) = (context.lists(), context.call.shape.kv_len);
        let protect = self.scorer.protect(context.budget_tokens);
        let mut slots = context.arena.alloc::<u32>(Label::Workspace, lists * kv_len)?;
        let mut order = context.arena.alloc::<u32>(Label::Workspace, lists * kv_len)?;
        let mut among = context.arena.alloc::<f32>(Label::Workspace, lists * kv_len)?;
        // Tokens of each list that compete; until the first round has ended, the first of the list.
        let kept = |list: usize| context.budget_tokens.min(context.len(list));
        let mut lens: Vec<usize> = (0..lists).map(kept).collect();
        slots.chunks_mut(kv_len).for_each(|slots| slots.iter_mut().zip(0..).for_each(|(to, slot)| *to = slot));
        // The round in which a token went; 0 for what is retained.
        scores.fill(0.0);
        let (mut start, mut round) = (context.budget_tokens.min(kv_len), 0.0);
        loop {
            let end = (start + self.size).min(kv_len);
            for (list, (slots, len)) in slots.chunks_mut(kv_len).zip(&mut lens).enumerate() {
                for slot in start..end.min(context.len(list)) {
                    slots[*len] = slot as u32;
                    *len += 1;
                }
            }
            self.score_part(context, &slots, &lens, &mut among)?;
            round += 1.0;
            for list in 0..lists {
                let (slots, among) = (&mut slots[list * kv_len..], &among[list * kv_len..]);
                let order = &mut order[list * kv_len..][..lens[list]];
                let scores = &mut scores[list * kv_len..][..context.len(list)];
                if end == kv_len {
                    finish(scores, &slots[..order.len()], among, round);
                    continue;
                }
                let window = context.len(list).saturating_sub(protect.window);
                let safe = |index: u32| {
                    let slot = slots[index as usize] as usize;
                    slot >= window || (context.positions)(list, slot) < protect.sink
                };
                order.iter_mut().zip(0..).for_each(|(to, index)| *to = index);
                order.sort_unstable_by(|&a, &b| {
                    let by_score = among[b as usize].total_cmp(&among[a as usize]);
                    safe(b).cmp(&safe(a)).then(by_score).then(b.cmp(&a))
                });
                let (stay, go) = order.split_at_mut(kept(list).min(lens[list]));
                go.iter().for_each(|&index| scores[slots[index as usize] as usize] = round);
                stay.sort_unstable();
                stay.iter().enumerate().for_each(|(to, &index)| slots[to] = slots[index as usize]);
                lens[list] = stay.len();
            }
            if end == kv_len {
                return Ok(());
            }
            start = end;
        }
    }
}

impl Blocks {
    /// Scores the tokens in `slots` among each other; the first `lens` of each list's part.
    fn score_part(
        &self,
        context: &Context<'_>,
        slots: &[u32],
        lens: &[usize],
        among: &mut [f32],
    ) -> Result<(), PolicyError> {
        let (heads, kv_len) = (context.call.shape.kv_heads, context.call.shape.kv_len);
        let part = Subset { kv: context.call.kv, slots, lens, heads, kv_len };
        let positions = |list: usize, slot: usize| (context.positions)(list, slots[list * kv_len + slot] as usize);
        let context = Context {
            call: Forward { kv: &part, ..context.call },
            lse: &[],
            future: None,
            accumulated: None,
            gates: None,
            reconstructed: None,
            positions: &positions,
            ..*context
        };
        self.scorer.score(&context, among)
    }
}

/// Writes the scores of what was retained to the end, and below them those of what went: the lower the earlier.
fn finish(scores: &mut [f32], slots: &[u32], among: &[f32], rounds: f32) {
    let lowest = among[..slots.len()].iter().copied().fold(f32::INFINITY, f32::min);
    let distance = lowest.abs().max(1.0);
    scores.iter_mut().for_each(|score| *score = lowest - distance * (rounds - *score));
    slots.iter().zip(among).for_each(|(&slot, &own)| scores[slot as usize] = own);
}

/// Some rows of each list.
struct Subset<'a> {
    kv: &'a dyn KvRows,
    slots: &'a [u32],
    lens: &'a [usize],
    heads: usize,
    kv_len: usize,
}

impl Subset<'_> {
    fn slot(&self, batch: usize, head: usize, index: usize) -> usize {
        self.slots[(batch * self.heads + head) * self.kv_len + index] as usize
    }
}

impl KvRows for Subset<'_> {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.lens[batch * self.heads + head]
    }

    fn format(&self) -> KvFormat {
        self.kv.format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.kv.key_rows(batch, head, self.slot(batch, head, start)).first(1)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.kv.value_rows(batch, head, self.slot(batch, head, start)).first(1)
    }
}

#[cfg(test)]
mod tests {
    use super::finish;

    #[test]
    fn what_went_scores_below_what_stayed_and_lower_the_earlier_it_went() {
        // Slots 1 and 3 stayed; 0 went in round 1, 2 in round 2 of 3.
        let mut scores = [1.0, 0.0, 2.0, 0.0];
        finish(&mut scores, &[1, 3], &[-4.0, 7.0, 99.0], 3.0);
        assert_eq!(scores, [-12.0, -4.0, -8.0, 7.0]);
    }
}

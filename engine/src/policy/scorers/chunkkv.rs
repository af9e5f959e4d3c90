//! ChunkKV (arXiv 2502.00299): neighbours stay or go together. Every token of a chunk of `length` positions gets the
//! mean score of the chunk over all heads of the sequence, so that heads keep the same chunks.
//!
//! Protected tokens count in the mean as kvpress counts them, with the highest score of all plus one; they are not
//! protected otherwise, or chunks would not stay whole (`+chunkkv+protect` protects again). kvpress keeps a whole number
//! of chunks, of which the last may be shorter, and so keeps fewer tokens than the budget says or more. Here the budget
//! is met: the best chunks stay, and of the chunk for which there is no whole room the latest tokens, as of all equal
//! scores. Where the chunks of kvpress fill the budget both keep the same.

use crate::named::Parameter;
use crate::policy::scored::above;
use crate::policy::{Context, Part, PartEntry, PolicyError, Protect, Scorer, Statistic};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "chunkkv",
    about: "whole chunks stay, the same in every head, by the mean of their scores",
    paper: "2502.00299",
    parameters: &[Parameter { name: "length", default: "20", about: "tokens of a chunk" }],
    build: |named, _| {
        let length = named.count("length", 20, 1)?;
        Ok(Part::Scorer(Box::new(move |scorer| Box::new(Chunks { scorer, length }))))
    },
};

struct Chunks {
    scorer: Box<dyn Scorer>,
    length: usize,
}

impl Scorer for Chunks {
    fn inner(&self) -> Option<&dyn Scorer> {
        Some(&*self.scorer)
    }

    fn is_absolute(&self) -> bool {
        false
    }

    /// Nothing: chunks would not stay whole.
    fn protect(&self, _: usize) -> Protect {
        Protect::default()
    }

    fn needs(&self) -> Vec<Statistic> {
        self.scorer.needs()
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.scorer.score(context, scores)?;
        lift_protected(self.scorer.as_ref(), context, scores);
        let (heads, kv_len) = (context.call.shape.kv_heads, context.call.shape.kv_len);
        for (sequence, scores) in scores.chunks_mut(heads * kv_len).enumerate() {
            let first = sequence * heads;
            // The next slot of each head's list: lists are in order of position.
            let mut next = vec![0; heads];
            let position = |head: usize, slot: usize| {
                (slot < context.len(first + head)).then(|| (context.positions)(first + head, slot))
            };
            while let Some(start) = (0..heads).filter_map(|head| position(head, next[head])).min() {
                let end = (start / self.length + 1) * self.length;
                let (mut sum, mut count) = (0.0f64, 0usize);
                let begun = next.clone();
                for (head, next) in next.iter_mut().enumerate() {
                    while position(head, *next).is_some_and(|position| position < end) {
                        sum += f64::from(scores[head * kv_len + *next]);
                        *next += 1;
                        count += 1;
                    }
                }
                let mean = (sum / count as f64) as f32;
                for (head, (&begun, &next)) in begun.iter().zip(&next).enumerate() {
                    scores[head * kv_len..][begun..next].fill(mean);
                }
            }
        }
        Ok(())
    }
}

/// Gives the protected tokens of a scorer the highest score of all plus one, as kvpress does.
fn lift_protected(scorer: &dyn Scorer, context: &Context<'_>, scores: &mut [f32]) {
    let protect = scorer.protect(context.budget_tokens);
    let kv_len = context.call.shape.kv_len;
    let all = scores.chunks(kv_len).enumerate().flat_map(|(list, scores)| &scores[..context.len(list)]);
    let highest = all.copied().fold(f32::NEG_INFINITY, f32::max);
    for (list, scores) in scores.chunks_mut(kv_len).enumerate() {
        let scores = &mut scores[..context.len(list)];
        let recent = scores.len().saturating_sub(protect.window);
        for (slot, score) in scores.iter_mut().enumerate() {
            if slot >= recent || (context.positions)(list, slot) < protect.sink {
                *score = above(highest, 1);
            }
        }
    }
}

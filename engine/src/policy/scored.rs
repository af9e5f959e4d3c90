//! One eviction step: scores with protected tokens above all others.

use super::Decoding;
use super::{Budget, BudgetError, Context, Policy, PolicyError, Protect};
use crate::memory::{Buffer, Label};
use std::collections::BTreeSet;

/// Scores of a context.
pub struct Scored {
    /// `[B, Hkv, kv_len]`: protected tokens above all others.
    pub values: Buffer<f32>,
    /// The highest score of a token that is scored; what lies above it is protected.
    pub highest_scored: f32,
    /// What the scorer protects under the context's budget.
    pub protect: Protect,
    /// Lists whose order is no scorer's any more: a budget allocation has settled it.
    pub settled: BTreeSet<usize>,
    /// Of each list, how many of its best tokens a budget allocation gave it whatever the other lists have (Ada-KV's floor); empty where
    /// none did.
    pub safe: Vec<usize>,
    /// Slots of each list that [`Scored::lower`] has put below all others.
    lowered: Vec<Vec<u32>>,
}

impl Scored {
    /// Scores with the protected tokens above `highest_scored` already.
    pub fn new(values: Buffer<f32>, highest_scored: f32, protect: Protect) -> Self {
        Scored { values, highest_scored, protect, settled: BTreeSet::new(), safe: Vec::new(), lowered: Vec::new() }
    }

    /// Puts the protected tokens of a context above all others of `values`, `[B, Hkv, kv_len]`.
    ///
    /// # Errors
    /// When a value is no number.
    pub fn protecting(context: &Context<'_>, protect: Protect, mut values: Buffer<f32>) -> Result<Self, PolicyError> {
        let highest_scored = protect_scores(context, protect, &mut values)?;
        Ok(Scored::new(values, highest_scored, protect))
    }

    /// Puts slots of lists below all scores of all lists, so that they take nothing of a budget, however it is divided.
    pub fn lower(&mut self, context: &Context<'_>, slots: &[Vec<u32>]) {
        self.lowered = slots.to_vec();
        self.lower_again(context);
    }

    /// The same of what was lowered before: budget allocations and refined scorers give lists new scores.
    pub(super) fn lower_again(&mut self, context: &Context<'_>) {
        if self.lowered.iter().all(Vec::is_empty) {
            return;
        }
        let kv_len = context.call.shape.kv_len;
        let all = (0..context.lists()).flat_map(|list| &self.values[list * kv_len..][..context.len(list)]);
        let lowest = all.copied().fold(f32::INFINITY, f32::min);
        let below = lowest - lowest.abs().max(1.0);
        for (slots, scores) in self.lowered.iter().zip(self.values.chunks_mut(kv_len)) {
            slots.iter().for_each(|&slot| scores[slot as usize] = below);
        }
    }

    /// How many steps above all that is scored a protected token lies; 0 for one that is scored.
    pub fn rank(&self, score: f32) -> u8 {
        (0..2).take_while(|&steps| score > above(self.highest_scored, steps)).count() as u8
    }
}

/// What lies some steps above a score: as many ones, or as numbers so large allow.
pub(super) fn above(score: f32, steps: u8) -> f32 {
    (0..steps).fold(score, |score, _| (score + 1.0).max(score.next_up()))
}

impl Policy {
    /// Scores every token that `context` shows; `None` for a policy that keeps everything.
    ///
    /// # Errors
    /// When the scorer lacks a statistic or gives a score that is no number, or the arena has no room.
    pub fn score(&self, context: &Context<'_>) -> Result<Option<Scored>, PolicyError> {
        let Some(scorer) = &self.scorer else { return Ok(None) };
        let mut values = context.arena.alloc(Label::Policy, context.lists() * context.call.shape.kv_len)?;
        scorer.score(context, &mut values)?;
        Ok(Some(Scored::protecting(context, scorer.protect(context.budget_tokens), values)?))
    }

    /// Tokens of a context that each KV head may keep under `budget` on average, or read in a step; all of them for a
    /// policy that keeps and reads everything. It may be more than the context where the policy evicts from, or reads, what
    /// comes behind it too.
    ///
    /// # Errors
    /// When nothing would stay, fewer than the sinks and one token more, or a budget that means nothing to a KV selection.
    pub fn budget_tokens(
        &self,
        name: &str,
        budget: Option<&Budget>,
        context_tokens: usize,
        token_bytes: u64,
        lists: usize,
    ) -> Result<usize, BudgetError> {
        let Some(budget) = budget else { return Ok(context_tokens) };
        if let Some(selection) = &self.selection {
            let tokens = budget.of_all(context_tokens, token_bytes, lists)?;
            let refused = |reason| BudgetError::Selection { budget: budget.to_string(), policy: name.into(), reason };
            selection.check(tokens, context_tokens).map_err(refused)?;
            return Ok(tokens);
        }
        let Some(scorer) = &self.scorer else { return Ok(context_tokens) };
        // What comes behind the context counts where it is evicted from too.
        let is_of_all = matches!(self.schedule.decoding, Decoding::EverySteps(_));
        let tokens = match is_of_all {
            true => budget.of_all(context_tokens, token_bytes, lists)?,
            false => budget.tokens(context_tokens, token_bytes, lists)?,
        };
        let sink = scorer.protect(tokens).sink;
        if tokens <= sink && (is_of_all || tokens < context_tokens) {
            return Err(BudgetError::Sinks { budget: budget.to_string(), tokens, policy: name.into(), sink });
        }
        Ok(tokens)
    }
}

/// Puts the protected tokens above all others: recent ones a step above the maximum (as kvpress does), sinks two. Returns the
/// maximum; refuses scores that are not numbers.
fn protect_scores(context: &Context<'_>, protect: Protect, scores: &mut [f32]) -> Result<f32, PolicyError> {
    let kv_len = context.call.shape.kv_len;
    let mut max = f32::NEG_INFINITY;
    for (list, scores) in scores.chunks(kv_len).enumerate() {
        for (slot, &score) in scores[..context.len(list)].iter().enumerate() {
            if !score.is_finite() {
                let (batch, head) = context.list_at(list);
                return Err(PolicyError::Score { score, batch, head, slot });
            }
            max = max.max(score);
        }
    }
    for (list, scores) in scores.chunks_mut(kv_len).enumerate() {
        let scores = &mut scores[..context.len(list)];
        // -0 equals 0, and is below it in the order by which tokens are selected.
        scores.iter_mut().for_each(|score| *score += 0.0);
        let recent = scores.len().saturating_sub(protect.window);
        scores[recent..].fill(above(max, 1));
        for (slot, score) in scores.iter_mut().enumerate().take(protect.sink) {
            // Lists are in order of position: past the sinks there are none.
            if (context.positions)(list, slot) >= protect.sink {
                break;
            }
            *score = above(max, 2);
        }
    }
    Ok(max)
}

//! How long lists get, and how they come to be so: what follows from a cell, its policy and its budget on any device.

use crate::experiment::cell::Cell;
use crate::policy::{Decoding, Policy};

/// What the lengths of lists follow from.
#[derive(Clone, Copy)]
pub(in crate::experiment::measure) struct Lengths<'a> {
    pub cell: &'a Cell,
    /// The policy, if it ever evicts.
    pub evicting: Option<&'a Policy>,
    pub budget_tokens: usize,
}

impl Lengths<'_> {
    /// Tokens of a prefill chunk.
    pub fn chunk(&self) -> usize {
        let context = self.cell.context_tokens;
        self.evicting.and_then(|policy| policy.schedule.chunk_tokens).map_or(context, |tokens| tokens.min(context))
    }

    /// Most tokens that one list may ever hold: in chunks, what a layer and its sequence may give to one head.
    pub fn most(&self) -> usize {
        let (cell, chunk) = (self.cell, self.chunk());
        if chunk == cell.context_tokens {
            return cell.context_tokens + cell.new_tokens;
        }
        let kept = self.budget_tokens * if self.is_even() { 1 } else { cell.kv_heads * cell.layers };
        (kept + chunk.max(cell.new_tokens)).min(cell.context_tokens + cell.new_tokens)
    }

    /// Whether all lists always hold the same number of tokens.
    pub fn is_even(&self) -> bool {
        self.evicting.is_none_or(Policy::is_even)
    }

    /// Tokens of a list, on average, when the chunk that begins at token `start` comes.
    pub fn before(&self, start: usize) -> usize {
        self.budget_tokens.min(start)
    }

    /// Tokens of the longest list where lists hold `tokens` on average, `fresh` of them not evicted yet.
    pub fn longest(&self, tokens: usize, fresh: usize) -> usize {
        if self.is_even() {
            return tokens;
        }
        let (cell, old) = (self.cell, tokens - fresh);
        let kept = (old * cell.kv_heads * cell.layers).min(cell.context_tokens);
        (kept + fresh).min(cell.context_tokens + cell.new_tokens)
    }

    /// Decode steps after which a list is back at its budget; all of them where it is never cut.
    pub fn grown(&self) -> usize {
        let new = self.cell.new_tokens;
        match self.evicting.map_or(Decoding::Never, |policy| policy.schedule.decoding) {
            Decoding::EverySteps(steps) => steps.min(new),
            Decoding::Never | Decoding::Delayed => new,
        }
    }

    /// Whether a decode step comes behind an eviction, so that its list is shorter than what its sequence has seen.
    pub fn decodes_evicted(&self) -> bool {
        let (context, new) = (self.cell.context_tokens, self.cell.new_tokens);
        let first = match self.evicting.map_or(Decoding::Never, |policy| policy.schedule.decoding) {
            _ if self.budget_tokens < context => return true,
            Decoding::Never => return false,
            Decoding::EverySteps(steps) => (self.budget_tokens - context + 1).next_multiple_of(steps),
            Decoding::Delayed => self.budget_tokens - context + 1,
        };
        first < new
    }

    /// Tokens of a list while decoding, on average and at most.
    pub fn late(&self) -> usize {
        let most = self.cell.context_tokens + self.cell.new_tokens;
        self.evicting.map_or(most, |_| (self.budget_tokens + self.grown()).min(most))
    }

    /// Latest queries that are held while decoding: more than one, or none.
    pub fn recent(&self) -> Option<usize> {
        let policy = self.evicting.filter(|policy| policy.schedule.decoding != Decoding::Never)?;
        let recent = policy.recent_queries().min(self.cell.context_tokens);
        (recent > 1).then_some(recent)
    }
}

//! Judgements on a GPU: attention that tokens received, scores, selection, and the cache that shrinks.

use super::turn::Session;
use crate::attention::export::Reduction;
use crate::cache::cuda::Latest;
use crate::experiment::measure::cuda::{Bench, TurnError};
use crate::memory::Label;
use crate::policy::cuda::{DeviceContext, DeviceScored, DeviceSelection, Queries, let_leave, score, select};
use crate::policy::tied_share;

impl Session<'_> {
    /// What a policy sees besides the cache.
    fn context<'c>(&'c self, queries: Queries<'c>, seen_tokens: usize) -> DeviceContext<'c> {
        let cell = &self.evict.cell;
        DeviceContext {
            runtime: self.bench.runtime,
            arena: self.bench.arena,
            cpu: &self.cpu,
            queries: Some(queries),
            q_heads: cell.q_heads,
            params: cell.params(),
            layers: cell.layers,
            seen_tokens,
            budget_tokens: self.evict.budget_tokens,
        }
    }

    /// For a policy that accumulates attention: adds what these queries give to each token of the cache.
    pub(super) fn accumulate(&mut self, queries: &Queries<'_>) -> Result<(), TurnError> {
        if !self.evict.accumulates() {
            return Ok(());
        }
        let Bench { runtime, arena, .. } = self.bench;
        let width = self.cache.max_len();
        let bytes = 4 * (self.cache.shape().lists() * width) as u64;
        let mut sums = runtime.device().alloc(arena, Label::Policy, bytes)?;
        let context = self.context(*queries, 0);
        let counted_ns = context.columns(&self.cache, None, Reduction::RECEIVED, &mut sums)?;
        self.score_ns += counted_ns + self.cache.add_attention(runtime, &sums, width)?;
        Ok(())
    }

    /// Judges the cache by the latest queries and shrinks it to the budget.
    pub(super) fn judge(&mut self, queries: Queries<'_>, seen_tokens: usize) -> Result<(), TurnError> {
        let evict = self.evict;
        let context = self.context(queries, seen_tokens);
        let scored = score(&evict.policy, &context, &self.cache)?;
        let mut scored = scored.expect("a policy with a scorer gives scores");
        let selection = select(&evict.policy, &context, &self.cache, &mut scored)?;
        self.tie_rate = if self.bench.truth.is_some() { self.tie_rate(&scored)? } else { 0.0 };
        self.score_ns += scored.time_ns;
        self.shrink(&selection)?;
        self.best_lost = selection.best_lost;
        Ok(())
    }

    /// Under a delayed schedule: judges the token that has just left the recent ones of each list.
    pub(super) fn judge_leaving(&mut self, queries: Queries<'_>, seen_tokens: usize) -> Result<(), TurnError> {
        let context = self.context(queries, seen_tokens);
        let scored = score(&self.evict.policy, &context, &self.cache)?;
        let mut scored = scored.expect("a policy with a scorer gives scores");
        let selection = let_leave(&context, &self.cache, &mut scored, &self.best_lost)?;
        self.score_ns += scored.time_ns;
        self.shrink(&selection)
    }

    /// Keeps what was selected.
    fn shrink(&mut self, selection: &DeviceSelection) -> Result<(), TurnError> {
        let (evict, runtime, before) = (self.evict, self.bench.runtime, self.cache.lens().iter().sum::<usize>());
        let shrunk_ns = selection.shrink(runtime, &mut self.cache)?;
        let turned_ns = if evict.turns() { self.cache.rerotate(runtime)? } else { 0 };
        self.evicted_tokens += (before - self.cache.lens().iter().sum::<usize>()) as u64;
        self.evict_ns += selection.time_ns + shrunk_ns + turned_ns;
        Ok(())
    }

    /// Judges by the latest queries, which are asked once more: the cache is not as they saw it.
    pub(super) fn judge_again(&mut self, latest: &Latest, seen_tokens: usize) -> Result<(), TurnError> {
        let (evict, Bench { runtime, arena, .. }) = (self.evict, self.bench);
        let plan = evict.again.as_ref().expect("planned where the latest queries are held");
        let q_len = latest.count();
        let mut q = latest.dense(runtime, arena)?;
        self.turn(&mut q, q_len, seen_tokens)?;
        let (asked_ns, lse) = plan.ask_paged(runtime, arena, &q, &self.cache.kv())?;
        self.score_ns += asked_ns;
        self.judge(Queries { q: &q, length: q_len, first: 0, lse: &lse, q_len }, seen_tokens)
    }

    fn tie_rate(&self, scored: &DeviceScored) -> Result<f64, TurnError> {
        let mut values = vec![0f32; self.cache.shape().lists() * scored.width];
        scored.values.read(bytemuck::cast_slice_mut(&mut values))?;
        let lists = values.chunks(scored.width).zip(self.cache.lens()).map(|(values, &len)| &values[..len]);
        Ok(tied_share(lists, scored.highest_judged))
    }
}

//! Judgements: statistics, scores, selection, and what becomes of the losers.

use super::Session;
use crate::attention::{Forward, Outputs, Shape, export, kernel};
use crate::experiment::measure::{TurnError, timed};
use crate::memory::{Buffer, Label};
use crate::policy::action::Fold;
use crate::policy::{BeforeRope, Context, Decoding, Future, Policy, Scored, Selection, Statistic, select, tie_rate};
use std::ops::Range;

/// The latest queries, which have seen the cache as it is.
pub(super) struct Queries<'a> {
    /// Their tokens.
    pub range: Range<usize>,
    /// Their log-sum-exps, `[layers * B, Hq, range]`.
    pub lse: &'a [f32],
}

/// Extents of the future queries over the whole sequence, for the oracle.
pub(super) fn future_shape(prepared: &crate::experiment::measure::Prepared) -> Shape {
    let cell = &prepared.cell;
    Shape { q_len: cell.new_tokens, kv_len: cell.context_tokens + cell.new_tokens, ..cell.shape() }
}

impl Session<'_> {
    /// Judges the cache and shrinks it to the budget. The selection of the `last` judgement of prefill is what a
    /// delayed schedule compares with.
    pub(super) fn judge(&mut self, policy: &Policy, queries: &Queries<'_>, last: bool) -> Result<(), TurnError> {
        let (prepared, bench) = (self.prepared, self.bench);
        // The bound's own pass over the future is no cost of a policy: it is not timed.
        let future_lse = match policy.looks_at(Statistic::FutureAttention) {
            true => Some(self.future_lse()?),
            false => None,
        };
        let (ns, accumulated) = timed(|| self.accumulate(policy, queries));
        self.score_ns += ns;
        let accumulated = accumulated?;
        let all = bench.dense(prepared.cell.context_tokens + prepared.cell.new_tokens)?;
        let future = future_lse.as_deref().map(|lse| {
            let shape = future_shape(prepared);
            let new = prepared.cell.context_tokens..shape.kv_len;
            let (params, q) = (prepared.cell.params(), bench.workload.q.view().tokens(new));
            Future { call: Forward { shape, params, q, kv: &all, cpu: bench.cpu }, lse }
        });
        let (selection, scored) = {
            let positions = |list, slot| self.cache.position(list, slot);
            let context = Context { future, ..self.context(queries, accumulated.as_deref(), &positions) };
            let (ns, scored) = timed(|| policy.score(&context));
            let mut scored = scored?.expect("a policy with a scorer gives scores");
            let (select_ns, selection) = timed(|| select(policy, &context, &mut scored));
            self.tie_rate = if bench.truth.is_some() { tie_rate(&context, &scored) } else { 0.0 };
            self.score_ns += ns;
            self.evict_ns += select_ns;
            (selection?, scored)
        };
        drop(accumulated);
        let kv_len = self.cache.max_len();
        let (ns, result) = timed(|| self.keep(policy, &selection, &scored, kv_len, queries.range.end));
        self.evict_ns += ns;
        result?;
        if last {
            self.best_lost = selection.best_lost;
        }
        Ok(())
    }

    /// What a policy sees of the cache.
    fn context<'c>(
        &'c self,
        queries: &Queries<'c>,
        accumulated: Option<&'c [f32]>,
        positions: &'c (dyn Fn(usize, usize) -> usize + Sync),
    ) -> Context<'c> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        Context {
            call: self.call(queries.range.clone()),
            layers: cell.layers,
            lse: queries.lse,
            future: None,
            accumulated,
            positions,
            seen_tokens: queries.range.end,
            before_rope: self.frequencies.as_ref().map(|frequencies| BeforeRope { frequencies, q: None, k: None }),
            w_o: None,
            budget_tokens: self.prepared.budget_tokens,
            seed: cell.seed,
            arena: bench.arena,
        }
    }

    /// Queries of the workload over the cache, all layers at once.
    pub(super) fn call(&self, queries: Range<usize>) -> Forward<'_> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let shape = Shape { q_len: queries.len(), kv_len: self.cache.max_len(), ..cell.shape() };
        Forward {
            shape,
            params: cell.params(),
            q: bench.workload.q.view().tokens(queries),
            kv: &self.cache,
            cpu: bench.cpu,
        }
    }

    fn future_lse(&self) -> Result<Buffer<f32>, TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let shape = future_shape(self.prepared);
        let kv = bench.dense(shape.kv_len)?;
        let q = bench.workload.q.view().tokens(cell.context_tokens..shape.kv_len);
        Ok(self.pass(&Forward { shape, params: cell.params(), q, kv: &kv, cpu: bench.cpu })?.lse)
    }

    /// A pass by the decode kernel, for its log-sum-exps.
    pub(super) fn pass(&self, call: &Forward<'_>) -> Result<Outputs, TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let kernel = kernel("decode").expect("the decode kernel is built in");
        let size = kernel.workspace(&call.shape, &call.params, cell.dtype, bench.cpu.threads());
        let mut workspace = size.allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &call.shape, cell.dtype)?;
        kernel.forward(call, &mut outputs, &mut workspace)?;
        Ok(outputs)
    }

    /// For a policy that accumulates attention: adds what these queries give to each token of the cache, and returns
    /// the sums, `[lists, kv_len]`.
    pub(super) fn accumulate(
        &mut self,
        policy: &Policy,
        queries: &Queries<'_>,
    ) -> Result<Option<Buffer<f32>>, TurnError> {
        if !policy.looks_at(Statistic::AccumulatedAttention) {
            return Ok(None);
        }
        let (call, arena) = (self.call(queries.range.clone()), self.bench.arena);
        let kv_len = call.shape.kv_len;
        let mut sums = arena.alloc::<f32>(Label::Policy, self.cache.shape().lists() * kv_len)?;
        let mut scratch = arena.alloc(Label::Workspace, export::workspace(&call.shape, call.cpu.threads()))?;
        export::column_sums(&call, queries.lse, 0..call.shape.q_len, &mut sums, &mut scratch);
        for (list, sums) in sums.chunks_mut(kv_len).enumerate() {
            self.cache.add_attention(list, sums)?;
            let len = self.cache.lens()[list];
            sums[..len].iter_mut().enumerate().for_each(|(slot, sum)| *sum = self.cache.attention(list, slot));
        }
        Ok(Some(sums))
    }

    /// Shrinks every list to what was selected; the policy's action first folds losers into tokens that stay.
    fn keep(
        &mut self,
        policy: &Policy,
        selection: &Selection,
        scored: &Scored,
        kv_len: usize,
        seen_tokens: usize,
    ) -> Result<(), TurnError> {
        for list in 0..self.cache.shape().lists() {
            let (kept, len) = (selection.kept(list), self.cache.lens()[list]);
            if let Some(action) = policy.action.as_ref().filter(|_| kept.len() < len) {
                let fold = Fold { arena: self.bench.arena, seed: self.prepared.cell.seed, seen_tokens };
                action.fold(&fold, &mut self.cache, list, kept, &scored.values[list * kv_len..][..len])?;
            }
            self.evicted_tokens += (len - kept.len()) as u64;
            self.cache.retain(list, kept.iter().map(|&slot| slot as usize))?;
        }
        self.cache.release();
        Ok(())
    }

    /// What the schedule asks for after a decode step.
    pub(super) fn judge_step(&mut self, policy: &Policy, step: usize, step_lse: &[f32]) -> Result<(), TurnError> {
        let due = match policy.schedule.decoding {
            Decoding::Never => return Ok(()),
            Decoding::EverySteps(steps) => (step + 1).is_multiple_of(steps),
            Decoding::Delayed => true,
        };
        let end = self.prepared.cell.context_tokens + step + 1;
        let queries = Queries { range: end - 1..end, lse: step_lse };
        if !due {
            // The attention of every query counts, also in steps that evict nothing.
            self.accumulate(policy, &queries)?;
            return Ok(());
        }
        let recent = policy.scorer.as_ref().map_or(1, |scorer| scorer.recent_queries()).min(end);
        if recent == 1 || policy.looks_at(Statistic::AccumulatedAttention) {
            return self.judge_due(policy, &queries);
        }
        let range = end - recent..end;
        let lse = self.pass(&self.call(range.clone()))?.lse;
        self.judge_due(policy, &Queries { range, lse: &lse })
    }

    fn judge_due(&mut self, policy: &Policy, queries: &Queries<'_>) -> Result<(), TurnError> {
        if policy.schedule.decoding != Decoding::Delayed {
            return self.judge(policy, queries, false);
        }
        let kv_len = self.cache.max_len();
        let positions = |list, slot| self.cache.position(list, slot);
        let scored = policy.score(&self.context(queries, None, &positions))?;
        let scored = scored.expect("a policy with a scorer gives scores");
        let window = policy.scorer.as_ref().map_or(0, |scorer| scorer.protect(self.prepared.budget_tokens).window);
        self.judge_leaving(&scored, kv_len, window)
    }

    /// Drops, in each list, the token that has just left the window if it does not beat all that prefill lost.
    fn judge_leaving(&mut self, scored: &Scored, kv_len: usize, window: usize) -> Result<(), TurnError> {
        for list in 0..self.cache.shape().lists() {
            let len = self.cache.lens()[list];
            let Some(slot) = len.checked_sub(window + 1) else { continue };
            if scored.values[list * kv_len + slot] <= self.best_lost[list] {
                self.cache.retain_ranges(list, [0..slot, slot + 1..len])?;
                self.evicted_tokens += 1;
            }
        }
        self.cache.release();
        Ok(())
    }
}

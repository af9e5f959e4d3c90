//! Judgements: statistics, scores, selection, and what becomes of the losers.

use super::asked::Recent;
use super::{Bench, Session};
use crate::attention::rope::Frequencies;
use crate::attention::{Forward, Outputs, Shape, kernel};
use crate::experiment::measure::{TurnError, timed};
use crate::memory::{Buffer, Label};
use crate::policy::action::Fold;
use crate::policy::evict::{self, Leaving};
use crate::policy::{BeforeRope, Context, Decoding, Future, Policy, Scored, Selection, Statistic, select, tie_rate};
use crate::tensor::TensorView;

/// Queries that have seen the cache as it is.
pub(super) struct Queries<'a> {
    /// As the cache is asked, `[layers * B, Hq, n, D]`.
    pub q: TensorView<'a>,
    /// The token behind the last one's: tokens seen so far.
    pub end: usize,
    /// Their log-sum-exps, `[layers * B, Hq, n]`.
    pub lse: &'a [f32],
}

/// Extents of the future queries over the whole sequence, for the oracle.
pub(super) fn future_shape(prepared: &crate::experiment::measure::Prepared) -> Shape {
    let cell = &prepared.cell;
    Shape { q_len: cell.new_tokens, kv_len: cell.context_tokens + cell.new_tokens, ..cell.shape() }
}

impl Session<'_> {
    /// Judges the cache by the latest queries and shrinks it to the budget; the attention of the `fresh` ones, which came
    /// since the last judgement or step, is added to what tokens received. The selection of the `last` judgement of
    /// prefill is what a delayed schedule compares with.
    pub(super) fn judge(
        &mut self,
        policy: &Policy,
        queries: &Queries<'_>,
        fresh: &Queries<'_>,
        last: bool,
    ) -> Result<(), TurnError> {
        let (prepared, bench) = (self.prepared, self.bench);
        // The bound's own pass over the future is no cost of a policy: it is not timed.
        let future_lse = match policy.looks_at(Statistic::FutureAttention) {
            true => Some(self.future_lse()?),
            false => None,
        };
        let (ns, accumulated) = timed(|| self.accumulate(policy, fresh));
        self.score_ns += ns;
        let accumulated = accumulated?;
        let all = bench.dense(prepared.cell.context_tokens + prepared.cell.new_tokens)?;
        let future = future_lse.as_deref().map(|lse| {
            let shape = future_shape(prepared);
            let new = prepared.cell.context_tokens..shape.kv_len;
            let (params, q) = (prepared.cell.params(), bench.workload.q.view().tokens(new));
            Future { call: Forward { shape, params, q, kv: &all, cpu: bench.cpu }, lse }
        });
        let selection = {
            let positions = |list, slot| self.cache.origin(list, slot);
            let context = Context { future, ..self.context(queries, accumulated.as_deref(), &positions) };
            let (ns, scored) = timed(|| policy.score(&context));
            let mut scored = scored?.expect("a policy with a scorer gives scores");
            let (select_ns, selection) = timed(|| select(policy, &context, &mut scored));
            self.tie_rate = if bench.truth.is_some() { tie_rate(&context, &scored) } else { 0.0 };
            self.score_ns += ns;
            self.evict_ns += select_ns;
            selection?
        };
        drop(accumulated);
        let (ns, result) = timed(|| self.keep(policy, &selection));
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
            call: self.call(queries.q),
            layers: cell.layers,
            lse: queries.lse,
            future: None,
            accumulated,
            gates: None,
            positions,
            seen_tokens: queries.end,
            before_rope: self.frequencies.as_ref().map(|frequencies| BeforeRope { frequencies, q: None, k: None }),
            w_o: &[],
            layer_numbers: &[],
            budget_tokens: self.prepared.budget_tokens,
            seed: cell.seed,
            arena: bench.arena,
        }
    }

    /// Queries over the cache, all layers at once.
    pub(super) fn call<'c>(&'c self, q: TensorView<'c>) -> Forward<'c> {
        let cell = &self.prepared.cell;
        let shape = Shape { q_len: q.dims()[2], kv_len: self.cache.max_len(), ..cell.shape() };
        Forward { shape, params: cell.params(), q, kv: &self.cache, cpu: self.bench.cpu }
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
        let call = self.call(queries.q);
        let kv_len = call.shape.kv_len;
        let mut sums = evict::received(&call, queries.lse, self.bench.arena)?;
        evict::add_received(&mut self.cache, |list| list, kv_len, &sums)?;
        evict::accumulated(&self.cache, |list| list, kv_len, &mut sums);
        Ok(Some(sums))
    }

    /// Shrinks every list to what was selected, as the policy does it.
    fn keep(&mut self, policy: &Policy, selection: &Selection) -> Result<(), TurnError> {
        for list in 0..self.cache.shape().lists() {
            self.shrink(policy, list, selection.kept(list))?;
        }
        self.cache.release();
        Ok(())
    }

    fn shrink(&mut self, policy: &Policy, list: usize, kept: &[u32]) -> Result<(), TurnError> {
        self.evicted_tokens += (self.cache.lens()[list] - kept.len()) as u64;
        let fold = fold(&self.bench, self.prepared.cell.seed, self.frequencies.as_ref());
        Ok(policy.shrink(&fold, &mut self.cache, list, kept)?)
    }

    /// What the schedule asks for after a decode step, whose query is `fresh`; `recent` holds the latest queries where
    /// the policy looks at more than that one.
    pub(super) fn judge_step(
        &mut self,
        policy: &Policy,
        step: usize,
        fresh: &Queries<'_>,
        recent: Option<&Recent>,
    ) -> Result<(), TurnError> {
        let due = match policy.schedule.decoding {
            Decoding::Never => return Ok(()),
            Decoding::EverySteps(steps) => (step + 1).is_multiple_of(steps),
            Decoding::Delayed => true,
        };
        if !due {
            // The attention of every query counts, also in steps that evict nothing.
            self.accumulate(policy, fresh)?;
            return Ok(());
        }
        let Some(recent) = recent else { return self.judge_due(policy, fresh, fresh) };
        let asked = self.ask(recent.view(), fresh.end)?;
        let lse = self.pass(&self.call(asked.view()))?.lse;
        self.judge_due(policy, &Queries { q: asked.view(), end: fresh.end, lse: &lse }, fresh)
    }

    fn judge_due(&mut self, policy: &Policy, queries: &Queries<'_>, fresh: &Queries<'_>) -> Result<(), TurnError> {
        if policy.schedule.decoding != Decoding::Delayed {
            return self.judge(policy, queries, fresh, false);
        }
        let kv_len = self.cache.max_len();
        let positions = |list, slot| self.cache.origin(list, slot);
        let scored = policy.score(&self.context(queries, None, &positions))?;
        let scored = scored.expect("a policy with a scorer gives scores");
        let window = policy.scorer.as_ref().map_or(0, |scorer| scorer.protect(self.prepared.budget_tokens).window);
        self.judge_leaving(policy, &scored, kv_len, window)
    }

    /// Evicts, in each list, the token that has just left the window if it does not beat all that prefill lost.
    fn judge_leaving(
        &mut self,
        policy: &Policy,
        scored: &Scored,
        kv_len: usize,
        window: usize,
    ) -> Result<(), TurnError> {
        let mut stays: Buffer<u32> = self.bench.arena.alloc(Label::Policy, kv_len)?;
        for list in 0..self.cache.shape().lists() {
            let scores = &scored.values[list * kv_len..][..kv_len];
            let leaving = Leaving { window, scores, best_lost: self.best_lost[list] };
            let fold = fold(&self.bench, self.prepared.cell.seed, self.frequencies.as_ref());
            let gone = evict::let_leave(policy, &fold, &mut self.cache, list, &leaving, &mut stays)?;
            self.evicted_tokens += gone as u64;
        }
        self.cache.release();
        Ok(())
    }
}

/// What an action may use.
fn fold<'a>(bench: &Bench<'a>, seed: u64, rope: Option<&'a Frequencies>) -> Fold<'a> {
    Fold { arena: bench.arena, cpu: bench.cpu, seed, draws: None, rope }
}

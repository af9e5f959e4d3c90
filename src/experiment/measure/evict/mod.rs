//! `evict`: prefill, one judgement of the context by a policy, then decode steps over what stayed.
//!
//! Prefill attention is dense and timed; the cache then shrinks for real, and decoding reads only what is left. While
//! decoding, the policy's schedule judges again. Late queries are compared with the dense f64 result.

mod late;
mod predict;

pub(super) use predict::predict;

use super::check::{accurate, finite};
use super::{Bench, Prepared, Turn, TurnError, timed};
use crate::attention::{Forward, Outputs, Shape, export, kernel};
use crate::cache::{CacheShape, Column, PAGE_TOKENS, PagedCache};
use crate::experiment::record::Eviction;
use crate::memory::{Buffer, Label};
use crate::policy::{Context, Future, Needs, Policy, Schedule, Scored, Selection, select};
use late::{Late, needle_recall};

fn cache_shape(prepared: &Prepared) -> CacheShape {
    let cell = &prepared.cell;
    CacheShape {
        batch: cell.batch,
        kv_heads: cell.kv_heads,
        head_dim: cell.head_dim,
        dtype: cell.dtype,
        max_tokens: cell.context_tokens + cell.new_tokens,
        page_tokens: PAGE_TOKENS,
        columns: match prepared.policy.as_ref().and_then(Policy::needs) {
            Some(Needs::AllQueries) => &[Column::Attention],
            _ => &[],
        },
    }
}

/// One decode step over at most everything; the workspace is taken once for all steps.
fn step_shape(prepared: &Prepared) -> Shape {
    let tokens = prepared.cell.context_tokens + prepared.cell.new_tokens;
    Shape { q_len: 1, kv_len: tokens, ..prepared.cell.shape() }
}

/// The future queries over the whole sequence, for the oracle.
fn future_shape(prepared: &Prepared) -> Shape {
    let tokens = prepared.cell.context_tokens + prepared.cell.new_tokens;
    Shape { q_len: prepared.cell.new_tokens, kv_len: tokens, ..prepared.cell.shape() }
}

/// Queries that a judgement during decoding looks at.
fn recent_queries(policy: &Policy, budget_tokens: usize) -> usize {
    match &policy.scorer {
        Some(scorer) if scorer.needs() == Needs::RecentQueries => scorer.protect(budget_tokens).window.max(1),
        _ => 1,
    }
}

/// What happens in a turn, and what it leaves behind.
struct Session<'a> {
    prepared: &'a Prepared,
    bench: Bench<'a>,
    cache: PagedCache,
    thresholds: Vec<f32>,
    tie_rate: f64,
    evicted_tokens: u64,
}

pub(super) fn turn(prepared: &Prepared, bench: Bench<'_>) -> Result<Turn, TurnError> {
    let cell = &prepared.cell;
    let context = cell.context_tokens;
    let (k, v) = (bench.workload.k.view(), bench.workload.v.view());
    let mut cache = PagedCache::new(bench.arena, cache_shape(prepared))?;
    cache.append(k, v, 0..context)?;
    let mut session = Session { prepared, bench, cache, thresholds: Vec::new(), tie_rate: 0.0, evicted_tokens: 0 };
    let mut turn = Turn::default();

    let (prefill_ns, lse) = session.prefill()?;
    turn.samples_ns.insert("prefill", prefill_ns);
    if let Some(policy) = prepared.policy.as_ref().filter(|policy| policy.scorer.is_some()) {
        let (score_ns, evict_ns) = session.evict_context(policy, &lse)?;
        turn.samples_ns.extend([("score", score_ns), ("evict", evict_ns)]);
    }
    drop(lse);
    let kept: usize = session.cache.lens().iter().sum();
    let kv_bytes_live = bench.arena.live_bytes(Label::Kv) + bench.arena.live_bytes(Label::KvFragmentation);

    let late = session.decode(&mut turn)?;
    if let Some(truth) = bench.truth {
        let shape = *session.cache.shape();
        let drift = truth.drift(cell.head_dim, |at, row| row.copy_from_slice(late.o(cell, at)));
        if let (Some(budget), 0) = (&cell.budget, session.evicted_tokens) {
            return Err(TurnError::Failed(format!(
                "the policy evicted nothing: a budget of {budget} against a context of {context} tokens"
            )));
        }
        if cell.budget.is_none() {
            accurate(&drift, cell.dtype)?;
        }
        turn.drift = Some(drift);
        turn.eviction = Some(Eviction {
            budget_tokens: prepared.budget_tokens,
            kept_fraction: kept as f64 / (shape.lists() * context) as f64,
            evicted_tokens: session.evicted_tokens,
            kv_bytes_dense: (shape.lists() * shape.pages(context)) as u64 * shape.page_bytes(),
            kv_bytes_live,
            kv_bytes_peak: session.cache.most_pages() as u64 * shape.page_bytes(),
            needle_recall: needle_recall(cell, bench, &late),
            attention_mass_kept: late.attention_mass(cell, truth),
            tie_rate: session.tie_rate,
        });
        if let Some(protected) = prepared.policy.as_ref().and_then(|policy| policy.scorer.as_ref()) {
            let window = protected.protect(prepared.budget_tokens).window;
            if window >= prepared.budget_tokens {
                turn.warnings.push(format!(
                    "the policy's window of {window} recent tokens takes the whole budget of {} tokens",
                    prepared.budget_tokens
                ));
            }
        }
    }
    Ok(turn)
}

impl<'a> Session<'a> {
    /// Dense attention over the context; returns its time and the log-sum-exps.
    fn prefill(&self) -> Result<(u64, Buffer<f32>), TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let shape = cell.shape();
        let size = self.prepared.kernel.workspace(&shape, &cell.params(), cell.dtype, bench.cpu.threads());
        let mut workspace = size.allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        bench.poison(&mut outputs);
        let kv = bench.dense(cell.context_tokens)?;
        let call = bench.forward(cell, shape, &kv);
        let (prefill_ns, result) = timed(|| self.prepared.kernel.forward(&call, &mut outputs, &mut workspace));
        result?;
        if bench.truth.is_some() {
            finite(&outputs)?;
        }
        Ok((prefill_ns, outputs.lse))
    }

    /// Judges the context once and shrinks the cache; returns the times of scoring and of evicting.
    fn evict_context(&mut self, policy: &Policy, lse: &[f32]) -> Result<(u64, u64), TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let shape = cell.shape();
        // The bound's own pass over the future is no cost of a policy: it is not timed.
        let future_lse = match policy.needs() {
            Some(Needs::FutureQueries) => Some(self.future_lse()?),
            _ => None,
        };
        let (score_ns, scores) = timed(|| -> Result<_, TurnError> {
            let kv = bench.dense(cell.context_tokens)?;
            let accumulated = self.accumulate(policy, lse)?;
            let all = bench.dense(cell.context_tokens + cell.new_tokens)?;
            let call = bench.forward(cell, shape, &kv);
            let future = future_lse.as_ref().map(|lse| Future {
                call: Forward {
                    shape: future_shape(self.prepared),
                    q: bench.workload.q.view().tokens(cell.context_tokens..cell.context_tokens + cell.new_tokens),
                    kv: &all,
                    ..call
                },
                lse,
            });
            let context = Context {
                call,
                lse,
                future,
                accumulated: accumulated.as_deref(),
                positions: &|_, slot| slot,
                budget_tokens: self.prepared.budget_tokens,
                seed: cell.seed,
                arena: bench.arena,
            };
            let scores = policy.score(&context)?;
            Ok((scores, accumulated))
        });
        let (scores, accumulated) = scores?;
        let scores = scores.expect("a policy with a scorer gives scores");
        let (evict_ns, selection) = timed(|| -> Result<_, TurnError> {
            let selection = self.select(policy, &scores, shape.kv_len)?;
            self.keep(&selection)?;
            Ok(selection)
        });
        let selection = selection?;
        drop(accumulated);
        self.tie_rate = selection.tie_rate;
        self.thresholds = selection.thresholds;
        Ok((score_ns, evict_ns))
    }

    fn future_lse(&self) -> Result<Buffer<f32>, TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let (shape, tokens) = (future_shape(self.prepared), cell.context_tokens + cell.new_tokens);
        let kv = bench.dense(tokens)?;
        let q = bench.workload.q.view().tokens(cell.context_tokens..tokens);
        let call = Forward { shape, params: cell.params(), q, kv: &kv, cpu: bench.cpu };
        Ok(self.pass(&call)?.lse)
    }

    /// A pass by the decode kernel, for its log-sum-exps.
    fn pass(&self, call: &Forward<'_>) -> Result<Outputs, TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let kernel = kernel("decode").expect("the decode kernel is built in");
        let size = kernel.workspace(&call.shape, &call.params, cell.dtype, bench.cpu.threads());
        let mut workspace = size.allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &call.shape, cell.dtype)?;
        kernel.forward(call, &mut outputs, &mut workspace)?;
        Ok(outputs)
    }

    /// For a policy that accumulates attention: adds what the context's queries give to each token of the cache, and
    /// returns the sums, `[B, Hkv, kv_len]`.
    fn accumulate(&mut self, policy: &Policy, lse: &[f32]) -> Result<Option<Buffer<f32>>, TurnError> {
        if policy.needs() != Some(Needs::AllQueries) {
            return Ok(None);
        }
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let shape = cell.shape();
        let kv = bench.dense(cell.context_tokens)?;
        let sums = self.column_sums(&bench.forward(cell, shape, &kv), lse)?;
        Ok(Some(self.add_attention(sums, shape.kv_len)?))
    }

    fn column_sums(&self, call: &Forward<'_>, lse: &[f32]) -> Result<Buffer<f32>, TurnError> {
        let (shape, arena) = (call.shape, self.bench.arena);
        let mut sums = arena.alloc::<f32>(Label::Policy, self.cache.shape().lists() * shape.kv_len)?;
        let mut scratch = arena.alloc(Label::Workspace, export::workspace(&shape, call.cpu.threads()))?;
        export::column_sums(call, lse, 0..shape.q_len, &mut sums, &mut scratch);
        Ok(sums)
    }

    fn add_attention(&mut self, mut sums: Buffer<f32>, kv_len: usize) -> Result<Buffer<f32>, TurnError> {
        for (list, sums) in sums.chunks_mut(kv_len).enumerate() {
            self.cache.add_attention(list, sums)?;
            let len = self.cache.lens()[list];
            sums[..len].iter_mut().enumerate().for_each(|(slot, sum)| *sum = self.cache.attention(list, slot));
        }
        Ok(sums)
    }

    fn select(&self, policy: &Policy, scores: &Scored, kv_len: usize) -> Result<Selection, TurnError> {
        let (arena, budget) = (self.bench.arena, self.prepared.budget_tokens);
        let heads = self.cache.shape().kv_heads;
        Ok(select(arena, policy.allotment, scores, self.cache.lens(), heads, kv_len, budget)?)
    }

    /// Shrinks every list to what was selected.
    fn keep(&mut self, selection: &Selection) -> Result<(), TurnError> {
        for list in 0..self.cache.shape().lists() {
            let kept = selection.kept(list);
            self.evicted_tokens += (self.cache.lens()[list] - kept.len()) as u64;
            self.cache.retain(list, kept.iter().map(|&slot| slot as usize))?;
        }
        self.cache.release();
        Ok(())
    }

    /// Decodes the new tokens one by one; adds the mean times of a step and of what the schedule costs.
    fn decode(&mut self, turn: &mut Turn) -> Result<Late, TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let (k, v) = (bench.workload.k.view(), bench.workload.v.view());
        let kernel = kernel("decode").expect("the decode kernel is built in");
        let shape = step_shape(self.prepared);
        let mut workspace =
            kernel.workspace(&shape, &cell.params(), cell.dtype, bench.cpu.threads()).allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        let mut late = Late {
            o: bench.arena.alloc(Label::Activations, cell.new_tokens * shape.rows() * cell.head_dim)?,
            lse: bench.arena.alloc(Label::Activations, cell.new_tokens * shape.rows())?,
        };
        let (mut decode_ns, mut judge_ns) = (0, 0);
        for step in 0..cell.new_tokens {
            let token = cell.context_tokens + step;
            self.cache.append(k, v, token..token + 1)?;
            let shape = Shape { kv_len: self.cache.max_len(), ..shape };
            let q = bench.workload.q.view().tokens(token..token + 1);
            let call = Forward { shape, params: cell.params(), q, kv: &self.cache, cpu: bench.cpu };
            bench.poison(&mut outputs);
            let (step_ns, result) = timed(|| kernel.forward(&call, &mut outputs, &mut workspace));
            result?;
            decode_ns += step_ns;
            if bench.truth.is_some() {
                finite(&outputs)?;
                late.store(step, &outputs);
            }
            if let Some(policy) = self.prepared.policy.as_ref().filter(|policy| policy.scorer.is_some()) {
                let (ns, result) = timed(|| self.judge_step(policy, step, &outputs.lse));
                result?;
                judge_ns += ns;
            }
        }
        let steps = cell.new_tokens as u64;
        turn.samples_ns.insert("decode", decode_ns / steps);
        if self.prepared.policy.as_ref().is_some_and(|policy| policy.schedule != Schedule::AfterPrefill) {
            turn.samples_ns.insert("decode_evict", judge_ns / steps);
        }
        Ok(late)
    }

    /// What the schedule asks for after a decode step.
    fn judge_step(&mut self, policy: &Policy, step: usize, step_lse: &[f32]) -> Result<(), TurnError> {
        let due = match policy.schedule {
            Schedule::AfterPrefill => return Ok(()),
            Schedule::EverySteps(steps) => (step + 1).is_multiple_of(steps),
            Schedule::Delayed => true,
        };
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let budget_tokens = self.prepared.budget_tokens;
        let end = cell.context_tokens + step + 1;
        let kv_len = self.cache.max_len();
        let params = cell.params();
        // The attention of every query counts, also in steps that evict nothing.
        let accumulated = if policy.needs() == Some(Needs::AllQueries) {
            let shape = Shape { q_len: 1, kv_len, ..cell.shape() };
            let q = bench.workload.q.view().tokens(end - 1..end);
            let sums = self.column_sums(&Forward { shape, params, q, kv: &self.cache, cpu: bench.cpu }, step_lse)?;
            Some(self.add_attention(sums, kv_len)?)
        } else {
            None
        };
        if !due {
            return Ok(());
        }
        let recent = recent_queries(policy, budget_tokens).min(end);
        let shape = Shape { q_len: recent, kv_len, ..cell.shape() };
        let q = bench.workload.q.view().tokens(end - recent..end);
        let call = Forward { shape, params, q, kv: &self.cache, cpu: bench.cpu };
        let lse = if recent > 1 { Some(self.pass(&call)?.lse) } else { None };
        let cache = &self.cache;
        let context = Context {
            call,
            lse: lse.as_deref().unwrap_or(step_lse),
            future: None,
            accumulated: accumulated.as_deref(),
            positions: &|list, slot| cache.position(list, slot),
            budget_tokens,
            seed: cell.seed,
            arena: bench.arena,
        };
        let scores = policy.score(&context)?.expect("a policy with a scorer gives scores");
        if policy.schedule == Schedule::Delayed {
            let window = policy.scorer.as_ref().map_or(0, |scorer| scorer.protect(budget_tokens).window);
            self.judge_leaving(&scores, kv_len, window)?;
        } else {
            let selection = self.select(policy, &scores, kv_len)?;
            self.keep(&selection)?;
        }
        Ok(())
    }

    /// Drops, in each list, the token that has just left the window if it scores below the threshold of prefill.
    fn judge_leaving(&mut self, scores: &Scored, kv_len: usize, window: usize) -> Result<(), TurnError> {
        for list in 0..self.cache.shape().lists() {
            let len = self.cache.lens()[list];
            let Some(slot) = len.checked_sub(window + 1) else { continue };
            if scores.values[list * kv_len + slot] < self.thresholds[list / self.cache.shape().kv_heads] {
                self.cache.retain_ranges(list, [0..slot, slot + 1..len])?;
                self.evicted_tokens += 1;
            }
        }
        self.cache.release();
        Ok(())
    }
}

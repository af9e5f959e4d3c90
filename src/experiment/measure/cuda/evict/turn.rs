//! A turn: prefill, judgement, decode steps.

use super::Evict;
use crate::attention::cuda::{Inputs, Results};
use crate::attention::export::Reduction;
use crate::attention::{Outputs, Shape};
use crate::cache::cuda::{DeviceCache, take_tokens};
use crate::device::Cpu;
use crate::device::cuda::DeviceBuffer;
use crate::experiment::measure::check::{accurate, finite};
use crate::experiment::measure::cuda::{Bench, Turn, TurnError, Written};
use crate::experiment::measure::evict::late::Late;
use crate::experiment::measure::evict::outcome::{self, Evicted, Kept};
use crate::memory::{Arena, Label};
use crate::policy::cuda::{DeviceContext, DeviceScored, Queries, score, select};
use crate::policy::{Decoding, tied_share};
use crate::tensor::Tensor;
use std::ops::Range;

/// What happens in a turn, and what it leaves behind.
struct Session<'a> {
    evict: &'a Evict,
    bench: Bench<'a>,
    /// Divides budgets.
    cpu: Cpu,
    cache: DeviceCache,
    evicted_tokens: u64,
    tie_rate: f64,
    /// The GPU's nanoseconds for judgements so far: scoring, and choosing and evicting.
    score_ns: u64,
    evict_ns: u64,
}

pub(super) fn turn(evict: &Evict, bench: Bench<'_>) -> Result<Turn, TurnError> {
    let cell = &evict.cell;
    let cpu = Cpu::new(Some(1)).map_err(|error| TurnError::Failed(error.to_string()))?;
    let cache = DeviceCache::new(bench.runtime.device(), bench.arena, evict.cache_shape())?;
    let mut session = Session { evict, bench, cpu, cache, evicted_tokens: 0, tie_rate: 0.0, score_ns: 0, evict_ns: 0 };
    let mut turn = Turn::default();
    turn.samples_ns.insert("prefill", session.prefill()?);
    if evict.judges() {
        turn.samples_ns.extend([("score", session.score_ns), ("evict", session.evict_ns)]);
    }
    let kept = session.kept()?;
    let late = session.decode(&mut turn)?;
    if let (Some(truth), Some(workload)) = (bench.truth, &bench.inputs.host) {
        let evicted = Evicted {
            cell,
            policy: Some(&evict.policy),
            budget_tokens: evict.budget_tokens,
            cache: *session.cache.shape(),
            most_pages: session.cache.most_pages(),
            evicted_tokens: session.evicted_tokens,
            tie_rate: session.tie_rate,
            workload,
        };
        outcome::check(&evicted, &kept, &late)?;
        let drift = truth.drift(cell.head_dim, |at, row| row.copy_from_slice(late.o(cell, at)));
        if cell.budget.is_none() {
            accurate(&drift, cell.dtype)?;
        }
        turn.drift = Some(drift);
        turn.eviction = Some(outcome::eviction(&evicted, &kept, &late, truth));
        turn.warnings.extend(outcome::warnings(&evicted));
    }
    Ok(turn)
}

impl Session<'_> {
    /// KV bytes of pages in use.
    fn kv_bytes_live(&self) -> u64 {
        self.cache.pages() as u64 * self.cache.shape().page_bytes()
    }

    fn kept(&self) -> Result<Kept, TurnError> {
        let by_position = match self.bench.truth {
            Some(_) => {
                let positions = self.cache.read_positions()?;
                let of_list = |list: usize| positions[list].iter().map(|&position| position as usize).collect();
                outcome::by_position(&self.evict.cell, of_list)
            }
            None => Vec::new(),
        };
        Ok(Kept { lens: self.cache.lens().to_vec(), kv_bytes_live: self.kv_bytes_live(), by_position })
    }

    /// Tokens of each head in the inputs.
    fn length(&self) -> usize {
        self.evict.cell.context_tokens + self.evict.cell.new_tokens
    }

    fn append(&mut self, tokens: Range<usize>) -> Result<(), TurnError> {
        let Bench { runtime, inputs, .. } = self.bench;
        let length = self.length();
        self.cache.append(runtime, [&inputs.k, &inputs.v], length, tokens)?;
        Ok(())
    }

    /// Attention over the context, layer by layer, and its judgement; returns the time of attention.
    fn prefill(&mut self) -> Result<u64, TurnError> {
        let (evict, Bench { runtime, arena, inputs, .. }) = (self.evict, self.bench);
        let context = evict.cell.context_tokens;
        self.append(0..context)?;
        let lse_bytes = if evict.observes() { 4 * evict.cell.shape().rows() as u64 } else { 0 };
        let mut lse = runtime.device().alloc(arena, Label::Activations, lse_bytes)?;
        let prefill_ns = self.attend(&mut lse)?;
        if evict.judges() {
            let length = self.length();
            let queries = Queries { q: &inputs.q, length, first: 0, lse: &lse, q_len: context };
            self.accumulate(&queries)?;
            self.judge(queries, context)?;
        }
        Ok(prefill_ns)
    }

    /// Attention of the context to itself; returns its time, and leaves the log-sum-exps where there is room for them.
    fn attend(&self, lse: &mut DeviceBuffer) -> Result<u64, TurnError> {
        let (evict, bench) = (self.evict, self.bench);
        let (cell, device) = (&evict.cell, bench.runtime.device());
        let layer = Shape { batch: cell.batch, ..cell.shape() };
        let take = |dims| device.alloc(bench.arena, Label::Workspace, Tensor::bytes_of(cell.dtype, dims));
        let (mut q, mut k, mut v) = (take(layer.q_dims())?, take(layer.kv_dims())?, take(layer.kv_dims())?);
        let mut scratch = evict.prefill.scratch(device, bench.arena)?;
        let mut written = Written::allocate(bench, layer, cell.dtype)?;
        let mut total_ns = 0;
        for index in 0..cell.layers {
            let copy = |from: &DeviceBuffer, heads: usize, to: &mut DeviceBuffer| {
                let heads = index * cell.batch * heads..(index + 1) * cell.batch * heads;
                let kind = (cell.dtype, cell.head_dim);
                take_tokens(bench.runtime, kind, (from, self.length()), heads, 0..cell.context_tokens, to)
            };
            copy(&bench.inputs.q, cell.q_heads, &mut q)?;
            copy(&bench.inputs.k, cell.kv_heads, &mut k)?;
            copy(&bench.inputs.v, cell.kv_heads, &mut v)?;
            written.poison(bench)?;
            let inputs = Inputs { q: &q, k: &k, v: &v };
            total_ns += evict.prefill.forward(bench.runtime, inputs, written.results(), &mut scratch)?;
            if bench.truth.is_some() {
                finite(&written.read()?)?;
            }
            if lse.bytes() > 0 {
                lse.copy_at((4 * index * layer.rows()) as u64, &written.lse)?;
            }
        }
        Ok(total_ns)
    }

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
    fn accumulate(&mut self, queries: &Queries<'_>) -> Result<(), TurnError> {
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
    fn judge(&mut self, queries: Queries<'_>, seen_tokens: usize) -> Result<(), TurnError> {
        let (evict, runtime) = (self.evict, self.bench.runtime);
        let context = self.context(queries, seen_tokens);
        let scored = score(&evict.policy, &context, &self.cache)?;
        let mut scored = scored.expect("a policy with a scorer gives scores");
        let selection = select(&evict.policy, &context, &self.cache, &mut scored)?;
        let tie_rate = if self.bench.truth.is_some() { self.tie_rate(&scored)? } else { 0.0 };
        let before: usize = self.cache.lens().iter().sum();
        let width = selection.width;
        let kept_ns = self.cache.keep(runtime, &selection.slots, width, &selection.counts, &selection.counts_there)?;
        let released_ns = self.cache.release(runtime)?;
        self.evicted_tokens += (before - self.cache.lens().iter().sum::<usize>()) as u64;
        self.tie_rate = tie_rate;
        self.score_ns += scored.time_ns;
        self.evict_ns += selection.time_ns + kept_ns + released_ns;
        Ok(())
    }

    fn tie_rate(&self, scored: &DeviceScored) -> Result<f64, TurnError> {
        let mut values = vec![0f32; self.cache.shape().lists() * scored.width];
        scored.values.read(bytemuck::cast_slice_mut(&mut values))?;
        let lists = values.chunks(scored.width).zip(self.cache.lens()).map(|(values, &len)| &values[..len]);
        Ok(tied_share(lists, scored.highest_judged))
    }

    /// Decodes the new tokens one by one; adds the mean times of a step and of what the schedule costs.
    fn decode(&mut self, turn: &mut Turn) -> Result<Late, TurnError> {
        let (evict, bench) = (self.evict, self.bench);
        let (cell, device, shape) = (&evict.cell, bench.runtime.device(), evict.step_shape());
        let q_bytes = Tensor::bytes_of(cell.dtype, shape.q_dims());
        let mut q = device.alloc(bench.arena, Label::Activations, q_bytes)?;
        let mut written = Written::allocate(bench, shape, cell.dtype)?;
        let mut scratch = evict.step.scratch(device, bench.arena)?;
        // What is compared lies on the host.
        let host = Arena::unlimited();
        let rows = if bench.truth.is_some() { cell.new_tokens * shape.rows() } else { 0 };
        let mut late = Late {
            o: host.alloc(Label::Activations, rows * cell.head_dim)?,
            lse: host.alloc(Label::Activations, rows)?,
            live_bytes: Vec::new(),
            read_bytes: 0,
            all_bytes: 0,
        };
        let (mut decode_ns, judged_before) = (0, self.score_ns + self.evict_ns);
        for step in 0..cell.new_tokens {
            let token = cell.context_tokens + step;
            self.append(token..token + 1)?;
            let (kind, heads) = ((cell.dtype, cell.head_dim), 0..shape.batch * shape.q_heads);
            take_tokens(bench.runtime, kind, (&bench.inputs.q, self.length()), heads, token..token + 1, &mut q)?;
            written.poison(bench)?;
            let results: Results<'_> = written.results();
            decode_ns += evict.step.forward_paged(bench.runtime, &q, &self.cache.kv(), results, &mut scratch)?;
            if bench.truth.is_some() {
                let outputs: Outputs = written.read()?;
                finite(&outputs)?;
                late.store(step, &outputs);
                late.live_bytes.push(self.kv_bytes_live());
                let all = self.cache.lens().iter().sum::<usize>() as u64 * self.cache.shape().token_bytes();
                (late.all_bytes, late.read_bytes) = (late.all_bytes + all, late.read_bytes + all);
            }
            if let (true, Decoding::EverySteps(steps)) = (evict.judges(), evict.policy.schedule.decoding) {
                let queries = Queries { q: &q, length: 1, first: 0, lse: &written.lse, q_len: 1 };
                self.accumulate(&queries)?;
                if (step + 1).is_multiple_of(steps) {
                    self.judge(queries, token + 1)?;
                }
            }
        }
        let steps = cell.new_tokens as u64;
        turn.samples_ns.insert("decode", decode_ns / steps);
        if evict.judges() && evict.policy.schedule.decoding != Decoding::Never {
            turn.samples_ns.insert("decode_evict", (self.score_ns + self.evict_ns - judged_before) / steps);
        }
        Ok(late)
    }
}

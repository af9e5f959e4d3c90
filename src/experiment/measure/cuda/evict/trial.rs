//! A trial: prefill in one piece or in chunks, and decode steps.

use super::{Chunk, Evict};
use crate::attention::Outputs;
use crate::attention::cuda::{Inputs, Results};
use crate::cache::cuda::{DeviceCache, ObservedRows, take_tokens};
use crate::device::Cpu;
use crate::device::cuda::DeviceBuffer;
use crate::eviction::cuda::{CudaBackend, CudaView};
use crate::eviction::{Moment, Plan, Session, Totals};
use crate::experiment::cell::Cell;
use crate::experiment::measure::check::{accurate, finite};
use crate::experiment::measure::cuda::{Bench, Trial, TrialError, Written};
use crate::experiment::measure::evict::late::Late;
use crate::experiment::measure::evict::outcome::{self, Evicted, Kept};
use crate::memory::{Arena, Label};
use crate::policy::cuda::Queries;
use crate::tensor::Tensor;
use std::ops::Range;

/// What happens in a trial, and what it leaves behind.
struct Running<'a> {
    evict: &'a Evict,
    bench: Bench<'a>,
    /// Divides budgets.
    cpu: Cpu,
    cache: DeviceCache,
    /// Where the policy evicts.
    session: Option<Session<'a>>,
}

pub(super) fn trial(evict: &Evict, bench: Bench<'_>) -> Result<Trial, TrialError> {
    let cell = &evict.cell;
    let cpu = Cpu::new(None).map_err(|error| TrialError::Failed(error.to_string()))?;
    let mut cache = DeviceCache::new(bench.runtime.device(), bench.arena, evict.cache_shape(), cell.dtype)?;
    if evict.rotates() {
        let stated = bench.inputs.host.as_ref().and_then(|workload| workload.rope);
        let name = cell.policy.as_deref().unwrap_or_default();
        if let Some(frequencies) = evict.policy.rope(name, stated, cell.head_dim)? {
            cache.set_rope(&frequencies)?;
        }
    }
    // Before any time is taken.
    bench.runtime.load([cache.program()])?;
    let plan = Plan { policy: &evict.policy, budget_tokens: evict.budget_tokens, seed: cell.seed };
    let session = evict.evicts().then(|| Session::new(plan));
    let mut running = Running { evict, bench, cpu, cache, session };
    let mut trial = Trial::default();
    trial.samples_ns.insert("prefill", running.prefill()?);
    if let Some(session) = &running.session {
        let totals = session.totals();
        trial.samples_ns.extend([("score", totals.score_ns), ("evict", totals.evict_ns)]);
    }
    let kept = running.kept()?;
    let late = running.decode(&mut trial)?;
    let totals = running.totals();
    if let (Some(truth), Some(workload)) = (bench.truth, &bench.inputs.host) {
        let evicted = Evicted {
            cell,
            policy: Some(&evict.policy),
            budget_tokens: evict.budget_tokens,
            cache: *running.cache.shape(),
            kv_bytes_peak: running.cache.most_pages() as u64 * running.cache.shape().page_bytes(),
            evicted_tokens: totals.evicted_tokens,
            tie_rate: totals.tie_rate,
            workload,
        };
        outcome::check(&evicted, &kept, &late)?;
        let drift = truth.drift(cell.head_dim, |at, row| row.copy_from_slice(late.o(cell, at)));
        // What the cache's format rounds is a result.
        if cell.budget.is_none() && cell.kv_format.is_none() {
            accurate(&drift, cell.dtype)?;
        }
        trial.drift = Some(drift);
        trial.eviction = Some(outcome::eviction(&evicted, &kept, &late, truth));
        trial.warnings.extend(outcome::warnings(&evicted));
    }
    Ok(trial)
}

impl Running<'_> {
    fn totals(&self) -> Totals {
        self.session.as_ref().map(|session| *session.totals()).unwrap_or_default()
    }

    /// KV bytes of pages in use.
    fn kv_bytes_live(&self) -> u64 {
        self.cache.pages() as u64 * self.cache.shape().page_bytes()
    }

    fn kept(&self) -> Result<Kept, TrialError> {
        let by_position = match self.bench.truth {
            Some(_) => {
                let positions = self.cache.read_origins()?;
                let of_list = |list: usize| positions[list].iter().map(|&position| position as usize).collect();
                outcome::by_position(&self.evict.cell, of_list)
            }
            None => Vec::new(),
        };
        let lens = self.cache.lens().to_vec();
        let list_kv_bytes = lens.iter().map(|&tokens| self.cache.shape().kv_bytes([tokens])).collect();
        Ok(Kept { lens, list_kv_bytes, kv_bytes_live: self.kv_bytes_live(), by_position })
    }

    /// Tokens of each head in the inputs.
    fn length(&self) -> usize {
        self.evict.cell.context_tokens + self.evict.cell.new_tokens
    }

    fn append(&mut self, tokens: Range<usize>) -> Result<(), TrialError> {
        let Bench { runtime, inputs, .. } = self.bench;
        let length = self.length();
        let count = tokens.len();
        self.cache.append(runtime, [&inputs.k, &inputs.v], length, tokens)?;
        if self.evict.rotates() {
            let lists = 0..self.cache.shape().lists();
            runtime.device().timed(|| self.cache.turn_newest(runtime, lists, count))?;
        }
        Ok(())
    }

    /// The queries of some tokens, up to the latest, as the cache is to be asked: rotated with its keys, where these are.
    fn ask(&self, tokens: Range<usize>, q: &mut DeviceBuffer) -> Result<(), TrialError> {
        let Bench { runtime, inputs, .. } = self.bench;
        let cell = &self.evict.cell;
        let (kind, heads) = ((cell.dtype, cell.head_dim), 0..cell.layers * cell.batch * cell.q_heads);
        take_tokens(runtime, kind, (&inputs.q, self.length()), heads, tokens.clone(), q)?;
        self.trial(q, tokens.len(), tokens.end)
    }

    /// Rotates queries `[layers * B, Hq, count, D]`, of which the last is that of token `end - 1`, with the cache's keys, where
    /// these are.
    fn trial(&self, q: &mut DeviceBuffer, count: usize, end: usize) -> Result<(), TrialError> {
        if self.is_rotated(end) {
            let (runtime, lists) = (self.bench.runtime, 0..self.cache.shape().lists());
            let extents = [self.evict.cell.q_heads, count];
            runtime.device().timed(|| self.cache.rotate_queries(runtime, lists, q, extents, end))?;
        }
        Ok(())
    }

    /// Whether keys stand elsewhere than in the sequence, of which `end` tokens were seen.
    fn is_rotated(&self, end: usize) -> bool {
        self.evict.rotates() && self.cache.lens().iter().any(|&len| len != end)
    }

    /// Attention over the context, chunk by chunk and layer by layer, with an eviction step after each; returns the time of attention.
    fn prefill(&mut self) -> Result<u64, TrialError> {
        let (evict, Bench { runtime, arena, inputs, .. }) = (self.evict, self.bench);
        let mut prefill_ns = 0;
        for chunk in &evict.chunks {
            let Range { start, end } = chunk.tokens;
            self.append(start..end)?;
            let rows = evict.cell.layers * chunk.plan.shape().rows();
            let lse_bytes = if evict.observes() { 4 * rows as u64 } else { 0 };
            let mut lse = runtime.device().alloc(arena, Label::Activations, lse_bytes)?;
            let rotated = match self.is_rotated(end) {
                true => {
                    let bytes = evict.query_bytes(end - start);
                    let mut rotated = runtime.device().alloc(arena, Label::Activations, bytes)?;
                    self.ask(start..end, &mut rotated)?;
                    Some(rotated)
                }
                false => None,
            };
            let (q, tokens, length) = match &rotated {
                Some(rotated) => (rotated, 0..end - start, end - start),
                None => (&inputs.q, start..end, self.length()),
            };
            prefill_ns += self.attend(chunk, (q, length), tokens.clone(), &mut lse)?;
            let queries = Queries { q, length, first: tokens.start, lse: &lse, q_len: end - start };
            let moment = Moment::Chunk { last: end == evict.cell.context_tokens };
            self.evict(queries, end, moment, true)?;
        }
        Ok(prefill_ns)
    }

    /// Attention of a chunk, whose queries are `tokens` of those of `q`, to the cache; returns its time, and leaves the
    /// log-sum-exps where there is room for them.
    fn attend(
        &self,
        chunk: &Chunk,
        q: (&DeviceBuffer, usize),
        tokens: Range<usize>,
        lse: &mut DeviceBuffer,
    ) -> Result<u64, TrialError> {
        let (bench, cell) = (self.bench, &self.evict.cell);
        let (device, plan, layer) = (bench.runtime.device(), &chunk.plan, chunk.plan.shape());
        let take = |bytes| device.alloc(bench.arena, Label::Workspace, bytes);
        let [keys, values] = self.evict.copied_bytes(chunk);
        let (mut asked, mut k, mut v) =
            (take(Tensor::bytes_of(cell.dtype, layer.q_dims()))?, take(keys)?, take(values)?);
        let mut scratch = plan.scratch(device, bench.arena)?;
        let mut written = Written::allocate(bench, layer, cell.dtype)?;
        let mut total_ns = 0;
        for index in 0..cell.layers {
            let heads = |of_layer: usize| index * cell.batch * of_layer..(index + 1) * cell.batch * of_layer;
            let (kind, lists) = ((cell.dtype, cell.head_dim), heads(cell.kv_heads));
            take_tokens(bench.runtime, kind, q, heads(cell.q_heads), tokens.clone(), &mut asked)?;
            written.poison(bench)?;
            let results: Results<'_> = written.results();
            total_ns += match chunk.paged {
                true => {
                    plan.forward_paged(bench.runtime, &asked, &self.cache.kv_from(lists.start), results, &mut scratch)?
                }
                false => {
                    let to = [&mut k, &mut v];
                    device.timed(|| self.cache.gather(bench.runtime, lists, to, layer.kv_len))?;
                    plan.forward(bench.runtime, Inputs { q: &asked, k: &k, v: &v }, results, &mut scratch)?
                }
            };
            if bench.truth.is_some() {
                finite(&written.read()?)?;
            }
            if lse.bytes() > 0 {
                lse.copy_at((4 * index * layer.rows()) as u64, &written.lse)?;
            }
        }
        Ok(total_ns)
    }

    /// The context's latest queries, for a policy that looks at more than one while decoding.
    fn observe_context(&self) -> Result<Option<ObservedRows>, TrialError> {
        let Some(plan) = &self.evict.again else { return Ok(None) };
        let (Bench { runtime, arena, inputs, .. }, shape) = (self.bench, plan.shape());
        let kind = (self.evict.cell.dtype, shape.head_dim);
        let mut latest =
            ObservedRows::new(runtime.device(), arena, kind, [1, shape.batch * shape.q_heads, shape.q_len])?;
        latest.push(runtime, 0, (&inputs.q, self.length()), self.evict.cell.context_tokens, shape.q_len)?;
        latest.advance(shape.q_len);
        Ok(Some(latest))
    }

    /// Decodes the new tokens one by one; adds the mean times of a step and of what the schedule costs.
    fn decode(&mut self, trial: &mut Trial) -> Result<Late, TrialError> {
        let (evict, bench) = (self.evict, self.bench);
        let (cell, device, shape) = (&evict.cell, bench.runtime.device(), evict.step_shape());
        let q_bytes = Tensor::bytes_of(cell.dtype, shape.q_dims());
        let mut q = device.alloc(bench.arena, Label::Activations, q_bytes)?;
        let mut recent = self.observe_context()?;
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
        let (mut decode_ns, before) = (0, self.totals());
        for step in 0..cell.new_tokens {
            let token = cell.context_tokens + step;
            self.append(token..token + 1)?;
            self.ask(token..token + 1, &mut q)?;
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
            let queries = Queries { q: &q, length: 1, first: 0, lse: &written.lse, q_len: 1 };
            self.evict_step(queries, token + 1, recent.as_mut())?;
        }
        let steps = cell.new_tokens as u64;
        trial.samples_ns.insert("decode", decode_ns / steps);
        if self.session.as_ref().is_some_and(Session::is_open) {
            let totals = self.totals();
            let evicting_ns = totals.score_ns + totals.evict_ns - before.score_ns - before.evict_ns;
            trial.samples_ns.insert("decode_evict", evicting_ns / steps);
        }
        Ok(late)
    }

    /// What the schedule asks for behind a decode step, whose query is `fresh`; `recent` holds the latest queries where the
    /// policy looks at more than that one.
    fn evict_step(
        &mut self,
        fresh: Queries<'_>,
        end: usize,
        recent: Option<&mut ObservedRows>,
    ) -> Result<(), TrialError> {
        let Some(session) = self.session.as_mut().filter(|session| session.is_open()) else { return Ok(()) };
        let due = session.advance();
        let Some(recent) = recent else {
            return if due { self.evict(fresh, end, Moment::Step, true) } else { self.accumulate(fresh, end) };
        };
        self.accumulate(fresh, end)?;
        let (Bench { runtime, arena, inputs, .. }, plan) = (self.bench, self.evict.again.as_ref());
        recent.push(runtime, 0, (&inputs.q, self.length()), end, 1)?;
        recent.advance(1);
        let Some(plan) = plan.filter(|_| due) else { return Ok(()) };
        let q_len = recent.count();
        let mut q = recent.dense(runtime, arena)?;
        self.trial(&mut q, q_len, end)?;
        let (ask_ns, lse) = plan.ask_paged(runtime, arena, &q, &self.cache.kv())?;
        self.session.iter_mut().for_each(|session| session.add_score_ns(ask_ns));
        self.evict(Queries { q: &q, length: q_len, first: 0, lse: &lse, q_len }, end, Moment::Step, false)
    }

    fn accumulate(&mut self, queries: Queries<'_>, end: usize) -> Result<(), TrialError> {
        let Running { evict, bench, cpu, cache, session } = self;
        let Some(session) = session else { return Ok(()) };
        let backend = CudaBackend { runtime: bench.runtime, arena: bench.arena, cpu, counts_ties: false };
        Ok(session.accumulate(&backend, cache, &view(&evict.cell, queries, end))?)
    }

    /// An eviction step; the attention of its queries is added first, if they are `fresh`.
    fn evict(&mut self, queries: Queries<'_>, end: usize, moment: Moment, fresh: bool) -> Result<(), TrialError> {
        if fresh {
            self.accumulate(queries, end)?;
        }
        let Running { evict, bench, cpu, cache, session } = self;
        let Some(session) = session else { return Ok(()) };
        let counts_ties = bench.truth.is_some();
        let backend = CudaBackend { runtime: bench.runtime, arena: bench.arena, cpu, counts_ties };
        Ok(session.evict(&backend, cache, &[view(&evict.cell, queries, end)], moment)?)
    }
}

/// All lists of a cell.
fn view<'v>(cell: &Cell, queries: Queries<'v>, seen_tokens: usize) -> CudaView<'v> {
    let (q_heads, params, layers) = (cell.q_heads, cell.params(), cell.layers);
    CudaView { queries: Some(queries), q_heads, params, layers, seen_tokens }
}

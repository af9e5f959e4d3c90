//! Decode steps over what was retained.

use super::late::Late;
use super::steps::Queries;
use super::{Running, lengths};
use crate::attention::{Forward, KvRows, Outputs, Shape, kernel};
use crate::eviction::Session;
use crate::experiment::measure::check::finite;
use crate::experiment::measure::trials::timed;
use crate::experiment::measure::{Prepared, Trial, TrialError};
use crate::memory::Label;
use crate::policy::sparse::{KvSelector, Lists, Start};

/// One decode step over at most everything; the workspace is taken once for all steps.
pub(super) fn step_shape(prepared: &Prepared) -> Shape {
    Shape { q_len: 1, kv_len: lengths(prepared).most(), ..prepared.cell.shape() }
}

impl Running<'_> {
    /// Decodes the new tokens one by one; adds the mean times of a step and of what the schedule costs.
    pub(super) fn decode(&mut self, trial: &mut Trial) -> Result<Late, TrialError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let q = bench.workload.q.view();
        let kernel = kernel("decode").expect("the decode kernel is built in");
        let shape = step_shape(self.prepared);
        let mut workspace =
            kernel.workspace(&shape, &cell.params(), cell.dtype, bench.cpu.threads()).allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        let mut late = Late {
            o: bench.arena.alloc(Label::Activations, cell.new_tokens * shape.rows() * cell.head_dim)?,
            lse: bench.arena.alloc(Label::Activations, cell.new_tokens * shape.rows())?,
            live_bytes: Vec::new(),
            read_bytes: 0,
            all_bytes: 0,
        };
        let mut selector = self.open_selection(trial)?;
        let mut window = self.observe_context()?;
        let (mut decode_ns, mut evict_ns) = (0, 0);
        for step in 0..cell.new_tokens {
            let token = cell.context_tokens + step;
            self.append(token..token + 1)?;
            let query = q.tokens(token..token + 1);
            let asked = self.attending(query, token + 1)?;
            bench.poison(&mut outputs);
            let (step_ns, result) = timed(|| {
                let Some(selector) = &mut selector else {
                    return kernel.forward(&self.call(asked.view()), &mut outputs, &mut workspace);
                };
                let lists = Lists::all(&self.cache);
                selector.step(asked.view(), lists, bench.cpu);
                let (call, rows) = (self.call(asked.view()), selector.rows(lists));
                let call = match &rows {
                    Some(rows) => {
                        let kv_len = rows.max_len().min(call.shape.kv_len);
                        Forward { shape: Shape { kv_len, ..call.shape }, kv: rows as &dyn KvRows, ..call }
                    }
                    None => call,
                };
                kernel.forward(&call, &mut outputs, &mut workspace)
            });
            result?;
            decode_ns += step_ns;
            if bench.truth.is_some() {
                finite(&outputs)?;
                late.store(step, &outputs);
                late.live_bytes.push(self.kv_bytes_live());
                let all = (0..self.cache.lens().len()).map(|list| self.cache.held_bytes(list)).sum::<u64>();
                late.all_bytes += all;
                late.read_bytes +=
                    selector.as_ref().map_or(all, |selector| selector.read_bytes(Lists::all(&self.cache)));
            }
            let queries = Queries { q: asked.view(), end: token + 1, lse: &outputs.lse };
            let (ns, result) = timed(|| self.evict_step(&queries, query, window.as_mut()));
            result?;
            evict_ns += ns;
        }
        let steps = cell.new_tokens as u64;
        trial.samples_ns.insert("decode", decode_ns / steps);
        if self.session.as_ref().is_some_and(Session::is_open) {
            trial.samples_ns.insert("decode_evict", evict_ns / steps);
        }
        Ok(late)
    }

    /// Begins to read by the policy's reader, if it has one; adds what that costs to the times.
    fn open_selection(&mut self, trial: &mut Trial) -> Result<Option<Box<dyn KvSelector>>, TrialError> {
        let (prepared, bench) = (self.prepared, self.bench);
        let Some(selection) = prepared.policy.as_ref().and_then(|policy| policy.selection.as_ref()) else {
            return Ok(None);
        };
        let context = prepared.cell.context_tokens;
        let start = Start {
            cache: Lists::all(&self.cache),
            q: bench.workload.q.view().tokens(context.saturating_sub(selection.recent_queries())..context),
            budget_tokens: prepared.budget_tokens,
            cpu: bench.cpu,
            arena: bench.arena,
        };
        let (open_ns, selector) = timed(|| selection.open(&start));
        let selector = selector?;
        let (prune_ns, pruned) = timed(|| selector.prune(&mut self.cache, 0));
        pruned?;
        trial.samples_ns.insert("score", open_ns + prune_ns);
        Ok(Some(selector))
    }
}

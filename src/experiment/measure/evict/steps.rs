//! Eviction steps of a trial: behind chunks of prefill, whose queries lie in the workload, and behind decode steps, whose
//! latest queries are held where the policy looks at more than one.

use super::{Running, evicting, lengths};
use crate::attention::{Forward, Shape, kernel};
use crate::eviction::{CpuBackend, Moment, ObservationWindow, Span, View, WindowShape, recompute_lse};
use crate::experiment::cell::Cell;
use crate::experiment::measure::{Prepared, TrialError};
use crate::memory::Buffer;
use crate::policy::{BeforeRope, Future, Statistic};
use crate::tensor::TensorView;

/// Queries that have attended to the cache as it is.
pub(super) struct Queries<'a> {
    /// As they attended, `[layers * B, Hq, n, D]`.
    pub q: TensorView<'a>,
    /// The token behind the last one's: tokens seen so far.
    pub end: usize,
    /// Their log-sum-exps, `[layers * B, Hq, n]`.
    pub lse: &'a [f32],
}

/// Extents of the future queries over the whole sequence, for the oracle.
pub(super) fn future_shape(prepared: &Prepared) -> Shape {
    let cell = &prepared.cell;
    Shape { q_len: cell.new_tokens, kv_len: cell.context_tokens + cell.new_tokens, ..cell.shape() }
}

/// The observation window of decode steps: log-sum-exps are recomputed over the lists as they are.
pub(super) fn window_shape(cell: &Cell) -> WindowShape {
    let (layers, dtype) = (cell.layers * cell.batch, cell.dtype);
    WindowShape { layers, q_heads: cell.q_heads, head_dim: cell.head_dim, dtype, has_lse: false }
}

impl Running<'_> {
    /// The eviction step behind a chunk of prefill. What is left after the last one is what decoding begins with.
    pub(super) fn evict_chunk(&mut self, queries: &Queries<'_>, last: bool) -> Result<(), TrialError> {
        let Some(policy) = evicting(self.prepared) else { return Ok(()) };
        // The bound's own pass over the future is no cost of a policy: it is not timed.
        let (shape, bench) = (future_shape(self.prepared), self.bench);
        let all = bench.dense(shape.kv_len)?;
        let q = bench.workload.q.view().tokens(self.prepared.cell.context_tokens..shape.kv_len);
        let call = Forward { shape, params: self.prepared.cell.params(), q, kv: &all, cpu: bench.cpu };
        let future_lse = match policy.looks_at(Statistic::FutureAttention) {
            true => Some(self.lse(&call)?),
            false => None,
        };
        let future = future_lse.as_deref().map(|lse| Future { call, lse });
        self.accumulate(queries)?;
        self.evict(queries, future, Moment::Chunk { last })
    }

    /// What the schedule asks for behind a decode step, whose query is `fresh` as it attended and `query` in the workload;
    /// `window` holds the latest queries where the policy looks at more than that one.
    pub(super) fn evict_step(
        &mut self,
        fresh: &Queries<'_>,
        query: TensorView<'_>,
        window: Option<&mut ObservationWindow>,
    ) -> Result<(), TrialError> {
        let Some(session) = self.session.as_mut().filter(|session| session.is_open()) else { return Ok(()) };
        let due = session.advance();
        // The attention of every query counts, also in steps that evict nothing.
        self.accumulate(fresh)?;
        let Some(window) = window else {
            return if due { self.evict(fresh, None, Moment::Step) } else { Ok(()) };
        };
        let sequences = query.dims()[0];
        for sequence in 0..sequences {
            window.push(sequence, query.sequences(sequence..sequence + 1), &[])?;
        }
        if !due {
            return Ok(());
        }
        let asked = self.attending(window.view(0..sequences), fresh.end)?;
        let lse = match evicting(self.prepared).is_some_and(|policy| policy.looks_at_attention()) {
            true => Some(self.lse(&self.call(asked.view()))?),
            false => None,
        };
        let queries = Queries { q: asked.view(), end: fresh.end, lse: lse.as_deref().unwrap_or(&[]) };
        self.evict(&queries, None, Moment::Step)
    }

    /// The context's latest queries, for a policy that looks at more than one while decoding.
    pub(super) fn observe_context(&self) -> Result<Option<ObservationWindow>, TrialError> {
        let Some(queries) = lengths(self.prepared).recent() else { return Ok(None) };
        let (cell, shape) = (&self.prepared.cell, window_shape(&self.prepared.cell));
        let mut window = ObservationWindow::new(self.bench.arena, shape, Span::Latest(queries), queries)?;
        let q = self.bench.workload.q.view().tokens(cell.context_tokens - queries..cell.context_tokens);
        for sequence in 0..shape.layers {
            window.push(sequence, q.sequences(sequence..sequence + 1), &[])?;
        }
        Ok(Some(window))
    }

    /// Queries over the cache, all layers at once.
    pub(super) fn call<'c>(&'c self, q: TensorView<'c>) -> Forward<'c> {
        let cell = &self.prepared.cell;
        let shape = Shape { q_len: q.dims()[2], kv_len: self.cache.max_len(), ..cell.shape() };
        Forward { shape, params: cell.params(), q, kv: &self.cache, cpu: self.bench.cpu }
    }

    /// Log-sum-exps by the decode kernel.
    fn lse(&self, call: &Forward<'_>) -> Result<Buffer<f32>, TrialError> {
        let decode = kernel("decode").expect("the decode kernel is built in");
        Ok(recompute_lse(&*decode, call, self.bench.arena)?)
    }

    fn accumulate(&mut self, queries: &Queries<'_>) -> Result<(), TrialError> {
        let view = Self::view(self.prepared, None, queries, None);
        let backend = CpuBackend { cpu: self.bench.cpu, arena: self.bench.arena, rope: None, counts_ties: false };
        let Some(session) = &mut self.session else { return Ok(()) };
        Ok(session.accumulate(&backend, &mut self.cache, &view)?)
    }

    fn evict(&mut self, queries: &Queries<'_>, future: Option<Future<'_>>, moment: Moment) -> Result<(), TrialError> {
        let Running { prepared, bench, cache, frequencies, session } = self;
        let Some(session) = session else { return Ok(()) };
        let rope = frequencies.as_ref();
        let before_rope = rope.map(|frequencies| BeforeRope { frequencies, q: None, k: None });
        let backend = CpuBackend { cpu: bench.cpu, arena: bench.arena, rope, counts_ties: bench.truth.is_some() };
        let view = Self::view(prepared, before_rope, queries, future);
        Ok(session.evict(&backend, cache, &[view], moment)?)
    }

    /// All lists of the cache.
    fn view<'v>(
        prepared: &Prepared,
        before_rope: Option<BeforeRope<'v>>,
        queries: &Queries<'v>,
        future: Option<Future<'v>>,
    ) -> View<'v> {
        let cell = &prepared.cell;
        View {
            first: 0,
            step: 1,
            count: cell.layers * cell.batch,
            layers: cell.layers,
            params: cell.params(),
            q: queries.q,
            lse: queries.lse,
            seen_tokens: queries.end,
            future,
            reconstructed: None,
            before_rope,
            w_o: &[],
            layer_numbers: &[],
            kept: 0..0,
        }
    }
}

//! A policy at work in a model on a GPU: the eviction session of its sequence, and what each layer's attention shows, kept as
//! far as the policy looks at it. Keys, values, queries and scores stay on the GPU.

use super::attend::attended;
use super::gates::{DeviceGates, Place};
use crate::attention::cuda::export::{Observed, begin_columns};
use crate::attention::export::Reduction;
use crate::cache::cuda::{self as device_cache, DeviceCache};
use crate::device::Cpu;
use crate::device::cuda::{CudaError, DeviceBuffer, Growing, Landing, Runtime};
use crate::eviction::cuda::{CudaBackend, CudaView, Deferred, DeviceWindow};
use crate::eviction::{Moment, Plan, Session, Span};
use crate::memory::{Arena, Label};
use crate::model::decoder::params;
use crate::model::{Config, Eviction, ModelError};
use crate::policy::cuda::Queries;
use crate::policy::{Policy, PolicyError};
use crate::tensor::DType;

/// A policy with what it has seen of the sequence.
pub(super) struct DeviceEvictor<'a> {
    session: Session<'a>,
    cpu: &'a Cpu,
    arena: Arena,
    window: Option<DeviceWindow>,
    /// Of a policy with gates.
    gates: Option<DeviceGates>,
    /// Attention that a layer's tokens receive of a pass.
    received: Growing,
    /// Whether keys and queries are rotated to positions inside the cache: from the first eviction step on, if at all.
    rotates: bool,
    /// The number of tokens by which RoPE turned last.
    turned_tokens: usize,
    /// Of steps between new tokens, from the first one on.
    deferred: Option<Deferred>,
}

impl<'a> DeviceEvictor<'a> {
    /// For a sequence whose context, as the budget counts it, will be `context` tokens long, and of which at most `rows` come at once.
    ///
    /// # Errors
    /// [`PolicyError::Combination`] with what has no form on a GPU; when the budget leaves nothing, or there is no room.
    pub fn new(
        eviction: Eviction<'a>,
        config: &Config,
        cache: &DeviceCache,
        [context, rows]: [usize; 2],
        (runtime, cpu, arena): (&Runtime, &'a Cpu, &Arena),
    ) -> Result<Self, ModelError> {
        check(&eviction, config)?;
        let Eviction { policy, name, ref budget, seed, .. } = eviction;
        let (shape, dtype) = (attended(config, 1, 1), cache.rows().dtype());
        let (token_bytes, lists) = (cache.shape().token_bytes(), cache.shape().lists());
        let budget_tokens = policy.budget_tokens(name, budget.as_ref(), context, token_bytes, lists)?;
        let window = match (observes(policy), Span::of_decoding(policy)) {
            (true, Span::Latest(queries)) => {
                Some(DeviceWindow::new(runtime.device(), arena, (config.layers, queries), &shape, dtype)?)
            }
            _ => None,
        };
        // Not when the first token is waited for.
        let of_window = window.is_some().then(|| device_cache::program(DType::F32.into(), 1));
        runtime.load(policy.programs(cache.rows(), config.head_dim).into_iter().chain(of_window))?;
        let received = Growing::new(runtime.device(), arena, Label::Policy)?;
        let gates = DeviceGates::new(policy, config, rows, runtime.device(), arena)?;
        let session = Session::new(Plan { policy, budget_tokens, seed });
        let arena = arena.clone();
        Ok(DeviceEvictor {
            session,
            cpu,
            arena,
            window,
            gates,
            received,
            rotates: false,
            turned_tokens: 0,
            deferred: None,
        })
    }

    /// The policy, if it ever evicts.
    pub fn evicting(&self) -> Option<&'a Policy> {
        Some(self.session.plan().policy).filter(|policy| policy.scorer.is_some())
    }

    /// Whether another eviction step may come.
    fn is_open(&self) -> bool {
        self.evicting().is_some() && self.session.is_open()
    }

    /// List-tokens that were evicted so far.
    pub fn evicted_tokens(&self) -> u64 {
        self.session.totals().evicted_tokens
    }

    /// Whether keys and queries are rotated to positions inside the cache by now.
    pub fn rotates(&self) -> bool {
        self.rotates
    }

    /// The number of tokens by which RoPE turned last, if new ones stand behind what the lists hold, and not behind all that the
    /// sequence has seen.
    pub fn turned_tokens(&mut self) -> Option<&mut usize> {
        Some(&mut self.turned_tokens).filter(|_| self.rotates && self.session.is_decoding())
    }

    /// Begins to give the `place`'s newest tokens, which are in their lists, their gates, as [`DeviceGates::begin`].
    ///
    /// # Errors
    /// As [`Runtime::module`].
    pub fn gate(
        &mut self,
        place: &Place<'_>,
        hidden: &DeviceBuffer,
        narrowed: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let is_open = self.is_open();
        let Some(gates) = self.gates.as_mut().filter(|_| is_open) else { return Ok(()) };
        gates.begin(place, hidden, narrowed)
    }

    /// Begins to look at the attention of a layer: `count` queries `[Hq, count, D]` and their log-sum-exps.
    ///
    /// # Errors
    /// When there is no room, and as [`Runtime::module`].
    pub fn see(
        &mut self,
        config: &Config,
        (runtime, cache): (&Runtime, &DeviceCache),
        layer: usize,
        count: usize,
        [q, lse]: [&DeviceBuffer; 2],
    ) -> Result<(), CudaError> {
        if !self.is_open() {
            return Ok(());
        }
        if let Some(window) = &mut self.window {
            window.push(runtime, layer, count, [q, lse])?;
        }
        if self.session.accumulates() {
            let lists = layer * config.kv_heads..(layer + 1) * config.kv_heads;
            let width = cache.lens()[lists.clone()].iter().copied().max().unwrap_or(0);
            let (shape, rows) = (attended(config, count, width), cache.rows());
            let params = params(config, layer);
            let observed = Observed { q, length: count, first: 0, lse, rows, shape, params };
            let bytes = 4 * (lists.len() * width) as u64;
            let received = self.received.of(runtime.device(), &self.arena, bytes)?;
            let these = cache.some_lists(lists.clone())?;
            begin_columns(runtime, &these, &observed, count, Reduction::RECEIVED, received)?;
            cache.receive(runtime, lists, received, width)?;
        }
        Ok(())
    }

    /// Every layer has shown `count` queries.
    pub fn advance(&mut self, count: usize) {
        let is_open = self.is_open();
        if let Some(window) = self.window.as_mut().filter(|_| is_open) {
            window.advance(count);
        }
    }

    /// The eviction step behind prefill, of which `horizon` tokens are seen when it ends, or behind a chunk of it.
    ///
    /// # Errors
    /// When the policy gives scores that are no numbers, there is no room, or a kernel fails.
    pub fn evict_chunk(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &mut DeviceCache,
        seen: usize,
        horizon: usize,
    ) -> Result<(), ModelError> {
        let Some(policy) = self.evicting() else { return Ok(()) };
        if !self.session.is_open() {
            // An earlier prompt was evicted from, and the schedule asks for no more.
            return Ok(());
        }
        let last = seen == horizon;
        if policy.rerotates {
            cache.set_rope(&config.rope.frequencies(config.head_dim, config.max_positions, horizon))?;
            (self.rotates, self.turned_tokens) = (true, horizon);
        }
        let DeviceEvictor { session, cpu, arena, window, deferred, .. } = self;
        let dense = window.as_ref().map(|window| window.dense(runtime, arena)).transpose()?;
        let q_len = window.as_ref().map_or(0, DeviceWindow::count);
        let queries = dense.as_ref().map(|[q, lse]| Queries { q, length: q_len, first: 0, lse, q_len });
        let backend = CudaBackend { runtime, arena, cpu, counts_ties: false };
        session.evict(&backend, cache, &[view(config, queries, seen)], Moment::Chunk { last })?;
        // It knows the best scores that lists had lost before.
        *deferred = None;
        if !last {
            window.iter_mut().for_each(DeviceWindow::forget);
        } else if !session.is_open() {
            *window = None;
        }
        Ok(())
    }

    /// Begins what the schedule asks for behind a decode step, whose kernels were begun; what it finds lands behind `start`.
    ///
    /// # Errors
    /// When there is no room, or a kernel fails.
    pub fn begin_step(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &DeviceCache,
        seen: usize,
        landing: (&mut Landing, usize),
    ) -> Result<(), ModelError> {
        if self.evicting().is_none() || !self.session.advance() {
            return Ok(());
        }
        let DeviceEvictor { session, cpu, arena, window, deferred, .. } = self;
        let lists = cache.shape().lists();
        let deferred = match deferred {
            Some(deferred) => deferred,
            none => none.insert(Deferred::new(runtime.device(), arena, lists, session.best_evicted())?),
        };
        let backend = CudaBackend { runtime, arena, cpu, counts_ties: false };
        let asked = (session.plan(), session.rule(Moment::Step, 0));
        Ok(deferred.begin(&backend, asked, cache, (&view(config, None, seen), window.as_ref()), landing)?)
    }

    /// Ends what was begun behind the step, with what has landed of it.
    ///
    /// # Errors
    /// When the policy gave scores that are no numbers, or a kernel fails.
    pub fn end_step(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &mut DeviceCache,
        seen: usize,
        found: &[u32],
    ) -> Result<(), ModelError> {
        let DeviceEvictor { session, cpu, arena, deferred, .. } = self;
        let Some(deferred) = deferred else { return Ok(()) };
        let frequencies = || config.rope.frequencies(config.head_dim, config.max_positions, seen);
        let rope = session.plan().policy.rerotates.then(frequencies);
        let backend = CudaBackend { runtime, arena, cpu, counts_ties: false };
        session.add_evicted(deferred.end(&backend, cache, rope.as_ref(), found)?);
        Ok(())
    }
}

/// All lists of the sequence.
fn view<'v>(config: &Config, queries: Option<Queries<'v>>, seen_tokens: usize) -> CudaView<'v> {
    let (q_heads, params, layers) = (config.q_heads, params(config, 0), config.layers);
    CudaView { queries, q_heads, params, layers, seen_tokens }
}

/// Whether eviction steps look at the latest queries.
fn observes(policy: &Policy) -> bool {
    policy.scorer.as_ref().and_then(|scorer| scorer.scoring_plan()).is_some_and(|plan| plan.observes())
}

/// Refuses what a model cannot do, or has no form on a GPU.
pub(super) fn check(eviction: &Eviction<'_>, config: &Config) -> Result<(), PolicyError> {
    eviction.check(config)?;
    let Eviction { policy, name, .. } = *eviction;
    policy.check_device_in_model(name)?;
    let refuse = |reason: &str| {
        Err(PolicyError::Combination { policy: name.into(), reason: format!("{reason}; use --device cpu") })
    };
    if policy.scorer.is_none() {
        return Ok(());
    }
    if config.windows.iter().any(Option::is_some) {
        return refuse("in a model with sliding windows nothing is evicted on CUDA yet");
    }
    if policy.rerotates && config.rope.part < 1.0 {
        return refuse("it rotates keys, of which the model rotates a part, which has no kernel yet");
    }
    if Span::of_prefill(policy) == Span::All {
        return refuse("it looks at all queries of the context, which are not held on CUDA yet");
    }
    Ok(())
}

//! A policy at work in a model on a GPU: what [`crate::model::evictor`] does, with the kernels of [`crate::policy::cuda`].
//!
//! Keys, values, queries and scores stay on the GPU. What has no form there is refused by name before anything runs.

use super::attend::attended;
use super::held::Held;
use super::steps::{Begun, Room};
use crate::attention::cuda::export::{Observed, begin_columns};
use crate::attention::export::Reduction;
use crate::cache::cuda::DeviceCache;
use crate::device::Cpu;
use crate::device::cuda::{CudaError, DeviceBuffer, Growing, Runtime};
use crate::memory::{Arena, Label};
use crate::model::decoder::params;
use crate::model::evictor::{looks_at_all_queries, recent_queries};
use crate::model::{Config, Eviction, ModelError};
use crate::policy::cuda::{DeviceContext, Queries, score, select};
use crate::policy::{Decoding, Policy, PolicyError, Statistic};

/// A policy with what it has seen of the sequence.
pub(super) struct DeviceEvictor<'a> {
    pub(super) eviction: Eviction<'a>,
    cpu: &'a Cpu,
    pub(super) arena: Arena,
    pub(super) budget_tokens: usize,
    pub(super) held: Option<Held>,
    /// Attention that a layer's tokens receive of a pass.
    received: Growing,
    /// Whether another judgement may come.
    open: bool,
    /// Whether keys and queries are turned to positions inside the cache: from the first judgement on, if at all.
    pub(super) turns: bool,
    /// The best score that each list lost in the latest judgement of prefill.
    pub(super) best_lost: Vec<f32>,
    pub(super) steps: usize,
    pub(super) evicted_tokens: u64,
    /// Of judgements between decode steps, from the first one on.
    pub(super) room: Option<Room>,
    /// The judgement that was begun with the latest step.
    pub(super) begun: Option<Begun>,
}

impl<'a> DeviceEvictor<'a> {
    /// For a sequence whose context, as the budget counts it, will be `context` tokens long.
    ///
    /// # Errors
    /// [`PolicyError::Combination`] with what has no form on a GPU; when the budget leaves nothing, or there is no room.
    pub fn new(
        eviction: Eviction<'a>,
        config: &Config,
        cache: &DeviceCache,
        context: usize,
        (runtime, cpu, arena): (&Runtime, &'a Cpu, &Arena),
    ) -> Result<Self, ModelError> {
        check(&eviction, config)?;
        let Eviction { policy, name, ref budget, .. } = eviction;
        let (shape, dtype) = (attended(config, 1, 1), cache.shape().dtype());
        let (token_bytes, lists) = (cache.shape().token_bytes(), cache.shape().lists());
        let budget_tokens = policy.budget_tokens(name, budget.as_ref(), context, token_bytes, lists)?;
        let held = match observes(policy) {
            true => {
                let extents = (config.layers, recent_queries(policy));
                Some(Held::new(runtime.device(), arena, extents, &shape, dtype)?)
            }
            false => None,
        };
        let received = Growing::new(runtime.device(), arena, Label::Policy)?;
        let (arena, open) = (arena.clone(), policy.scorer.is_some());
        Ok(DeviceEvictor {
            eviction,
            cpu,
            arena,
            budget_tokens,
            held,
            received,
            open,
            turns: false,
            best_lost: Vec::new(),
            steps: 0,
            evicted_tokens: 0,
            room: None,
            begun: None,
        })
    }

    /// The policy, if it ever evicts.
    pub fn judging(&self) -> Option<&'a Policy> {
        Some(self.eviction.policy).filter(|policy| policy.scorer.is_some())
    }

    /// List-tokens that were evicted so far.
    pub fn evicted_tokens(&self) -> u64 {
        self.evicted_tokens
    }

    /// Whether keys and queries are turned to positions inside the cache by now.
    pub fn turns(&self) -> bool {
        self.turns
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
        if !self.open {
            return Ok(());
        }
        if let Some(held) = &mut self.held {
            held.push(runtime, layer, count, [q, lse])?;
        }
        if self.eviction.policy.looks_at(Statistic::AccumulatedAttention) {
            let lists = layer * config.kv_heads..(layer + 1) * config.kv_heads;
            let width = cache.lens()[lists.clone()].iter().copied().max().unwrap_or(0);
            let (shape, dtype) = (attended(config, count, width), cache.shape().dtype());
            let params = params(config, layer);
            let observed = Observed { q, length: count, first: 0, lse, dtype, shape, params };
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
        if let Some(held) = self.held.as_mut().filter(|_| self.open) {
            held.advance(count);
        }
    }

    /// Judges after prefill, or after a chunk of it that is not the `last`.
    ///
    /// # Errors
    /// When the policy gives scores that are no numbers, there is no room, or a kernel fails.
    pub fn judge_prefill(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &mut DeviceCache,
        seen: usize,
        last: bool,
    ) -> Result<(), ModelError> {
        let Some(policy) = self.judging() else { return Ok(()) };
        self.judge(config, runtime, cache, seen)?;
        if !last {
            self.held.iter_mut().for_each(Held::forget);
        } else if policy.schedule.decoding == Decoding::Never {
            (self.open, self.held) = (false, None);
        }
        Ok(())
    }

    /// Judges every list and shrinks it.
    fn judge(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &mut DeviceCache,
        seen_tokens: usize,
    ) -> Result<(), ModelError> {
        let DeviceEvictor { eviction, ref arena, ref held, .. } = *self;
        let q_len = held.as_ref().map_or(0, Held::count);
        let dense = held.as_ref().map(|held| held.dense(runtime, arena)).transpose()?;
        let queries = dense.as_ref().map(|[q, lse]| Queries { q, length: q_len, first: 0, lse, q_len });
        let context = self.context(config, runtime, queries, seen_tokens);
        let Some(mut scored) = score(eviction.policy, &context, cache)? else { return Ok(()) };
        let selection = select(eviction.policy, &context, cache, &mut scored)?;
        drop((scored, dense));
        let before: usize = cache.lens().iter().sum();
        selection.shrink(runtime, cache)?;
        if eviction.policy.rerotates {
            cache.set_rope(&config.rope.frequencies(config.head_dim, config.max_positions, seen_tokens))?;
            cache.rerotate(runtime)?;
            self.turns = true;
        }
        self.evicted_tokens += (before - cache.lens().iter().sum::<usize>()) as u64;
        self.best_lost = selection.best_lost;
        Ok(())
    }

    /// What a policy sees besides the cache.
    pub(super) fn context<'c>(
        &'c self,
        config: &Config,
        runtime: &'c Runtime,
        queries: Option<Queries<'c>>,
        seen_tokens: usize,
    ) -> DeviceContext<'c> {
        DeviceContext {
            runtime,
            arena: &self.arena,
            cpu: self.cpu,
            queries,
            q_heads: config.q_heads,
            params: params(config, 0),
            layers: config.layers,
            seen_tokens,
            budget_tokens: self.budget_tokens,
        }
    }
}

/// Whether judgements look at the latest queries.
fn observes(policy: &Policy) -> bool {
    policy.scorer.as_ref().and_then(|scorer| scorer.recipe()).is_some_and(|recipe| recipe.observes())
}

/// Refuses what a model cannot do, or has no form on a GPU.
pub(super) fn check(eviction: &Eviction<'_>, config: &Config) -> Result<(), PolicyError> {
    eviction.check(config)?;
    let Eviction { policy, name, .. } = *eviction;
    policy.check_device(name)?;
    let refuse = |reason: &str| {
        Err(PolicyError::Combination { policy: name.into(), reason: format!("{reason}; use --device cpu") })
    };
    if policy.scorer.is_none() {
        return Ok(());
    }
    if config.windows.iter().any(Option::is_some) {
        return refuse("in a model with sliding windows nothing is evicted on CUDA yet");
    }
    if looks_at_all_queries(policy) {
        return refuse("it looks at all queries of the context, which are not held on CUDA yet");
    }
    Ok(())
}

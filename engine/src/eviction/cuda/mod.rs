//! Eviction steps on a GPU, over a cache in its memory: scores, selection and compaction are kernels
//! ([`crate::policy::cuda`]), and keys and values never leave it.
//!
//! [`CudaBackend`] waits for what it begins and times it, as experiments and prefill want it. Between the decode steps of a
//! model nothing may be waited for but the step's logits: `Deferred` (`deferred.rs`) does the same in two halves.

mod deferred;
mod tensors;
mod window;

pub(crate) use deferred::{Deferred, landing_bytes};
pub use tensors::{DeviceTensors, RetainedThere, retain};
pub(crate) use window::DeviceWindow;

use super::{Backend, Chosen, Evicted, Plan, Rule};
use crate::attention::Params;
use crate::attention::export::Reduction;
use crate::cache::cuda::DeviceCache;
use crate::device::Cpu;
use crate::device::cuda::Runtime;
use crate::memory::{Arena, Label};
use crate::policy::cuda::{
    DeviceContext, DevicePolicyError, DeviceScored, DeviceSelection, Queries, let_leave, score, select,
};
use crate::policy::tie_rate_of;

/// A GPU.
#[derive(Clone, Copy)]
pub struct CudaBackend<'a> {
    /// The GPU and its compiler.
    pub runtime: &'a Runtime,
    /// The arena that counts its memory.
    pub arena: &'a Arena,
    /// Divides budgets.
    pub cpu: &'a Cpu,
    /// Whether ties are counted, for which all scores come to the host.
    pub counts_ties: bool,
}

/// All lists of a cache, and what a policy sees of them.
#[derive(Clone, Copy)]
pub struct CudaView<'v> {
    /// The latest queries; with a statistic of attention.
    pub queries: Option<Queries<'v>>,
    /// `Hq`.
    pub q_heads: usize,
    /// Scale, soft-cap and mask.
    pub params: Params,
    /// Layers that are folded into the cache's sequences.
    pub layers: usize,
    /// Tokens that each sequence has seen.
    pub seen_tokens: usize,
}

impl CudaBackend<'_> {
    /// What kernels of a policy look at.
    fn context<'c>(&'c self, view: &CudaView<'c>, budget_tokens: usize) -> DeviceContext<'c> {
        let CudaBackend { runtime, arena, cpu, .. } = *self;
        let CudaView { queries, q_heads, params, layers, seen_tokens } = *view;
        DeviceContext { runtime, arena, cpu, queries, q_heads, params, layers, seen_tokens, budget_tokens }
    }

    fn tie_rate(&self, cache: &DeviceCache, scored: &DeviceScored) -> Result<f64, DevicePolicyError> {
        if !self.counts_ties {
            return Ok(0.0);
        }
        let mut values = vec![0f32; cache.shape().lists() * scored.width];
        scored.values.read(bytemuck::cast_slice_mut(&mut values))?;
        let lists = values.chunks(scored.width).zip(cache.lens()).map(|(values, &len)| &values[..len]);
        Ok(tie_rate_of(lists, scored.highest_scored))
    }
}

impl Backend for CudaBackend<'_> {
    type Cache = DeviceCache;
    type View<'v> = CudaView<'v>;
    type Selection = DeviceSelection;
    type Error = DevicePolicyError;

    fn accumulate(&self, cache: &mut DeviceCache, view: &CudaView<'_>) -> Result<u64, DevicePolicyError> {
        let width = cache.max_len();
        let bytes = 4 * (cache.shape().lists() * width) as u64;
        let mut sums = self.runtime.device().alloc(self.arena, Label::Policy, bytes)?;
        let counted_ns = self.context(view, 0).columns(cache, None, Reduction::RECEIVED, &mut sums)?;
        Ok(counted_ns + cache.add_attention(self.runtime, &sums, width)?)
    }

    fn choose(
        &self,
        plan: &Plan<'_>,
        cache: &DeviceCache,
        view: &CudaView<'_>,
        rule: Rule<'_>,
    ) -> Result<Chosen<DeviceSelection>, DevicePolicyError> {
        let context = self.context(view, plan.budget_tokens);
        let mut scored = score(plan.policy, &context, cache)?.expect("a session's policy has a scorer");
        let selection = match rule {
            Rule::Budget => select(plan.policy, &context, cache, &mut scored)?,
            Rule::Delayed { best_evicted } => let_leave(&context, cache, &mut scored, best_evicted)?,
        };
        let (score_ns, select_ns, tie_rate) = (scored.time_ns, selection.time_ns, self.tie_rate(cache, &scored)?);
        Ok(Chosen { best_evicted: selection.best_lost.clone(), selection, score_ns, select_ns, tie_rate })
    }

    fn evict(
        &self,
        plan: &Plan<'_>,
        cache: &mut DeviceCache,
        _: &CudaView<'_>,
        selection: &DeviceSelection,
    ) -> Result<Evicted, DevicePolicyError> {
        let before: usize = cache.lens().iter().sum();
        let mut ns = selection.shrink(self.runtime, cache)?;
        if plan.policy.rerotates {
            ns += cache.rerotate(self.runtime)?;
        }
        Ok(Evicted { tokens: (before - cache.lens().iter().sum::<usize>()) as u64, ns })
    }

    fn release(&self, cache: &mut DeviceCache) -> Result<u64, DevicePolicyError> {
        Ok(cache.release(self.runtime, 0)?)
    }
}

//! Policies on a GPU: scores, selection and counts without the cache coming to the host.
//!
//! A scorer with a [`ScoringPlan`] is computed by kernels over a [`DeviceCache`] (`scores.rs`); protection and selection are
//! kernels as well (`kernels/select.cu`). How the budget is divided is decided on the host by the policy's own
//! budget allocations: those that look at list lengths alone need nothing from the GPU, those that compare scores (`ada`,
//! `global`) get a copy of the scores, 4 bytes for each token and KV head. Keys and values never leave the GPU.

mod delayed;
mod division;
mod scores;

pub use delayed::let_leave;
pub(crate) use delayed::{begin_leaving, staying};
pub(crate) use division::{divide, divides_by_scores};
pub use scores::scratch_bytes;

use super::{Policy, PolicyError, Protect, Registry, ScoringPlan, Statistic};
use crate::attention::cuda::export::{self, Observed};
use crate::attention::export::Reduction;
use crate::attention::{Params, Shape};
use crate::cache::CacheShape;
use crate::cache::cuda::DeviceCache;
use crate::device::Cpu;
use crate::device::cuda::{Choice, ChoiceOperands, CudaError, DeviceBuffer, Launch, Program, Runtime, SELECT};
use crate::format::GpuRows;
use crate::memory::{Arena, Label};
use crate::tensor::DType;

/// What went wrong when a GPU evicted.
#[derive(Debug, thiserror::Error)]
pub enum DevicePolicyError {
    /// In the policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// On the GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Queries that have seen a cache.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// `[B, Hq, length, D]`.
    pub q: &'a DeviceBuffer,
    /// Rows of a head in `q`, of which `Lq` from `first` on are the queries.
    pub length: usize,
    /// The first of them.
    pub first: usize,
    /// Their log-sum-exps over the cache, `[B, Hq, Lq]` in f32.
    pub lse: &'a DeviceBuffer,
    /// `Lq`.
    pub q_len: usize,
}

/// What a policy sees on a GPU besides the cache that it evicts from; the words are those of [`crate::policy::Context`].
#[derive(Clone, Copy)]
pub struct DeviceContext<'a> {
    /// The GPU.
    pub runtime: &'a Runtime,
    /// Counts the GPU's memory.
    pub arena: &'a Arena,
    /// Divides the budget.
    pub cpu: &'a Cpu,
    /// With a statistic of attention.
    pub queries: Option<Queries<'a>>,
    /// `Hq`.
    pub q_heads: usize,
    /// Scale, soft-cap and mask of the queries.
    pub params: Params,
    /// Layers that are folded into the batch.
    pub layers: usize,
    /// Tokens that each sequence has seen: the position of the next.
    pub seen_tokens: usize,
    /// Tokens that each head may keep on average.
    pub budget_tokens: usize,
}

/// Scores on a GPU.
pub struct DeviceScored {
    /// `[B, Hkv, width]` in f32: protected tokens above all others.
    pub values: DeviceBuffer,
    /// Slots of each list: the longest list.
    pub width: usize,
    /// The highest score of a token that is scored; what lies above it is protected.
    pub highest_scored: f32,
    /// What the scorer protects.
    pub protect: Protect,
    /// The GPU's time for it.
    pub time_ns: u64,
    /// `[4, B, Hkv]`, as [`ChoiceOperands::found`].
    found: DeviceBuffer,
}

/// Tokens that stay, on a GPU.
pub struct DeviceSelection {
    /// `[B, Hkv, width]` in u32: slots that stay, ascending, at the front of each list's part.
    pub slots: DeviceBuffer,
    /// Slots of each list's part.
    pub width: usize,
    /// How many stay of each list.
    pub counts: Vec<usize>,
    /// The same on the GPU, `[B, Hkv]` in i32.
    pub counts_there: DeviceBuffer,
    /// Highest score that each list lost; minus infinity where it lost nothing.
    pub best_lost: Vec<f32>,
    /// The GPU's time for it.
    pub time_ns: u64,
}

impl DeviceSelection {
    /// Retains what was selected. Returns the GPU's time in nanoseconds.
    ///
    /// # Errors
    /// As [`DeviceCache::keep`].
    pub fn shrink(&self, runtime: &Runtime, cache: &mut DeviceCache) -> Result<u64, CudaError> {
        cache.keep(runtime, &self.slots, self.width, &self.counts, &self.counts_there)
    }
}

impl Policy {
    /// What evicting by it compiles, over a cache of a type and head dim; nothing where nothing is evicted on a GPU.
    pub fn programs(&self, rows: GpuRows, head_dim: usize) -> Vec<Program> {
        let plan = self.scorer.as_ref().and_then(|scorer| scorer.scoring_plan());
        plan.map_or_else(Vec::new, |plan| {
            let mut programs = scores::programs(&plan, rows, head_dim);
            programs.push(program());
            programs
        })
    }

    /// Says whether a GPU can evict from tensors by this policy, which was written as `name`.
    ///
    /// # Errors
    /// [`PolicyError::Combination`] with what has no form for a GPU and what has.
    pub fn check_device(&self, name: &str) -> Result<(), PolicyError> {
        if self.looks_at(Statistic::HiddenStates) {
            let reason =
                "gates of hidden states are worked out in models on CUDA, not for tensors; use --device cpu".into();
            return Err(PolicyError::Combination { policy: name.into(), reason });
        }
        self.check_form(name, |policy| !policy.looks_at(Statistic::HiddenStates))
    }

    /// The same of a model at work there.
    ///
    /// # Errors
    /// As [`Policy::check_device`].
    pub fn check_device_in_model(&self, name: &str) -> Result<(), PolicyError> {
        self.check_form(name, |_| true)
    }

    /// The same; policies that `fit` are told where this one has no form.
    fn check_form(&self, name: &str, fit: impl Fn(&Policy) -> bool) -> Result<(), PolicyError> {
        let refuse = |reason: String| Err(PolicyError::Combination { policy: name.into(), reason });
        let has_scoring_plan =
            |policy: &Policy| policy.scorer.as_ref().is_some_and(|scorer| scorer.scoring_plan().is_some());
        if self.selection.is_some() || (self.scorer.is_some() && !has_scoring_plan(self)) {
            let registry = Registry::default();
            let can_evict = |policy: &Policy| has_scoring_plan(policy) && policy.action.is_none() && fit(policy);
            let can = registry
                .entries()
                .iter()
                .map(|entry| entry.name)
                .filter(|name| registry.policy(name).is_ok_and(|policy| can_evict(&policy)));
            let can: Vec<&str> = can.collect();
            return refuse(format!("no kernel for it on CUDA yet; there are {}; or use --device cpu", can.join(", ")));
        }
        let network = self.scorer.as_ref().and_then(|scorer| scorer.network());
        if network.is_none() && (!self.parameters.is_empty() || self.looks_at(Statistic::HiddenStates)) {
            let why = "a policy file and hidden states are read on CUDA by the network of a scorer's gates alone";
            return refuse(format!("{why}; use --device cpu"));
        }
        if self.action.is_some() {
            return refuse("evicted tokens are only dropped on CUDA; leave the action out, or use --device cpu".into());
        }
        let looks = !(self.layers.needs().is_empty() && self.heads.needs().is_empty());
        if looks || self.heads.settles_lists() {
            let why = "on CUDA budgets are divided by lengths or scores (uniform, pyramid, table, ada, global)";
            let what = if looks { "by attention" } else { "with scores of a head's own" };
            return refuse(format!("{why}, not {what}; use --device cpu"));
        }
        Ok(())
    }
}

impl DeviceContext<'_> {
    /// The extents of `q_len` queries over a cache.
    fn shape(&self, cache: &DeviceCache, q_len: usize) -> Shape {
        let CacheShape { batch, kv_heads, head_dim, .. } = *cache.shape();
        Shape { batch, q_heads: self.q_heads, kv_heads, q_len, kv_len: cache.max_len(), head_dim }
    }

    /// Attention that the cached tokens receive from the last `queries` queries (all of them where it is `None`):
    /// `columns` `[B, Hkv, longest list]` in f32. Returns the GPU's time in nanoseconds.
    ///
    /// # Errors
    /// When the queries are missing, and as [`Runtime::module`].
    pub fn columns(
        &self,
        cache: &DeviceCache,
        queries: Option<usize>,
        reduction: Reduction,
        columns: &mut DeviceBuffer,
    ) -> Result<u64, DevicePolicyError> {
        self.runtime.load([export::program(cache.rows(), cache.shape().head_dim, reduction.queries)])?;
        self.runtime.device().timed(|| self.begin_columns(cache, queries, reduction, columns))
    }

    /// Begins them.
    ///
    /// # Errors
    /// As [`DeviceContext::columns`].
    pub(crate) fn begin_columns(
        &self,
        cache: &DeviceCache,
        queries: Option<usize>,
        reduction: Reduction,
        columns: &mut DeviceBuffer,
    ) -> Result<(), DevicePolicyError> {
        let what = "queries and their log-sum-exps";
        let seen = self.queries.ok_or(PolicyError::Missing { policy: "on CUDA", what })?;
        let (rows, shape) = (cache.rows(), self.shape(cache, seen.q_len));
        let (Queries { q, length, first, lse, .. }, params) = (seen, self.params);
        let observed = Observed { q, length, first, lse, rows, shape, params };
        let asked = queries.unwrap_or(seen.q_len);
        Ok(export::begin_columns(self.runtime, &cache.lists()?, &observed, asked, reduction, columns)?)
    }
}

/// Scores every token of the cache; `None` for a policy that keeps everything.
///
/// # Errors
/// [`PolicyError::Score`] when a score is no number, [`PolicyError::Missing`] when a statistic is missing; when there is
/// no room, and as [`Runtime::module`].
pub fn score(
    policy: &Policy,
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
) -> Result<Option<DeviceScored>, DevicePolicyError> {
    let Some(scorer) = &policy.scorer else { return Ok(None) };
    let (device, lists, width) = (context.runtime.device(), cache.shape().lists(), cache.max_len());
    let take = |label, bytes| device.alloc(context.arena, label, bytes);
    let mut values = take(Label::Policy, 4 * (lists * width) as u64)?;
    let mut found = take(Label::Policy, 16 * lists as u64)?;
    let time_ns = {
        let head_dim = cache.shape().head_dim;
        context.runtime.load(policy.programs(cache.rows(), head_dim))?;
        let bytes = scorer.scoring_plan().map_or(0, |plan| scratch_bytes(&plan, lists, width, head_dim));
        let mut scratch = take(Label::Workspace, bytes)?;
        device.timed(|| begin_score(policy, context, cache, [&mut values, &mut scratch, &mut found]))?
    };
    let mut words = vec![0u32; 4 * lists];
    found.read(bytemuck::cast_slice_mut(&mut words))?;
    let highest_scored = highest_of(cache, &values, &words)?;
    let protect = scorer.protect(context.budget_tokens);
    Ok(Some(DeviceScored { values, width, highest_scored, protect, time_ns, found }))
}

/// Begins to score every token of the cache: `scores` `[B, Hkv, longest list]`, protected tokens above all others, with
/// [`scratch_bytes`] of scratch memory, and `found` `[4, lists]`, in which [`highest_of`] looks.
///
/// # Errors
/// [`PolicyError::Missing`] when a statistic is missing or the policy has no form for a GPU; when a buffer is too small,
/// and as [`Runtime::module`].
pub(crate) fn begin_score(
    policy: &Policy,
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    [scores, scratch, found]: [&mut DeviceBuffer; 3],
) -> Result<(), DevicePolicyError> {
    let what = "a form for CUDA";
    let scorer = policy.scorer.as_ref();
    let plan =
        scorer.and_then(|scorer| scorer.scoring_plan()).ok_or(PolicyError::Missing { policy: "on CUDA", what })?;
    let protect = scorer.map_or_else(Protect::default, |scorer| scorer.protect(context.budget_tokens));
    scores::begin(&plan, context, cache, [&mut *scores, scratch])?;
    let (lists, width) = (cache.shape().lists(), cache.max_len());
    let Protect { sink, window, .. } = protect;
    let choice = ChoiceOperands { scores, chosen: None, found, lists, width, sink, recent: window };
    launch(context, cache, "score_bounds", [lists, 1, 1], 1024, &choice)?;
    Ok(launch(context, cache, "score_protect", [width.div_ceil(256), lists, 1], 256, &choice)?)
}

/// The highest score of a token that is not protected, by what [`begin_score`] has found, `[4, lists]`.
///
/// # Errors
/// [`PolicyError::Score`] when a score is no number.
pub(crate) fn highest_of(cache: &DeviceCache, scores: &DeviceBuffer, found: &[u32]) -> Result<f32, DevicePolicyError> {
    let lists = cache.shape().lists();
    let (tops, wrong) = found[lists..3 * lists].split_at(lists);
    if let Some((list, &slot)) = wrong.iter().enumerate().find(|&(_, &slot)| slot as i32 >= 0) {
        let slot = slot as usize;
        let score = number_at(scores, list * cache.max_len() + slot)?;
        let heads = cache.shape().kv_heads;
        return Err(PolicyError::Score { score, batch: list / heads, head: list % heads, slot }.into());
    }
    Ok(tops.iter().map(|&bits| f32::from_bits(bits)).fold(f32::NEG_INFINITY, f32::max))
}

/// Divides the budget of an eviction step over the lists and chooses the best of each.
///
/// # Errors
/// When a budget allocation lacks something, there is no room, and as [`Runtime::module`].
pub fn select(
    policy: &Policy,
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    scored: &mut DeviceScored,
) -> Result<DeviceSelection, DevicePolicyError> {
    let (device, lists) = (context.runtime.device(), cache.shape().lists());
    let (width, counts) = (scored.width, divide(policy, context, cache, &scored.values, scored.highest_scored)?);
    let numbers: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
    let mut counts_there = device.alloc(context.arena, Label::Policy, 4 * lists as u64)?;
    counts_there.write(bytemuck::cast_slice(&numbers))?;
    let mut slots = device.alloc(context.arena, Label::Policy, 4 * (lists * width) as u64)?;
    let DeviceScored { values, found, .. } = scored;
    let chosen = (&counts_there, &mut slots);
    context.runtime.load([program()])?;
    let time_ns = device.timed(|| begin_select(context, cache, [values, &mut *found], chosen))?;
    let mut best_lost = vec![0f32; lists];
    found.read(bytemuck::cast_slice_mut(&mut best_lost))?;
    policy.raise_to_threshold(&mut best_lost);
    Ok(DeviceSelection { slots, width, counts, counts_there, best_lost, time_ns })
}

/// Begins to choose the best of each list, so many as `chosen.0` `[lists]` says: their slots go to `chosen.1`
/// `[lists, longest list]`, and the best scores that are lost to `found` `[4, lists]`.
///
/// # Errors
/// When a buffer is too small, and as [`Runtime::module`].
pub(crate) fn begin_select(
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    [scores, found]: [&mut DeviceBuffer; 2],
    chosen: (&DeviceBuffer, &mut DeviceBuffer),
) -> Result<(), CudaError> {
    let (lists, width) = (cache.shape().lists(), cache.max_len());
    let choice = ChoiceOperands { scores, chosen: Some(chosen), found, lists, width, sink: 0, recent: 0 };
    launch(context, cache, "select_best", [lists, 1, 1], 1024, &choice)
}

/// What is compiled for selections: scores are f32 whatever the cache holds.
fn program() -> Program {
    Program { source: SELECT, dtype: DType::F32, head_dim: 1, macros: vec![] }
}

/// Begins a function of `select.cu`.
fn launch(
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    function: &'static str,
    grid: [usize; 3],
    threads: u32,
    operands: &ChoiceOperands<'_>,
) -> Result<(), CudaError> {
    let program = program();
    let launch = Launch { function, grid, threads, shared_bytes: 0 };
    let (device, lists, choice) = (context.runtime.device(), cache.lists()?, Choice::new(operands)?);
    device.begin(&device.ready(&*context.runtime.module(&program)?, &[launch])?, &[&lists, &choice])
}

/// Element `index` of a buffer of f32.
fn number_at(buffer: &DeviceBuffer, index: usize) -> Result<f32, CudaError> {
    let mut number = [0f32];
    buffer.read_from(4 * index, bytemuck::cast_slice_mut(&mut number))?;
    Ok(number[0])
}

/// Whether an eviction step looks at attention, so that its queries and their log-sum-exps are needed.
pub fn looks_at_attention(policy: &Policy) -> bool {
    let observes = |plan: ScoringPlan| plan.observes();
    policy.scorer.as_ref().and_then(|scorer| scorer.scoring_plan()).is_some_and(observes)
        || policy.looks_at(Statistic::AccumulatedAttention)
}

/// Bytes on the GPU of an eviction step of `lists` lists of at most `width` tokens, besides the cache: the most at one moment.
pub fn eviction_bytes(policy: &Policy, lists: usize, width: usize, head_dim: usize) -> u64 {
    let Some(plan) = policy.scorer.as_ref().and_then(|scorer| scorer.scoring_plan()) else { return 0 };
    let scores = 4 * (lists * width) as u64;
    scores + 16 * lists as u64 + scratch_bytes(&plan, lists, width, head_dim).max(4 * lists as u64 + scores)
}

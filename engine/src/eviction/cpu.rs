//! Eviction steps on the CPU, over a paged cache.

use super::attention::{accumulated, add_cumulative_attention, attention_sums};
use super::{Backend, Chosen, Evicted, Plan, Rule};
use crate::attention::rope::Frequencies;
use crate::attention::{Forward, Params, Shape};
use crate::cache::{PagedCache, Sequences};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::policy::action::{Asked, Fold};
use crate::policy::{
    BeforeRope, Context, Future, PolicyError, Selection, Statistic, gates, list_number, select, select_leaving,
    tie_rate,
};
use crate::tensor::TensorView;
use std::ops::Range;
use std::time::Instant;

/// The CPU, and what actions may use there.
#[derive(Clone, Copy)]
pub struct CpuBackend<'a> {
    /// The threads.
    pub cpu: &'a Cpu,
    /// Where memory comes from.
    pub arena: &'a Arena,
    /// RoPE's frequencies, to rotate keys to positions inside the cache; `None` where the inputs do not tell.
    pub rope: Option<&'a Frequencies>,
    /// Whether ties are counted, which takes a sort of all scores.
    pub counts_ties: bool,
}

/// Lists of a paged cache that are scored together, and what a policy sees of them. Its sequences are `count` of the cache:
/// `first`, `first + step`, ...
pub struct View<'v> {
    /// Sequence of the cache that is the first.
    pub first: usize,
    /// Distance of neighbours.
    pub step: usize,
    /// Sequences.
    pub count: usize,
    /// Layers that are folded into these.
    pub layers: usize,
    /// Scale, soft-cap and mask.
    pub params: Params,
    /// The latest queries, `[count, Hq, n, D]`.
    pub q: TensorView<'v>,
    /// Their log-sum-exps over the lists as they are, `[count, Hq, n]`; with a statistic of attention.
    pub lse: &'v [f32],
    /// Tokens that each sequence has seen.
    pub seen_tokens: usize,
    /// Queries that will come, for the oracle.
    pub future: Option<Future<'v>>,
    /// What each token was looked at while the model repeated its context, `[count, Hkv, longest list]`.
    pub reconstructed: Option<&'v [f32]>,
    /// How to look behind RoPE.
    pub before_rope: Option<BeforeRope<'v>>,
    /// Output projection of every layer, each `[1, Hq, D, hidden]`; empty where there is none.
    pub w_o: &'v [TensorView<'v>],
    /// The model's number of each sequence's layer; empty where they are all of a model's layers in order.
    pub layer_numbers: &'v [usize],
    /// Positions that are never evicted and that no budget counts.
    pub kept: Range<usize>,
}

impl View<'_> {
    fn sequences<'c>(&self, cache: &'c PagedCache) -> Sequences<'c> {
        Sequences { cache, first: self.first, step: self.step }
    }

    fn lists(&self, cache: &PagedCache) -> usize {
        self.count * cache.shape().kv_heads
    }

    /// Number in the cache of a list of the view.
    fn list(&self, cache: &PagedCache, index: usize) -> usize {
        let heads = cache.shape().kv_heads;
        cache.list(self.first + index / heads * self.step, index % heads)
    }

    /// The queries over the lists as they are.
    pub fn call<'c>(&'c self, kv: &'c Sequences<'c>, cpu: &'c Cpu) -> Forward<'c> {
        let [batch, q_heads, q_len, head_dim] = self.q.dims();
        let shape =
            Shape { batch, q_heads, kv_heads: kv.cache.shape().kv_heads, q_len, kv_len: kv.max_len(batch), head_dim };
        Forward { shape, params: self.params, q: self.q, kv, cpu }
    }
}

impl Backend for CpuBackend<'_> {
    type Cache = PagedCache;
    type View<'v> = View<'v>;
    type Selection = Selection;
    type Error = PolicyError;

    fn accumulate(&self, cache: &mut PagedCache, view: &View<'_>) -> Result<u64, PolicyError> {
        let start = Instant::now();
        let (kv_len, sums) = {
            let kv = view.sequences(cache);
            let call = view.call(&kv, self.cpu);
            (call.shape.kv_len, attention_sums(&call, view.lse, self.arena)?)
        };
        let lists: Vec<usize> = (0..view.lists(cache)).map(|index| view.list(cache, index)).collect();
        add_cumulative_attention(cache, |index| lists[index], kv_len, &sums)?;
        Ok(nanoseconds(start))
    }

    fn choose(
        &self,
        plan: &Plan<'_>,
        cache: &PagedCache,
        view: &View<'_>,
        rule: Rule<'_>,
    ) -> Result<Chosen<Selection>, PolicyError> {
        let start = Instant::now();
        let kv = view.sequences(cache);
        let call = view.call(&kv, self.cpu);
        let list = |index| view.list(cache, index);
        let sums = match plan.policy.looks_at(Statistic::AccumulatedAttention) {
            true => Some(accumulated(cache, list, [view.lists(cache), call.shape.kv_len], self.arena)?),
            false => None,
        };
        let gates = match plan.policy.looks_at(Statistic::HiddenStates) {
            true => Some(gates::carried(cache, view.lists(cache), list, call.shape.kv_len, self.arena)?),
            false => None,
        };
        let context = Context {
            call,
            layers: view.layers,
            lse: view.lse,
            future: view.future,
            accumulated: sums.as_deref(),
            gates: gates.as_deref(),
            reconstructed: view.reconstructed,
            positions: &|index, slot| cache.origin(list(index), slot),
            seen_tokens: view.seen_tokens,
            before_rope: view.before_rope,
            w_o: view.w_o,
            layer_numbers: view.layer_numbers,
            budget_tokens: plan.budget_tokens,
            seed: plan.seed,
            arena: self.arena,
        };
        let mut scored = plan.policy.score(&context)?.expect("a session's policy has a scorer");
        let score_ns = nanoseconds(start);
        // Before anything changes them.
        let tie_rate = if self.counts_ties { tie_rate(&context, &scored) } else { 0.0 };
        let start = Instant::now();
        let is_kept = |list, slot: &u32| view.kept.contains(&(context.positions)(list, *slot as usize));
        let kept = |list| (0..context.len(list) as u32).filter(|slot| is_kept(list, slot)).collect::<Vec<_>>();
        let kept: Vec<Vec<u32>> =
            if view.kept.is_empty() { Vec::new() } else { (0..context.lists()).map(kept).collect() };
        scored.lower(&context, &kept);
        let mut selection = match rule {
            Rule::Budget => select(plan.policy, &context, &mut scored)?,
            Rule::Delayed { best_evicted } => select_leaving(&context, &scored, best_evicted)?,
        };
        kept.iter().enumerate().for_each(|(list, slots)| selection.add(list, slots));
        let select_ns = nanoseconds(start);
        Ok(Chosen { best_evicted: selection.best_lost.clone(), selection, score_ns, select_ns, tie_rate })
    }

    fn evict(
        &self,
        plan: &Plan<'_>,
        cache: &mut PagedCache,
        view: &View<'_>,
        selection: &Selection,
    ) -> Result<Evicted, PolicyError> {
        let start = Instant::now();
        let fold = Fold {
            arena: self.arena,
            cpu: self.cpu,
            seed: plan.seed,
            number: 0,
            draws: None,
            rope: self.rope,
            asked: None,
        };
        let heads = cache.shape().kv_heads;
        let sequences = view.lists(cache) / (heads * view.layers);
        let mut tokens = 0;
        for index in 0..view.lists(cache) {
            let (list, kept) = (view.list(cache, index), selection.kept(index));
            let lost = cache.lens()[list] - kept.len();
            if lost > 0 {
                let asked = Asked { q: view.q, list: index, params: view.params };
                let number = list_number(index, heads, sequences, view.layer_numbers);
                plan.policy.shrink(&Fold { asked: Some(asked), number, ..fold }, cache, list, kept)?;
                tokens += lost as u64;
            }
        }
        Ok(Evicted { tokens, ns: nanoseconds(start) })
    }

    fn release(&self, cache: &mut PagedCache) -> Result<u64, PolicyError> {
        let start = Instant::now();
        cache.release();
        Ok(nanoseconds(start))
    }
}

fn nanoseconds(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
}

//! A policy at work in a model: what each layer's attention shows is kept as far as the policy looks at it, and the
//! cache of each sequence is judged, all layers together, when the schedule says so.
//!
//! Sequences of a batch are judged by themselves, so that a sequence keeps what it would keep alone. A scorer that looks
//! at recent queries finds those of every layer in a window that moves on with the tokens; one that looks at all
//! queries of the context finds all since the last judgement, which is memory that is counted under `policy`. Layers
//! whose sliding windows differ are judged one by one.

mod held;
mod judge;
mod witness;

use crate::attention::Forward;
use crate::attention::rope::Frequencies;
use crate::cache::PagedCache;
use crate::format::KvFormat;
use crate::memory::{Arena, ArenaError, Buffer, Claim};
use crate::model::{Config, ModelError};
use crate::policy::{Axis, Budget, Decoding, Policy, PolicyError, Statistic, evict};

use held::Held;
pub(super) use judge::Scene;
pub(super) use witness::Witness;

/// What is asked of a policy.
#[derive(Clone, Copy)]
pub struct Eviction<'p> {
    /// The policy.
    pub policy: &'p Policy,
    /// As it was written, for messages.
    pub name: &'p str,
    /// What may stay of a sequence's context: a fraction, tokens of each KV head, or bytes in all layers.
    pub budget: Option<Budget>,
    /// For policies that draw numbers.
    pub seed: u64,
}

impl Eviction<'_> {
    /// Refuses what a model cannot do.
    ///
    /// # Errors
    /// What it is, and why.
    pub fn check(&self, config: &Config) -> Result<(), PolicyError> {
        let refuse = |reason: &str| Err(PolicyError::Combination { policy: self.name.into(), reason: reason.into() });
        let extents = [
            (Axis::Layers, config.layers),
            (Axis::KvHeads, config.kv_heads),
            (Axis::HeadDim, config.head_dim),
            (Axis::Hidden, config.hidden),
        ];
        self.policy.check_parameters(self.name, &extents)?;
        if self.policy.reader.is_some() {
            return refuse("it chooses what a step reads of the cache; in a model, policies evict");
        }
        if self.policy.looks_at(Statistic::FutureAttention) {
            return refuse("it looks into the future, which a model has yet to write");
        }
        let recent = self.policy.scorer.as_ref().map_or(1, |scorer| scorer.recent_queries());
        if self.policy.rerotates && self.policy.schedule.decoding != Decoding::Never && recent > 1 {
            return refuse(
                "it turns keys and judges again by queries that were asked before; use 'once', or leave 'rerotate' out",
            );
        }
        if self.policy.rerotates && config.windows.iter().any(Option::is_some) {
            return refuse(
                "it turns keys to positions inside the cache, where this model's sliding windows mean nothing",
            );
        }
        let uneven = config.windows.iter().any(|window| *window != config.windows[0]);
        if uneven && !self.policy.layers.is_even() {
            return refuse("it divides the budget over layers, but this model's layers have different windows");
        }
        Ok(())
    }
}

impl Eviction<'_> {
    /// A warning where the budget of a context of `context_tokens`, kept in `format`, leaves nothing to judge
    /// ([`Policy::only_protected`]).
    pub fn warning(&self, config: &Config, context_tokens: usize, format: KvFormat) -> Option<String> {
        let token_bytes = format.token_bytes(config.head_dim);
        let lists = config.layers * config.kv_heads;
        let budget = self.policy.budget_tokens(self.name, self.budget.as_ref(), context_tokens, token_bytes, lists);
        self.policy.only_protected(budget.ok()?, context_tokens)
    }
}

/// What a sequence's judgements go by.
struct Judged {
    budget_tokens: usize,
    /// Highest score that each list lost after prefill, by layer and head; empty before.
    best_lost: Vec<f32>,
    /// Decode steps so far.
    steps: usize,
    held: Option<Held>,
}

/// A policy with what it has seen of each sequence.
pub(super) struct Evictor<'a> {
    eviction: Eviction<'a>,
    arena: &'a Arena,
    sequences: Vec<Judged>,
    /// RoPE of each judgement, for scorers that look behind it.
    frequencies: Option<Frequencies>,
    evicted_tokens: u64,
    _parameters: Claim,
}

impl<'a> Evictor<'a> {
    /// For sequences whose contexts, as budgets count them, will be `contexts` tokens long.
    pub fn new(
        eviction: Eviction<'a>,
        config: &Config,
        contexts: &[usize],
        token_bytes: u64,
        arena: &'a Arena,
    ) -> Result<Self, ModelError> {
        eviction.check(config)?;
        let lists = config.layers * config.kv_heads;
        let sequence = |&context: &usize| -> Result<Judged, ModelError> {
            let Eviction { policy, name, ref budget, .. } = eviction;
            let budget_tokens = policy.budget_tokens(name, budget.as_ref(), context, token_bytes, lists)?;
            Ok(Judged { budget_tokens, best_lost: Vec::new(), steps: 0, held: None })
        };
        let sequences = contexts.iter().map(sequence).collect::<Result<_, _>>()?;
        let _parameters = eviction.policy.parameters.claim(arena)?;
        Ok(Evictor { eviction, arena, sequences, frequencies: None, evicted_tokens: 0, _parameters })
    }

    /// The policy, if it ever evicts.
    pub fn judging(&self) -> Option<&'a Policy> {
        Some(self.eviction.policy).filter(|policy| policy.scorer.is_some())
    }

    /// The policy, if it gives the tokens of a sequence gates as they arrive.
    pub fn gating(&self, sequence: usize) -> Option<&'a Policy> {
        self.judging().filter(|policy| self.is_open(policy, sequence) && policy.looks_at(Statistic::HiddenStates))
    }

    /// RoPE's frequencies, once keys and queries are turned to positions inside the cache.
    pub fn turns(&self) -> Option<&Frequencies> {
        self.judging().filter(|policy| policy.rerotates).and(self.frequencies.as_ref())
    }

    /// List-tokens that were evicted so far.
    pub fn evicted_tokens(&self) -> u64 {
        self.evicted_tokens
    }

    /// Whether another judgement of a sequence may come.
    fn is_open(&self, policy: &Policy, sequence: usize) -> bool {
        self.sequences[sequence].best_lost.is_empty() || policy.schedule.decoding != Decoding::Never
    }

    /// Looks at the attention of one of `layers` layers for neighbouring sequences from `sequence` on: the call, and the
    /// log-sum-exps of its queries. Returns what its tokens received, where the policy adds that up.
    pub fn see(
        &mut self,
        layer: usize,
        layers: usize,
        sequence: usize,
        call: &Forward<'_>,
        lse: &[f32],
    ) -> Result<Option<Received>, ModelError> {
        let Some(policy) = self.judging() else { return Ok(None) };
        let shape = call.shape;
        for index in 0..shape.batch {
            let sequence = sequence + index;
            let Some(wanted) = self.wanted(policy, sequence) else { continue };
            let judged = &mut self.sequences[sequence];
            let held = match &mut judged.held {
                Some(held) => held,
                held => held.insert(Held::new(self.arena, layers, &shape, wanted)?),
            };
            held.push(layer, call.q.sequences(index..index + 1), &lse[index * shape.q_heads * shape.q_len..])?;
        }
        let open = (0..shape.batch).any(|index| self.is_open(policy, sequence + index));
        if !(open && policy.looks_at(Statistic::AccumulatedAttention)) {
            return Ok(None);
        }
        Ok(Some(Received { kv_len: shape.kv_len, sums: evict::received(call, lse, self.arena)? }))
    }

    /// Queries of a sequence that are to be held: none, the latest so many, or all since the last judgement.
    fn wanted(&self, policy: &Policy, sequence: usize) -> Option<Wanted> {
        if !self.is_open(policy, sequence) {
            return None;
        }
        let before_decoding = self.sequences[sequence].best_lost.is_empty();
        Some(if before_decoding { wanted_of_prefill(policy) } else { Wanted::Latest(recent_queries(policy)) })
    }

    /// Makes what is known of sequence `to` what is known of `from`.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), ArenaError> {
        let Judged { budget_tokens, best_lost, steps, held } = &self.sequences[from];
        let held = held.as_ref().map(|held| held.copy(None)).transpose()?;
        self.sequences[to] =
            Judged { budget_tokens: *budget_tokens, best_lost: best_lost.clone(), steps: *steps, held };
        Ok(())
    }
}

/// Queries that a policy looks at in a judgement between new tokens.
pub(super) fn recent_queries(policy: &Policy) -> usize {
    policy.scorer.as_ref().map_or(1, |scorer| scorer.recent_queries())
}

/// Whether a policy looks at all queries of the context when it judges a prefill.
pub(super) fn looks_at_all_queries(policy: &Policy) -> bool {
    let over = |needs: Vec<Statistic>| needs.contains(&Statistic::RecentAttention);
    policy.looks_at(Statistic::Queries) || over(policy.layers.needs()) || over(policy.heads.needs())
}

/// Queries that a policy looks at when it judges a prefill.
fn wanted_of_prefill(policy: &Policy) -> Wanted {
    if looks_at_all_queries(policy) { Wanted::All } else { Wanted::Latest(recent_queries(policy)) }
}

/// Queries that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    All,
    Latest(usize),
}

/// Attention that the tokens of some lists received in a pass, `[lists, kv_len]`.
pub(super) struct Received {
    kv_len: usize,
    sums: Buffer<f32>,
}

impl Received {
    /// Adds it to the tokens of the lists from `first` on; of each list, so many tokens were `skipped`.
    pub fn add(&self, cache: &mut PagedCache, first: usize, skipped: &[usize]) -> Result<(), ModelError> {
        if skipped.is_empty() {
            return Ok(evict::add_received(cache, |list| first + list, self.kv_len, &self.sums)?);
        }
        for ((list, &skipped), sums) in (first..).zip(skipped).zip(self.sums.chunks(self.kv_len)) {
            let sums: Vec<f32> = std::iter::repeat_n(0.0, skipped).chain(sums.iter().copied()).collect();
            cache.add_attention(list, &sums)?;
        }
        Ok(())
    }
}

//! A policy at work in a model: what each layer's attention shows is kept as far as the policy looks at it, and each
//! sequence has an eviction session of its own, so that it retains what it would retain alone.
//!
//! A scorer that looks at recent queries finds those of every layer in an observation window that moves on with the tokens;
//! one that looks at all queries of the context finds all since the last eviction step, which is memory that is counted
//! under `policy`. Layers whose sliding windows differ are scored one by one.

mod recorder;
mod scene;

use crate::attention::rope::Frequencies;
use crate::attention::{Forward, Shape};
use crate::cache::PagedCache;
use crate::eviction::{ObservationWindow, Plan, Session, Span, WindowShape, add_cumulative_attention, attention_sums};
use crate::format::KvFormat;
use crate::memory::{Arena, ArenaError, Buffer, Claim};
use crate::model::{Config, ModelError, Repeat};
use crate::policy::sparse::{KvSelector, Lists};
use crate::policy::{Averages, Axis, Budget, Decoding, Policy, PolicyError, Reconstruction, Schedule, Statistic};
use crate::tensor::DType;
use std::ops::Range;
use std::sync::Arc;

pub(super) use recorder::QueryRecorder;
pub(super) use scene::Scene;

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
    /// How the model is asked to repeat its context, for policies that look at that.
    pub repeat: Option<&'p Repeat>,
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
            (Axis::QHeads, config.q_heads),
            (Axis::KvHeads, config.kv_heads),
            (Axis::HeadDim, config.head_dim),
            (Axis::RopePairs, config.rope.pairs(config.head_dim)),
            (Axis::Hidden, config.hidden),
        ];
        self.policy.check_parameters(self.name, &extents)?;
        if self.policy.selection.is_some() && config.windows.iter().any(Option::is_some) {
            return refuse("it chooses what a step reads of the whole context, but this model has sliding windows");
        }
        if self.policy.looks_at(Statistic::FutureAttention) {
            return refuse("it looks into the future, which a model has yet to write");
        }
        if self.policy.reconstruction.is_some() {
            if config.windows.iter().any(Option::is_some) {
                return refuse("it has the model repeat its context, most of which this model's sliding windows hide");
            }
            let Schedule { chunk_tokens, decoding } = &self.policy.schedule;
            if chunk_tokens.is_some() || *decoding != Decoding::Never {
                return refuse(
                    "it has the model repeat its context once that was read; leave 'chunks', 'every' and 'delayed' out",
                );
            }
        }
        if self.policy.action.as_ref().is_some_and(|action| action.refits())
            && config.windows.iter().any(Option::is_some)
        {
            return refuse(
                "it refits what is retained to queries that see the whole context, most of which this model's sliding windows hide",
            );
        }
        let recent = self.policy.scorer.as_ref().map_or(1, |scorer| scorer.recent_queries());
        if self.policy.rerotates && self.policy.schedule.decoding != Decoding::Never && recent > 1 {
            return refuse(
                "it rotates keys and evicts again by queries that were asked before; use 'once', or leave 'rerotate' out",
            );
        }
        let is_dynamic = config.rope.is_dynamic();
        if self.policy.rerotates && self.policy.schedule.decoding != Decoding::Never && is_dynamic {
            return refuse(
                "it rotates keys again while decoding, and this model's RoPE has turned them by frequencies of other \
                 lengths; use 'once', or leave 'rerotate' out",
            );
        }
        if self.policy.rerotates && config.windows.iter().any(Option::is_some) {
            return refuse(
                "it rotates keys to positions inside the cache, where this model's sliding windows mean nothing",
            );
        }
        let averages = self.policy.scorer.as_ref().map_or(Averages::Nothing, |scorer| scorer.averages());
        if averages == Averages::Layers && config.check_even_windows().is_err() {
            return refuse("it takes a mean over layers, and this model's have different windows; use layers=own");
        }
        match self.policy.layers.is_even() {
            true => Ok(()),
            false => config.check_even_windows().or_else(refuse),
        }
    }
}

impl Eviction<'_> {
    /// The same for a sample of an evaluation: what is drawn is drawn anew for each, so that an interval over samples holds it too.
    pub fn of_sample(self, sample: usize) -> Self {
        // Far apart, so that neighbouring seeds have no draws in common.
        Eviction { seed: self.seed ^ (sample as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15), ..self }
    }

    /// Tokens that the cache must have room for besides those of a context of `context_tokens` and what follows it.
    pub fn more_tokens(&self, context_tokens: usize) -> usize {
        let how = self.policy.reconstruction.zip(self.repeat);
        how.map_or(0, |(how, repeat)| repeat.most_tokens(context_tokens, how))
    }

    /// What a reader must know of the budget of a context of `context_tokens`, kept in `format` ([`Policy::warnings`]).
    pub fn warnings(&self, config: &Config, context_tokens: usize, format: KvFormat) -> Vec<String> {
        let token_bytes = format.token_bytes(config.head_dim);
        let lists = config.layers * config.kv_heads;
        let budget = self.policy.budget_tokens(self.name, self.budget.as_ref(), context_tokens, token_bytes, lists);
        let Ok(tokens) = budget else { return Vec::new() };
        let idle = self.budget.as_ref().and_then(|budget| self.policy.holds_all(budget, tokens, context_tokens));
        let mut warnings = self.policy.warnings(tokens, context_tokens, 0, (config.layers, config.kv_heads));
        warnings.extend(idle);
        warnings.extend(self.policy.few_queries(context_tokens).filter(|_| tokens < context_tokens));
        warnings
    }
}

/// How a context is repeated.
pub(super) struct Repeated<'a> {
    pub how: Reconstruction,
    pub repeat: &'a Repeat,
    /// The policy, for messages.
    pub name: &'a str,
}

/// What is known of a sequence.
struct Sequence<'a> {
    session: Session<'a>,
    window: Option<ObservationWindow>,
    /// What each token was looked at while the context was repeated, `[layers, Hkv, tokens]`, until it is evicted from.
    reconstructed: Option<Arc<Buffer<f32>>>,
    /// KV selection of every layer, once the context was read.
    selectors: Vec<Box<dyn KvSelector>>,
    /// RoPE as of its latest eviction step, where the policy looks behind it or rotates by it; some depend on its length.
    frequencies: Option<Frequencies>,
    /// Tokens by whose number they are.
    turned_tokens: usize,
}

impl<'a> Sequence<'a> {
    /// Before the first token.
    fn new(session: Session<'a>) -> Self {
        let selectors = Vec::new();
        Sequence { session, window: None, reconstructed: None, selectors, frequencies: None, turned_tokens: 0 }
    }
}

/// A policy with what it has seen of each sequence.
pub(super) struct Evictor<'a> {
    eviction: Eviction<'a>,
    arena: &'a Arena,
    sequences: Vec<Sequence<'a>>,
    /// Positions that are never evicted and that no budget counts.
    pub kept: Range<usize>,
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
        let sequence = |&context: &usize| -> Result<Sequence<'a>, ModelError> {
            let Eviction { policy, name, ref budget, seed, .. } = eviction;
            let budget_tokens = policy.budget_tokens(name, budget.as_ref(), context, token_bytes, lists)?;
            Ok(Sequence::new(Session::new(Plan { policy, budget_tokens, seed })))
        };
        let sequences = contexts.iter().map(sequence).collect::<Result<_, _>>()?;
        let _parameters = eviction.policy.parameters.claim(arena)?;
        Ok(Evictor { eviction, arena, sequences, kept: 0..0, _parameters })
    }

    /// The policy, if it ever evicts.
    pub fn evicting(&self) -> Option<&'a Policy> {
        Some(self.eviction.policy).filter(|policy| policy.scorer.is_some())
    }

    /// The policy, if it gives the tokens of a sequence gates as they arrive.
    pub fn gating(&self, sequence: usize) -> Option<&'a Policy> {
        let is_open = self.sequences[sequence].session.is_open();
        self.evicting().filter(|policy| is_open && policy.looks_at(Statistic::HiddenStates))
    }

    /// How the context of a sequence is to be repeated before it is evicted from, if at all.
    pub fn repeats(&self, sequence: usize) -> Option<Repeated<'a>> {
        let Eviction { policy, name, repeat, .. } = self.eviction;
        let is_open = self.sequences[sequence].session.is_open();
        let (how, repeat) = policy.reconstruction.zip(repeat).filter(|_| is_open)?;
        Some(Repeated { how, repeat, name })
    }

    /// What the tokens of a sequence were looked at meanwhile.
    pub fn reconstructed(&mut self, sequence: usize, scores: Arc<Buffer<f32>>) {
        self.sequences[sequence].reconstructed = Some(scores);
    }

    /// RoPE's frequencies, once keys and queries of a sequence are rotated to positions inside the cache.
    pub fn rotates(&self, sequence: usize) -> Option<&Frequencies> {
        self.evicting().filter(|policy| policy.rerotates).and(self.sequences[sequence].frequencies.as_ref())
    }

    /// The number of tokens by which RoPE turned a sequence last, if new ones stand behind what its lists hold, and not behind all
    /// that it has seen.
    pub fn turned_tokens(&self, sequence: usize) -> Option<usize> {
        let is_behind = self.sequences[sequence].session.is_decoding() && self.rotates(sequence).is_some();
        is_behind.then(|| self.sequences[sequence].turned_tokens)
    }

    /// New tokens of such a sequence are turned by these frequencies, which are those of so many tokens, and so are they turned back.
    pub fn turn(&mut self, sequence: usize, tokens: usize, frequencies: &Frequencies) {
        if self.turned_tokens(sequence).is_some() {
            let sequence = &mut self.sequences[sequence];
            (sequence.turned_tokens, sequence.frequencies) = (tokens, Some(frequencies.clone()));
        }
    }

    /// List-tokens that were evicted so far, of all sequences.
    pub fn evicted_tokens(&self) -> u64 {
        self.sequences.iter().map(|sequence| sequence.session.totals().evicted_tokens).sum()
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
    ) -> Result<Option<AttentionSums>, ModelError> {
        let (policy, shape, mut open) = (self.eviction.policy, call.shape, false);
        for index in 0..shape.batch {
            let Sequence { session, window, selectors, .. } = &mut self.sequences[sequence + index];
            let span = if session.is_decoding() { Span::of_decoding(policy) } else { Span::of_prefill(policy) };
            if span == Span::Latest(0) || !session.is_open() || !selectors.is_empty() {
                continue;
            }
            open = true;
            let window = match window {
                Some(window) => window,
                none => {
                    let shape = window_shape(layers, &shape);
                    none.insert(ObservationWindow::new(self.arena, shape, span, call.shape.q_len)?)
                }
            };
            window.push(layer, call.q.sequences(index..index + 1), &lse[index * shape.q_heads * shape.q_len..])?;
        }
        if !(open && policy.looks_at(Statistic::AccumulatedAttention)) {
            return Ok(None);
        }
        Ok(Some(AttentionSums { kv_len: shape.kv_len, sums: attention_sums(call, lse, self.arena)? }))
    }

    /// What a decode step of a sequence reads in a layer, where the policy selects it; nothing before the context was read.
    pub fn selector(&mut self, layer: usize, sequence: usize) -> Option<&mut Box<dyn KvSelector>> {
        self.sequences[sequence].selectors.get_mut(layer)
    }

    /// Whether decode steps of some sequence read what the policy selects.
    pub fn selects(&self) -> bool {
        self.sequences.iter().any(|sequence| !sequence.selectors.is_empty())
    }

    /// KV bytes that the latest decode step of a sequence read, in all layers; `None` where it reads all.
    pub fn read_bytes(&self, cache: &PagedCache, batch: usize, sequence: usize) -> Option<u64> {
        let selectors = &self.sequences[sequence].selectors;
        let lists = |layer: usize| Lists::of_sequence(cache, layer * batch + sequence);
        let bytes = selectors.iter().enumerate().map(|(layer, selector)| selector.read_bytes(lists(layer)));
        (!selectors.is_empty()).then(|| bytes.sum())
    }

    /// Forgets what is known of a sequence, whose tokens were taken from it.
    pub fn forget(&mut self, sequence: usize) {
        let session = Session::new(*self.sequences[sequence].session.plan());
        self.sequences[sequence] = Sequence::new(session);
    }

    /// Makes what is known of sequence `to` what is known of `from`.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), ArenaError> {
        let Sequence { session, window, selectors, frequencies, turned_tokens, .. } = &self.sequences[from];
        let window = window.as_ref().map(|window| window.copy(None)).transpose()?;
        let selectors = selectors.iter().map(|selector| selector.copy(self.arena)).collect::<Result<_, _>>()?;
        let (session, frequencies, turned_tokens) = (session.clone(), frequencies.clone(), *turned_tokens);
        self.sequences[to] = Sequence { session, window, reconstructed: None, selectors, frequencies, turned_tokens };
        Ok(())
    }
}

/// What is held of the queries of so many layers, which are f32 here.
fn window_shape(layers: usize, call: &Shape) -> WindowShape {
    WindowShape { layers, q_heads: call.q_heads, head_dim: call.head_dim, dtype: DType::F32, has_lse: true }
}

/// Attention that the tokens of some lists received in a pass, `[lists, kv_len]`.
pub(super) struct AttentionSums {
    kv_len: usize,
    sums: Buffer<f32>,
}

impl AttentionSums {
    /// Adds it to the tokens of the lists from `first` on; of each list, so many tokens were `skipped`.
    pub fn add(&self, cache: &mut PagedCache, first: usize, skipped: &[usize]) -> Result<(), ModelError> {
        if skipped.is_empty() {
            return Ok(add_cumulative_attention(cache, |list| first + list, self.kv_len, &self.sums)?);
        }
        for ((list, &skipped), sums) in (first..).zip(skipped).zip(self.sums.chunks(self.kv_len)) {
            let sums: Vec<f32> = std::iter::repeat_n(0.0, skipped).chain(sums.iter().copied()).collect();
            cache.add_attention(list, &sums)?;
        }
        Ok(())
    }
}

//! Eviction from a cache that is shared out over ranks: the same tokens stay as on one rank.
//!
//! Each rank holds a chunk of the sequence's keys ([`Tree`]) and computes the policy's statistic over it, by its [`ScoringPlan`]: for
//! attention, with log-sum-exps over the keys of all ranks. The statistics of all ranks, 4 bytes for each token and KV head, are
//! gathered; then every rank finishes the scores, divides the budget and selects over the whole context, with the same numbers and
//! so with the same result, and evicts what is its own. Keys and values stay where they are.

use super::pieces::{Part, Piece};
use super::{Rank, RankError, Tree};
use crate::attention::export::{self, OverGroup, OverQueries, Reduction};
use crate::attention::{Forward, KvRows, Shape};
use crate::cache::PagedCache;
use crate::eviction::Retained;
use crate::format::KvFormat;
use crate::memory::{Buffer, Label};
use crate::policy::{Context, List, Policy, Scored, Scorer, ScoringPlan, each_list, keydiff, select, tie_rate};
use crate::tensor::{DType, Rows, TensorView};
use std::ops::Range;

/// A policy for caches that are shared out, and its plan.
pub struct Sharded<'p> {
    policy: &'p Policy,
    scorer: &'p dyn Scorer,
    plan: ScoringPlan,
}

/// What is evicted from.
#[derive(Clone, Copy)]
pub struct Held<'a> {
    /// The whole context, and which of its keys are here.
    pub tree: &'a Tree,
    /// The queries of the context that every rank has, `[B, Hq, Lq, D]`, bottom-right aligned.
    pub q: TensorView<'a>,
    /// Tokens that each KV head may keep on average, over all ranks.
    pub budget_tokens: usize,
    /// Layers that are folded into the batch.
    pub layers: usize,
    /// For policies that draw numbers.
    pub seed: u64,
}

impl<'p> Sharded<'p> {
    /// Says whether a policy can decide over ranks.
    ///
    /// # Errors
    /// When it keeps everything, looks at what is not gathered, or does more with a token than drop it.
    pub fn new(name: &str, policy: &'p Policy) -> Result<Self, RankError> {
        let refused = |why: &str| {
            let known = "streaming-llm, knorm, keydiff, h2o, snapkv, tova and max-attention are";
            RankError::Unsupported(format!("policy '{name}' is not available over ranks: {why}; {known}"))
        };
        let scorer = policy.scorer.as_deref().ok_or_else(|| refused("it evicts nothing"))?;
        let plan = scorer.scoring_plan().ok_or_else(|| refused("its scores are no single statistic of a token"))?;
        match &plan {
            ScoringPlan::Gates => return Err(refused("it looks at hidden states")),
            ScoringPlan::TimesValueNorm(_) => return Err(refused("its scores need norms of values")),
            ScoringPlan::Recent { reduction: Reduction { queries: OverQueries::CountBelowEven, .. }, .. } => {
                return Err(refused("it counts the keys that a query sees"));
            }
            _ => {}
        }
        if policy.action.is_some() || policy.rerotates {
            return Err(refused("tokens that it merges or moves may lie on different ranks"));
        }
        if !(policy.layers.needs().is_empty() && policy.heads.needs().is_empty()) {
            return Err(refused("its budget allocation looks at attention"));
        }
        Ok(Sharded { policy, scorer, plan })
    }

    /// Evicts from this rank's cache, which holds its chunk of the context, every token of it; what is retained on all ranks.
    ///
    /// # Errors
    /// As [`Sharded::retain`].
    pub fn evict(&self, on: Rank<'_>, held: Held<'_>, cache: &mut PagedCache) -> Result<Retained, RankError> {
        let retained = self.retain(on, held, cache)?;
        let mine = held.tree.keys().of(on.comm.rank())[0].clone();
        for list in 0..cache.shape().lists() {
            let slots = retained.selection.kept(list).iter().map(|&slot| slot as usize);
            cache.retain(list, slots.filter(|slot| mine.contains(slot)).map(|slot| slot - mine.start))?;
        }
        cache.release();
        Ok(retained)
    }

    /// What is retained of the whole context: the same on every rank.
    ///
    /// # Errors
    /// When another rank ended, a score is no number, or the arena has no room.
    pub fn retain(&self, on: Rank<'_>, held: Held<'_>, kv: &dyn KvRows) -> Result<Retained, RankError> {
        let (rank, shape) = (on.comm.rank(), held.tree.shape());
        let lists = shape.batch * shape.kv_heads;
        let mut own: Buffer<f32> = on.arena.alloc(Label::Policy, lists * held.tree.keys().len(rank))?;
        self.statistic(on, held, kv, &mut own)?;

        let mut all = gather(on, held.tree, &own)?;
        let length = |_| shape.kv_len;
        if let ScoringPlan::Recent { queries, then, .. } = &self.plan {
            let observers = queries.unwrap_or(shape.q_len).min(shape.q_len);
            then.apply(&mut all, [shape.kv_heads, shape.kv_len], length, observers, on.arena)?;
        }
        let (whole, positions) = (Whole(shape.kv_len), |_: usize, slot: usize| slot);
        let context = self.context(on, held, shape, &whole, &positions);
        let mut scored = Scored::protecting(&context, self.scorer.protect(held.budget_tokens), all)?;
        let selection = select(self.policy, &context, &mut scored)?;
        let tie_rate = tie_rate(&context, &scored);
        Ok(Retained { scores: Some(scored.values), selection, accumulated: None, tie_rate })
    }

    /// Bytes that a rank sends in [`Sharded::retain`].
    pub fn sent_bytes(&self, tree: &Tree, rank: usize) -> u64 {
        let (shape, ranks) = (tree.shape(), tree.keys().ranks());
        let lists = (shape.batch * shape.kv_heads) as u64;
        // Every part but that of the rank behind.
        let gathered = 4 * lists * (shape.kv_len - tree.keys().len((rank + 1) % ranks)) as u64;
        let of_plan = match &self.plan {
            ScoringPlan::KeyUnlike => anchors_sent(rank, ranks) * 4 * lists * shape.head_dim as u64,
            ScoringPlan::Accumulated { .. } | ScoringPlan::Recent { .. } => {
                let rows = shape.batch * shape.q_heads * self.observed(shape.q_len).len();
                super::all_reduce_messages(rank, ranks) * 4 * rows as u64
            }
            _ => 0,
        };
        if ranks == 1 { 0 } else { gathered + of_plan }
    }

    /// Queries whose attention is looked at.
    fn observed(&self, q_len: usize) -> Range<usize> {
        match self.plan {
            ScoringPlan::Recent { queries: Some(queries), .. } => q_len.saturating_sub(queries)..q_len,
            _ => 0..q_len,
        }
    }

    /// Writes this rank's share of what the plan gathers, `[lists, tokens here]`.
    fn statistic(&self, on: Rank<'_>, held: Held<'_>, kv: &dyn KvRows, own: &mut [f32]) -> Result<(), RankError> {
        let rank = on.comm.rank();
        let (start, shape) = (held.tree.keys().of(rank)[0].start, held.tree.shape_of(rank));
        let positions = |_: usize, slot: usize| start + slot;
        let context = self.context(on, held, shape, kv, &positions);
        match &self.plan {
            ScoringPlan::Positions | ScoringPlan::KeyNorm => self.scorer.score(&context, own)?,
            ScoringPlan::KeyUnlike => {
                let anchors = anchors(on, &context)?;
                each_list(&context, own, &mut [], |list, scores, _| {
                    let width = shape.head_dim;
                    keydiff::unlike(list, &anchors[list.index * width..][..width], scores);
                });
            }
            ScoringPlan::Accumulated { age } => {
                columns(on, held, kv, 0..shape.q_len, Reduction::RECEIVED, own)?;
                if *age {
                    for scores in own.chunks_mut(shape.kv_len) {
                        let seen = |slot: usize| (context.seen_tokens - positions(0, slot)) as f32;
                        scores.iter_mut().enumerate().for_each(|(slot, score)| *score /= seen(slot));
                    }
                }
            }
            ScoringPlan::Recent { reduction, .. } => {
                columns(on, held, kv, self.observed(shape.q_len), *reduction, own)?;
            }
            ScoringPlan::TimesValueNorm(_) | ScoringPlan::Gates => {
                unreachable!("refused when the policy was looked at")
            }
        }
        Ok(())
    }

    /// What a policy sees of `kv`, lists of `shape.kv_len` tokens at these positions.
    fn context<'a>(
        &self,
        on: Rank<'a>,
        held: Held<'a>,
        shape: Shape,
        kv: &'a dyn KvRows,
        positions: &'a (dyn Fn(usize, usize) -> usize + Sync),
    ) -> Context<'a> {
        Context {
            call: Forward { shape, params: held.tree.params(), q: held.q, kv, cpu: on.cpu },
            layers: held.layers,
            lse: &[],
            future: None,
            accumulated: None,
            gates: None,
            reconstructed: None,
            positions,
            seen_tokens: held.tree.shape().kv_len,
            before_rope: None,
            w_o: &[],
            layer_numbers: &[],
            budget_tokens: held.budget_tokens,
            seed: held.seed,
            arena: on.arena,
        }
    }
}

/// The whole context, of which only the length is asked: all else of it was gathered.
struct Whole(usize);

impl KvRows for Whole {
    fn len(&self, _batch: usize, _head: usize) -> usize {
        self.0
    }

    fn format(&self) -> KvFormat {
        KvFormat::plain(DType::F32)
    }

    fn key_rows(&self, _batch: usize, _head: usize, _start: usize) -> Rows<'_> {
        unreachable!("policies that look at keys of other ranks are refused")
    }

    fn value_rows(&self, _batch: usize, _head: usize, _start: usize) -> Rows<'_> {
        unreachable!("policies that look at values of other ranks are refused")
    }
}

/// The statistics of all ranks, `[lists, Lk]`, of those that each has of its own keys.
fn gather(on: Rank<'_>, tree: &Tree, own: &[f32]) -> Result<Buffer<f32>, RankError> {
    let (keys, kv_len, lists) = (tree.keys(), tree.shape().kv_len, own.len() / tree.keys().len(on.comm.rank()));
    let mut gathered: Buffer<f32> = on.arena.alloc(Label::Policy, lists * kv_len)?;
    {
        let (mut parts, mut rest) = (Vec::new(), &mut gathered[..]);
        for rank in 0..keys.ranks() {
            let (part, more) = rest.split_at_mut(lists * keys.len(rank));
            rest = more;
            parts.push(part);
        }
        parts[on.comm.rank()].copy_from_slice(own);
        let mut parts: Vec<&mut [u8]> = parts.into_iter().map(bytemuck::cast_slice_mut).collect();
        on.comm.all_gather(&mut parts)?;
    }
    // Rank by rank as it came; list by list as policies read it.
    let mut all: Buffer<f32> = on.arena.alloc(Label::Policy, lists * kv_len)?;
    for rank in 0..keys.ranks() {
        let range = keys.of(rank)[0].clone();
        let part = &gathered[lists * range.start..lists * range.end];
        for (list, part) in part.chunks_exact(range.len()).enumerate() {
            all[list * kv_len..][range.clone()].copy_from_slice(part);
        }
    }
    Ok(all)
}

/// Sums of the normalised keys of all ranks for each list, `[lists, D]`. Each rank goes on where the one before it ended, so
/// that the sums are those of one rank to the last bit; then they go around.
fn anchors(on: Rank<'_>, context: &Context<'_>) -> Result<Buffer<f32>, RankError> {
    let (comm, width) = (on.comm, context.call.shape.head_dim);
    let (rank, last) = (comm.rank(), comm.size() - 1);
    let mut anchors: Buffer<f32> = on.arena.alloc(Label::Policy, context.lists() * width)?;
    if rank > 0 {
        comm.transfer(&[], &mut [(rank - 1, bytemuck::cast_slice_mut(&mut anchors))])?;
    }
    for (list, anchor) in anchors.chunks_exact_mut(width).enumerate() {
        keydiff::add_to_anchor(&List::new(context, list), anchor);
    }
    if rank < last {
        comm.transfer(&[(rank + 1, bytemuck::cast_slice(&anchors))], &mut [])?;
        comm.transfer(&[], &mut [(comm.previous(), bytemuck::cast_slice_mut(&mut anchors))])?;
    }
    if last > 0 && comm.next() != last {
        comm.transfer(&[(comm.next(), bytemuck::cast_slice(&anchors))], &mut [])?;
    }
    Ok(anchors)
}

/// Times that a rank sends sums in [`anchors`].
fn anchors_sent(rank: usize, ranks: usize) -> u64 {
    if rank + 2 < ranks { 2 } else { 1 }
}

/// The softmax probabilities that some queries give the keys here, reduced to one number for each list and token; the
/// log-sum-exps are over the keys of all ranks.
fn columns(
    on: Rank<'_>,
    held: Held<'_>,
    kv: &dyn KvRows,
    queries: Range<usize>,
    reduction: Reduction,
    own: &mut [f32],
) -> Result<(), RankError> {
    let (tree, count) = (held.tree, queries.len());
    let q = held.q.tokens(queries.clone());
    let lse = tree.log_sum_exps(on, q, queries.clone(), kv)?;
    let Shape { q_heads, kv_heads, kv_len, .. } = tree.shape_of(on.comm.rank());
    let group = q_heads / kv_heads;
    let pieces = tree.pieces(on.comm.rank(), queries);
    // One head at a time: over its queries first, which may be in two pieces, then over the heads of the group.
    let of_head = |piece: &Piece| {
        let (shape, params) = tree.part(piece);
        (Shape { batch: 1, q_heads: 1, kv_heads: 1, ..shape }, params)
    };
    let elements = pieces.iter().map(|piece| export::workspace(&of_head(piece).0, on.cpu.threads())).max().unwrap_or(0);
    let mut scratch = on.arena.alloc(Label::Workspace, elements)?;
    let mut totals: Buffer<f32> = on.arena.alloc(Label::Workspace, 2 * kv_len)?;
    let (totals, of_piece) = totals.split_at_mut(kv_len);
    let over_queries = Reduction { group: OverGroup::Sum, ..reduction };
    own.fill(0.0);
    for (head, lse) in lse.chunks_exact(count).enumerate() {
        let (batch, q_head) = (head / q_heads, head % q_heads);
        let at = [batch, q_head / group];
        totals.fill(0.0);
        for piece in &pieces {
            let (shape, params) = of_head(piece);
            let one = q.sequences(batch..batch + 1).permuted([1, 0, 2, 3]).sequences(q_head..q_head + 1);
            let keys = Part { kv, list: Some(at), keys: piece.k.clone() };
            let call = Forward { shape, params, q: one.tokens(piece.q.clone()), kv: &keys, cpu: on.cpu };
            let of_piece = &mut of_piece[..piece.k.len()];
            export::columns(&call, &lse[piece.q.clone()], 0..piece.q.len(), over_queries, of_piece, &mut scratch);
            combine(&mut totals[piece.k.clone()], of_piece, reduction.queries == OverQueries::Max);
        }
        let sums = &mut own[(batch * kv_heads + at[1]) * kv_len..][..kv_len];
        combine(sums, totals, reduction.group == OverGroup::Max);
        if reduction.group == OverGroup::Mean && (q_head + 1) % group == 0 {
            sums.iter_mut().for_each(|sum| *sum *= 1.0 / group as f32);
        }
    }
    Ok(())
}

/// Adds `from`, or takes the larger.
fn combine(to: &mut [f32], from: &[f32], is_max: bool) {
    let pairs = to.iter_mut().zip(from);
    if is_max { pairs.for_each(|(to, from)| *to = to.max(*from)) } else { pairs.for_each(|(to, from)| *to += from) }
}

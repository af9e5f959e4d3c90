//! Peak memory of the measure, from the shapes.

use super::decode::step_shape;
use super::lengths::Lengths;
use super::queries::query_bytes;
use super::steps::{future_shape, window_shape};
use super::{cache_shape, evicting, lengths};
use crate::attention::{Outputs, Shape, export, kernel};
use crate::experiment::measure::Prepared;
use crate::policy::{Decoding, Policy, Statistic, selection_bytes};

/// Peak bytes besides the inputs: the largest of attention and eviction of every chunk, and of decoding. Exact where
/// all lists keep the same number of tokens; where heads or layers keep different numbers, what follows the first
/// eviction depends on the data, and this is an upper bound; so it does where a format leaves tokens in full.
pub(in crate::experiment::measure) fn predict(prepared: &Prepared, threads: usize) -> u64 {
    let plan = Plan { prepared, threads };
    let (context, chunk) = (prepared.cell.context_tokens, lengths(prepared).chunk());
    let mut peak = plan.decoding();
    for start in (0..context).step_by(chunk) {
        peak = peak.max(plan.chunk(start, chunk.min(context - start)));
    }
    peak
}

struct Plan<'a> {
    prepared: &'a Prepared,
    threads: usize,
}

impl Plan<'_> {
    fn lengths(&self) -> Lengths<'_> {
        lengths(self.prepared)
    }

    /// Bytes of a cache whose lists hold `tokens` of the `seen` on average; all the same number if `even`.
    fn held(&self, tokens: usize, seen: usize, is_even: bool) -> u64 {
        let cache = cache_shape(self.prepared);
        if tokens < seen && cache.format.keeps_full() {
            return cache.most_bytes_evicted(tokens, seen);
        }
        let even = cache.bytes(std::iter::repeat_n(tokens, cache.lists()), 0).values().sum::<u64>();
        if is_even {
            return even;
        }
        // Each list may have begun a page more.
        let most_pages = cache.lists() * (cache.pages(tokens) + 1);
        even.max(cache.bytes(std::iter::repeat_n(tokens, cache.lists()), most_pages).values().sum())
    }

    fn lse_bytes(shape: &Shape) -> u64 {
        4 * shape.rows() as u64
    }

    /// Attention of the chunk that begins at token `start`, and its eviction step.
    fn chunk(&self, start: usize, tokens: usize) -> u64 {
        let cell = &self.prepared.cell;
        let lengths = self.lengths();
        let old = lengths.before(start);
        let kv_len = lengths.longest(old + tokens, tokens);
        let folded = Shape { q_len: tokens, kv_len, ..cell.shape() };
        let layer = Shape { batch: cell.batch, ..folded };
        let (params, lse) = (cell.params(), Self::lse_bytes(&folded));
        let workspace = self.prepared.kernel().workspace(&layer, &params, cell.dtype, self.threads).bytes();
        let attention = Outputs::bytes(&layer, cell.dtype) + workspace;
        let step = evicting(self.prepared)
            .map_or(0, |policy| self.accumulation(policy, &folded).max(self.scoring(policy, &folded)));
        let rotated = if self.rerotates() && old < start { query_bytes(cell, tokens) } else { 0 };
        self.held(old + tokens, start + tokens, start == 0 || lengths.is_even()) + lse + rotated + attention.max(step)
    }

    fn rerotates(&self) -> bool {
        evicting(self.prepared).is_some_and(|policy| policy.rerotates)
    }

    /// What it takes to score, select and evict, besides the cache and the log-sum-exps of the queries of `shape`.
    fn scoring(&self, policy: &Policy, shape: &Shape) -> u64 {
        let row = 4 * (shape.batch * shape.kv_heads * shape.kv_len) as u64;
        let sums = if policy.looks_at(Statistic::AccumulatedAttention) { row } else { 0 };
        let future = policy.looks_at(Statistic::FutureAttention).then(|| future_shape(self.prepared));
        let looked_at = future.unwrap_or(*shape);
        let scratch = policy.scorer.as_ref().map_or(0, |scorer| scorer.scratch_bytes(&looked_at, self.threads));
        let selection = selection_bytes(shape.batch * shape.kv_heads, shape.kv_len);
        let fold = policy.action.as_ref().map_or(0, |action| row + action.scratch_bytes(shape, self.threads));
        let scored = (sums + row + scratch.max(selection)).max(fold);
        match future {
            None => scored,
            Some(shape) => self.pass(&shape).max(Self::lse_bytes(&shape) + scored),
        }
    }

    /// What it takes to add the attention of queries of `shape` to what tokens received.
    fn accumulation(&self, policy: &Policy, shape: &Shape) -> u64 {
        if !policy.looks_at(Statistic::AccumulatedAttention) {
            return 0;
        }
        4 * (shape.batch * shape.kv_heads * shape.kv_len + export::workspace(shape, self.threads)) as u64
    }

    /// A pass of the decode kernel.
    fn pass(&self, shape: &Shape) -> u64 {
        let cell = &self.prepared.cell;
        let decode = kernel("decode").expect("the decode kernel is built in");
        let workspace = decode.workspace(shape, &cell.params(), cell.dtype, self.threads).bytes();
        Outputs::bytes(shape, cell.dtype) + workspace
    }

    /// Decoding, and the largest of the eviction steps in it.
    fn decoding(&self) -> u64 {
        let (cell, lengths) = (&self.prepared.cell, self.lengths());
        let (new, step) = (cell.new_tokens, step_shape(self.prepared));
        let results = 4 * (new * step.rows() * (cell.head_dim + 1)) as u64;
        let steps = results + self.pass(&step);
        let Some(policy) = evicting(self.prepared) else {
            let selection = self.prepared.policy.as_ref().and_then(|policy| policy.selection.as_ref());
            let selection =
                selection.map_or(0, |selection| selection.bytes(&cache_shape(self.prepared), &step, self.threads));
            return self.held(cell.context_tokens + new, cell.context_tokens + new, true) + steps + selection;
        };
        let (tokens, grown) = (lengths.late(), lengths.grown());
        let fresh = Shape { q_len: 1, kv_len: lengths.longest(tokens, grown), ..cell.shape() };
        let evicting = match policy.schedule.decoding {
            Decoding::Never => 0,
            Decoding::EverySteps(steps) if steps > new => self.accumulation(policy, &fresh),
            _ => self.accumulation(policy, &fresh).max(self.step(policy, &fresh)),
        };
        let window = lengths.recent().map_or(0, |queries| window_shape(cell).bytes(queries));
        let rotated = if self.rerotates() && lengths.decodes_evicted() { query_bytes(cell, 1) } else { 0 };
        self.held(tokens, cell.context_tokens + new, lengths.is_even()) + steps + window + rotated + evicting
    }

    /// An eviction step behind a decode step, whose query is `fresh`.
    fn step(&self, policy: &Policy, fresh: &Shape) -> u64 {
        // A single query has its log-sum-exps from its own step.
        let Some(recent) = self.lengths().recent() else { return self.scoring(policy, fresh) };
        let shape = Shape { q_len: recent, ..*fresh };
        let rotates = self.rerotates() && self.lengths().decodes_evicted();
        let rotated = if rotates { query_bytes(&self.prepared.cell, recent) } else { 0 };
        let scoring = self.scoring(policy, &shape);
        rotated
            + match policy.looks_at_attention() {
                true => self.pass(&shape).max(Self::lse_bytes(&shape) + scoring),
                false => scoring,
            }
    }
}

//! Peak memory of the measure, from the shapes.

use super::{cache_shape, future_shape, recent_queries, step_shape};
use crate::attention::{Outputs, Shape, export, kernel};
use crate::cache::PAGE_TOKENS;
use crate::experiment::measure::Prepared;
use crate::policy::{Decoding, Statistic, selection_bytes};

/// Peak bytes besides the inputs: the largest of prefill, judgement and decoding. The first two are exact; decoding is
/// an upper bound, which is the largest only where many more tokens are decoded than the context has.
pub(in crate::experiment::measure) fn predict(prepared: &Prepared, threads: usize) -> u64 {
    let cell = &prepared.cell;
    let (shape, params, cache) = (cell.shape(), cell.params(), cache_shape(prepared));
    let (lists, context, new) = (cache.lists(), cell.context_tokens, cell.new_tokens);
    let held = |tokens: usize| cache.bytes(std::iter::repeat_n(tokens, lists), 0).values().sum::<u64>();
    let decode = kernel("decode").expect("the decode kernel is built in");
    let workspace = |shape: &Shape| decode.workspace(shape, &params, cell.dtype, threads).bytes();
    let lse_bytes = |shape: &Shape| 4 * shape.rows() as u64;

    let prefill = held(context) + Outputs::bytes(&shape, cell.dtype) + prepared.workspace_bytes(threads);
    let mut judgement = 0;
    let mut judged_again = 0;
    let mut tokens_after = context + new;
    if let Some((policy, scorer)) = prepared.policy.as_ref().and_then(|p| Some((p, p.scorer.as_ref()?))) {
        let accumulates = policy.looks_at(Statistic::AccumulatedAttention);
        let judge = |scored: &Shape, kv_len: usize| {
            let row = 4 * (lists * kv_len) as u64;
            let accumulated = if accumulates { row } else { 0 };
            let export = if accumulates { 4 * export::workspace(scored, threads) as u64 } else { 0 };
            accumulated + export.max(row + scorer.scratch_bytes(scored, threads).max(selection_bytes(lists, kv_len)))
        };
        let mut scored = shape;
        let mut oracle = 0;
        let mut oracle_pass = 0;
        if policy.looks_at(Statistic::FutureAttention) {
            scored = future_shape(prepared);
            oracle = lse_bytes(&scored);
            oracle_pass = Outputs::bytes(&scored, cell.dtype) + workspace(&scored);
        }
        judgement = held(context) + lse_bytes(&shape) + oracle_pass.max(oracle + judge(&scored, context));
        // A list grows until the schedule cuts it back to the budget.
        let grown = match policy.schedule.decoding {
            Decoding::EverySteps(steps) => steps.min(new),
            Decoding::Never | Decoding::Delayed => new,
        };
        tokens_after = (prepared.budget_tokens + grown).min(context + new) + 2 * PAGE_TOKENS;
        if policy.schedule.decoding != Decoding::Never {
            let kv_len = context + new;
            let recent = Shape { q_len: recent_queries(policy), kv_len, ..shape };
            judged_again = judge(&recent, kv_len);
            // A single query has its log-sum-exps from its own step.
            if recent.q_len > 1 {
                let pass = Outputs::bytes(&recent, cell.dtype) + workspace(&recent);
                judged_again = pass.max(lse_bytes(&recent) + judged_again);
            }
        }
    }
    let step = step_shape(prepared);
    let results = 4 * (new * step.rows() * (cell.head_dim + 1)) as u64;
    let decoding = held(tokens_after) + results + Outputs::bytes(&step, cell.dtype) + workspace(&step) + judged_again;
    prefill.max(judgement).max(decoding)
}

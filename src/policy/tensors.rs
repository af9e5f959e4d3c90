//! A policy applied once to tensors: what `kvsieve evict` does, and what a library user calls without a cache.

use super::{Context, Future, Needs, Policy, PolicyError, Scored, Selection, select};
use crate::attention::{Forward, Kernel, Outputs, Shape, Tiled, export};
use crate::memory::{Arena, Buffer, Label};
use crate::tensor::TensorView;

/// What stays of a context, and why.
pub struct Judged {
    /// Scores `[B, Hkv, Lk]` with protected tokens above all others; `None` for a policy without scores.
    pub scores: Option<Buffer<f32>>,
    /// The tokens that stay.
    pub selection: Selection,
}

/// Judges a context once. `call` shows its queries, keys, values and mask; `future` are queries `[B, Hq, Lf, D]` that
/// come after it, for policies that need them.
///
/// # Errors
/// When the policy lacks a statistic, gives scores that are no numbers, or the arena has no room.
pub fn judge(
    policy: &Policy,
    call: Forward<'_>,
    future: Option<TensorView<'_>>,
    budget_tokens: usize,
    seed: u64,
    arena: &Arena,
) -> Result<Judged, PolicyError> {
    let shape = call.shape;
    let lists = shape.batch * shape.kv_heads;
    let lens: Vec<usize> = (0..lists).map(|list| call.kv.len(list / shape.kv_heads, list % shape.kv_heads)).collect();
    let needs = policy.needs();
    let lse = match needs {
        Some(Needs::RecentQueries | Needs::AllQueries) => Some(log_sum_exps(&call, arena)?),
        _ => None,
    };
    let lse = lse.as_deref().unwrap_or(&[]);
    let accumulated = match needs {
        Some(Needs::AllQueries) => {
            let mut sums = arena.alloc::<f32>(Label::Policy, lists * shape.kv_len)?;
            let mut scratch = arena.alloc(Label::Workspace, export::workspace(&shape, call.cpu.threads()))?;
            export::column_sums(&call, lse, 0..shape.q_len, &mut sums, &mut scratch);
            Some(sums)
        }
        _ => None,
    };
    let future_call = future.map(|q| {
        // Every future query comes after the whole context.
        let params = crate::attention::Params { causal: false, ..call.params };
        Forward { shape: Shape { q_len: q.dims()[2], ..shape }, params, q, ..call }
    });
    let future_lse = match (&future_call, needs) {
        (Some(call), Some(Needs::FutureQueries)) => Some(log_sum_exps(call, arena)?),
        _ => None,
    };
    let context = Context {
        call,
        lse,
        future: future_call.zip(future_lse.as_deref()).map(|(call, lse)| Future { call, lse }),
        accumulated: accumulated.as_deref(),
        positions: &|_, slot| slot,
        budget_tokens,
        seed,
        arena,
    };
    let scored = match policy.score(&context)? {
        Some(scored) => scored,
        // Everything is protected, so nothing is judged and nothing ties.
        None => Scored { values: arena.alloc(Label::Policy, lists * shape.kv_len)?, highest_judged: f32::NEG_INFINITY },
    };
    let selection = select(arena, policy.allotment, &scored, &lens, shape.kv_heads, shape.kv_len, budget_tokens)?;
    Ok(Judged { scores: policy.scorer.is_some().then_some(scored.values), selection })
}

/// Log-sum-exps of a call, `[B, Hq, Lq]`.
fn log_sum_exps(call: &Forward<'_>, arena: &Arena) -> Result<Buffer<f32>, PolicyError> {
    let kernel = Tiled::AUTO;
    let dtype = call.q.dtype();
    let run = || -> Result<Buffer<f32>, crate::attention::AttentionError> {
        let size = kernel.workspace(&call.shape, &call.params, dtype, call.cpu.threads());
        let mut workspace = size.allocate(arena)?;
        let mut outputs = Outputs::allocate(arena, &call.shape, dtype)?;
        kernel.forward(call, &mut outputs, &mut workspace)?;
        Ok(outputs.lse)
    };
    run().map_err(|error| match error {
        crate::attention::AttentionError::Arena(error) => PolicyError::Arena(error),
        other => unreachable!("the tiled kernel does every checked problem: {other}"),
    })
}

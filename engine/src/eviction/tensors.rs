//! A policy applied once to tensors: what `kvsieve evict` does, and what a library user calls without a cache.

use super::attention::{attention_sums, recompute_lse};
use crate::attention::rope::Frequencies;
use crate::attention::{AttentionError, Forward, Params, Shape, Tiled};
use crate::memory::{Arena, Buffer, Label};
use crate::policy::{BeforeRope, Context, Future, Policy, PolicyError, Protect, Scored, Selection, Statistic};
use crate::policy::{select, tie_rate};
use crate::tensor::TensorView;

/// What is retained of a context, and why.
pub struct Retained {
    /// Scores `[B, Hkv, Lk]` with protected tokens above all others; `None` for a policy without scores.
    pub scores: Option<Buffer<f32>>,
    /// The tokens that are retained.
    pub selection: Selection,
    /// Attention that each token received from all queries, `[B, Hkv, Lk]`, where the policy looks at it.
    pub accumulated: Option<Buffer<f32>>,
    /// Fraction of scored tokens whose score equals that of another of the same list.
    pub tie_rate: f64,
}

/// What a caller has besides queries, keys and values.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// Layers folded into the batch.
    pub layers: usize,
    /// Queries `[B, Hq, Lf, D]` that come after the context.
    pub future: Option<TensorView<'a>>,
    /// RoPE's frequencies.
    pub rope: Option<&'a Frequencies>,
    /// Queries before RoPE, `[B, Hq, Lq, D]`; without them they are rotated back.
    pub q_pre: Option<TensorView<'a>>,
    /// Keys before RoPE, `[B, Hkv, Lk, D]`; without them they are rotated back.
    pub k_pre: Option<TensorView<'a>>,
    /// Output projection of each query head, `[1, Hq, D, hidden]`.
    pub w_o: Option<TensorView<'a>>,
    /// Hidden states, `[B, 1, Lk, hidden]`.
    pub hidden: Option<TensorView<'a>>,
    /// The model's number of each sequence's layer, as in [`Context::layer_numbers`].
    pub layer_numbers: &'a [usize],
    /// Tokens that each head may keep on average.
    pub budget_tokens: usize,
    /// For policies that draw numbers.
    pub seed: u64,
}

impl Given<'_> {
    /// A budget and nothing else.
    pub fn budget(budget_tokens: usize) -> Self {
        let (future, rope, q_pre, k_pre, w_o, hidden) = (None, None, None, None, None, None);
        Given { layers: 1, future, rope, q_pre, k_pre, w_o, hidden, layer_numbers: &[], budget_tokens, seed: 0 }
    }
}

/// Scores a context once and chooses what is retained of it. `call` shows its queries, keys, values and mask.
///
/// # Errors
/// When the policy lacks a statistic, looks at future queries under a sliding window, gives scores that are no numbers, or the arena has
/// no room.
pub fn retain(policy: &Policy, call: Forward<'_>, given: Given<'_>, arena: &Arena) -> Result<Retained, PolicyError> {
    let shape = call.shape;
    if policy.looks_at(Statistic::FutureAttention) && given.future.is_some() && call.params.window.is_some() {
        let reason = "future queries come behind the whole context, and a sliding window is counted from its end; leave the window \
                      or the future queries out";
        return Err(PolicyError::Combination { policy: "a score by future queries".into(), reason: reason.into() });
    }
    let _parameters = policy.parameters.claim(arena)?;
    let lse = match policy.looks_at_attention() {
        true => Some(log_sum_exps(&call, arena)?),
        false => None,
    };
    let lse = lse.as_deref().unwrap_or(&[]);
    let accumulated = match policy.looks_at(Statistic::AccumulatedAttention) {
        true => Some(attention_sums(&call, lse, arena)?),
        false => None,
    };
    let future_call = given.future.map(|q| {
        // Every future query comes after the whole context.
        let params = Params { causal: false, ..call.params };
        Forward { shape: Shape { q_len: q.dims()[2], ..shape }, params, q, ..call }
    });
    let future_lse = match (&future_call, policy.looks_at(Statistic::FutureAttention)) {
        (Some(call), true) => Some(log_sum_exps(call, arena)?),
        _ => None,
    };
    let w_o: Vec<TensorView<'_>> = given.w_o.map_or(Vec::new(), |w_o| vec![w_o; given.layers]);
    let context = Context {
        call,
        layers: given.layers,
        lse,
        future: future_call.zip(future_lse.as_deref()).map(|(call, lse)| Future { call, lse }),
        accumulated: accumulated.as_deref(),
        gates: None,
        reconstructed: None,
        positions: &|_, slot| slot,
        seen_tokens: shape.kv_len,
        before_rope: given.rope.map(|frequencies| BeforeRope { frequencies, q: given.q_pre, k: given.k_pre }),
        w_o: &w_o,
        layer_numbers: given.layer_numbers,
        // A policy without scores keeps everything; its budget may be for what a step reads.
        budget_tokens: if policy.scorer.is_some() { given.budget_tokens } else { shape.kv_len },
        seed: given.seed,
        arena,
    };
    let gates = policy.gates(&context, given.hidden)?;
    let context = Context { gates: gates.as_deref(), ..context };
    let mut scored = match policy.score(&context)? {
        Some(scored) => scored,
        // Everything is protected, so nothing is scored and nothing ties.
        None => Scored::new(
            arena.alloc(Label::Policy, context.lists() * shape.kv_len)?,
            f32::NEG_INFINITY,
            Protect::default(),
        ),
    };
    let tie_rate = tie_rate(&context, &scored);
    let selection = select(policy, &context, &mut scored)?;
    Ok(Retained { scores: policy.scorer.is_some().then_some(scored.values), selection, accumulated, tie_rate })
}

/// Log-sum-exps of a call, `[B, Hq, Lq]`.
fn log_sum_exps(call: &Forward<'_>, arena: &Arena) -> Result<Buffer<f32>, PolicyError> {
    recompute_lse(&Tiled::AUTO, call, arena).map_err(|error| match error {
        AttentionError::Arena(error) => PolicyError::Arena(error),
        other => unreachable!("the tiled kernel does every checked problem: {other}"),
    })
}

//! A policy applied once to tensors: what `kvsieve evict` does, and what a library user calls without a cache.

use super::{BeforeRope, Context, Future, Policy, PolicyError, Protect, Scored, Selection, Statistic};
use super::{select, tie_rate};
use crate::attention::rope::Frequencies;
use crate::attention::{AttentionError, Forward, Kernel, Outputs, Params, Shape, Tiled, export};
use crate::memory::{Arena, Buffer, Label};
use crate::tensor::TensorView;

/// What stays of a context, and why.
pub struct Judged {
    /// Scores `[B, Hkv, Lk]` with protected tokens above all others; `None` for a policy without scores.
    pub scores: Option<Buffer<f32>>,
    /// The tokens that stay.
    pub selection: Selection,
    /// Attention that each token received from all queries, `[B, Hkv, Lk]`, where the policy looks at it.
    pub accumulated: Option<Buffer<f32>>,
    /// Share of judged tokens whose score equals that of another of the same list.
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

/// Judges a context once. `call` shows its queries, keys, values and mask.
///
/// # Errors
/// When the policy lacks a statistic, gives scores that are no numbers, or the arena has no room.
pub fn judge(policy: &Policy, call: Forward<'_>, given: Given<'_>, arena: &Arena) -> Result<Judged, PolicyError> {
    let shape = call.shape;
    let lists = shape.batch * shape.kv_heads;
    let needs = policy.needs();
    let _parameters = policy.parameters.claim(arena)?;
    let attends = [Statistic::RecentAttention, Statistic::AccumulatedAttention];
    let lse = match needs.iter().any(|need| attends.contains(need)) {
        true => Some(log_sum_exps(&call, arena)?),
        false => None,
    };
    let lse = lse.as_deref().unwrap_or(&[]);
    let accumulated = match needs.contains(&Statistic::AccumulatedAttention) {
        true => {
            let mut sums = arena.alloc::<f32>(Label::Policy, lists * shape.kv_len)?;
            let mut scratch = arena.alloc(Label::Workspace, export::workspace(&shape, call.cpu.threads()))?;
            export::column_sums(&call, lse, 0..shape.q_len, &mut sums, &mut scratch);
            Some(sums)
        }
        false => None,
    };
    let future_call = given.future.map(|q| {
        // Every future query comes after the whole context.
        let params = Params { causal: false, ..call.params };
        Forward { shape: Shape { q_len: q.dims()[2], ..shape }, params, q, ..call }
    });
    let future_lse = match (&future_call, needs.contains(&Statistic::FutureAttention)) {
        (Some(call), true) => Some(log_sum_exps(call, arena)?),
        _ => None,
    };
    let before_rope = given.rope.map(|frequencies| BeforeRope { frequencies, q: given.q_pre, k: given.k_pre });
    let w_o: Vec<TensorView<'_>> = given.w_o.map_or(Vec::new(), |w_o| vec![w_o; given.layers]);
    let context = Context {
        call,
        layers: given.layers,
        lse,
        future: future_call.zip(future_lse.as_deref()).map(|(call, lse)| Future { call, lse }),
        accumulated: accumulated.as_deref(),
        gates: None,
        positions: &|_, slot| slot,
        seen_tokens: shape.kv_len,
        before_rope,
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
        // Everything is protected, so nothing is judged and nothing ties.
        None => Scored {
            values: arena.alloc(Label::Policy, lists * shape.kv_len)?,
            highest_judged: f32::NEG_INFINITY,
            protect: Protect::default(),
        },
    };
    let selection = select(policy, &context, &mut scored)?;
    let tie_rate = tie_rate(&context, &scored);
    Ok(Judged { scores: policy.scorer.is_some().then_some(scored.values), selection, accumulated, tie_rate })
}

/// Log-sum-exps of a call, `[B, Hq, Lq]`.
fn log_sum_exps(call: &Forward<'_>, arena: &Arena) -> Result<Buffer<f32>, PolicyError> {
    let kernel = Tiled::AUTO;
    let dtype = call.q.dtype();
    let run = || -> Result<Buffer<f32>, AttentionError> {
        let size = kernel.workspace(&call.shape, &call.params, dtype, call.cpu.threads());
        let mut workspace = size.allocate(arena)?;
        let mut outputs = Outputs::allocate(arena, &call.shape, dtype)?;
        kernel.forward(call, &mut outputs, &mut workspace)?;
        Ok(outputs.lse)
    };
    run().map_err(|error| match error {
        AttentionError::Arena(error) => PolicyError::Arena(error),
        other => unreachable!("the tiled kernel does every checked problem: {other}"),
    })
}

//! A policy applied once to tensors in a GPU's memory: what `kvsieve evict --device cuda` does, and what a library user
//! calls. A cache is filled with the tensors, scored there, and shrunk.

use super::{CudaBackend, CudaView};
use crate::attention::cuda::{Inputs, Results, cuda_kernel};
use crate::attention::rope::Frequencies;
use crate::attention::{Outputs, Params, Shape};
use crate::cache::cuda::DeviceCache;
use crate::cache::{CacheShape, PAGE_TOKENS};
use crate::device::Cpu;
use crate::device::cuda::{CudaError, DeviceBuffer, Runtime};
use crate::eviction::{Backend, Plan};
use crate::memory::{Arena, Label};
use crate::policy::action::rerotate::NO_ROPE;
use crate::policy::cuda::{DevicePolicyError, Queries, looks_at_attention, score, select};
use crate::policy::{Policy, PolicyError, Statistic};
use crate::tensor::DType;

/// A context in a GPU's memory.
#[derive(Clone, Copy)]
pub struct DeviceTensors<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub k: &'a DeviceBuffer,
    /// `[B, Hkv, Lk, D]`.
    pub v: &'a DeviceBuffer,
    /// Their element type.
    pub dtype: DType,
    /// Their extents.
    pub shape: Shape,
    /// Scale, soft-cap and mask.
    pub params: Params,
    /// Layers folded into the batch.
    pub layers: usize,
    /// RoPE's frequencies, for a policy that rotates keys.
    pub rope: Option<&'a Frequencies>,
}

/// What is retained of a context.
pub struct RetainedThere {
    /// What was retained, with its keys at positions inside the cache if the policy rotates them.
    pub cache: DeviceCache,
    /// Positions of the context that stayed, for each list, ascending.
    pub kept: Vec<Vec<u32>>,
    /// Scores `[B, Hkv, Lk]` in f32 with protected tokens above all others, and the highest score of a token that was not protected; `None`
    /// for a policy without scores.
    pub scores: Option<(DeviceBuffer, f32)>,
    /// The GPU's time for all kernels.
    pub time_ns: u64,
}

/// Scores a context once and evicts from it, under a budget of `budget_tokens` tokens for each head on average.
///
/// # Errors
/// When the policy lacks a statistic or gives scores that are no numbers, there is no room, or a kernel fails.
pub fn retain(
    policy: &Policy,
    runtime: &Runtime,
    arena: &Arena,
    cpu: &Cpu,
    tensors: DeviceTensors<'_>,
    budget_tokens: usize,
) -> Result<RetainedThere, DevicePolicyError> {
    let DeviceTensors { q, k, v, dtype, shape, params, layers, rope } = tensors;
    let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = shape;
    let accumulates = policy.looks_at(Statistic::AccumulatedAttention);
    let (columns, page_tokens) = (policy.columns(), PAGE_TOKENS);
    let held = CacheShape { batch, kv_heads, head_dim, format: dtype.into(), max_tokens: kv_len, page_tokens, columns };
    let mut cache = DeviceCache::new(runtime.device(), arena, held, dtype)?;
    if policy.rerotates {
        cache.set_rope(rope.ok_or::<PolicyError>(NO_ROPE)?)?;
    }
    let mut time_ns = cache.append(runtime, [k, v], kv_len, 0..kv_len)?;
    let lse = match looks_at_attention(policy) {
        true => {
            let (ns, lse) = log_sum_exps(runtime, arena, &tensors)?;
            time_ns += ns;
            Some(lse)
        }
        false => None,
    };
    let queries = lse.as_ref().map(|lse| Queries { q, length: q_len, first: 0, lse, q_len });
    let backend = CudaBackend { runtime, arena, cpu, counts_ties: false };
    let view = CudaView { queries, q_heads, params, layers, seen_tokens: kv_len };
    if accumulates {
        time_ns += backend.accumulate(&mut cache, &view)?;
    }
    let context = backend.context(&view, budget_tokens);
    let Some(mut scored) = score(policy, &context, &cache)? else {
        let kept = cache.read_origins()?;
        return Ok(RetainedThere { cache, kept, scores: None, time_ns });
    };
    let selection = select(policy, &context, &cache, &mut scored)?;
    time_ns += scored.time_ns + selection.time_ns;
    let plan = Plan { policy, budget_tokens, seed: 0 };
    time_ns += backend.evict(&plan, &mut cache, &view, &selection)?.ns + backend.release(&mut cache)?;
    let kept = cache.read_origins()?;
    Ok(RetainedThere { cache, kept, scores: Some((scored.values, scored.highest_scored)), time_ns })
}

/// Log-sum-exps of the queries, `[B, Hq, Lq]` in f32, and the GPU's time for them.
fn log_sum_exps(
    runtime: &Runtime,
    arena: &Arena,
    tensors: &DeviceTensors<'_>,
) -> Result<(u64, DeviceBuffer), DevicePolicyError> {
    let device = runtime.device();
    let tiled = cuda_kernel("tiled").expect("it is built in");
    let plan = tiled.plan(&tensors.shape, &tensors.params, tensors.dtype.into(), device.limits());
    let plan = plan.map_err(|error| CudaError::Operand(error.to_string()))?;
    let mut scratch = plan.scratch(device, arena)?;
    let lse_bytes = 4 * tensors.shape.rows() as u64;
    let outputs_bytes = Outputs::bytes(&tensors.shape, tensors.dtype);
    let mut o = device.alloc(arena, Label::Activations, outputs_bytes - lse_bytes)?;
    let mut lse = device.alloc(arena, Label::Activations, lse_bytes)?;
    let inputs = Inputs { q: tensors.q, k: tensors.k, v: tensors.v };
    let ns = plan.forward(runtime, inputs, Results { o: &mut o, lse: &mut lse }, &mut scratch)?;
    Ok((ns, lse))
}

//! What the end of a pass depends on while a model reads a text: the gradient of `sum |h|^2` over its tokens, with `h` what the last block puts
//! out, by what attention adds to the residual stream (KVgrad, openreview.net cg1wTCJjjk, as kvpress 0.5.5 has it).
//!
//! Several texts are read behind one context, each as if it alone came next. Keys and values of the context are as a cache holds them:
//! gradients do not flow into them. It is computed once; of each text the rows that are read, forth and back.

use super::activations::{Extents, Recompute};
use super::network::Network;
use super::parameters::Parameters;
use super::weights::{Frozen, Packed};
use crate::device::Cpu;
use crate::memory::{Arena, Buffer, Label};
use crate::model::{Model, ModelError};
use crate::policy::PolicyError;
use crate::ranks::RankError;
use crate::tensor::DType;

/// Norms of the gradient at each token of each of `texts` behind `context`, `[layers, tokens]`. Attention computes in bf16 where `dtype`
/// says so, else in f32. ([`crate::model::Gradients`].)
///
/// # Errors
/// When columns of the model's matrices lie in an order of their own, or the arena has no room.
pub fn sensitivity(
    model: &Model,
    dtype: DType,
    context: &[u32],
    texts: &[Vec<u32>],
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Vec<Buffer<f32>>, ModelError> {
    if model.weights.each(&mut |_| ()).into_iter().any(|matrix| matrix.order().is_some()) {
        let reason = "columns of the model's matrices are in another order (desc_act), which gradients do not know";
        return Err(PolicyError::Combination { policy: "kvgrad".into(), reason: reason.into() }.into());
    }
    let dtype = if dtype == DType::Bf16 { DType::Bf16 } else { DType::F32 };
    let parameters = Parameters::all_frozen(&model.config, dtype);
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let (len, layers) = (context.len() + longest, model.config.layers);
    let extents = Extents { parameters: &parameters, batch: 1, len, skipped: context.len() };
    let weights = Frozen::Packed(Packed::of_model(model, &parameters, arena)?);
    // Little memory matters more here than the time of the blocks' insides.
    let network = Network::new(arena, cpu, extents, Recompute::Full)?;
    let mut network = network.sensing(arena)?;
    let mut known = 0;
    let mut of_text = |text: &Vec<u32>| {
        // Rows behind a shorter text are seen by none of its own.
        let tokens: Vec<u32> = context.iter().chain(text).copied().chain(std::iter::repeat(0)).take(len).collect();
        let all = network.sensitivity(weights.all(), &tokens, text.len(), known).map_err(alone)?;
        known = context.len();
        let mut norms = arena.alloc::<f32>(Label::Policy, layers * text.len())?;
        for (to, from) in norms.chunks_exact_mut(text.len()).zip(all.chunks_exact(len)) {
            to.copy_from_slice(&from[context.len()..][..text.len()]);
        }
        Ok(norms)
    };
    texts.iter().map(&mut of_text).collect()
}

/// The error of a pass that no other rank takes part in.
fn alone(error: RankError) -> ModelError {
    match error {
        RankError::Attention(error) => error.into(),
        RankError::Arena(error) => error.into(),
        other => unreachable!("one rank alone: {other}"),
    }
}

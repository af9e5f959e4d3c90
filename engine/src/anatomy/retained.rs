//! What a policy leaves of needles, head by head: a head that copies finds nothing where its KV head has lost the needle.

use super::CHUNK_TOKENS;
use super::retrieval::{RetrievalError, Sequence, sequence};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Decoder, Eviction, Model, Setup, Text};
use crate::tensor::DType;

/// Fraction of the tokens of needles' values that each KV head retains, `[layers][Hkv]`: those of the `samples` needles of
/// [`retrieval`](super::retrieval()), whose contexts are evicted before the question is seen.
///
/// # Errors
/// When the context is too short for a needle, the model cannot do what the policy does, or the arena has no room.
pub fn needles_retained(
    model: &Model,
    text: &Text,
    (context_tokens, samples): (usize, usize),
    eviction: Eviction<'_>,
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Vec<Vec<f64>>, RetrievalError> {
    let (layers, kv_heads) = (model.config.layers, model.config.kv_heads);
    let mut held = vec![vec![0usize; kv_heads]; layers];
    let mut all = 0;
    for sample in 0..samples {
        let Sequence { tokens, context, copies } = sequence(text, context_tokens, sample)?;
        let context = &tokens[..context];
        let max_tokens = context.len() + eviction.more_tokens(context.len());
        let setup = Setup::of(max_tokens, DType::F32);
        let setup = Setup { columns: eviction.policy.columns(), chunk_tokens: CHUNK_TOKENS.min(max_tokens), ..setup };
        let mut decoder = Decoder::new(model, setup, cpu, arena)?;
        decoder.evict(eviction.of_sample(sample), &[context.len()])?;
        decoder.prefill(&[context], |_, _, _| ())?;
        let cache = decoder.cache();
        for (layer, held) in held.iter_mut().enumerate() {
            for (head, held) in held.iter_mut().enumerate() {
                let list = cache.list(layer, head);
                let is_held = |source: usize| {
                    let slot = cache.first_slot(list, source);
                    slot < cache.lens()[list] && cache.origin(list, slot) == source
                };
                *held += copies.iter().filter(|[_, source]| is_held(*source)).count();
            }
        }
        all += copies.len();
    }
    let fraction = |held: &usize| *held as f64 / all.max(1) as f64;
    Ok(held.iter().map(|heads| heads.iter().map(fraction).collect()).collect())
}

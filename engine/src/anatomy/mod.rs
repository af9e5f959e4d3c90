//! The anatomy of a model's attention: where each head looks, layer by layer, and what its first tokens are like.
//!
//! Eviction works where attention is concentrated, and each policy bets on a kind of head: StreamingLLM on heads that rest
//! on the first tokens and the latest, SnapKV on heads whose late queries agree, key-based scores on keys of unlike
//! direction. [`anatomy`] measures these kinds on a text; a needle copied out of a context finds the heads that fetch
//! ([`retrieval`]), which are those an eviction must not harm; what a policy leaves them of needles is [`needles_retained`].

mod heads;
mod retained;
mod retrieval;

pub use heads::{FIRST, Head, KvHead, LAST, MASS, QUERIES};
pub use retained::needles_retained;
pub use retrieval::{Retrieval, RetrievalError, retrieval};

use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Activation, Capture, Captured, Decoder, Model, ModelError, Setup};
use crate::tensor::DType;

/// Tokens that go through the model together.
const CHUNK_TOKENS: usize = 512;

/// What the heads of a model do over a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Anatomy {
    /// Tokens of the text.
    pub tokens: usize,
    /// `[layers][Hq]`.
    pub heads: Vec<Vec<Head>>,
    /// `[layers][Hkv]`.
    pub kv_heads: Vec<Vec<KvHead>>,
}

/// Where the heads of `model` look while it reads `tokens`, at least 2, and what the first keys and values are like.
///
/// # Errors
/// When the model cannot read the tokens, or the arena has no room.
pub fn anatomy(model: &Model, tokens: &[u32], cpu: &Cpu, arena: &Arena) -> Result<Anatomy, ModelError> {
    let [q, k, v] = &activations(model, tokens, [Activation::Q, Activation::K, Activation::V], cpu, arena)?;
    let layers = 0..model.config.layers;
    let heads = layers.clone().map(|layer| heads::heads(model, layer, (&q.view(), &k.view()), cpu)).collect();
    let kv_heads = layers.map(|layer| heads::kv_heads(layer, &k.view(), &v.view())).collect();
    Ok(Anatomy { tokens: tokens.len(), heads, kv_heads })
}

/// Activations of all layers over a sequence.
fn activations<const N: usize>(
    model: &Model,
    tokens: &[u32],
    kinds: [Activation; N],
    cpu: &Cpu,
    arena: &Arena,
) -> Result<[Captured; N], ModelError> {
    let setup = Setup { chunk_tokens: CHUNK_TOKENS.min(tokens.len()), ..Setup::of(tokens.len(), DType::F32) };
    let layers: Vec<usize> = (0..model.config.layers).collect();
    let capture = Capture::new(arena, &model.config, &layers, &kinds, tokens.len())?;
    let mut decoder = Decoder::new(model, setup, cpu, arena)?;
    decoder.hook(&capture);
    decoder.prefill(&[tokens], |_, _, _| ())?;
    drop(decoder);
    Ok(<[Captured; N]>::try_from(capture.finish()?).ok().expect("a tensor for each kind"))
}

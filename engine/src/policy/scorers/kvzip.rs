//! KVzip (arXiv 2505.23416): a token is worth what the model needs of it to write its context again.
//!
//! Behind the prefill the model is asked to repeat the context, a chunk of it at a time, and is fed the chunk as its answer.
//! A token's score is the most attention that any of these queries, of any query head of its group, gives it; they see
//! the chunk, the first tokens of the context, and what is fed. That takes two to three times a prefill, looks at no
//! question, and is done once. The budget is one pool for all layers and heads. What is fed leaves nothing behind in the cache.
//!
//! KVzip+ (arXiv 2601.07891, as kvpress has it) divides the attention by the norm of the query's hidden state, and
//! multiplies it by that of the value behind the output projection, before the maximum. Where kvpress protects the first tokens only
//! behind a chat template, and scores nothing of the template, the first `sink` tokens are protected here and all others scored.
//!
//! With `level=head` (the authors' context-independent mode, snu-mllab/KVzip at 5d84729) nothing is repeated at run time: a
//! head's score, the most that any of its tokens got in a context that the model repeated once, is read from a policy file and is that
//! of all its tokens, so heads go whole. `kvsieve calibrate --method kvzip-heads` makes the file. The budget is met to the token: of the
//! head that it cuts through the latest tokens stay, where the authors' threshold lets the whole head go.

use crate::named::Parameter;
use crate::policy::Axis::{KvHeads, Layers};
use crate::policy::allocation::{ada::Ada, global::Global};
use crate::policy::{Context, Learned, Policy, PolicyEntry, PolicyError, Protect, Reconstruction, Scorer};
use crate::policy::{Statistic, Weighing, each_list};

/// The tensor of scores of whole heads, `[layers, Hkv]`.
pub const HEADS: &str = "kvzip.heads";
/// Tokens that are repeated at a time, and first tokens beside them, where the policy's text does not say.
pub const CHUNK: usize = 2048;
/// See [`CHUNK`].
pub const SINK: usize = 4;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "kvzip",
    about: "keeps what the model looks at while it repeats its context: one pool for all layers and heads; level=head keeps \
            whole heads by kvzip.heads [layers, Hkv] of --policy-file",
    paper: "2505.23416",
    parameters: &[
        Parameter { name: "chunk", default: "2048", about: "tokens of the context that are repeated at a time" },
        Parameter { name: "sink", default: "4", about: "first tokens, which are kept, and seen beside every chunk" },
        Parameter { name: "plus", default: "false", about: "true: KVzip+, attention weighed by norms" },
        Parameter {
            name: "level",
            default: "pair",
            about: "pair: keys and values one by one; head: whole heads, by scores of a policy file, and nothing is repeated",
        },
    ],
    build: |named, assets| {
        let reconstruction = Reconstruction {
            chunk_tokens: named.count("chunk", CHUNK, 1)?,
            sink: named.count("sink", SINK, 0)?,
            weighing: if named.flag("plus", false)? { Weighing::Norms } else { Weighing::Nothing },
        };
        match named.text("level") {
            None | Some("pair") => Ok(reconstructing(ENTRY.name, reconstruction)),
            Some("head") => {
                if named.text("chunk").is_some() || named.text("plus").is_some() {
                    return Err(named
                        .wrong("level", "pair, where chunk or plus say how a context is repeated".into())
                        .into());
                }
                let heads = assets.needed(HEADS, &[Layers, KvHeads])?;
                Ok(pooled(WholeHeads { sink: reconstruction.sink, heads }))
            }
            Some(_) => Err(named.wrong("level", "pair or head".into()).into()),
        }
    },
};

/// The method `policy`, whose scores are what the model's pass over the repeated context gives.
pub(super) fn reconstructing(policy: &'static str, how: Reconstruction) -> Policy {
    Policy { reconstruction: Some(how), ..pooled(Reconstructed { policy, how }) }
}

/// One pool for all layers and heads, once behind the prefill.
fn pooled(scorer: impl Scorer + 'static) -> Policy {
    let policy = Policy::after_prefill(scorer);
    Policy { layers: Box::new(Global { threshold: None }), heads: Box::new(Ada { floor: 0.0 }), ..policy }
}

struct Reconstructed {
    policy: &'static str,
    how: Reconstruction,
}

impl Scorer for Reconstructed {
    fn needs(&self) -> Vec<Statistic> {
        let gradients = (self.how.weighing == Weighing::Gradients).then_some(Statistic::Gradients);
        std::iter::once(Statistic::Reconstruction).chain(gradients).collect()
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.how.sink, window: 0 }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let what = "a model that repeats its context: `eval`, `generate` and `inspect` have one";
        scores.copy_from_slice(context.reconstructed.ok_or(PolicyError::Missing { policy: self.policy, what })?);
        Ok(())
    }
}

/// Scores of heads in place of tokens.
struct WholeHeads {
    sink: usize,
    /// `None` where there is no file, which is refused before anything is scored.
    heads: Option<Learned>,
}

impl Scorer for WholeHeads {
    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let missing = PolicyError::Missing { policy: ENTRY.name, what: "a policy file of heads' scores" };
        let heads = self.heads.as_ref().ok_or(missing)?;
        each_list(context, scores, &mut [], |list, scores, _| {
            scores.fill(heads.at(&[context.layer_number(list.batch)])[list.head]);
        });
        Ok(())
    }
}

/// Scores of whole heads from those of a context's tokens, `tokens` of each head: the most that one of them got. The first `sink`
/// tokens are left out, which every head looks at; the authors' lie in a system prompt, which has no score.
pub fn of_heads(scores: &[f32], tokens: usize, sink: usize) -> Vec<f32> {
    let best = |head: &[f32]| head[sink.min(tokens)..].iter().copied().fold(0.0, f32::max);
    scores.chunks_exact(tokens).map(best).collect()
}

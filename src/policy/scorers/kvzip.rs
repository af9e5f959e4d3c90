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

use crate::named::Parameter;
use crate::policy::allocation::{ada::Ada, global::Global};
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Reconstruction, Scorer, Statistic};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "kvzip",
    about: "keeps what the model looks at while it repeats its context: one pool for all layers and heads",
    paper: "2505.23416",
    parameters: &[
        Parameter { name: "chunk", default: "2048", about: "tokens of the context that are repeated at a time" },
        Parameter { name: "sink", default: "4", about: "first tokens, which are kept, and seen beside every chunk" },
        Parameter { name: "plus", default: "false", about: "true: KVzip+, attention weighed by norms" },
    ],
    build: |named, _| {
        let reconstruction = Reconstruction {
            chunk_tokens: named.count("chunk", 2048, 1)?,
            sink: named.count("sink", 4, 0)?,
            weighs_outputs: named.flag("plus", false)?,
        };
        Ok(Policy {
            layers: Box::new(Global { threshold: None }),
            heads: Box::new(Ada { floor: 0.0 }),
            reconstruction: Some(reconstruction),
            ..Policy::after_prefill(KvZip { sink: reconstruction.sink })
        })
    },
};

struct KvZip {
    sink: usize,
}

impl Scorer for KvZip {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Reconstruction]
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let what = "a model that repeats its context: `eval` and `generate` have one";
        scores.copy_from_slice(context.reconstructed.ok_or(PolicyError::Missing { policy: ENTRY.name, what })?);
        Ok(())
    }
}

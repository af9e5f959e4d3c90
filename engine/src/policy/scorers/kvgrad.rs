//! KVgrad (openreview.net, cg1wTCJjjk; as kvpress 0.5.5 has it): a token is worth what the model makes of it when it writes its
//! context again.
//!
//! The context is repeated as under [`super::kvzip`]. A query's attention to a token is multiplied by the norm of the token's value behind the
//! output projection, which is what the token adds to the residual stream there, and by the norm of the gradient of
//! `sum over queries of |h|^2` by what attention adds to the stream at that query, with `h` what the last block puts out: how much
//! the end of the pass depends on it. A token's score is the most over queries and over the query heads of its group. KVzip+ divides by
//! the norm of the query's hidden state in place of that gradient.
//!
//! Gradients are those of the model with everything in its cache, and do not flow into the context itself. They come from the
//! backward pass that trains models, which computes the block's insides again, so that little memory is taken; in all a pass over the context and
//! three over what is fed come on top of KVzip's.

use super::kvzip::{SINK, reconstructing};
use crate::named::Parameter;
use crate::policy::{PolicyEntry, Reconstruction, Weighing};

/// Tokens that are repeated at a time, where the policy's text does not say: the authors' figure.
const CHUNK: usize = 512;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "kvgrad",
    about: "keeps what the end of the model's pass depends on while it repeats its context: attention times the norm of what the token \
            adds and that of the gradient there; one pool for all layers and heads",
    paper: "",
    parameters: &[
        Parameter { name: "chunk", default: "512", about: "tokens of the context that are repeated at a time" },
        Parameter { name: "sink", default: "4", about: "first tokens, which are kept, and seen beside every chunk" },
    ],
    build: |named, _| {
        let how = Reconstruction {
            chunk_tokens: named.count("chunk", CHUNK, 1)?,
            sink: named.count("sink", SINK, 0)?,
            weighing: Weighing::Gradients,
        };
        Ok(reconstructing(ENTRY.name, how))
    },
};

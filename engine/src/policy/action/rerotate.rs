//! Positions inside the cache: after an eviction the retained keys are rotated to positions without gaps.
//!
//! StreamingLLM's own form (arXiv 2309.17453). Distances between what is retained shrink to those inside the cache, so queries
//! must take their positions there too: a query in front of a list of `n` tokens, its own among them, is at `n - 1`.
//! Heads that keep different numbers of tokens have queries at different positions. Keys are rounded to the cache's type
//! each time they are rotated, where a cache of keys before RoPE would round them once.

use crate::policy::{Part, PartEntry, PolicyError};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "rerotate",
    about: "retained keys, and queries, are rotated to positions inside the cache (RoPE)",
    paper: "2309.17453",
    parameters: &[],
    build: |_, _| Ok(Part::Rerotate),
};

/// Why keys cannot be rotated.
pub const NO_ROPE: PolicyError = PolicyError::Missing {
    policy: "rerotate",
    what: "rope_theta of the inputs and an even head dim, to rotate keys to other positions",
};

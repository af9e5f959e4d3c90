//! When tokens are evicted: after the prefill or after each chunk of it, and while decoding.

use super::registry::{Part, PartEntry};
use crate::named::Parameter;

/// When tokens are evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Schedule {
    /// Tokens of a prefill chunk: the cache is cut back to the budget after each. `None`: after the whole context.
    pub chunk_tokens: Option<usize>,
    /// While decoding.
    pub decoding: Decoding,
}

/// When tokens are evicted while decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Decoding {
    /// Never: the cache grows by every new token.
    #[default]
    Never,
    /// Back to the budget every so many decode steps.
    EverySteps(usize),
    /// Each token once, when it leaves the protected window: it stays if it scores above every token that its head
    /// lost after prefill.
    Delayed,
}

/// After prefill only.
pub const ONCE: PartEntry = PartEntry {
    name: "once",
    about: "evicts after prefill only",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Part::Decoding(Decoding::Never)),
};

/// Chunked prefill.
pub const CHUNKS: PartEntry = PartEntry {
    name: "chunks",
    about: "prefill in chunks, back to the budget after each: peak memory does not grow with the context",
    paper: "",
    parameters: &[Parameter { name: "tokens", default: "1024", about: "tokens of a chunk" }],
    build: |named, _| Ok(Part::Chunks(named.count("tokens", 1024, 1)?)),
};

/// Every n steps.
pub const EVERY: PartEntry = PartEntry {
    name: "every",
    about: "back to the budget every so many decode steps: it counts new tokens too",
    paper: "",
    parameters: &[Parameter { name: "steps", default: "1", about: "decode steps between evictions" }],
    build: |named, _| Ok(Part::Decoding(Decoding::EverySteps(named.count("steps", 1, 1)?))),
};

/// DMS's schedule.
pub const DELAYED: PartEntry = PartEntry {
    name: "delayed",
    about: "each new token is decided on once, when it leaves a window of recent tokens",
    paper: "2506.05345",
    parameters: &[Parameter { name: "window", default: "128", about: "recent tokens that are not evicted yet" }],
    build: |named, _| Ok(Part::Delayed { window: named.count("window", 128, 1)? }),
};

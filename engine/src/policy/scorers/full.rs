//! `full`: nothing is evicted. The baseline of every comparison.

use crate::policy::{Policy, PolicyEntry};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "full",
    about: "keeps every token: the baseline",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Policy::full()),
};

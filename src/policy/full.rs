//! `full`: nothing is evicted. The baseline of every comparison.

use super::{Allotment, Needs, Policy, PolicyEntry, Schedule};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "full",
    about: "keeps every token: the baseline",
    paper: "",
    parameters: &[],
    needs: Needs::Positions,
    build: |_| Ok(Policy { scorer: None, allotment: Allotment::Uniform, schedule: Schedule::AfterPrefill }),
};

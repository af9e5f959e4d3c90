//! The evicted token is dropped and leaves nothing behind: what a method does unless it says otherwise.

use crate::policy::{Part, PartEntry};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "drop",
    about: "an evicted token is dropped",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Part::Action(None)),
};

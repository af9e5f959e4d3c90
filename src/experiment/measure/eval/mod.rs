//! `eval`: what a model answers under policies and budgets (`docs/evaluation.md`).
//!
//! Cells take no turns of their own: those that differ only in policy and budget are a group, whose contexts are read
//! once and judged by all of them.

mod grid;
mod group;
mod tally;

pub use grid::expand;
pub use group::{Ended, groups, run, status_of};

/// The policy that every evaluation has beside those that it names.
pub const RANDOM: &str = "random";

/// The task of going on with a text of the user's.
pub const PERPLEXITY: &str = "perplexity";

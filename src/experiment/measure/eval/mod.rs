//! `eval`: what a model answers under policies and budgets (`docs/evaluation.md`).
//!
//! Cells take no turns of their own: those that differ only in policy and budget are a group, whose contexts are read
//! once and judged by all of them. What each sample gives is on disk at once, in a [`Journal`].

mod grid;
mod group;
mod journal;
mod tally;

pub use grid::expand;
pub use group::{Ended, groups, run, status_of};
pub use journal::Journal;

/// The policy that every evaluation has beside those that it names.
pub const RANDOM: &str = "random";

/// The task of going on with a text of the user's.
pub const PERPLEXITY: &str = "perplexity";

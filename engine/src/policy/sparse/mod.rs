//! KV selection: every token stays, and each decode step reads a part of what is there.
//!
//! A [`KvSelection`] is a method; opened on lists of a cache after prefill it becomes a [`KvSelector`], which looks at the query of every
//! step. What it holds besides the cache (an index) is real memory under its labels, and what it
//! read is counted step by step: the rows, and the index that they were chosen by.

mod lists;
pub mod quest;
mod selected;
pub mod think;

pub use lists::Lists;
pub use selected::Selected;

use super::{PolicyError, Statistic};
use crate::attention::Shape;
use crate::cache::{CacheShape, PagedCache};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError};
use crate::tensor::TensorView;

/// What a selection begins with.
pub struct Start<'a> {
    /// The context; every list holds all of it.
    pub cache: Lists<'a>,
    /// The last [`KvSelection::recent_queries`] queries of the context, or all if there are fewer, `[B, Hq, n, D]`.
    pub q: TensorView<'a>,
    /// Tokens that a step may read of each KV head.
    pub budget_tokens: usize,
    /// Where it runs.
    pub cpu: &'a Cpu,
    /// Where memory comes from.
    pub arena: &'a Arena,
}

/// Chooses what decode steps read.
pub trait KvSelection: Send + Sync {
    /// What it looks at.
    fn needs(&self) -> Vec<Statistic>;

    /// How many of the context's last queries it looks at when it is opened.
    fn recent_queries(&self) -> usize {
        1
    }

    /// Refuses a budget that means nothing to it, in words that follow its name.
    ///
    /// # Errors
    /// What would be right.
    fn check(&self, budget_tokens: usize, context_tokens: usize) -> Result<(), String>;

    /// Whether a step would read all of the context.
    fn reads_all(&self, budget_tokens: usize, context_tokens: usize) -> bool;

    /// KV bytes that a step reads of lists of `tokens` tokens: rows and index.
    fn step_bytes(&self, cache: &CacheShape, budget_tokens: usize, context_tokens: usize, tokens: usize) -> u64;

    /// Most bytes that it holds at one time. `step` is the shape of a decode step.
    fn bytes(&self, cache: &CacheShape, step: &Shape, threads: usize) -> u64;

    /// Begins on a cache.
    ///
    /// # Errors
    /// When the arena has no room.
    fn open(&self, start: &Start<'_>) -> Result<Box<dyn KvSelector>, PolicyError>;
}

/// A selection at work on the lists that it was opened on.
pub trait KvSelector: Send + Sync {
    /// The same for lists that hold the same tokens.
    ///
    /// # Errors
    /// When the arena has no room.
    fn copy(&self, arena: &Arena) -> Result<Box<dyn KvSelector>, ArenaError>;

    /// Takes out of the context what no step will read: once, behind [`KvSelection::open`]. `first` is the first of its
    /// sequences in the cache.
    ///
    /// # Errors
    /// When another sequence shares a page and the arena has no room for a copy.
    fn prune(&self, _cache: &mut PagedCache, _first: usize) -> Result<(), ArenaError> {
        Ok(())
    }

    /// Looks at the query `[B, Hq, 1, D]` of a step, and at the tokens that came since the last one.
    fn step(&mut self, q: TensorView<'_>, cache: Lists<'_>, cpu: &Cpu);

    /// The rows that this step reads; `None` for all.
    fn rows<'a>(&'a self, _cache: Lists<'a>) -> Option<Selected<'a>> {
        None
    }

    /// KV bytes that this step reads: rows and index.
    fn read_bytes(&self, cache: Lists<'_>) -> u64;

    /// What was chosen, by name, in numbers for each list; as many for each.
    fn choice(&self) -> (&'static str, Vec<Vec<i64>>);
}

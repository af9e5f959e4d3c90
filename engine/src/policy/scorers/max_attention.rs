//! `max-attention`: a token is worth the most attention that any query of the context gave it, over the query heads of
//! the group.
//!
//! KVzip (arXiv 2505.23416) scores so, but over the queries of a model that repeats the context, each of which sees the
//! whole of it: that is `kvzip`. This scorer needs no model: it takes the context's own queries, all of them or the `last` ones. Under a
//! causal mask early queries see few tokens, so that with `last=all` early tokens score high for want of rivals (the
//! first one has 1 from itself); the last queries come closer to what KVzip asks. Behind a prefill
//! chunk all of its queries are at hand; between decode steps as many as `last` says, one if it is `all`.

use super::snapkv::recent_columns;
use crate::attention::Shape;
use crate::attention::export::{self, OverGroup, OverQueries, Reduction};
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Scorer, ScoringPlan, Statistic, Then};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "max-attention",
    about: "keeps the tokens to which some query of the context attends most",
    paper: "2505.23416",
    parameters: &[Parameter {
        name: "last",
        default: "all",
        about: "queries that are asked; all: those of the context",
    }],
    build: |named, _| {
        let last = match named.text("last") {
            None | Some("all") => None,
            Some(_) => Some(named.count("last", 1, 1)?),
        };
        Ok(Policy::after_prefill(MaxAttention { last }))
    },
};

struct MaxAttention {
    last: Option<usize>,
}

impl Scorer for MaxAttention {
    fn needs(&self) -> Vec<Statistic> {
        match self.last {
            Some(_) => vec![Statistic::RecentAttention],
            // The pass is as wide as the context, which costs as much as accumulated attention.
            None => vec![Statistic::Queries, Statistic::RecentAttention],
        }
    }

    fn recent_queries(&self) -> usize {
        self.last.unwrap_or(1)
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * export::workspace(shape, threads) as u64
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        let reduction = Reduction { queries: OverQueries::Max, group: OverGroup::Max };
        Some(ScoringPlan::Recent { queries: self.last, reduction, then: Then::Nothing })
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let reduction = Reduction { queries: OverQueries::Max, group: OverGroup::Max };
        recent_columns(context, self.last.unwrap_or(usize::MAX), reduction, scores)?;
        Ok(())
    }
}

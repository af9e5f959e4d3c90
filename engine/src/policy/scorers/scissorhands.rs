//! Scissorhands (arXiv 2305.17118): tokens that were important stay important. A record counts, over a history of recent
//! queries, how often a token got less than an even share of the attention (`1 / t` of `t` tokens); those with the
//! highest counts go, and a few recent tokens always stay.
//!
//! The score is minus that count, averaged over the query heads of the group. A token younger than the history is
//! counted only by the queries that saw it. Counts are whole numbers, so many tie; of equals the later is retained. The paper
//! drops half of the budget at once whenever the cache is full; here `every:steps=64` cuts back to the budget that often,
//! over the tokens that are still cached.

use super::snapkv::recent_columns;
use crate::attention::Shape;
use crate::attention::export::{self, OverGroup, OverQueries, Reduction};
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic, Then};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "scissorhands",
    about: "keeps tokens that recent queries rarely gave less than an even fraction of attention; the paper's is near scissorhands+every:steps=64",
    paper: "2305.17118",
    parameters: &[
        Parameter { name: "history", default: "400", about: "recent queries that count" },
        Parameter { name: "window", default: "10", about: "recent tokens kept" },
    ],
    build: |named, _| {
        let (history, window) = (named.count("history", 400, 1)?, named.count("window", 10, 0)?);
        Ok(Policy::after_prefill(Scissorhands { history, window }))
    },
};

struct Scissorhands {
    history: usize,
    window: usize,
}

impl Scorer for Scissorhands {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: 0, window: self.window }
    }

    fn recent_queries(&self) -> usize {
        self.history
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * export::workspace(shape, threads) as u64
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        let reduction = Reduction { queries: OverQueries::CountBelowEven, group: OverGroup::Mean };
        Some(ScoringPlan::Recent { queries: Some(self.history), reduction, then: Then::Negated })
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let reduction = Reduction { queries: OverQueries::CountBelowEven, group: OverGroup::Mean };
        recent_columns(context, self.history, reduction, scores)?;
        scores.iter_mut().for_each(|score| *score = -*score);
        Ok(())
    }
}

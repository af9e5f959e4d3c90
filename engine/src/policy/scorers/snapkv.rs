//! SnapKV (arXiv 2404.14469): what the last queries of the prompt look at is what the answer will need.
//!
//! The score is the attention that the last `window` queries give a token, reduced over these queries, then over the
//! query heads of the group, then smoothed by a pool of width `kernel` along the sequence; the last `local` tokens and
//! the first `sink` stay. Defaults and order of steps are those of NVIDIA's kvpress (window 64, average pool 5, means).
//! Public implementations differ in all of these, so each is a preset:
//!
//! - `snapkv@kvpress` is `snapkv`.
//! - `snapkv@reference`: FasterDecoding/SnapKV, `snapkv/monkeypatch/snapkv_utils.py` at 395b54d, where `init_snapkv`
//!   sets window 32 and kernel 5, average pool, and sums over queries. It caches keys and values per query head; here a
//!   KV head has one list, with the mean over its group.
//! - `snapkv@factory`: KVCache-Factory's runner, window 8 and a max pool of 7 over sums.
//! - `snapkv@frontier`: sparse-frontier's class, window 256, average pool 7 over all columns, the window's own included
//!   (`span=all`), with the last 128 tokens and the first 4 protected. `queries=max,group=max` is how it scores for
//!   Ada-SnapKV.

use super::pool::{Kind, Pool};
use crate::attention::Shape;
use crate::attention::export::{self, OverGroup, OverQueries, Reduction};
use crate::memory::Label;
use crate::named::{Named, NamedError, Parameter};
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic, Then};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "snapkv",
    about: "keeps what the last queries of the prompt attend to, and these last tokens",
    paper: "2404.14469",
    parameters: &[
        Parameter { name: "window", default: "64", about: "observing queries" },
        Parameter { name: "kernel", default: "5", about: "width of the pool, odd" },
        Parameter { name: "pool", default: "avg", about: "avg or max" },
        Parameter { name: "queries", default: "mean", about: "over the observing queries: mean, sum or max" },
        Parameter { name: "group", default: "mean", about: "then over the query heads of a group: mean, max or sum" },
        Parameter { name: "span", default: "past", about: "what is pooled: past (before the window) or all" },
        Parameter { name: "local", default: "window", about: "recent tokens kept; window: as many as observe" },
        Parameter { name: "sink", default: "0", about: "first tokens kept" },
    ],
    build: |named, _| Ok(Policy::after_prefill(SnapKv::of(named)?)),
};

struct SnapKv {
    window: usize,
    pool: Pool,
    reduction: Reduction,
    mean: bool,
    all: bool,
    protect: Protect,
}

impl SnapKv {
    fn of(named: &Named) -> Result<Self, NamedError> {
        let window = named.count("window", 64, 1)?;
        let queries = match named.text("queries") {
            None | Some("mean" | "sum") => OverQueries::Sum,
            Some("max") => OverQueries::Max,
            Some(_) => return Err(named.wrong("queries", "mean, sum or max".into())),
        };
        let group = match named.text("group") {
            None | Some("mean") => OverGroup::Mean,
            Some("sum") => OverGroup::Sum,
            Some("max") => OverGroup::Max,
            Some(_) => return Err(named.wrong("group", "mean, max or sum".into())),
        };
        let all = match named.text("span") {
            None | Some("past") => false,
            Some("all") => true,
            Some(_) => return Err(named.wrong("span", "past or all".into())),
        };
        let local = match named.text("local") {
            None | Some("window") => window,
            Some(_) => named.count("local", window, 0)?,
        };
        if !all && local < window {
            let why = format!("at least the window of {window}, whose tokens have no score unless span=all");
            return Err(named.wrong("local", why));
        }
        Ok(SnapKv {
            window,
            pool: Pool::of(named, 5, Kind::Average)?,
            reduction: Reduction { queries, group },
            mean: matches!(named.text("queries"), None | Some("mean")),
            all,
            protect: Protect { sink: named.count("sink", 0, 0)?, window: local },
        })
    }

    fn then(&self) -> Then {
        Then::Pooled { mean: self.mean, pool: self.pool, behind: if self.all { 0 } else { self.window } }
    }
}

impl Scorer for SnapKv {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    fn protect(&self, _: usize) -> Protect {
        self.protect
    }

    fn recent_queries(&self) -> usize {
        self.window
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * export::workspace(shape, threads).max(shape.kv_len) as u64
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::Recent { queries: Some(self.window), reduction: self.reduction, then: self.then() })
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let Shape { kv_heads, kv_len, .. } = context.call.shape;
        let observers = recent_columns(context, self.window, self.reduction, scores)?;
        self.then().apply(scores, [kv_heads, kv_len], |list| context.len(list), observers, context.arena)?;
        Ok(())
    }
}

/// The softmax of the last `window` queries, reduced to a number for each token, `[B, Hkv, kv_len]`; returns how many
/// queries there were. Takes [`export::workspace`] from the arena.
pub(super) fn recent_columns(
    context: &Context<'_>,
    window: usize,
    reduction: Reduction,
    scores: &mut [f32],
) -> Result<usize, PolicyError> {
    let shape = context.call.shape;
    let queries = shape.q_len.saturating_sub(window)..shape.q_len;
    let elements = export::workspace(&shape, context.call.cpu.threads());
    let mut scratch = context.arena.alloc(Label::Workspace, elements)?;
    export::columns(&context.call, context.lse, queries.clone(), reduction, scores, &mut scratch);
    Ok(queries.len())
}

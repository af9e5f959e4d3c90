//! Eviction policies: who stays in the cache.
//!
//! A policy is a scorer x an allotment x a schedule x an action. The scorer gives every cached token of every KV head
//! an importance; the allotment divides the budget over heads; the schedule says when tokens are judged; the action
//! here is always to drop the loser, and its bytes are given back. A published method is one combination with
//! defaults: adding one is one file with a [`PolicyEntry`] and one line in [`POLICIES`], and a crate of your own
//! adds its entries to a [`Registry`].

mod budget;
mod dms;
mod full;
mod h2o;
mod judge;
mod keydiff;
mod knorm;
mod oracle;
mod random;
mod registry;
mod select;
mod snapkv;
mod streaming_llm;
mod tensors;
mod tova;

pub use budget::{Budget, BudgetError};
pub use judge::Scored;
pub use registry::{PolicyEntry, Registry};
pub use select::{Selection, select, selection_bytes};
pub use tensors::{Judged, judge};

use crate::attention::Forward;
use crate::memory::{Arena, ArenaError};
use crate::named::NamedError;

/// The policies that come with kvsieve, in the order in which they are listed.
pub const POLICIES: &[PolicyEntry] = &[
    full::ENTRY,
    random::ENTRY,
    streaming_llm::ENTRY,
    knorm::ENTRY,
    keydiff::ENTRY,
    h2o::ENTRY,
    snapkv::ENTRY,
    tova::ENTRY,
    dms::ENTRY,
    oracle::ENTRY,
];

/// What went wrong in a policy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// Its name or a parameter.
    #[error(transparent)]
    Named(#[from] NamedError),
    /// The budget.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A statistic that it needs is not there.
    #[error("policy '{policy}' needs {what}")]
    Missing {
        /// The policy.
        policy: &'static str,
        /// What it needs and where that comes from.
        what: &'static str,
    },
    /// A score that is no number.
    #[error("policy gave the score {score} to slot {slot} of KV head {head}, sequence {batch}; scores must be numbers")]
    Score {
        /// The score.
        score: f32,
        /// Sequence.
        batch: usize,
        /// KV head.
        head: usize,
        /// Slot in the head's list.
        slot: usize,
    },
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

/// What a scorer looks at, which is what it costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing but positions.
    Positions,
    /// The keys: one read of the cache.
    Keys,
    /// The attention of the last few queries: a pass of these queries over the keys.
    RecentQueries,
    /// The attention of every query so far: a pass over the context, and one per decoded token.
    AllQueries,
    /// The queries that will come: an upper bound, not a policy one can run.
    FutureQueries,
}

impl Needs {
    /// In words, for lists.
    pub fn describe(self) -> &'static str {
        match self {
            Needs::Positions => "nothing but positions",
            Needs::Keys => "keys (one read of K)",
            Needs::RecentQueries => "attention of the last queries (one thin pass)",
            Needs::AllQueries => "attention of all queries (one tiled pass, one row per step)",
            Needs::FutureQueries => "attention of future queries (bound, not runnable)",
        }
    }
}

/// Tokens that are never judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Protect {
    /// The first tokens of the sequence, by position.
    pub sink: usize,
    /// The latest tokens of a head's list.
    pub window: usize,
}

/// What a scorer sees.
pub struct Context<'a> {
    /// The queries so far (bottom-right aligned with the keys), the cached keys and values, the mask. `kv_len` of its
    /// shape is the longest list; lists may be shorter.
    pub call: Forward<'a>,
    /// Log-sum-exps of these queries over these keys, `[B, Hq, Lq]`.
    pub lse: &'a [f32],
    /// Queries that will come, for the oracle.
    pub future: Option<Future<'a>>,
    /// Attention that each token received from every query so far, `[B, Hkv, kv_len]`, for [`Needs::AllQueries`].
    pub accumulated: Option<&'a [f32]>,
    /// Position in its sequence of the token in `(list, slot)`.
    pub positions: &'a (dyn Fn(usize, usize) -> usize + Sync),
    /// Tokens that each head may keep.
    pub budget_tokens: usize,
    /// Seed of the cell.
    pub seed: u64,
    /// Where scratch memory comes from.
    pub arena: &'a Arena,
}

/// Queries that will come, over all keys that will be there.
pub struct Future<'a> {
    /// The future queries and the whole sequence's keys and values.
    pub call: Forward<'a>,
    /// Their log-sum-exps, `[B, Hq, Lq]`.
    pub lse: &'a [f32],
}

/// Gives each cached token an importance.
pub trait Scorer: Send + Sync {
    /// What it looks at.
    fn needs(&self) -> Needs;

    /// Tokens that it never judges, under a budget of so many tokens a head.
    fn protect(&self, _budget_tokens: usize) -> Protect {
        Protect::default()
    }

    /// Scratch bytes of [`Scorer::score`]: what it takes from the arena at most at one time.
    fn scratch_bytes(&self, _call: &crate::attention::Shape, _threads: usize) -> u64 {
        0
    }

    /// Writes `scores` `[B, Hkv, kv_len]`: higher stays. Entries past the end of a shorter list are not looked at.
    ///
    /// # Errors
    /// When something it needs is missing.
    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError>;
}

/// How a budget is divided over the heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allotment {
    /// Every head keeps the same number.
    Uniform,
    /// One threshold for all heads of a sequence: a head keeps what scores above it.
    Threshold,
}

/// When tokens are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// Once, after prefill.
    AfterPrefill,
    /// After prefill, and back to the budget every so many decode steps.
    EverySteps(usize),
    /// After prefill, and then each token once, when it leaves the protected window: it stays if it scores above the
    /// threshold that prefill set.
    Delayed,
}

/// A policy: scorer x allotment x schedule; a loser is dropped.
pub struct Policy {
    /// Who is important; `None` keeps everything.
    pub scorer: Option<Box<dyn Scorer>>,
    /// How the budget is divided.
    pub allotment: Allotment,
    /// When tokens are judged.
    pub schedule: Schedule,
}

impl Policy {
    /// A policy that judges once after prefill and gives every head the same budget.
    pub fn after_prefill(scorer: impl Scorer + 'static) -> Self {
        let scorer: Option<Box<dyn Scorer>> = Some(Box::new(scorer));
        Policy { scorer, allotment: Allotment::Uniform, schedule: Schedule::AfterPrefill }
    }

    /// The same with evictions every `steps` decode steps (0: never after prefill).
    pub fn every(self, steps: usize) -> Self {
        let schedule = if steps == 0 { Schedule::AfterPrefill } else { Schedule::EverySteps(steps) };
        Policy { schedule, ..self }
    }

    /// What its scorer looks at.
    pub fn needs(&self) -> Option<Needs> {
        self.scorer.as_ref().map(|scorer| scorer.needs())
    }
}

/// Scores with the protected tokens above all others: recent ones at the maximum + 1 (as kvpress does), sinks at the
/// maximum + 2. Returns the maximum; refuses scores that are not numbers.
///
/// # Errors
/// Names the first score that is NaN or infinite.
pub fn protect_scores(context: &Context<'_>, protect: Protect, scores: &mut [f32]) -> Result<f32, PolicyError> {
    let shape = context.call.shape;
    let len = |list: usize| context.call.kv.len(list / shape.kv_heads, list % shape.kv_heads);
    let mut max = f32::NEG_INFINITY;
    for (list, scores) in scores.chunks(shape.kv_len).enumerate() {
        for (slot, &score) in scores[..len(list)].iter().enumerate() {
            if !score.is_finite() {
                let (batch, head) = (list / shape.kv_heads, list % shape.kv_heads);
                return Err(PolicyError::Score { score, batch, head, slot });
            }
            max = max.max(score);
        }
    }
    for (list, scores) in scores.chunks_mut(shape.kv_len).enumerate() {
        let scores = &mut scores[..len(list)];
        let recent = scores.len().saturating_sub(protect.window);
        scores[recent..].fill(max + 1.0);
        for (slot, score) in scores.iter_mut().enumerate().take(protect.sink) {
            // Lists are in order of position: past the sinks there are none.
            if (context.positions)(list, slot) >= protect.sink {
                break;
            }
            *score = max + 2.0;
        }
    }
    Ok(max)
}

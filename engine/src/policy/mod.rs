//! Eviction policies: which tokens are retained.
//!
//! A policy is a scorer x a budget allocation x a schedule x an action. The scorer gives every cached token of every KV head
//! an importance; the budget allocation divides the budget over layers and heads; the schedule says when tokens are evicted;
//! the action says what becomes of an evicted token before its bytes are given back. A KV selection instead keeps everything and chooses
//! what each decode step reads. A published method is a [`PolicyEntry`]:
//! a scorer with the method's defaults; [`PartEntry`]s replace one of these, as in `snapkv:window=64+ada:floor=0.2`,
//! and a [`Preset`] names a combination. Adding one is one file and one line in [`POLICIES`], [`PARTS`] or [`PRESETS`];
//! a crate of your own adds its entries to a [`Registry`].

pub mod action;
pub mod allocation;
mod assets;
mod budget;
mod catalogue;
mod context;
pub mod cuda;
mod fits;
pub mod gates;
pub(crate) mod least_squares;
mod linear;
mod list;
pub(crate) mod network;
mod presets;
mod published;
mod registry;
mod schedule;
mod scored;
mod scorers;
mod scoring_plan;
mod select;
pub mod sparse;

pub use assets::{Assets, Axis, Learned, Parameters, PolicyFile};
pub use budget::{Budget, BudgetError};
pub use catalogue::{cost_class, describe, markdown};
pub use context::{BeforeRope, Context, Future, Protect, Reconstruction, Statistic, Weighing, list_number};
pub use gates::DecidedBy;
pub use list::{List, each_list};
use network::Network;
pub use presets::PRESETS;
pub use registry::{ChangeScorer, Part, PartEntry, PolicyEntry, Preset, Registry};
pub use schedule::{Decoding, Schedule};
pub use scored::Scored;
pub use scorers::{keydiff, kvzip, qfilters, triattention};
pub use scoring_plan::{ScoringPlan, Then};
pub use select::{Selection, select, select_leaving, selection_bytes, tie_rate, tie_rate_of};

use crate::attention::Shape;
use crate::memory::ArenaError;
use crate::named::NamedError;
use crate::tensor::file::FileError;
use action::Action;
use allocation::{OverHeads, OverLayers};
use sparse::KvSelection;

/// The methods that come with kvsieve, in the order in which they are listed.
pub const POLICIES: &[PolicyEntry] = &[
    scorers::full::ENTRY,
    scorers::random::ENTRY,
    scorers::streaming_llm::ENTRY,
    scorers::knorm::ENTRY,
    scorers::keydiff::ENTRY,
    scorers::lagkv::ENTRY,
    scorers::cur::ENTRY,
    scorers::leverage::ENTRY,
    scorers::non_causal::ENTRY,
    scorers::compactor::ENTRY,
    scorers::expected_attention::ENTRY,
    scorers::cap::ENTRY,
    scorers::qfilters::ENTRY,
    scorers::triattention::ENTRY,
    scorers::h2o::ENTRY,
    scorers::h2o::OBSERVED,
    scorers::snapkv::ENTRY,
    scorers::tova::ENTRY,
    scorers::morphkv::ENTRY,
    scorers::scissorhands::ENTRY,
    scorers::max_attention::ENTRY,
    scorers::rms_attention::ENTRY,
    scorers::r_kv::ENTRY,
    scorers::kvzip::ENTRY,
    scorers::kvgrad::ENTRY,
    scorers::gate::ENTRY,
    scorers::dms::ENTRY,
    scorers::dmc::ENTRY,
    scorers::oracle::ENTRY,
    scorers::oracle_output::ENTRY,
    sparse::quest::ENTRY,
    sparse::think::ENTRY,
];

/// What may replace a part of a method, in the order in which it is listed.
pub const PARTS: &[PartEntry] = &[
    allocation::uniform::ENTRY,
    allocation::pyramid::ENTRY,
    allocation::ada::ENTRY,
    allocation::global::ENTRY,
    allocation::global::THRESHOLD,
    allocation::duo::ENTRY,
    allocation::simlayer::ENTRY,
    allocation::table::ENTRY,
    schedule::ONCE,
    schedule::CHUNKS,
    schedule::EVERY,
    schedule::DELAYED,
    scorers::protect::ENTRY,
    scorers::vnorm::ENTRY,
    scorers::critical::ENTRY,
    scorers::chunkkv::ENTRY,
    scorers::blocks::ENTRY,
    action::drop::ENTRY,
    action::merge::ENTRY,
    action::cam::ENTRY,
    action::accumulate::ENTRY,
    action::matching::ENTRY,
    action::rerotate::ENTRY,
];

/// What went wrong in a policy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// Its name or a parameter.
    #[error(transparent)]
    Named(#[from] NamedError),
    /// Parts that do not go together.
    #[error("policy '{policy}': {reason}")]
    Combination {
        /// The policy as it was written.
        policy: String,
        /// Why it makes no sense.
        reason: String,
    },
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
    #[error(
        "policy gave the score {score} to slot {slot} of KV head {head}, sequence {batch}; scores must be numbers: are the inputs too large?"
    )]
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
    /// Its file, or a tensor in it, in words.
    #[error("{0}")]
    File(String),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl From<FileError> for PolicyError {
    fn from(error: FileError) -> Self {
        PolicyError::File(error.to_string())
    }
}

/// Gives each cached token an importance.
pub trait Scorer: Send + Sync {
    /// What it looks at besides positions.
    fn needs(&self) -> Vec<Statistic>;

    /// The scorer whose scores it changes, for one that makes another of one. What it does not say otherwise is as of that.
    fn inner(&self) -> Option<&dyn Scorer> {
        None
    }

    /// Says why it means nothing, if so; asked once, when a policy is built.
    ///
    /// # Errors
    /// In these cases.
    fn check(&self) -> Result<(), &'static str> {
        self.inner().map_or(Ok(()), |inner| inner.check())
    }

    /// Whether a token's score says the same in every eviction step, whatever else a list holds by then and whatever is asked: what
    /// delayed eviction compares. That of a gate does, that of attention does not.
    fn is_absolute(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_absolute())
    }

    /// Lists over which it takes a mean of scores, slot by slot, so that they must hold the same tokens.
    fn averages(&self) -> Averages {
        self.inner().map_or(Averages::Nothing, |inner| inner.averages())
    }

    /// Tokens that it never evicts, under a budget of so many tokens a head.
    fn protect(&self, budget_tokens: usize) -> Protect {
        self.inner().map_or_else(Protect::default, |inner| inner.protect(budget_tokens))
    }

    /// How many of the latest queries it looks at in an eviction step between decode steps.
    fn recent_queries(&self) -> usize {
        self.inner().map_or(1, |inner| inner.recent_queries())
    }

    /// Scratch bytes of [`Scorer::score`]: what it takes from the arena at most at one time. The shape is that of the
    /// [`Context`]'s call, or of its future's for a scorer that looks there.
    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        self.inner().map_or(0, |inner| inner.scratch_bytes(shape, threads))
    }

    /// What it gives a token once, as it arrives, for a scorer that looks at [`Statistic::HiddenStates`]: from the token's
    /// hidden state in a layer, `hidden` `[hidden]`, a number for each KV head, `gates` `[Hkv]`. The cache carries these
    /// with the token; [`Context::gates`] shows them to every eviction.
    fn gate(&self, layer: usize, hidden: &[f32], gates: &mut [f32]) {
        if let Some(inner) = self.inner() {
            inner.gate(layer, hidden, gates);
        }
    }

    /// The function that [`Scorer::gate`] computes and the factor that it gives it, for a GPU to compute; `None` for a scorer without one.
    fn network(&self) -> Option<(&Network, f32)> {
        self.inner()?.network()
    }

    /// How a GPU gives the same scores; `None` for a scorer that has no form for one.
    fn scoring_plan(&self) -> Option<ScoringPlan> {
        None
    }

    /// Writes `scores` `[B, Hkv, kv_len]`: higher is retained. Entries past the end of a shorter list are not looked at.
    ///
    /// # Errors
    /// When something it needs is missing.
    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError>;

    /// Changes scores after the budget was divided by them: `counts` tokens stay of each list. For a method that
    /// chooses the tokens of a head in another way than it divides the budget. `scratch` is `[B, Hkv, kv_len]`.
    ///
    /// # Errors
    /// When something it needs is missing.
    fn refine(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        counts: &[usize],
        scratch: &mut [f32],
    ) -> Result<(), PolicyError> {
        self.inner().map_or(Ok(()), |inner| inner.refine(context, scored, counts, scratch))
    }
}

/// See [`Scorer::averages`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Averages {
    /// None.
    Nothing,
    /// Those of a layer's KV heads.
    Heads,
    /// Those of a KV head in all layers.
    Layers,
}

/// A policy: scorer x budget allocation x schedule x action.
pub struct Policy {
    /// Who is important; `None` keeps everything.
    pub scorer: Option<Box<dyn Scorer>>,
    /// How the budget is divided over layers.
    pub layers: Box<dyn OverLayers>,
    /// How a layer's budget is divided over its heads.
    pub heads: Box<dyn OverHeads>,
    /// When tokens are evicted.
    pub schedule: Schedule,
    /// What becomes of an evicted token; `None` drops it.
    pub action: Option<Box<dyn Action>>,
    /// Whether retained keys are rotated to positions inside the cache.
    pub rerotates: bool,
    /// What decode steps read, for a policy that keeps everything; `None` reads all that is there.
    pub selection: Option<Box<dyn KvSelection>>,
    /// How the model repeats its context before it is evicted from, with [`Statistic::Reconstruction`].
    pub reconstruction: Option<Reconstruction>,
    /// Whose hidden state a token's gate comes from, for a scorer that looks at [`Statistic::HiddenStates`].
    pub decided_by: DecidedBy,
    /// Which tensors of a policy file it was built from.
    pub parameters: Parameters,
}

impl Policy {
    /// A policy that keeps everything.
    pub fn full() -> Self {
        Policy {
            scorer: None,
            layers: Box::new(allocation::uniform::Uniform),
            heads: Box::new(allocation::uniform::Uniform),
            schedule: Schedule::default(),
            action: None,
            rerotates: false,
            selection: None,
            reconstruction: None,
            decided_by: DecidedBy::Itself,
            parameters: Parameters::default(),
        }
    }

    /// Whether nothing is evicted and all is read, whatever the budget.
    pub fn keeps_all(&self) -> bool {
        self.scorer.is_none() && self.selection.is_none()
    }

    /// A policy that keeps everything and reads a part of it in each decode step.
    pub fn selecting(selection: impl KvSelection + 'static) -> Self {
        Policy { selection: Some(Box::new(selection)), ..Policy::full() }
    }

    /// A policy that evicts once after prefill, gives every head the same budget, and drops evicted tokens.
    pub fn after_prefill(scorer: impl Scorer + 'static) -> Self {
        Policy { scorer: Some(Box::new(scorer)), ..Policy::full() }
    }

    /// What its scorer, its budget allocations, its action and its selection look at, each once.
    pub fn needs(&self) -> Vec<Statistic> {
        let mut needs = self.scorer.as_ref().map_or(Vec::new(), |scorer| scorer.needs());
        needs.extend(self.layers.needs());
        needs.extend(self.heads.needs());
        needs.extend(self.action.as_ref().map_or(Vec::new(), |action| action.needs()));
        needs.extend(self.selection.as_ref().map_or(Vec::new(), |selection| selection.needs()));
        needs.sort_unstable();
        needs.dedup();
        needs
    }

    /// How many of the latest queries its scorer and its action look at.
    pub fn recent_queries(&self) -> usize {
        let of_scorer = self.scorer.as_ref().map_or(0, |scorer| scorer.recent_queries());
        of_scorer.max(self.action.as_ref().map_or(0, |action| action.recent_queries()))
    }

    /// Whether it leaves all lists equally long.
    pub fn is_even(&self) -> bool {
        self.layers.is_even() && self.heads.is_even() && self.schedule.decoding != Decoding::Delayed
    }

    /// Whether it looks at attention, so that queries come with their log-sum-exps.
    pub fn looks_at_attention(&self) -> bool {
        let attention = [Statistic::RecentAttention, Statistic::AccumulatedAttention];
        self.needs().iter().any(|need| attention.contains(need))
    }

    /// Whether it looks at this.
    pub fn looks_at(&self, statistic: Statistic) -> bool {
        self.needs().contains(&statistic)
    }
}

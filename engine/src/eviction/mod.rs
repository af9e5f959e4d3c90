//! Eviction sessions: a policy at work on the lists of a cache, from the first chunk of prefill to the last decode step.
//!
//! A [`Session`] owns the protocol, which is the same everywhere: when the schedule asks for an eviction step, which rule
//! chooses in it, the best score that each list lost, and what the steps cost. What it takes to score, select and evict on
//! a device is a [`Backend`]: [`CpuBackend`] for a [`crate::cache::PagedCache`], [`cuda`] for a cache in a GPU's memory. Tensors,
//! experiments and models all evict through here. Queries that later steps look at are held in an [`ObservationWindow`].

mod attention;
mod cpu;
pub mod cuda;
mod loss;
mod tensors;
mod window;

pub(crate) use attention::add_cumulative_attention;
pub use attention::{attention_sums, recompute_lse};
pub use cpu::{CpuBackend, View};
pub use loss::{Asked, Loss, Own, loss};
pub use tensors::{Given, Retained, retain};
pub use window::{ObservationWindow, Span, WindowShape};

use crate::policy::{Decoding, Policy, Statistic};

/// What a session is to do.
#[derive(Clone, Copy)]
pub struct Plan<'p> {
    /// The policy; only one with a scorer evicts.
    pub policy: &'p Policy,
    /// Tokens that each KV head may keep on average.
    pub budget_tokens: usize,
    /// For policies that draw numbers.
    pub seed: u64,
}

/// When an eviction step comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Behind a chunk of prefill.
    Chunk {
        /// The last one, with which the context ends.
        last: bool,
    },
    /// Behind a decode step, when [`Session::advance`] says so.
    Step,
}

/// By what an eviction step chooses.
#[derive(Debug, Clone, Copy)]
pub enum Rule<'a> {
    /// All lists go back to the budget.
    Budget,
    /// Delayed eviction (arXiv 2506.05345): of each list only the token that has just left the protected window may go, and
    /// goes unless it scores above all that the list lost.
    Delayed {
        /// Highest score that each list lost in prefill, in the order of the view's lists.
        best_evicted: &'a [f32],
    },
}

/// What a backend has chosen.
pub struct Chosen<S> {
    /// The tokens that are retained.
    pub selection: S,
    /// Highest score that each list loses; minus infinity where it loses nothing.
    pub best_evicted: Vec<f32>,
    /// Nanoseconds of scoring, and of choosing.
    pub score_ns: u64,
    /// Nanoseconds of choosing.
    pub select_ns: u64,
    /// Fraction of scored tokens whose score equals that of another of the same list, where the backend is to count them.
    pub tie_rate: f64,
}

/// Scores, selects and evicts on one device.
pub trait Backend {
    /// Where keys and values lie.
    type Cache;
    /// Lists that are scored together, and what a policy sees of them besides the cache.
    type View<'v>;
    /// The tokens that are retained.
    type Selection;
    /// What can go wrong.
    type Error;

    /// Adds what tokens receive of the attention of a view's queries to what they received before; returns nanoseconds.
    ///
    /// # Errors
    /// When there is no room, or a kernel fails.
    fn accumulate(&self, cache: &mut Self::Cache, view: &Self::View<'_>) -> Result<u64, Self::Error>;

    /// Scores the lists of a view and chooses what is retained.
    ///
    /// # Errors
    /// When the policy lacks a statistic or gives scores that are no numbers, or there is no room.
    fn choose(
        &self,
        plan: &Plan<'_>,
        cache: &Self::Cache,
        view: &Self::View<'_>,
        rule: Rule<'_>,
    ) -> Result<Chosen<Self::Selection>, Self::Error>;

    /// Retains what was chosen; returns how many list-tokens were evicted.
    ///
    /// # Errors
    /// When the policy's action or re-rotation of keys lacks something, or there is no room.
    fn evict(
        &self,
        plan: &Plan<'_>,
        cache: &mut Self::Cache,
        view: &Self::View<'_>,
        selection: &Self::Selection,
    ) -> Result<Evicted, Self::Error>;

    /// Gives memory that no page needs back; returns nanoseconds.
    ///
    /// # Errors
    /// When a kernel fails.
    fn release(&self, cache: &mut Self::Cache) -> Result<u64, Self::Error>;
}

/// What an eviction took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evicted {
    /// List-tokens that are gone.
    pub tokens: u64,
    /// Nanoseconds.
    pub ns: u64,
}

/// What the eviction steps of a session came to so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// List-tokens that were evicted.
    pub evicted_tokens: u64,
    /// Nanoseconds of scoring, attention that is accumulated included.
    pub score_ns: u64,
    /// Nanoseconds of selecting and evicting.
    pub evict_ns: u64,
    /// Fraction of tied scores in the latest step behind a chunk of prefill.
    pub tie_rate: f64,
}

/// A policy at work: where its schedule stands, and what the steps so far came to.
#[derive(Clone)]
pub struct Session<'p> {
    plan: Plan<'p>,
    /// Decode steps so far.
    steps: usize,
    /// Highest score that each list lost in the eviction steps of prefill.
    best_evicted: Vec<f32>,
    /// Whether the last of these was taken.
    is_decoding: bool,
    totals: Totals,
}

impl<'p> Session<'p> {
    /// Before the first token.
    pub fn new(plan: Plan<'p>) -> Self {
        Session { plan, steps: 0, best_evicted: Vec::new(), is_decoding: false, totals: Totals::default() }
    }

    /// What it is to do.
    pub fn plan(&self) -> &Plan<'p> {
        &self.plan
    }

    /// What its eviction steps came to so far.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Whether the context was evicted from, so that what comes are decode steps.
    pub fn is_decoding(&self) -> bool {
        self.is_decoding
    }

    /// Whether another eviction step may come.
    pub fn is_open(&self) -> bool {
        !self.is_decoding() || self.plan.policy.schedule.decoding != Decoding::Never
    }

    /// Whether tokens carry the attention that they receive.
    pub fn accumulates(&self) -> bool {
        self.plan.policy.looks_at(Statistic::AccumulatedAttention)
    }

    /// Counts a decode step; says whether an eviction step is due behind it.
    pub fn advance(&mut self) -> bool {
        self.steps += 1;
        match self.plan.policy.schedule.decoding {
            Decoding::Never => false,
            Decoding::EverySteps(every) => self.steps.is_multiple_of(every),
            Decoding::Delayed => true,
        }
    }

    /// For a policy that looks at accumulated attention: adds that of a view's queries.
    ///
    /// # Errors
    /// As [`Backend::accumulate`].
    pub fn accumulate<B: Backend>(
        &mut self,
        backend: &B,
        cache: &mut B::Cache,
        view: &B::View<'_>,
    ) -> Result<(), B::Error> {
        if self.accumulates() {
            self.totals.score_ns += backend.accumulate(cache, view)?;
        }
        Ok(())
    }

    /// An eviction step over all lists, those of each view scored together.
    ///
    /// # Errors
    /// As [`Backend::choose`] and [`Backend::evict`].
    pub fn evict<B: Backend>(
        &mut self,
        backend: &B,
        cache: &mut B::Cache,
        views: &[B::View<'_>],
        moment: Moment,
    ) -> Result<(), B::Error> {
        let mut best_evicted = Vec::new();
        for view in views {
            let chosen = backend.choose(&self.plan, cache, view, self.rule(moment, best_evicted.len()))?;
            self.count(&chosen, moment);
            best_evicted.extend(chosen.best_evicted);
            let evicted = backend.evict(&self.plan, cache, view, &chosen.selection)?;
            self.totals.evicted_tokens += evicted.tokens;
            self.totals.evict_ns += evicted.ns;
        }
        self.totals.evict_ns += backend.release(cache)?;
        if let Moment::Chunk { last } = moment {
            // A chunk of few tokens may evict nothing of a list: what earlier ones evicted counts as well.
            self.best_evicted.resize(best_evicted.len(), f32::NEG_INFINITY);
            self.best_evicted.iter_mut().zip(best_evicted).for_each(|(most, lost)| *most = most.max(lost));
            self.is_decoding |= last;
        }
        Ok(())
    }

    /// Highest score that each list lost in the eviction steps of prefill; empty before the first.
    pub fn best_evicted(&self) -> &[f32] {
        &self.best_evicted
    }

    /// Counts time that was spent on log-sum-exps before a step.
    pub fn add_score_ns(&mut self, ns: u64) {
        self.totals.score_ns += ns;
    }

    /// Counts what an eviction step has evicted that was carried out in two halves.
    pub fn add_evicted(&mut self, tokens: u64) {
        self.totals.evicted_tokens += tokens;
    }

    /// The rule of an eviction step, for the lists from `first` on.
    pub fn rule(&self, moment: Moment, first: usize) -> Rule<'_> {
        match (moment, self.plan.policy.schedule.decoding) {
            (Moment::Step, Decoding::Delayed) if self.is_decoding => {
                Rule::Delayed { best_evicted: &self.best_evicted[first..] }
            }
            _ => Rule::Budget,
        }
    }

    fn count<S>(&mut self, chosen: &Chosen<S>, moment: Moment) {
        self.totals.score_ns += chosen.score_ns;
        self.totals.evict_ns += chosen.select_ns;
        if let Moment::Chunk { .. } = moment {
            self.totals.tie_rate = chosen.tie_rate;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Registry;
    use std::cell::RefCell;
    use std::convert::Infallible;

    /// Tells what lists lost in each step, and notes the rule that it was given.
    struct Told {
        lost: RefCell<Vec<Vec<f32>>>,
        rules: RefCell<Vec<Option<Vec<f32>>>>,
    }

    impl Backend for Told {
        type Cache = ();
        type View<'v> = ();
        type Selection = ();
        type Error = Infallible;

        fn accumulate(&self, (): &mut (), (): &()) -> Result<u64, Infallible> {
            Ok(0)
        }

        fn choose(&self, _: &Plan<'_>, (): &(), (): &(), rule: Rule<'_>) -> Result<Chosen<()>, Infallible> {
            self.rules.borrow_mut().push(match rule {
                Rule::Budget => None,
                Rule::Delayed { best_evicted } => Some(best_evicted.to_vec()),
            });
            let best_evicted = self.lost.borrow_mut().remove(0);
            let tie_rate = self.rules.borrow().len() as f64;
            Ok(Chosen { selection: (), best_evicted, score_ns: 0, select_ns: 0, tie_rate })
        }

        fn evict(&self, _: &Plan<'_>, (): &mut (), (): &(), (): &()) -> Result<Evicted, Infallible> {
            Ok(Evicted::default())
        }

        fn release(&self, (): &mut ()) -> Result<u64, Infallible> {
            Ok(0)
        }
    }

    #[test]
    fn delayed_eviction_goes_by_what_all_chunks_lost() {
        const NOTHING: f32 = f32::NEG_INFINITY;
        let policy = Registry::default().policy("keydiff+chunks:tokens=4+delayed").unwrap();
        let mut session = Session::new(Plan { policy: &policy, budget_tokens: 4, seed: 0 });
        let lost = vec![vec![1.0, NOTHING], vec![3.0, NOTHING], vec![NOTHING, 2.0], vec![9.0, 9.0]];
        let backend = Told { lost: RefCell::new(lost), rules: RefCell::default() };
        // A last chunk of a token, of which the first list loses nothing.
        for last in [false, false, true] {
            assert!(!session.is_decoding());
            session.evict(&backend, &mut (), &[()], Moment::Chunk { last }).unwrap();
        }
        assert!(session.is_decoding() && session.advance());
        session.evict(&backend, &mut (), &[()], Moment::Step).unwrap();
        assert_eq!(backend.rules.into_inner(), [None, None, None, Some(vec![3.0, 2.0])]);
        // What goes between decode steps is no new mark.
        assert_eq!(session.best_evicted(), [3.0, 2.0]);
        assert_eq!(session.totals().tie_rate, 3.0, "ties are those of the step behind prefill");
    }
}

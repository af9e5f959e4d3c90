//! DMS without training (after arXiv 2506.05345): a threshold on a score, and delayed eviction.
//!
//! Learned DMS predicts for each token whether it will be needed and evicts it only when it leaves a window of recent
//! tokens. Here the prediction is a training-free score. Prefill chooses the one threshold that meets the budget over
//! all heads of a sequence, so heads keep different counts; while decoding, each token is judged once against that
//! threshold, when it leaves the window.

use super::keydiff::KeyDiff;
use super::knorm::Knorm;
use super::{Allotment, Context, Needs, Policy, PolicyEntry, PolicyError, Protect, Schedule, Scorer};
use crate::named::Parameter;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "dms",
    about: "score threshold over all heads, each token judged when it leaves a recent window (training-free)",
    paper: "2506.05345",
    parameters: &[
        Parameter { name: "window", default: "128", about: "recent tokens that are not judged yet" },
        Parameter { name: "scorer", default: "keydiff", about: "keydiff or knorm" },
    ],
    needs: Needs::Keys,
    build: |named| {
        let inner: Box<dyn Scorer> = match named.text("scorer") {
            None | Some("keydiff") => Box::new(KeyDiff),
            Some("knorm") => Box::new(Knorm),
            Some(_) => return Err(named.wrong("scorer", "keydiff or knorm".into())),
        };
        let scorer = Dms { inner, window: named.count("window", 128, 1)? };
        Ok(Policy { allotment: Allotment::Threshold, schedule: Schedule::Delayed, ..Policy::after_prefill(scorer) })
    },
};

struct Dms {
    inner: Box<dyn Scorer>,
    window: usize,
}

impl Scorer for Dms {
    fn needs(&self) -> Needs {
        self.inner.needs()
    }

    fn protect(&self, budget_tokens: usize) -> Protect {
        Protect { sink: 0, window: self.window.min(budget_tokens) }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.inner.score(context, scores)
    }
}

//! StreamingLLM (arXiv 2309.17453): the first tokens, which attract attention whatever they say, and the latest.
//!
//! Kept tokens keep their positions; the paper's own form re-assigns positions inside the cache.

use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, ScoringPlan, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "streaming-llm",
    about: "keeps the first tokens (attention sinks) and the latest; the paper's is streaming-llm+every",
    paper: "2309.17453",
    parameters: &[Parameter { name: "sink", default: "4", about: "first tokens kept" }],
    build: |named, _| {
        let sink = named.count("sink", 4, 0)?;
        Ok(Policy::after_prefill(StreamingLlm { sink }))
    },
};

struct StreamingLlm {
    sink: usize,
}

impl Scorer for StreamingLlm {
    fn is_absolute(&self) -> bool {
        true
    }

    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::Positions)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, &mut [], |list, scores, _| {
            scores.iter_mut().enumerate().for_each(|(slot, score)| *score = list.position(slot) as f32);
        });
        Ok(())
    }
}

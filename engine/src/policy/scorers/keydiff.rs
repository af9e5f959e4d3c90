//! KeyDiff (arXiv 2504.15364): keys unlike the others are the ones that queries pick out, so the score is the
//! negative cosine between a key and the mean of the normalised keys of its head.

use crate::attention::Shape;
use crate::policy::{Context, List, Policy, PolicyEntry, PolicyError, Scorer, ScoringPlan, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "keydiff",
    about: "keeps the keys least similar to the mean key of their head",
    paper: "2504.15364",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(KeyDiff)),
};

struct KeyDiff;

/// Norms below this count as this, so that a zero key has cosine 0 with everything.
const LEAST_NORM: f32 = 1e-12;

fn norm(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt().max(LEAST_NORM)
}

impl Scorer for KeyDiff {
    /// Nearly: the mean of the keys that stay stands for that of all.
    fn is_absolute(&self) -> bool {
        true
    }

    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys]
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::KeyUnlike)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let width = context.call.shape.head_dim;
        each_list(context, scores, &mut [], |list, scores, _| {
            let mut anchor = [0.0f32; Shape::MAX_HEAD_DIM];
            let anchor = &mut anchor[..width];
            add_to_anchor(list, anchor);
            unlike(list, anchor, scores);
        });
        Ok(())
    }
}

/// Adds the normalised keys of a list to `anchor`, `[D]`, in order.
pub fn add_to_anchor(list: &List<'_>, anchor: &mut [f32]) {
    list.keys(|_, key| {
        let norm = norm(key);
        anchor.iter_mut().zip(key).for_each(|(sum, x)| *sum += x / norm);
    });
}

/// The negative cosine between each key of a list and `anchor`.
pub fn unlike(list: &List<'_>, anchor: &[f32], scores: &mut [f32]) {
    let anchor_norm = norm(anchor);
    list.keys(|slot, key| {
        let inner: f32 = key.iter().zip(anchor).map(|(x, y)| x * y).sum();
        scores[slot] = -inner / (norm(key) * anchor_norm);
    });
}

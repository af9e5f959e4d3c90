//! What an eviction came to: bytes, which tokens are retained, and what that did to the results.

use super::late::{Late, needle_recall};
use crate::cache::CacheShape;
use crate::experiment::cell::Cell;
use crate::experiment::measure::{TrialError, Truth};
use crate::experiment::record::{Eviction, Step};
use crate::policy::Policy;
use crate::workload::Workload;
use std::collections::BTreeMap;

/// Bins of the context in which retained tokens are counted.
const BINS: usize = 64;

/// Moments of decoding that a record tells at most.
const MOMENTS: usize = 128;

/// What a trial was asked to do and what it came to, whichever device it ran on.
pub(in crate::experiment::measure) struct Evicted<'a> {
    pub cell: &'a Cell,
    pub policy: Option<&'a Policy>,
    pub budget_tokens: usize,
    pub cache: CacheShape,
    /// Most KV bytes of pages in use at one moment.
    pub kv_bytes_peak: u64,
    pub evicted_tokens: u64,
    pub tie_rate: f64,
    pub workload: &'a Workload,
}

/// What was retained after prefill.
pub(in crate::experiment::measure) struct Kept {
    pub lens: Vec<usize>,
    /// KV bytes of each list's pages.
    pub list_kv_bytes: Vec<u64>,
    /// KV bytes of pages in use.
    pub kv_bytes_live: u64,
    /// Fraction of each bin of the context that stayed, for each list of the first sequence.
    pub by_position: Vec<Vec<f32>>,
}

/// Refuses a policy that evicted nothing, or did not meet its budget; one that reads a part must have read less.
pub(in crate::experiment::measure) fn check(evicted: &Evicted<'_>, kept: &Kept, late: &Late) -> Result<(), TrialError> {
    let cell = evicted.cell;
    let Some(budget) = &cell.budget else { return Ok(()) };
    let context = cell.context_tokens;
    if evicted.policy.is_some_and(|policy| policy.selection.is_some()) {
        if late.read_bytes < late.all_bytes {
            return Ok(());
        }
        return Err(TrialError::Failed(format!(
            "the policy read no less than all: {} of {} bytes under a budget of {budget}",
            late.read_bytes, late.all_bytes
        )));
    }
    // A threshold may keep everything, or less than the budget allows.
    let is_bound = evicted.policy.is_none_or(|policy| policy.layers.threshold().is_none());
    if evicted.evicted_tokens == 0 && is_bound {
        return Err(TrialError::Failed(format!(
            "the policy evicted nothing: a budget of {budget} against a context of {context} tokens"
        )));
    }
    // A budget above the context is for what evicts while decoding.
    let (tokens, wanted) = (kept.lens.iter().sum::<usize>(), evicted.budget_tokens.min(context) * kept.lens.len());
    if tokens > wanted || is_bound && tokens < wanted {
        return Err(TrialError::Failed(format!(
            "the budget was not met: {tokens} tokens stayed in {} lists, {budget} allows {wanted}",
            kept.lens.len()
        )));
    }
    Ok(())
}

/// What a reader should know before trusting the numbers.
pub(in crate::experiment::measure) fn warnings(evicted: &Evicted<'_>) -> Vec<String> {
    let (cell, budget) = (evicted.cell, evicted.budget_tokens);
    let lists = (cell.layers, cell.kv_heads);
    let of = |policy: &Policy| {
        let few = policy.few_queries(cell.context_tokens).filter(|_| budget < cell.context_tokens);
        policy.warnings(budget, cell.context_tokens, 0, lists).into_iter().chain(few).collect()
    };
    evicted.policy.map_or(Vec::new(), of)
}

pub(in crate::experiment::measure) fn eviction(
    evicted: &Evicted<'_>,
    kept: &Kept,
    late: &Late,
    truth: &Truth,
) -> Eviction {
    let (cell, shape) = (evicted.cell, evicted.cache);
    let context = cell.context_tokens;
    let lists_of_layer = cell.batch * cell.kv_heads;
    let fullest = kept.list_kv_bytes.chunks(lists_of_layer).map(|lists| lists.iter().copied().max().unwrap_or(0));
    let kept_by_head = kept.lens.chunks(lists_of_layer).map(|layer| {
        let of_head = |head: usize| layer.iter().skip(head).step_by(cell.kv_heads).sum::<usize>();
        (0..cell.kv_heads).map(|head| of_head(head) as f64 / (cell.batch * context) as f64).collect()
    });
    let masses = truth.at.iter().zip(&truth.rows).map(|(&at, dense)| late.mass_kept(cell, at, dense));
    let mass: Option<f64> = masses.sum();
    Eviction {
        budget_tokens: evicted.budget_tokens,
        kept_fraction: kept.lens.iter().sum::<usize>() as f64 / (shape.lists() * context) as f64,
        evicted_tokens: evicted.evicted_tokens,
        kv_bytes_dense: shape.kv_bytes(std::iter::repeat_n(context, shape.lists())),
        kv_bytes_live: kept.kv_bytes_live,
        kv_bytes_peak: evicted.kv_bytes_peak,
        needle_recall: needle_recall(cell, evicted.workload, late),
        attention_mass_kept: mass.map(|mass| mass / truth.at.len() as f64),
        tie_rate: evicted.tie_rate,
        kv_bytes_read: late.read_bytes / cell.new_tokens as u64,
        kv_bytes_padded: fullest.map(|bytes| bytes * lists_of_layer as u64).sum(),
        kept_by_head: kept_by_head.collect(),
        kept_by_position: kept.by_position.clone(),
        drift_by_head: drift_by_head(cell, late, truth),
        steps: steps(cell, late, truth),
    }
}

/// Fraction of each bin of the context that stayed in each list of the first sequence, lowest layer first.
/// `positions(list)` are those of a list's tokens in the context.
pub(in crate::experiment::measure) fn by_position(
    cell: &Cell,
    positions: impl Fn(usize) -> Vec<usize>,
) -> Vec<Vec<f32>> {
    let (context, bins) = (cell.context_tokens, BINS.min(cell.context_tokens));
    let bin = |position: usize| position * bins / context;
    let mut tokens = vec![0f32; bins];
    (0..context).for_each(|position| tokens[bin(position)] += 1.0);
    let lists = (0..cell.layers).flat_map(|layer| (0..cell.kv_heads).map(move |head| (layer, head)));
    lists
        .map(|(layer, head)| {
            let mut kept = vec![0f32; bins];
            let here = positions(layer * cell.batch * cell.kv_heads + head);
            here.into_iter().for_each(|position| kept[bin(position)] += 1.0);
            // Three digits are more than a picture shows.
            kept.iter().zip(&tokens).map(|(kept, all)| (kept / all * 1000.0).round() / 1000.0).collect()
        })
        .collect()
}

/// Squared distance and norm, from which a drift is computed.
#[derive(Default, Clone, Copy)]
struct Distance {
    apart: f64,
    norm: f64,
}

impl Distance {
    fn add(&mut self, got: &[f32], wanted: &[f64]) {
        for (&got, &wanted) in got.iter().zip(wanted) {
            self.apart += (f64::from(got) - wanted).powi(2);
            self.norm += wanted * wanted;
        }
    }

    fn relative(self) -> f64 {
        if self.apart == 0.0 { 0.0 } else { (self.apart / self.norm).sqrt() }
    }
}

fn drift_by_head(cell: &Cell, late: &Late, truth: &Truth) -> Vec<Vec<f64>> {
    let mut heads = vec![Distance::default(); cell.layers * cell.q_heads];
    for (&at, dense) in truth.at.iter().zip(&truth.rows) {
        heads[at[0] / cell.batch * cell.q_heads + at[1]].add(late.o(cell, at), &dense.o);
    }
    heads.chunks(cell.q_heads).map(|layer| layer.iter().map(|head| head.relative()).collect()).collect()
}

/// The checked decode steps, or evenly many of them.
fn steps(cell: &Cell, late: &Late, truth: &Truth) -> Vec<Step> {
    let mut tokens: BTreeMap<usize, (Distance, Option<f64>, usize)> = BTreeMap::new();
    for (&at, dense) in truth.at.iter().zip(&truth.rows) {
        let (distance, mass, rows) = tokens.entry(at[2]).or_insert((Distance::default(), Some(0.0), 0));
        distance.add(late.o(cell, at), &dense.o);
        *mass = mass.zip(late.mass_kept(cell, at, dense)).map(|(sum, mass)| sum + mass);
        *rows += 1;
    }
    let every = tokens.len().div_ceil(MOMENTS).max(1);
    let moment = |(token, (distance, mass, rows)): (usize, (Distance, Option<f64>, usize))| Step {
        new_tokens: token - cell.context_tokens + 1,
        kv_bytes_live: late.live_bytes[token - cell.context_tokens],
        attention_mass_kept: mass.map(|mass| mass / rows as f64),
        drift: distance.relative(),
    };
    tokens.into_iter().step_by(every).map(moment).collect()
}

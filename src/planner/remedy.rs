//! Remedies: the sets of levers of least price with which a context fits, with all sequences that were asked for and with fewer.
//!
//! One lever of each kind is tried, in depth. A set costs what its levers cost, and the time of all together. Kinds of which the
//! last lever takes least come last: where these are not enough, none is.

use super::PlanError;
use super::levers::{GRADED, HELD, Lever, Loss, levers, time_factor, time_price};
use super::scenario::Scenario;
use super::search::MOST;
use super::source::Subject;
use serde::Serialize;

/// The set of levers of least price with which a context fits.
#[derive(Debug, Clone, Serialize)]
pub struct Remedy {
    /// The context.
    pub target_context_tokens: u64,
    /// Sequences that are held at once.
    pub sequences: u64,
    /// The levers; none where it fits as it is.
    pub levers: Vec<String>,
    /// What they do to results.
    pub losses: Vec<Loss>,
    /// What they cost together.
    pub price: f64,
    /// Peak at the target.
    pub peak_bytes: u64,
    /// The largest context that fits with them.
    pub max_context_tokens: Option<u64>,
    /// How much longer a sequence takes.
    pub time_factor: Option<f64>,
}

/// Searches for the sets of least price with which `target` tokens fit: first with as many sequences held at once as were
/// asked for, then with fewer, where that is cheaper. What no set is enough for is left out.
///
/// # Errors
/// When the budget leaves no token.
pub fn remedies<'a>(scenario: &Scenario<'a>, target: u64, siblings: &'a [Subject]) -> Result<Vec<Remedy>, PlanError> {
    let start = Scenario { context: target.min(MOST), ..scenario.clone() };
    let mut levers = levers(&start, siblings)?;
    levers.retain(|lever| lever.pulled(&start).peak(start.context).is_ok());
    levers.sort_by_key(|lever| GRADED.iter().position(|kind| *kind == lever.kind).map_or(0, |at| at + 1));
    let kinds: Vec<&[Lever<'a>]> = levers.chunk_by(|one, next| one.kind == next.kind).collect();
    let is_held = |lever: &Lever<'a>| lever.kind == HELD;
    let Some(cheapest) = Search::of(&kinds, &start)? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    if cheapest.1.iter().any(|lever| is_held(lever)) {
        found.extend(Search::of(&kinds[..kinds.len() - 1], &start)?);
    }
    found.push(cheapest);
    found.iter().map(|(price, used)| remedy(&start, *price, used)).collect()
}

fn remedy<'a>(start: &Scenario<'a>, price: f64, used: &[&Lever<'a>]) -> Result<Remedy, PlanError> {
    let changed = used.iter().fold(start.clone(), |scenario, lever| lever.pulled(&scenario));
    Ok(Remedy {
        target_context_tokens: start.context,
        sequences: changed.held(),
        levers: used.iter().map(|lever| lever.name.clone()).collect(),
        losses: used.iter().map(|lever| lever.loss.clone()).collect(),
        price,
        peak_bytes: u64::try_from(changed.peak(start.context)?.1.total()).unwrap_or(u64::MAX),
        max_context_tokens: changed.max_context()?,
        time_factor: time_factor(start, &changed)?,
    })
}

/// The price of levers, and the levers.
type Set<'s, 'a> = (f64, Vec<&'s Lever<'a>>);

/// A search in depth, cut where what levers cost besides time is no longer less than the best price.
struct Search<'s, 'a> {
    start: &'s Scenario<'a>,
    kinds: &'s [&'s [Lever<'a>]],
    best: Option<Set<'s, 'a>>,
}

impl<'s, 'a> Search<'s, 'a> {
    /// The cheapest set of levers of these kinds with which it fits.
    fn of(kinds: &'s [&'s [Lever<'a>]], start: &'s Scenario<'a>) -> Result<Option<Set<'s, 'a>>, PlanError> {
        let mut search = Search { start, kinds, best: None };
        search.go(0, start, 0.0, &mut Vec::new())?;
        Ok(search.best)
    }

    fn go(
        &mut self,
        kind: usize,
        scenario: &Scenario<'a>,
        cost: f64,
        used: &mut Vec<&'s Lever<'a>>,
    ) -> Result<(), PlanError> {
        let is_dearer = |price: f64, best: &Option<Set<'s, 'a>>| best.as_ref().is_some_and(|(best, _)| price >= *best);
        if is_dearer(cost, &self.best) {
            return Ok(());
        }
        if scenario.fits(scenario.context)? {
            let price = cost + time_price(used, time_factor(self.start, scenario)?);
            if !is_dearer(price, &self.best) {
                self.best = Some((price, used.clone()));
            }
            return Ok(());
        }
        let Some(&levers) = self.kinds.get(kind) else { return Ok(()) };
        if GRADED.contains(&levers[0].kind) && !self.least(kind, scenario).fits(scenario.context)? {
            return Ok(());
        }
        self.go(kind + 1, scenario, cost, used)?;
        for lever in levers {
            used.push(lever);
            self.go(kind + 1, &lever.pulled(scenario), cost + lever.cost(), used)?;
            used.pop();
        }
        Ok(())
    }

    /// The scenario with the last lever of each kind from `kind` on.
    fn least(&self, kind: usize, scenario: &Scenario<'a>) -> Scenario<'a> {
        let last = self.kinds[kind..].iter().filter_map(|levers| levers.last());
        last.fold(scenario.clone(), |scenario, lever| lever.pulled(&scenario))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::presets::{GPUS, MODELS};
    use crate::planner::scenario::{Allocation, Attention, Logits, Memory};
    use crate::planner::source::Source;

    /// What the search leaves out rests on this: on top of any other lever, the last of a graded kind takes least.
    #[test]
    fn the_last_of_a_graded_kind_takes_least() {
        for (place, model) in MODELS.iter().enumerate() {
            let subject = Subject::new(model.clone(), Source::Preset, None).unwrap();
            let asked = Scenario {
                subject: &subject,
                weights: subject.published(),
                memory: Memory::Gpu(&GPUS[place % GPUS.len()]),
                overhead_bytes: None,
                batch: 1 + place as u64 % 7,
                concurrency: 9,
                context: 500 << (place % 10),
                output: 100,
                chunk: None,
                step: Some(3000).filter(|_| place.is_multiple_of(3)),
                attention: Attention::Naive,
                logits: Logits::All,
                kv: "bf16".parse().unwrap(),
                allocation: [Allocation::Exact, Allocation::Reserved(None)][place % 2],
                eviction: None,
                tensor_parallel: 1,
                pipeline: 1,
                offload: 0,
            };
            let all = levers(&asked, &[]).unwrap();
            for base in all.iter().map(|lever| lever.pulled(&asked)).chain([asked.clone()]) {
                for kind in GRADED {
                    let of_kind = all.iter().filter(|lever| lever.kind == kind);
                    let peaks: Vec<u128> =
                        of_kind.map(|lever| lever.pulled(&base).peak(base.context).unwrap().1.total()).collect();
                    assert_eq!(peaks.iter().min(), peaks.last(), "{} {kind}: {peaks:?}", model.name);
                }
            }
        }
    }
}

//! The simulator: a trace through a strategy, step by step, no clock.
//!
//! The queue is never empty, so what is seen is the memory's limit and not the load's. In every step: requests are
//! admitted first come, first served until the first that finds no room; every running request grows by one token, the
//! oldest first, and where there is no room for it the newest gives its own back and waits, first in the queue, to be computed
//! again (vLLM's preemption by recomputation); slots are counted; requests that have their last token leave.

use super::{Holding, Request, ServingError, Trace, strategy};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Where the slots of a pool were, on average over the counted steps. The first four shares add up to 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Share of the slots that hold tokens.
    pub token_fraction: f64,
    /// Share that is set aside for tokens that running requests will have.
    pub reserved_fraction: f64,
    /// Share inside what requests hold that none of their tokens will ever use.
    pub internal_fraction: f64,
    /// The rest: free slots, and those that an allocator's rounding takes beyond what was asked.
    pub external_fraction: f64,
    /// Share of the slots that requests hold, rounding included, which have no token.
    pub waste_of_held: f64,
    /// Running requests.
    pub mean_batch: f64,
    /// Requests that ended with their last token.
    pub finished_requests: u64,
    /// Times that a request gave its pages back because none was free for an older one, or for itself.
    #[serde(alias = "dropped_requests")]
    pub preempted_requests: u64,
    /// Steps that were counted.
    pub counted_steps: u64,
}

/// A request that waits, with the tokens that it has.
struct Waiting {
    /// Its number in the trace.
    number: u64,
    request: Request,
    tokens: usize,
}

impl Waiting {
    /// What it takes to start: of one that ran before, its tokens are the prompt.
    fn asks(&self) -> Request {
        Request { prompt_tokens: self.tokens, output_tokens: self.request.tokens() - self.tokens }
    }
}

/// A running request.
struct Running {
    waited: Waiting,
    holding: Holding,
}

/// Sums over steps: slots, except for `requests`.
#[derive(Default)]
struct Sums {
    tokens: u128,
    reserved: u128,
    internal: u128,
    taken: u128,
    requests: u128,
}

/// Runs `trace` through the strategy that `name` names (`paged:page=16`). Deterministic in `seed`.
///
/// # Errors
/// When the name means nothing or the pool is too small for it.
pub fn simulate(trace: &Trace, name: &str, seed: u64) -> Result<Usage, ServingError> {
    let mut strategy = strategy(name, trace.pool)?;
    let mut requests = (0..).zip(trace.requests(seed));
    let mut next = move || {
        let (number, request) = requests.next().expect("a trace has no end");
        Waiting { number, request, tokens: request.prompt_tokens }
    };
    let mut queue = VecDeque::from([next()]);
    // By their numbers: the oldest first.
    let mut running: Vec<Running> = Vec::new();
    let (mut sums, mut finished, mut preempted) = (Sums::default(), 0, 0);
    for step in 0..trace.steps {
        let counted = step >= trace.warmup_steps;
        while let Some(holding) = strategy.admit(queue[0].asks()) {
            let waited = queue.pop_front().expect("somebody waits");
            let at = running.partition_point(|older| older.waited.number < waited.number);
            running.insert(at, Running { waited, holding });
            if queue.is_empty() {
                queue.push_back(next());
            }
        }
        let mut at = 0;
        while at < running.len() {
            let Running { waited, holding } = &mut running[at];
            if strategy.grow(holding, waited.tokens + 1) {
                waited.tokens += 1;
                at += 1;
            } else {
                let newest = running.pop().expect("one of them needs room");
                strategy.release(newest.holding);
                queue.push_front(newest.waited);
                preempted += u64::from(counted);
            }
        }
        if counted {
            running.iter().for_each(|running| sums.add(running, strategy.reserves()));
        }
        running.retain(|running| {
            let goes_on = running.waited.tokens < running.waited.request.tokens();
            if !goes_on {
                strategy.release(running.holding);
                finished += u64::from(counted);
            }
            goes_on
        });
    }
    let counted_steps = trace.steps - trace.warmup_steps;
    let slot_steps = trace.pool.slots as f64 * counted_steps as f64;
    let share = |slots: u128| slots as f64 / slot_steps;
    let (token_fraction, reserved_fraction, internal_fraction) =
        (share(sums.tokens), share(sums.reserved), share(sums.internal));
    Ok(Usage {
        token_fraction,
        reserved_fraction,
        internal_fraction,
        external_fraction: 1.0 - token_fraction - reserved_fraction - internal_fraction,
        waste_of_held: 1.0 - sums.tokens as f64 / sums.taken as f64,
        mean_batch: sums.requests as f64 / counted_steps as f64,
        finished_requests: finished,
        preempted_requests: preempted,
        counted_steps,
    })
}

impl Sums {
    fn add(&mut self, running: &Running, reserves: bool) {
        let Holding { granted_tokens, taken_slots, .. } = running.holding;
        let Waiting { request, tokens, .. } = running.waited;
        // What the request will use of its holding: all its tokens to come, or those that are there.
        let used = if reserves { request.tokens() } else { tokens };
        self.tokens += tokens as u128;
        self.reserved += (used - tokens) as u128;
        self.internal += (granted_tokens - used) as u128;
        self.taken += taken_slots as u128;
        self.requests += 1;
    }
}

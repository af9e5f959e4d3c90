//! Contiguous reservations on a buddy allocator, as the vLLM paper (arXiv 2309.06180, section 6.1) built them to
//! compare itself with Orca: the longest request that there can be, the prompt and the output's next power of two, or
//! the true length.

use super::buddy::Buddy;
use super::{Holding, Pool, Request, Strategy, StrategyEntry};

/// The registry entry of `max`.
pub const MAX: StrategyEntry = StrategyEntry {
    name: "max",
    about: "Contiguous, the most tokens that a request may have, on a buddy allocator (Orca, Max)",
    parameters: &[],
    build: |_, pool| Ok(reservation(pool, |pool, _| pool.max_tokens)),
};

/// The registry entry of `pow2`.
pub const POW2: StrategyEntry = StrategyEntry {
    name: "pow2",
    about: "Contiguous, prompt and the output's next power of two, on a buddy allocator (Orca, Pow2)",
    parameters: &[],
    build: |_, pool| {
        Ok(reservation(pool, |_, request| request.prompt_tokens + request.output_tokens.next_power_of_two()))
    },
};

/// The registry entry of `oracle`.
pub const ORACLE: StrategyEntry = StrategyEntry {
    name: "oracle",
    about: "Contiguous, the true length known beforehand, on a buddy allocator (Orca, Oracle)",
    parameters: &[],
    build: |_, pool| Ok(reservation(pool, |_, request| request.tokens())),
};

/// Tokens that a request asks for.
type Ask = fn(Pool, Request) -> usize;

struct Reservation {
    pool: Pool,
    buddy: Buddy,
    ask: Ask,
}

fn reservation(pool: Pool, ask: Ask) -> Box<dyn Strategy> {
    Box::new(Reservation { pool, buddy: Buddy::new(pool.slots), ask })
}

impl Strategy for Reservation {
    fn admit(&mut self, request: Request) -> Option<Holding> {
        let granted_tokens = (self.ask)(self.pool, request).min(self.pool.max_tokens);
        let (first_slot, taken_slots) = self.buddy.take(granted_tokens)?;
        Some(Holding { granted_tokens, taken_slots, first_slot })
    }

    fn grow(&mut self, holding: &mut Holding, tokens: usize) -> bool {
        tokens <= holding.granted_tokens
    }

    fn release(&mut self, holding: Holding) {
        self.buddy.give((holding.first_slot, holding.taken_slots));
    }

    fn reserves(&self) -> bool {
        true
    }
}

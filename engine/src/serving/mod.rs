//! What a serving system does with KV memory: allocation strategies, and a simulator of request traces.
//!
//! A pool of slots, each of which holds keys and values of one token in every layer, is shared by requests of unknown
//! length. A [`Strategy`] decides which slots a request gets and when. [`simulate()`] runs a [`Trace`] through a
//! strategy and says where the slots were, on average: tokens, reserved, lost inside what requests hold, lost outside.
//! Nothing here computes attention. `docs/serving.md` has the rules and the comparison with the vLLM paper.

mod buddy;
mod paged;
pub mod published;
mod reserve;
mod simulate;
#[cfg(test)]
mod tests;
mod trace;

pub use buddy::Buddy;
pub use paged::DEFAULT_PAGE_TOKENS;
pub use simulate::{Usage, simulate};
pub use trace::{Request, TRACES, Trace, TraceEntry};

use crate::named::{Named, NamedError, Parameter};
use std::path::PathBuf;

/// The memory that requests share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Slots: tokens whose keys and values fit.
    pub slots: usize,
    /// Most tokens of a request, prompt and output together.
    pub max_tokens: usize,
}

/// What a request holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// Tokens for which the request may use slots.
    pub granted_tokens: usize,
    /// Slots that nobody else can have: what is granted, and what rounding adds to it.
    pub taken_slots: usize,
    /// First slot of a contiguous holding; 0 for pages, which lie anywhere.
    pub first_slot: usize,
}

/// Decides which slots of a pool a request gets and when.
pub trait Strategy {
    /// Takes what a request needs before it can start; `None` when there is no room now.
    fn admit(&mut self, request: Request) -> Option<Holding>;

    /// Makes room for `tokens` tokens in all; `false` when there is none, and nothing is taken then.
    fn grow(&mut self, holding: &mut Holding, tokens: usize) -> bool;

    /// Gives everything back.
    fn release(&mut self, holding: Holding);

    /// Whether slots are set aside for tokens to come. Empty slots of a request that will be used are `reserved` then;
    /// otherwise they are the unfilled end of its last page and count as lost inside.
    fn reserves(&self) -> bool;
}

/// Makes a strategy over an empty pool.
pub type Build = fn(&Named, Pool) -> Result<Box<dyn Strategy>, NamedError>;

/// A strategy as the registry knows it.
pub struct StrategyEntry {
    /// Name in experiment files and records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Makes it over an empty pool.
    pub build: Build,
}

/// Every allocation strategy. The three reservations are those that the vLLM paper built for its comparison with Orca.
pub const STRATEGIES: &[StrategyEntry] = &[reserve::MAX, reserve::POW2, reserve::ORACLE, paged::ENTRY];

/// A strategy or a trace that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// A name or a parameter that means nothing.
    #[error(transparent)]
    Named(#[from] NamedError),
    /// A pool in which the longest request finds no room even alone.
    #[error(
        "strategy '{strategy}' has no room for a request of {max_tokens} tokens in a pool of {slots} slots; give the \
         trace more slots or a smaller max"
    )]
    TooSmall {
        /// The strategy.
        strategy: String,
        /// Slots of the pool.
        slots: usize,
        /// Tokens of the longest request.
        max_tokens: usize,
    },
    /// A file that is not a trace.
    #[error("trace '{path}': {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What was wrong, and what would be right.
        reason: String,
    },
}

/// Makes the strategy that a text such as `paged:page=32` names, over an empty pool.
///
/// # Errors
/// When there is no such strategy or parameter, a value is wrong, or the longest request would never find room.
pub fn strategy(text: &str, pool: Pool) -> Result<Box<dyn Strategy>, ServingError> {
    let named: Named = text.parse()?;
    let entry = named.find("strategy", STRATEGIES, |entry| entry.name)?;
    named.check(entry.parameters)?;
    let longest = Request { prompt_tokens: pool.max_tokens - 1, output_tokens: 1 };
    if (entry.build)(&named, pool)?.admit(longest).is_none() {
        let Pool { slots, max_tokens } = pool;
        return Err(ServingError::TooSmall { strategy: text.into(), slots, max_tokens });
    }
    Ok((entry.build)(&named, pool)?)
}

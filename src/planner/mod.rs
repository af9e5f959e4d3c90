//! Where memory goes, what fits, and what to change first: every byte from a formula that says how it is known.
//!
//! A [`Scenario`] is a model, a card and a load: batch, context, attention, formats, eviction. [`Scenario::waterfall`] puts
//! bytes to each term of each phase (load, prefill, decode), [`Scenario::max_context`] finds the context at which it dies,
//! [`levers`] ranks what could be changed by context gained and price paid, and [`remedy`] finds the cheapest set that is enough.
//! Models and cards are tables in `presets/`. `docs/memory.md` has the formulas, and how far they are from what others measured.

pub mod allocator;
pub mod architecture;
pub mod audit;
pub mod cards;
pub mod claims;
pub mod eviction;
pub mod kv;
pub mod levers;
pub mod measure;
mod own;
pub mod presets;
pub mod published;
mod read;
pub mod remedy;
pub mod roofline;
pub mod scale;
pub mod scenario;
pub mod search;
pub mod source;
pub mod train;
pub mod waterfall;
pub mod weights;

pub use own::own_peak_bytes;
pub use scenario::{Phase, Scenario};
pub use source::Subject;
pub use waterfall::Waterfall;

use crate::format::FormatError;
use crate::model::ModelError;
use crate::named::NamedError;
use crate::policy::{BudgetError, PolicyError};
use crate::tensor::file::FileError;
use std::path::PathBuf;

/// A question that has no answer.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A name that is not in its table.
    #[error("unknown {kind} '{name}'; near it are {near}")]
    Unknown {
        /// What kind of thing was looked for.
        kind: &'static str,
        /// The name.
        name: String,
        /// Names near it.
        near: String,
    },
    /// A value that cannot be.
    #[error("{what} is {value}; {expected}")]
    Value {
        /// What it is of.
        what: &'static str,
        /// The value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// Heads that a format of keys and values cannot keep.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Bytes beyond any memory.
    #[error("{what} comes to more than 2^60 bytes; ask for less")]
    Overflow {
        /// What was computed.
        what: &'static str,
    },
    /// A file that is not understood.
    #[error("'{path}': {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What was wrong, its value, and what would be right.
        reason: String,
    },
    /// Tensors that cannot be read.
    #[error(transparent)]
    Tensors(#[from] FileError),
    /// A model that cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A name or parameter that means nothing.
    #[error(transparent)]
    Named(#[from] NamedError),
    /// A budget that cannot be met.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A policy that there is not.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

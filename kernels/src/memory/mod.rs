//! Memory that is counted, not estimated.
//!
//! Every tensor of the program lives in an [`Arena`]: a labelled ledger whose buffers are anonymous pages taken
//! from the operating system and given back when dropped. Because no more than 4 MiB of small buffers are kept behind the
//! ledger's back, the resident set of the process ([`os`]) is an independent check of what the ledger says.

mod arena;
mod label;
pub mod os;
mod spare;

pub use arena::{Arena, ArenaError, Buffer, Claim, Event, Usage};
pub use label::{Label, LabelBytes};

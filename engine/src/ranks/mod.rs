//! Attention over ranks: sequences that are shared out over threads of one process, or over processes by MPI.
//!
//! A rank has an arena of its own, its share of the keys, and a [`Comm`] to the others. What moves bytes between ranks is a
//! [`Transport`]: [`threads`] of one process, always there, MPI (`mpi`) and NCCL (`nccl`), with the features of these names. On them
//! stand [`Ring`], the forward and backward passes of ring attention with a zig-zag placement, and [`Tree`], decode by an
//! all-reduce of partial results; both call the kernels of [`crate::attention`] on parts of the problem and no others, and say
//! before they run what they will take and send, to the byte. [`evict`] evicts from a cache that is shared out so.
//! `docs/ranks.md` has the equations.
//!
//! Training over ranks ([`crate::train::zero`], [`crate::train::tensor_parallel`]) is built on [`Comm`] too.

mod comm;
pub mod cost;
pub mod evict;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod pieces;
mod ring;
mod shards;
mod shared;
pub mod threads;
mod tree;

pub use comm::{Comm, Traffic, Transport, all_reduce_messages, parts};
pub use ring::{Rank, Ring, RingBackward};
pub use shards::{Placement, Shards};
pub use shared::{Asked, MOST_THREADS, Method, OfRank, Shared, scatter, scatter_rows};
pub use tree::Tree;

use crate::attention::AttentionError;
use crate::memory::ArenaError;
use crate::policy::PolicyError;

/// What went wrong on a rank.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RankError {
    /// Another rank ended before its work was done.
    #[error("rank {rank} of {size} ended: {reason}")]
    Ended {
        /// The rank.
        rank: usize,
        /// Ranks.
        size: usize,
        /// Why, in its own words.
        reason: String,
    },
    /// Nothing came from another rank for too long.
    #[error("rank {rank} of {size} has been silent for {seconds} s; is it stopped, or its machine out of reach?")]
    Silent {
        /// The rank.
        rank: usize,
        /// Ranks.
        size: usize,
        /// How long.
        seconds: u64,
    },
    /// Ranks that must agree do not.
    #[error("rank {rank} differs from rank 0 in {what}; start all ranks with {remedy}")]
    Differs {
        /// The first that differs.
        rank: usize,
        /// In what.
        what: &'static str,
        /// What would be right.
        remedy: &'static str,
    },
    /// What was asked for cannot be shared out.
    #[error("{0}")]
    Unsupported(String),
    /// MPI could not be started, in words.
    #[error("{0}")]
    Start(String),
    /// In attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// In a policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

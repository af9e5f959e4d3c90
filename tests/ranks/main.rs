//! Ranks: attention, commands and training over several of them, on threads of one process, and in builds with MPI or NCCL
//! over those.

mod attention;
mod commands;
#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "mpi")]
#[path = "../common/mpi.rs"]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod train;

//! kvsieve measures what attention costs at a context length, and what may be thrown away.
//!
//! The modules are floors of one house; each uses only those below it:
//! [`report`] over [`planner`] over [`experiment`] over [`workload`], [`eval`], [`anatomy`], [`editing`], [`task`], [`model`], [`ranks`], [`eviction`], [`policy`],
//! [`memories`], [`episodic`], [`serving`], [`cache`], [`attention`], [`device`],
//! [`tensor`] and [`memory`]. `ARCHITECTURE.md` is the map.

pub mod anatomy;
pub mod attention;
pub mod cache;
pub mod cli;
pub mod device;
pub mod editing;
pub mod episodic;
pub mod eval;
pub mod eviction;
pub mod experiment;
pub mod format;
pub mod memories;
pub mod memory;
pub mod model;
pub mod named;
pub mod planner;
pub mod policy;
pub mod ranks;
pub mod report;
pub mod serving;
pub mod task;
pub mod tensor;
pub mod train;
pub mod units;
pub mod workload;

/// Compiles the code of the guide to policies.
#[cfg(doctest)]
#[doc = include_str!("../docs/adding-a-policy.md")]
struct AddingAPolicy;

/// Compiles and runs the code of the guide to memories.
#[cfg(doctest)]
#[doc = include_str!("../docs/adding-a-memory.md")]
struct AddingAMemory;

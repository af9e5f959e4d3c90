//! kvsieve measures what attention costs at a context length, and what may be thrown away.
//!
//! The modules are floors of one house; each uses only those below it:
//! [`cli`] over [`report`] over [`planner`] over [`experiment`] over [`eval`], [`anatomy`], [`train`], [`editing`], [`task`],
//! [`workload`], [`model`], [`ranks`], [`eviction`], [`policy`], [`memories`], [`episodic`], [`serving`], [`cache`], [`attention`],
//! [`format`](mod@format), [`device`], [`tensor`] and [`memory`]. [`stats`], [`named`] and [`units`] stand beside them.
//! `ARCHITECTURE.md` is the map.

pub mod cli;
pub mod experiment;
pub mod planner;
pub mod report;

#[doc(inline)]
pub use kvsieve_engine::{
    anatomy, editing, episodic, eval, eviction, memories, model, policy, ranks, serving, stats, task, train, workload,
};
#[doc(inline)]
pub use kvsieve_kernels::{attention, cache, device, format, memory, named, tensor, units};

/// Compiles the code of the guide to policies.
#[cfg(doctest)]
#[doc = include_str!("../docs/adding-a-policy.md")]
struct AddingAPolicy;

/// Compiles and runs the code of the guide to memories.
#[cfg(doctest)]
#[doc = include_str!("../docs/adding-a-memory.md")]
struct AddingAMemory;

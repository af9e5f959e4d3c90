//! Policies of eviction, and the models that they work in.
//!
//! These are the middle floors of kvsieve: [`workload`], [`eval`], [`anatomy`], [`train`], [`editing`], [`task`],
//! [`model`], [`ranks`], [`eviction`], [`policy`], [`memories`], [`episodic`] and [`serving`], over the floors of
//! `kvsieve-kernels`, which they call by the same paths as their own. The package `kvsieve` gives them all under its own
//! name; it, and not this one, is what others depend on.

pub mod anatomy;
pub mod editing;
pub mod episodic;
pub mod eval;
pub mod eviction;
pub mod memories;
pub mod model;
pub mod policy;
pub mod ranks;
pub mod serving;
pub mod stats;
pub mod task;
pub mod train;
pub mod workload;

use kvsieve_kernels::{attention, cache, device, format, memory, named, tensor, units};

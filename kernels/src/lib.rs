//! What attention is computed with: kernels, what they read, and what they run on.
//!
//! These are the lower floors of kvsieve: [`cache`] over [`attention`] over [`format`](mod@format) over [`device`] over
//! [`tensor`] over [`memory`]. The package `kvsieve` gives them all under its own name; it, and not this one, is what
//! others depend on. They are a package of their own so that a change above does not compile vector code again.

pub mod attention;
pub mod cache;
pub mod device;
pub mod format;
pub mod memory;
pub mod named;
pub mod tensor;
pub mod units;

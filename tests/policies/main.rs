//! Eviction policies: on caches small enough to do by hand, against public implementations, trained, and in models.

mod actions;
mod attention;
#[path = "../common/byte_model.rs"]
mod byte_model;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod dms;
mod duo;
mod file;
mod kvzap;
mod kvzip;
mod partial_rope;
mod scorers;
mod smollm2;
mod triattention;

//! Experiments through the library and on the command line: measures, traces, tasks, evaluations, shared runs, guides.

mod accounting;
#[path = "../common/byte_model.rs"]
mod byte_model;
#[path = "../common/mod.rs"]
mod common;
mod eval;
mod guides;
mod joint;
mod knobs;
mod measures;
mod resume;
mod serving;
mod tasks;

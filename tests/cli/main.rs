//! Commands as their users meet them.

mod attend;
#[path = "../common/byte_model.rs"]
mod byte_model;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod documented_commands;
mod eval;
mod evict;
mod inspect;
mod memory;
mod misc;
mod models;
mod outputs;
mod questions;
mod report;
mod resume;
mod run;

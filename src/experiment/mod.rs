//! Experiments: a TOML file becomes a grid of cells, each is measured beside the others, each leaves one record.

pub mod answers;
pub mod axes;
pub mod cell;
mod earlier;
pub mod edited;
pub mod engine;
pub mod environment;
pub mod estimate;
pub mod grid;
pub mod kernels;
pub mod max_context;
pub mod measure;
pub mod policy_axis;
pub mod recalled;
pub mod record;
pub mod runner;
mod shipped;
pub mod spec;
pub mod store;
pub mod weights;

pub use cell::Device;
pub use engine::{Engine, Gpu};
pub use grid::Experiment;
pub use runner::{Options, Outcome, Progress, run};
pub use shipped::SHIPPED;
pub use spec::Spec;

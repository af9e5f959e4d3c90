//! Scorers, one file each, and the methods that they make with their usual schedule.

pub mod full;
pub mod h2o;
pub mod keydiff;
pub mod knorm;
pub mod oracle;
pub mod protect;
pub mod random;
pub mod snapkv;
pub mod streaming_llm;
pub mod tova;

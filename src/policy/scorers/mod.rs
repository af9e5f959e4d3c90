//! Scorers, one file each, and the methods that they make with their usual schedule.

pub mod full;
pub mod h2o;
pub mod keydiff;
pub mod knorm;
pub mod max_attention;
pub mod morphkv;
pub mod oracle;
mod past;
mod pool;
pub mod protect;
pub mod r_kv;
pub mod random;
mod redundancy;
pub mod scissorhands;
pub mod snapkv;
pub mod streaming_llm;
pub mod tova;

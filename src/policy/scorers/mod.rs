//! Scorers, one file each, and the methods that they make with their usual schedule.

pub mod blocks;
pub mod cap;
pub mod chunkkv;
pub mod compactor;
pub mod critical;
pub mod cur;
pub mod expected_attention;
pub mod full;
pub mod h2o;
pub mod keydiff;
pub mod knorm;
pub mod lagkv;
pub mod leverage;
pub mod non_causal;
pub mod oracle;
pub mod protect;
pub mod qfilters;
pub mod random;
pub mod snapkv;
pub mod streaming_llm;
pub mod tova;
pub mod vnorm;

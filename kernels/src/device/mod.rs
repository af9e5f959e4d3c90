//! Where the work runs: the CPU's threads and vector instructions, and what is known of a GPU.

pub mod cpu;
pub mod cuda;
pub mod gemm;
pub mod gpu;
pub mod probe;
pub mod simd;

pub use cpu::Cpu;

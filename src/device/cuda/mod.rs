//! NVIDIA GPUs: the driver and NVRTC are looked for at run time, kernels are compiled when they are first used.
//!
//! Nothing of CUDA is needed to build the crate or to start the binary. [`Device`] is a GPU with the memory taken from
//! it, [`Nvrtc`] the compiler, [`Program`] a file under `kernels/` for one element type and head dim, [`Runtime`] all of
//! them together. [`build`] takes compiled code from the disk or makes it. What a kernel's launch looks like for a
//! problem is [`crate::attention::cuda`]'s.

mod background;
mod build;
mod cublas;
mod device;
mod gradients;
mod layer;
mod lists;
mod nvml;
mod nvrtc;
mod pages;
mod problem;
mod runtime;
mod source;
mod sweep;
mod tensor_map;
mod tokens;
mod turning;

pub(crate) use background::{Growing, Landing};
pub use build::{Origin, build};
pub use cublas::{Cublas, Gemm};
pub(crate) use device::{Argument, Ready};
pub use device::{Device, DeviceBuffer, Limits, Module};
pub use gradients::{BackwardOperands, Gradients, backward, deltas};
pub(crate) use layer::{Each, Embedding, Heads, HeadsOperands, Linear, Narrowing, Norm};
pub(crate) use lists::{
    Changes, Choice, ChoiceOperands, Keeping, Lists, ListsOperands, Moves, Observers, ObserversOperands, Received,
    Scoring,
};
pub use nvml::{Condition, Nvml};
pub use nvrtc::Nvrtc;
pub(crate) use pages::Pages;
pub use pages::{PagedKv, Slabs};
pub use problem::{Extents, Launch, Operands, Problem};
pub use runtime::Runtime;
pub use source::{Program, Source};
pub(crate) use tensor_map::TensorMap;
pub(crate) use tokens::{Arrival, Corner, Gathering, Slice};
pub(crate) use turning::{Asking, AskingOperands, Turning};

use crate::memory::{ArenaError, Label};

/// Why a GPU cannot be used, or what went wrong on it.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No driver library.
    #[error(
        "no CUDA driver: libcuda.so.1 was not found; install NVIDIA's driver (in a container: start it with --gpus all), \
         or use --device cpu"
    )]
    NoDriver,
    /// No NVRTC where it was looked for.
    #[error(
        "no NVRTC to compile the kernels with: {looked}; pip install nvidia-cuda-nvrtc, set CUDA_HOME, or give its \
         path (--nvrtc or KVSIEVE_NVRTC)"
    )]
    NoNvrtc {
        /// Where it was looked for and what was wrong.
        looked: String,
    },
    /// A GPU too old for the instructions that kernels use.
    #[error("{name} has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or later")]
    TooOld {
        /// The GPU.
        name: String,
        /// Its capability.
        major: i32,
        /// Its capability.
        minor: i32,
    },
    /// NVRTC refused a kernel.
    #[error("NVRTC {version} does not compile {program} for {architecture}: {log}")]
    Compile {
        /// NVRTC's version.
        version: String,
        /// What was compiled.
        program: String,
        /// For which architecture.
        architecture: String,
        /// The compiler's own words.
        log: String,
    },
    /// The GPU has no memory left.
    #[error(
        "out of GPU memory: {asked_bytes} bytes for {label} asked, {free_bytes} bytes free; shorten the context",
        label = label.name()
    )]
    OutOfMemory {
        /// What the memory was for.
        label: Label,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes free at that moment.
        free_bytes: u64,
    },
    /// The limit that was set.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Buffers that do not fit the problem.
    #[error("{0}")]
    Operand(String),
    /// A matrix product that cuBLAS refused.
    #[error("cuBLAS {version}: a product failed with status {status}")]
    Cublas {
        /// Its version.
        version: String,
        /// Its `cublasStatus_t`.
        status: i32,
    },
    /// Any other failure of the driver.
    #[error("CUDA: {what} failed: {reason}")]
    Driver {
        /// What was being done.
        what: &'static str,
        /// The driver's own words.
        reason: cudarc::driver::DriverError,
    },
}

/// Says what was being done when the driver failed.
fn doing(what: &'static str) -> impl Fn(cudarc::driver::DriverError) -> CudaError {
    move |reason| CudaError::Driver { what, reason }
}

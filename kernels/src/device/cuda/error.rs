//! What can go wrong on a GPU, each with what to do about it.
//!
//! Two kinds of failure need more than a message. One that is about memory makes a cell `oom` and ends the search of a
//! limit; one that leaves the context unusable ([`CudaError::is_fatal`]) makes every later call fail with the same words,
//! whoever calls, so that whoever goes on must open the GPU anew.

use super::nvrtc;
use crate::memory::{ArenaError, Label};
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// Why a GPU cannot be used, or what went wrong on it.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No driver library.
    #[error(
        "no CUDA driver: libcuda.so.1 was not found; install NVIDIA's driver (in a container: start it with --gpus all), \
         or use --device cpu"
    )]
    NoDriver,
    /// A driver without functions that are called.
    #[error(
        "the driver has CUDA {found}; kvsieve needs {needed} or later: update NVIDIA's driver (525.60 is the first), or \
         use --device cpu"
    )]
    OldDriver {
        /// The CUDA version that it has.
        found: String,
        /// The first that will do.
        needed: String,
    },
    /// No NVRTC where it was looked for.
    #[error(
        "no NVRTC to compile the kernels with: {looked}; pip install nvidia-cuda-nvrtc, set CUDA_HOME, or give its \
         path (--nvrtc or KVSIEVE_NVRTC)"
    )]
    NoNvrtc {
        /// Where it was looked for and what was wrong.
        looked: String,
    },
    /// An NVRTC older, or much younger, than the GPU.
    #[error("NVRTC {version} ({path}) does not compile for {architecture}; {}", nvrtc::advice(architecture))]
    Architecture {
        /// NVRTC's version.
        version: String,
        /// Where it lies.
        path: String,
        /// What it was to compile for.
        architecture: String,
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
    /// Machine code that the driver does not take.
    #[error(
        "CUDA: loading the kernels failed: {reason}; NVRTC {nvrtc} made them, the driver has CUDA {driver}{}",
        newer(nvrtc, driver)
    )]
    Load {
        /// The version of NVRTC that made it.
        nvrtc: String,
        /// The CUDA version of the driver.
        driver: String,
        /// The driver's own words.
        reason: DriverError,
    },
    /// The GPU has no memory left for a tensor.
    #[error(
        "out of GPU memory: {requested_bytes} bytes for {label} requested, {free_bytes} bytes free; shorten the context",
        label = label.name()
    )]
    OutOfMemory {
        /// What the memory was for.
        label: Label,
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes free at that moment.
        free_bytes: u64,
    },
    /// The GPU has no memory left for what the driver or cuBLAS takes by itself.
    #[error("out of GPU memory while {what}: shorten the context, or end what else uses the GPU (nvidia-smi lists it)")]
    NoRoom {
        /// What was being done.
        what: &'static str,
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
    /// A GPU that could not be opened again after a fault.
    #[error("the GPU was lost and does not come back: {0}")]
    Lost(String),
    /// Any other failure of the driver.
    #[error("CUDA: {what} failed: {reason}")]
    Driver {
        /// What was being done.
        what: &'static str,
        /// The driver's own words.
        reason: DriverError,
    },
}

impl CudaError {
    /// Whether the context is lost with it: every later call in this process fails until the GPU is opened anew.
    pub fn is_fatal(&self) -> bool {
        match self {
            CudaError::Driver { reason, .. } | CudaError::Load { reason, .. } => ends_context(reason.0),
            CudaError::Lost(_) => true,
            _ => false,
        }
    }

    /// Whether memory is what was missing, the GPU's or that of a limit.
    pub fn is_memory(&self) -> bool {
        matches!(self, CudaError::OutOfMemory { .. } | CudaError::NoRoom { .. } | CudaError::Arena(_))
    }
}

/// Errors after which the driver's documentation ("CUDA Driver API", `CUresult`) calls the context or the process
/// unusable, and those of a GPU that is no longer there. By number, as an older binding does not name the later ones.
fn ends_context(result: CUresult) -> bool {
    const DEVICE_UNAVAILABLE: u32 = 46;
    const ECC_UNCORRECTABLE: u32 = 214;
    const NVLINK_UNCORRECTABLE: u32 = 220;
    const CONTAINED: u32 = 226;
    const ILLEGAL_ADDRESS: u32 = 700;
    const LAUNCH_TIMEOUT: u32 = 702;
    const CONTEXT_IS_DESTROYED: u32 = 709;
    const ASSERT: u32 = 710;
    const HARDWARE_STACK_ERROR: u32 = 714;
    const LAUNCH_FAILED: u32 = 719;
    const TENSOR_MEMORY_LEAK: u32 = 721;
    const UNKNOWN: u32 = 999;
    matches!(
        result as u32,
        DEVICE_UNAVAILABLE
            | ECC_UNCORRECTABLE
            | NVLINK_UNCORRECTABLE
            | CONTAINED
            | ILLEGAL_ADDRESS
            | LAUNCH_TIMEOUT
            | CONTEXT_IS_DESTROYED
            | ASSERT
            // Illegal instruction, misaligned address, invalid address space and invalid program counter lie between.
            | HARDWARE_STACK_ERROR..=LAUNCH_FAILED | TENSOR_MEMORY_LEAK | UNKNOWN
    )
}

/// Says what was being done when the driver failed.
pub(super) fn doing(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |reason| match reason.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::NoRoom { what },
        _ => CudaError::Driver { what, reason },
    }
}

/// What to do where the compiler is of a later major version than the driver, which such code may ask too much of.
fn newer(nvrtc: &str, driver: &str) -> String {
    let major = |version: &str| version.split('.').next().and_then(|major| major.parse::<i32>().ok());
    match (major(nvrtc), major(driver)) {
        (Some(nvrtc), Some(driver)) if nvrtc > driver => {
            format!(": update the driver, or use an NVRTC of CUDA {driver} (--nvrtc)")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_end_the_context_are_told_from_those_that_do_not() {
        use CUresult::*;
        let fatal = |result| doing("x")(DriverError(result)).is_fatal();
        let ends = [
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_LAUNCH_TIMEOUT,
            CUDA_ERROR_ASSERT,
            CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUDA_ERROR_MISALIGNED_ADDRESS,
            CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUDA_ERROR_INVALID_PC,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_ECC_UNCORRECTABLE,
            CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUDA_ERROR_UNKNOWN,
        ];
        assert!(ends.into_iter().all(fatal));
        let stays = [
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_NOT_FOUND,
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
            CUDA_ERROR_NOT_SUPPORTED,
        ];
        assert!(!stays.into_iter().any(fatal));
        assert!(doing("x")(DriverError(CUDA_ERROR_OUT_OF_MEMORY)).is_memory());
    }

    #[test]
    fn a_compiler_younger_than_the_driver_is_named() {
        assert!(newer("13.0", "12.4").ends_with("use an NVRTC of CUDA 12 (--nvrtc)"));
        assert_eq!((newer("12.8", "12.2").as_str(), newer("12.8", "13.0").as_str()), ("", ""));
    }
}

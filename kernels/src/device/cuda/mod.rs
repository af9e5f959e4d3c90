//! NVIDIA GPUs: the driver and NVRTC are looked for at run time, kernels are compiled when they are first used.
//!
//! Nothing of CUDA is needed to build the crate or to start the binary. [`Device`] is a GPU with the memory taken from
//! it, [`Nvrtc`] the compiler, [`Program`] a file under `kernels/` for one element type and head dim, [`Runtime`] all of
//! them together. [`Cache`] has compiled code on the disk, or makes it. What a kernel's launch looks like for a
//! problem is [`crate::attention::cuda`]'s.

mod background;
mod buffer;
mod build;
mod cublas;
mod device;
mod driver;
mod error;
mod gradients;
mod layer;
mod limits;
mod lists;
mod nvml;
mod nvrtc;
mod pages;
mod problem;
mod rerotate;
mod runtime;
mod source;
mod sweep;
mod tensor_map;
mod tokens;

pub use background::{Growing, Landing};
pub use buffer::DeviceBuffer;
pub use build::{Built, Cache, Origin};
use cublas::NoCublas;
pub use cublas::{Cublas, Gemm};
pub use device::{Argument, Ready};
pub use device::{Device, Module};
pub use error::CudaError;
use error::doing;
pub use gradients::{BackwardOperands, Gradients, backward, deltas};
pub use layer::{Each, Embedding, Heads, HeadsOperands, Linear, Narrowing, Norm};
pub use limits::Limits;
pub use lists::{
    Changes, Choice, ChoiceOperands, Gating, Keeping, Lists, ListsOperands, Moves, Observers, ObserversOperands,
    Received, Scoring,
};
pub use nvml::{Condition, GpuProcess, Nvml};
pub use nvrtc::Nvrtc;
pub(crate) use pages::Pages;
pub use pages::{PagedKv, Slabs};
pub use problem::{Extents, Launch, Operands, Problem};
pub(crate) use rerotate::{Asking, AskingOperands, Rerotation};
pub use runtime::Runtime;
pub use source::{MODEL, Program, SCORE, SELECT, Source};
pub use sweep::Sweep;
pub(crate) use tensor_map::TensorMap;
pub(crate) use tokens::{Arrival, Corner, Gathering, Slice};

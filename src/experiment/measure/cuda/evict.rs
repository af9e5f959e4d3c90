//! `evict` on a GPU.

use super::{Planned, not_yet};
use crate::attention::cuda::CudaKernel;

pub(super) fn task(kernel: &dyn CudaKernel) -> Planned {
    not_yet(kernel, "eviction on CUDA")
}

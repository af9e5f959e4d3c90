//! Attention on a GPU: which kernels there are, what they need, and the launches of a problem.
//!
//! A [`CudaKernel`] makes a [`Plan`] for a problem: what is compiled and launched, and its scratch memory, said with the
//! same [`WorkspaceSize`] as a kernel of the CPU. A plan follows from the extents and the GPU's [`Limits`] alone, so it is
//! tested without a GPU; the sizes of tiles are those in the heads of the files under `kernels/`. Adding a kernel is one
//! file here, one under `kernels/`, and one line in [`CUDA_KERNELS`].

mod decode;
mod naive;
mod pass;
mod tiled;

pub use pass::{Inputs, Results, Scratch};

use super::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Extents, Launch, Limits, Program};
use crate::named::{Named, NamedError};
use crate::tensor::DType;

/// A kernel that runs on GPUs.
pub trait CudaKernel: Sync {
    /// Its name on the command line and in records.
    fn name(&self) -> &'static str;

    /// What runs for a problem on a GPU with `limits`.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] when the kernel cannot do this problem.
    fn plan(&self, shape: &Shape, params: &Params, dtype: DType, limits: &Limits) -> Result<Plan, AttentionError>;
}

/// Every kernel for GPUs.
pub const CUDA_KERNELS: &[&dyn CudaKernel] = &[&naive::Naive, &tiled::Tiled, &decode::Decode];

/// The kernel that a text names. None has parameters.
///
/// # Errors
/// When there is no such kernel or it is given a parameter.
pub fn cuda_kernel(text: &str) -> Result<&'static dyn CudaKernel, NamedError> {
    let named: Named = text.parse()?;
    let kernel = CUDA_KERNELS.iter().find(|kernel| kernel.name() == named.name).ok_or_else(|| NamedError::Unknown {
        kind: "kernel of --device cuda",
        name: named.name.clone(),
        known: CUDA_KERNELS.iter().map(|kernel| kernel.name()).collect::<Vec<_>>().join(", "),
    })?;
    named.check(&[])?;
    Ok(*kernel)
}

/// What runs for one problem on a GPU.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What is compiled.
    pub program: Program,
    /// What is launched, in order.
    pub launches: Vec<Launch>,
    /// Scratch memory: the size that is allocated, and the size that is predicted.
    pub workspace: WorkspaceSize,
    /// What kernels are told.
    pub extents: Extents,
}

/// Blocks in y and z that a grid may have.
const MOST_BLOCKS: usize = 65_535;

impl Plan {
    /// A plan in which no keys are split.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] when a grid has more blocks than GPUs take.
    fn new(
        kernel: &'static str,
        program: Program,
        launches: Vec<Launch>,
        workspace: WorkspaceSize,
        shape: &Shape,
        params: &Params,
    ) -> Result<Self, AttentionError> {
        if launches.iter().any(|launch| launch.grid[1].max(launch.grid[2]) > MOST_BLOCKS || launch.grid[0] >= 1 << 31) {
            let (what, instead) = ("grid on CUDA for so many heads or queries", "a smaller batch or shorter queries");
            return Err(AttentionError::Unsupported { kernel, what, instead });
        }
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
        let Params { scale, softcap, causal, window } = *params;
        let extents = Extents {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            dtype: program.dtype,
            causal,
            window,
            scale,
            softcap,
            split_keys: kv_len,
            scores: workspace.scores,
            partials: workspace.scratch,
        };
        Ok(Plan { program, launches, workspace, extents })
    }
}

/// What the kernels of `strip.cuh` can do; the name is that of the kernel which asks.
fn strip_takes(kernel: &'static str, head_dim: usize, dtype: DType) -> Result<(), AttentionError> {
    let unsupported = |what, instead| Err(AttentionError::Unsupported { kernel, what, instead });
    match (dtype, head_dim) {
        (DType::F32, _) => unsupported("f32 on CUDA", "naive, or --dtype bf16 or f16"),
        (_, d) if d % 8 != 0 || d > 128 => unsupported("head dims on CUDA but multiples of 8 up to 128", "naive"),
        _ => Ok(()),
    }
}

/// Bytes of a row of 16-bit elements in shared memory, padded as `strip.cuh` pads it.
fn row_bytes(head_dim: usize) -> usize {
    2 * head_dim.next_multiple_of(64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, q_heads: 8, kv_heads: 2, q_len: 1, kv_len: 5000, head_dim: 128 };

    const H200: Limits = Limits { capability: (9, 0), multiprocessors: 132, block_shared_bytes: 232_448 };

    fn plan(kernel: &str, shape: &Shape, dtype: DType) -> Result<Plan, AttentionError> {
        cuda_kernel(kernel).unwrap().plan(shape, &Params::new(shape.head_dim, true), dtype, &H200)
    }

    #[test]
    fn what_a_kernel_cannot_do_is_said() {
        let cases = [
            ("tiled", DType::F32, 128, "kernel 'tiled' has no f32 on CUDA; use naive"),
            ("decode", DType::Bf16, 100, "multiples of 8 up to 128; use naive"),
            ("tiled", DType::F16, 256, "multiples of 8 up to 128; use naive"),
        ];
        for (kernel, dtype, head_dim, expected) in cases {
            let error = plan(kernel, &Shape { head_dim, ..SHAPE }, dtype).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(plan("naive", &Shape { head_dim: 255, ..SHAPE }, DType::F32).is_ok());
        assert!(cuda_kernel("reference").err().unwrap().to_string().contains("naive, tiled, decode"));
        assert!(cuda_kernel("tiled:br=32").is_err());
    }

    #[test]
    fn only_naive_has_scores_and_only_decode_has_scratch() {
        let size = |kernel| plan(kernel, &SHAPE, DType::Bf16).unwrap().workspace;
        assert_eq!(size("naive"), WorkspaceSize { scores: SHAPE.scores(), scratch: 0 });
        assert_eq!(size("tiled"), WorkspaceSize::default());
        let decode = plan("decode", &SHAPE, DType::Bf16).unwrap();
        assert_eq!(decode.workspace, WorkspaceSize { scores: 0, scratch: decode.extents.splits() * 16 * 130 });
    }
}

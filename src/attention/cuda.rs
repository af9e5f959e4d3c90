//! Attention on a GPU: which kernels there are, what they need, and the launches of a problem.
//!
//! A [`CudaKernel`] says its scratch memory with the same [`WorkspaceSize`] as a kernel of the CPU; [`Plan`] is what is
//! launched for a problem. Both follow from the extents alone, so they are tested without a GPU; the sizes of tiles are
//! those in the heads of the files under `kernels/`.

use super::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Extents, Family, Launch, Program};
use crate::named::{Named, NamedError};
use crate::tensor::DType;

/// A kernel that runs on GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudaKernel {
    /// Scores in memory; any type.
    Naive,
    /// Tiles and online softmax; bf16 and f16.
    Tiled,
    /// Few queries against many keys; bf16 and f16.
    Decode,
}

/// Blocks per multiprocessor that decode's splits aim at: enough loads in flight, few partial results.
const BLOCKS_EACH: usize = 2;
/// Keys of a step of decode's four warps: a split is a multiple of it.
const STEP_KEYS: usize = 64;
/// Least keys of a split: below it the merge costs more than the splits gain.
const LEAST_SPLIT: usize = 256;
/// Query rows of a block of decode.
const DECODE_ROWS: usize = 16;
/// Blocks in y and z that a grid may have.
const MOST_BLOCKS: usize = 65_535;

impl CudaKernel {
    /// The kernel that a text names. None has parameters.
    ///
    /// # Errors
    /// When there is no such kernel or it is given a parameter.
    pub fn named(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let kernel = match named.name.as_str() {
            "naive" => CudaKernel::Naive,
            "tiled" => CudaKernel::Tiled,
            "decode" => CudaKernel::Decode,
            _ => {
                let known = "naive, tiled, decode".to_string();
                return Err(NamedError::Unknown { kind: "kernel of --device cuda", name: named.name.clone(), known });
            }
        };
        named.check(&[])?;
        Ok(kernel)
    }

    /// Its name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            CudaKernel::Naive => "naive",
            CudaKernel::Tiled => "tiled",
            CudaKernel::Decode => "decode",
        }
    }
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

impl Plan {
    /// The plan of a problem on a GPU with `multiprocessors`.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] when the kernel cannot do this problem.
    pub fn new(
        kernel: CudaKernel,
        shape: &Shape,
        params: &Params,
        dtype: DType,
        multiprocessors: usize,
    ) -> Result<Self, AttentionError> {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
        let unsupported = |what, instead| Err(AttentionError::Unsupported { kernel: kernel.name(), what, instead });
        if kernel != CudaKernel::Naive {
            if dtype == DType::F32 {
                return unsupported("f32 on CUDA", "naive, or --dtype bf16 or f16");
            }
            if head_dim % 8 != 0 || head_dim > 128 {
                return unsupported("head dims on CUDA but multiples of 8 up to 128", "naive");
            }
        }
        // As kernels/strip.cuh: rows of 16-bit elements, padded.
        let row_bytes = 2 * head_dim.next_multiple_of(64);
        let launch = |function, grid, threads, shared_bytes: usize| Launch {
            function,
            grid,
            threads,
            shared_bytes: shared_bytes as u32,
        };
        let (heads, rows, lists) = (batch * q_heads, shape.rows(), batch * kv_heads);
        let group_rows = shape.group() * q_len;
        let mut split_keys = kv_len;
        let (family, launches, workspace) = match kernel {
            CudaKernel::Naive => {
                let (q_tiles, kv_tiles, d_tiles) = (q_len.div_ceil(64), kv_len.div_ceil(64), head_dim.div_ceil(64));
                let launches = vec![
                    launch("naive_scores", [kv_tiles, q_tiles, heads], 256, 0),
                    launch("naive_softmax", [rows, 1, 1], 256, 0),
                    launch("naive_output", [d_tiles, q_tiles, heads], 256, 0),
                ];
                (Family::Naive, launches, WorkspaceSize { scores: shape.scores(), scratch: 0 })
            }
            CudaKernel::Tiled => {
                let block_rows = if head_dim <= 64 { 128 } else { 64 };
                let grid = [q_len.div_ceil(block_rows), q_heads, batch];
                let launches = vec![launch("tiled_forward", grid, 128, 4 * 64 * row_bytes)];
                (Family::Tiled, launches, WorkspaceSize::default())
            }
            CudaKernel::Decode => {
                let row_tiles = group_rows.div_ceil(DECODE_ROWS);
                let wanted = (BLOCKS_EACH * multiprocessors).div_ceil(lists * row_tiles);
                let splits = wanted.min(kv_len.div_ceil(LEAST_SPLIT)).max(1);
                split_keys = kv_len.div_ceil(splits).next_multiple_of(STEP_KEYS);
                let splits = kv_len.div_ceil(split_keys);
                let stages = if head_dim <= 64 { 4 } else { 3 };
                let shared = DECODE_ROWS * row_bytes + 4 * stages * 2 * 16 * row_bytes;
                let launches = vec![
                    launch("decode_partial", [splits, row_tiles, lists], 128, shared),
                    launch("decode_merge", [rows.div_ceil(4), 1, 1], 128, 0),
                ];
                (Family::Decode, launches, WorkspaceSize { scores: 0, scratch: splits * rows * (head_dim + 2) })
            }
        };
        if launches.iter().any(|launch| launch.grid[1].max(launch.grid[2]) > MOST_BLOCKS || launch.grid[0] >= 1 << 31) {
            return unsupported("grid on CUDA for so many heads or queries", "a smaller batch or shorter queries");
        }
        let Params { scale, softcap, causal, window } = *params;
        let extents = Extents {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            dtype,
            causal,
            window,
            scale,
            softcap,
            split_keys,
        };
        Ok(Plan { program: Program { family, dtype, head_dim }, launches, workspace, extents })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { batch: 2, q_heads: 8, kv_heads: 2, q_len: 1, kv_len: 5000, head_dim: 128 };

    fn plan(kernel: CudaKernel, shape: &Shape, dtype: DType) -> Result<Plan, AttentionError> {
        Plan::new(kernel, shape, &Params::new(shape.head_dim, true), dtype, 132)
    }

    #[test]
    fn what_a_kernel_cannot_do_is_said() {
        let cases = [
            (CudaKernel::Tiled, DType::F32, 128, "kernel 'tiled' has no f32 on CUDA; use naive"),
            (CudaKernel::Decode, DType::Bf16, 100, "multiples of 8 up to 128; use naive"),
            (CudaKernel::Tiled, DType::F16, 256, "multiples of 8 up to 128; use naive"),
        ];
        for (kernel, dtype, head_dim, expected) in cases {
            let error = plan(kernel, &Shape { head_dim, ..SHAPE }, dtype).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(plan(CudaKernel::Naive, &Shape { head_dim: 255, ..SHAPE }, DType::F32).is_ok());
        assert!(CudaKernel::named("reference").unwrap_err().to_string().contains("naive, tiled, decode"));
        assert!(CudaKernel::named("tiled:br=32").is_err());
    }

    #[test]
    fn only_naive_has_scores_and_only_decode_has_scratch() {
        let size = |kernel| plan(kernel, &SHAPE, DType::Bf16).unwrap().workspace;
        assert_eq!(size(CudaKernel::Naive), WorkspaceSize { scores: SHAPE.scores(), scratch: 0 });
        assert_eq!(size(CudaKernel::Tiled), WorkspaceSize::default());
        let decode = plan(CudaKernel::Decode, &SHAPE, DType::Bf16).unwrap();
        assert_eq!(decode.workspace, WorkspaceSize { scores: 0, scratch: decode.extents.splits() * 16 * 130 });
    }

    proptest! {
        /// Splits cover every key, none is empty, and there are no more than fill the GPU.
        #[test]
        fn splits_cover_the_keys(kv_len in 1usize..200_000, kv_heads in 1usize..20, group in 1usize..40, sms in 1usize..200) {
            let shape = Shape { q_heads: kv_heads * group, kv_heads, kv_len, ..SHAPE };
            let params = Params::new(128, false);
            let plan = Plan::new(CudaKernel::Decode, &shape, &params, DType::Bf16, sms).unwrap();
            let (splits, keys) = (plan.extents.splits(), plan.extents.split_keys);
            prop_assert!(splits * keys >= kv_len && (splits - 1) * keys < kv_len);
            prop_assert_eq!(keys % STEP_KEYS, 0);
            let [x, y, z] = plan.launches[0].grid;
            prop_assert_eq!(x, splits);
            prop_assert!((x - 1) * y * z < BLOCKS_EACH * sms || x == 1);
        }
    }
}

//! `decode` on a GPU: `kernels/decode.cu`.

use super::{CudaKernel, Plan, row_bytes, strip_takes};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "decode.cu", text: include_str!("../../../kernels/decode.cu") };
/// Blocks per multiprocessor that splits aim at: enough loads in flight, few partial results.
const BLOCKS_EACH: usize = 2;
const WARPS: usize = 4;
/// Keys of a warp's step.
const KEYS: usize = 16;
/// Least keys of a split: below it the merge costs more than the splits gain.
const LEAST_SPLIT: usize = 256;
/// Query rows of a block.
const ROWS: usize = 16;

/// Few queries against many keys; bf16 and f16.
pub(super) struct Decode;

impl CudaKernel for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn plan(&self, shape: &Shape, params: &Params, dtype: DType, limits: &Limits) -> Result<Plan, AttentionError> {
        let Shape { batch, kv_heads, q_len, kv_len, head_dim, .. } = *shape;
        strip_takes(self.name(), head_dim, dtype)?;
        let (lists, row_tiles) = (batch * kv_heads, (shape.group() * q_len).div_ceil(ROWS));
        let wanted = (BLOCKS_EACH * limits.multiprocessors).div_ceil(lists * row_tiles);
        let splits = wanted.min(kv_len.div_ceil(LEAST_SPLIT)).max(1);
        let split_keys = kv_len.div_ceil(splits).next_multiple_of(WARPS * KEYS);
        let splits = kv_len.div_ceil(split_keys);
        let stages = if head_dim <= 64 { 4 } else { 3 };
        let shared_bytes = ROWS * row_bytes(head_dim) + WARPS * stages * 2 * KEYS * row_bytes(head_dim);
        let launch = |function, grid, shared_bytes: usize| Launch {
            function,
            grid,
            threads: 32 * WARPS as u32,
            shared_bytes: shared_bytes as u32,
        };
        let launches = vec![
            launch("decode_partial", [splits, row_tiles, lists], shared_bytes),
            launch("decode_merge", [shape.rows().div_ceil(WARPS), 1, 1], 0),
        ];
        let program = Program { source: SOURCE, dtype, head_dim, macros: vec![("PAGED", 0)] };
        let workspace = WorkspaceSize { scores: 0, scratch: splits * shape.rows() * (head_dim + 2) };
        let mut plan = Plan::new(self.name(), program, launches, workspace, shape, params)?;
        plan.extents.split_keys = split_keys;
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Splits cover every key, none is empty, and there are no more than fill the GPU.
        #[test]
        fn splits_cover_the_keys(kv_len in 1usize..200_000, kv_heads in 1usize..20, group in 1usize..40, sms in 1usize..200) {
            let shape = Shape { q_heads: kv_heads * group, kv_heads, kv_len, batch: 2, q_len: 1, head_dim: 128 };
            let params = Params::new(128, false);
            let limits = Limits { capability: (8, 0), multiprocessors: sms, block_shared_bytes: 166_912 };
            let plan = Decode.plan(&shape, &params, DType::Bf16, &limits).unwrap();
            let (splits, keys) = (plan.extents.splits(), plan.extents.split_keys);
            prop_assert!(splits * keys >= kv_len && (splits - 1) * keys < kv_len);
            prop_assert_eq!(keys % WARPS * KEYS, 0);
            let [x, y, z] = plan.launches[0].grid;
            prop_assert_eq!(x, splits);
            prop_assert!((x - 1) * y * z < BLOCKS_EACH * sms || x == 1);
        }
    }
}

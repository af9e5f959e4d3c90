//! `decode` on a GPU: `kernels/decode.cu`, over dense tensors or pages.

use super::{CudaKernel, Plan, row_bytes, strip_takes};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "decode.cu", text: include_str!("../../../kernels/decode.cu") };
/// Blocks per multiprocessor that splits aim at: enough loads in flight, few partial results.
const BLOCKS_EACH: usize = 2;
/// Warps of a block and stages of each warp's ring, the best first.
const RINGS: [(usize, usize); 5] = [(4, 4), (4, 3), (4, 2), (2, 3), (2, 2)];
/// Warps of a block of the merge.
const MERGE_WARPS: usize = 4;
/// Least keys of a split: below it the merge costs more than the splits gain.
const LEAST_SPLIT: usize = 256;

/// Few queries against many keys.
pub(super) struct Decode;

impl CudaKernel for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn plan(&self, shape: &Shape, params: &Params, dtype: DType, limits: &Limits) -> Result<Plan, AttentionError> {
        plan(shape, params, dtype, limits, 0)
    }
}

/// What runs for a decode step over a cache in pages of `page_tokens` tokens; `shape.kv_len` is the length of the longest
/// list. [`Plan::forward_paged`] runs it.
///
/// # Errors
/// As [`CudaKernel::plan`]; when pages have no tokens.
pub fn decode_paged(
    shape: &Shape,
    params: &Params,
    dtype: DType,
    limits: &Limits,
    page_tokens: usize,
) -> Result<Plan, AttentionError> {
    if page_tokens == 0 {
        return Err(AttentionError::Option("pages of 0 tokens; pages have at least 1".into()));
    }
    plan(shape, params, dtype, limits, page_tokens)
}

/// The plan for pages of `page_tokens` tokens, or for dense tensors where it is 0.
fn plan(
    shape: &Shape,
    params: &Params,
    dtype: DType,
    limits: &Limits,
    page_tokens: usize,
) -> Result<Plan, AttentionError> {
    let Shape { batch, kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    strip_takes(Decode.name(), head_dim)?;
    let lists = batch * kv_heads;
    let (rows, keys) = tile(shape.group() * q_len, dtype);
    let ring_bytes = |warps, stages| (rows + warps * stages * 2 * keys) * row_bytes(head_dim, dtype);
    let (warps, stages) = limits.roomiest(&RINGS, |(warps, stages)| ring_bytes(warps, stages));

    let row_tiles = (shape.group() * q_len).div_ceil(rows);
    let wanted = (BLOCKS_EACH * limits.multiprocessors).div_ceil(lists * row_tiles);
    let splits = wanted.min(kv_len.div_ceil(LEAST_SPLIT)).max(1);
    let split_keys = kv_len.div_ceil(splits).next_multiple_of(warps * keys);
    let splits = kv_len.div_ceil(split_keys);
    let partial = Launch {
        function: "decode_partial",
        grid: [splits, row_tiles, lists],
        threads: 32 * warps as u32,
        shared_bytes: ring_bytes(warps, stages) as u32,
    };
    let merge = Launch {
        function: "decode_merge",
        grid: [shape.rows().div_ceil(MERGE_WARPS), 1, 1],
        threads: 32 * MERGE_WARPS as u32,
        shared_bytes: 0,
    };
    let macros = vec![("PAGE_TOKENS", page_tokens), ("WARPS", warps), ("STAGES", stages), ("ROWS", rows)];
    let program = Program { source: SOURCE, dtype, head_dim, macros };
    let workspace = WorkspaceSize { scores: 0, scratch: splits * shape.rows() * (head_dim + 2) };
    let mut plan = Plan::new(Decode.name(), program, vec![partial, merge], workspace, shape, params)?;
    plan.extents.split_keys = split_keys;
    Ok(plan)
}

/// Query rows of a block, and keys of a warp's step. Tensor cores take 16 by 16; in f32 a warp takes as few rows as there
/// are, since those that are not there cost as much.
fn tile(rows: usize, dtype: DType) -> (usize, usize) {
    match dtype {
        DType::F32 => (rows.next_power_of_two().clamp(4, 16), 8),
        DType::Bf16 | DType::F16 => (16, 16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Splits cover every key, none is empty, and there are no more than fill the GPU.
        #[test]
        fn splits_cover_the_keys(kv_len in 1usize..200_000, kv_heads in 1usize..20, group in 1usize..40, sms in 1usize..200,
                                 head_dim in 1usize..=256, wide in any::<bool>()) {
            let shape = Shape { q_heads: kv_heads * group, kv_heads, kv_len, batch: 2, q_len: 1, head_dim };
            let params = Params::new(head_dim, false);
            let limits = Limits { capability: (8, 0), multiprocessors: sms, block_shared_bytes: 166_912 };
            let dtype = if wide { DType::F32 } else { DType::Bf16 };
            let plan = Decode.plan(&shape, &params, dtype, &limits).unwrap();
            let (splits, keys) = (plan.extents.splits(), plan.extents.split_keys);
            prop_assert!(splits * keys >= kv_len && (splits - 1) * keys < kv_len);
            let value = |name| plan.program.macros.iter().find(|&&(macro_name, _)| macro_name == name).unwrap().1;
            prop_assert_eq!(keys % (value("WARPS") * if wide { 8 } else { 16 }), 0);
            let [x, y, z] = plan.launches[0].grid;
            prop_assert_eq!(x, splits);
            prop_assert!(y * value("ROWS") >= group && (y - 1) * value("ROWS") < group);
            prop_assert!((x - 1) * y * z < BLOCKS_EACH * sms || x == 1);
        }
    }
}

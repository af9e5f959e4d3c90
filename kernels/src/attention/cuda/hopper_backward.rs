//! The backward pass of `hopper`: `kernels/hopper_backward.cu`.

use super::tiled_backward::{DELTA_ROWS, ROUND_ROWS};
use super::{BackwardPlan, Plan, TmaTiles};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Program, Source, deltas};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "hopper_backward.cu", text: include_str!("../../../hopper_backward.cu") };
/// Keys of a block and queries of a step, as the kernel has them.
const KEYS: usize = 128;
const QUERIES: usize = 64;
/// Of a block: a warpgroup that copies and two that compute.
const THREADS: usize = 3 * 128;
/// Steps whose queries, and whose gradients of scores, are in shared memory at a time.
const STAGES: usize = 2;

/// A pass in bf16 or f16 on a GPU that has the instructions, which the caller has made sure of.
///
/// # Errors
/// [`AttentionError::Unsupported`] for head dims but 64 and 128, and for grids that GPUs do not take.
pub(super) fn plan(
    kernel: &'static str,
    shape: &Shape,
    params: &Params,
    dtype: DType,
) -> Result<BackwardPlan, AttentionError> {
    let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
    // At 256 the gradients of a consumer's keys and values alone would take every register.
    if !matches!(head_dim, 64 | 128) {
        let (what, instead) = ("backward pass for head dims but 64 and 128", "tiled");
        return Err(AttentionError::Unsupported { kernel, what, instead });
    }
    let rows = batch * q_heads * q_len.next_multiple_of(QUERIES);
    let launch = |function, grid, threads: usize, shared_bytes: usize| Launch {
        function,
        grid,
        threads: threads as u32,
        shared_bytes: shared_bytes as u32,
    };
    let launches = vec![
        launch("backward_delta", [rows.div_ceil(DELTA_ROWS), 1, 1], 128, 0),
        launch("hopper_backward", [kv_len.div_ceil(KEYS), kv_heads, batch], THREADS, shared_bytes(head_dim)),
        launch("backward_round", [rows.div_ceil(ROUND_ROWS), 1, 1], 128, 0),
    ];
    let macros = vec![("CAPPED", usize::from(params.softcap.is_some()))];
    let program = Program { source: SOURCE, dtype, head_dim, macros };
    let workspace = WorkspaceSize { scores: 0, scratch: deltas(shape.rows()) + rows * head_dim };
    let mut plan = Plan::new(kernel, program, launches, workspace, (shape, params), dtype.into())?;
    plan.tma_tiles = Some(TmaTiles { q_rows: QUERIES, kv_rows: KEYS });
    Ok(BackwardPlan(plan))
}

/// Shared memory of a block: K and V, rings of Q and dO, of dS, of two numbers for each query, and barriers.
fn shared_bytes(head_dim: usize) -> usize {
    let rows = 2 * KEYS + 2 * STAGES * QUERIES;
    let scores = STAGES * KEYS * QUERIES;
    let (values, barriers) = (STAGES * 2 * QUERIES, 2 + 3 * 2 * STAGES);
    2 * (rows * head_dim + scores) + 4 * values + 8 * barriers
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, q_heads: 8, kv_heads: 2, q_len: 100, kv_len: 300, head_dim: 128 };

    fn planned(head_dim: usize, params: Params) -> Plan {
        plan("hopper", &Shape { head_dim, ..SHAPE }, &params, DType::Bf16).unwrap().0
    }

    #[test]
    fn a_block_has_some_keys_of_a_kv_head() {
        for (head_dim, shared_bytes) in [(64, 99_440), (128, 164_976)] {
            let plan = planned(head_dim, Params::new(head_dim, true));
            let launches: Vec<_> =
                plan.launches.iter().map(|l| (l.function, l.grid, l.threads, l.shared_bytes)).collect();
            let expected = [
                ("backward_delta", [512, 1, 1], 128, 0),
                ("hopper_backward", [3, 2, 2], 384, shared_bytes),
                ("backward_round", [32, 1, 1], 128, 0),
            ];
            assert_eq!(launches, expected, "D {head_dim}");
            assert_eq!(plan.tma_tiles, Some(TmaTiles { q_rows: 64, kv_rows: 128 }));
        }
    }

    /// As `tiled` with atomics: 1600 rows, in tiles of 64 they are 2048.
    #[test]
    fn memory_is_a_number_for_each_query_and_dq_in_f32() {
        let plan = planned(128, Params::new(128, false));
        assert_eq!(plan.workspace, WorkspaceSize { scores: 0, scratch: 1600 + 2048 * 128 });
    }

    #[test]
    fn the_cap_is_compiled_in() {
        let macros = |params| planned(64, params).program.macros;
        assert_eq!(macros(Params::new(64, true)), [("CAPPED", 0)]);
        assert_eq!(macros(Params { softcap: Some(9.0), ..Params::new(64, true) }), [("CAPPED", 1)]);
    }

    #[test]
    fn other_head_dims_are_refused() {
        for head_dim in [32, 96, 256] {
            let shape = Shape { head_dim, ..SHAPE };
            let error = plan("hopper", &shape, &Params::new(head_dim, true), DType::F16).unwrap_err().to_string();
            assert_eq!(error, "kernel 'hopper' has no backward pass for head dims but 64 and 128; use tiled");
        }
    }
}

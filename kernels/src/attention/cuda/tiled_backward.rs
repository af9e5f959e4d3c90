//! The backward pass of `tiled` on a GPU: `kernels/backward.cu` on tensor cores, `kernels/backward_scalar.cu` for what
//! that cannot do.

use super::{BackwardPlan, Plan};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source, deltas};
use crate::tensor::DType;

const TENSOR: Source = Source { name: "backward.cu", text: include_str!("../../../backward.cu") };
const SCALAR: Source = Source { name: "backward_scalar.cu", text: include_str!("../../../backward_scalar.cu") };
/// Rows of `backward_delta`'s blocks, one for each warp.
pub(super) const DELTA_ROWS: usize = 4;
/// Queries of a block of `backward_round`.
pub(super) const ROUND_ROWS: usize = 64;
/// Queries of a block of `backward_queries`.
const OWN_ROWS: usize = 64;

/// A pass. `deterministic`: the same bits every time, for two more products.
pub(super) fn plan(
    kernel: &'static str,
    deterministic: bool,
    shape: &Shape,
    params: &Params,
    dtype: DType,
    limits: &Limits,
) -> Result<BackwardPlan, AttentionError> {
    let halves = dtype != DType::F32 && shape.head_dim.is_multiple_of(8);
    let tiles = Tiles::fitting(shape.head_dim, limits.block_shared_bytes).filter(|_| halves);
    let (program, launches, sums) = match tiles {
        Some(tiles) => tiles.pass(deterministic, shape, dtype),
        None => scalar(shape, dtype, limits.block_shared_bytes),
    };
    let workspace = WorkspaceSize { scores: 0, scratch: deltas(shape.rows()) + sums };
    Ok(BackwardPlan(Plan::new(kernel, program, launches, workspace, (shape, params), dtype.into())?))
}

/// A program, its launches, and elements of f32 for sums of `dq`.
type Pass = (Program, Vec<Launch>, usize);

/// The tiles of `backward.cu`, as its head tells them.
struct Tiles {
    keys: usize,
    queries: usize,
    threads: usize,
    small: bool,
    /// Bytes of a row in shared memory.
    row_bytes: usize,
}

impl Tiles {
    /// The largest that fit into a block's shared memory, with `dS` too.
    fn fitting(head_dim: usize, block_shared_bytes: usize) -> Option<Self> {
        let row_bytes = 2 * head_dim.next_multiple_of(64);
        let [large, small] = [(128, 64, 256), (64, 32, 128)].map(|(keys, queries, threads)| {
            let small = threads == 128 && head_dim <= 128;
            Tiles { keys, queries, threads, small, row_bytes }
        });
        let choices = if head_dim <= 128 { vec![large, small] } else { vec![small] };
        choices.into_iter().find(|tiles| tiles.key_block_bytes(false) <= block_shared_bytes)
    }

    /// Shared memory of `backward_keys`: K and V, two stages of Q and dO, their row values, and dS.
    fn key_block_bytes(&self, deterministic: bool) -> usize {
        let rows = (2 * self.keys + 4 * self.queries) * self.row_bytes;
        rows + 16 * self.queries + if deterministic { 0 } else { 2 * self.keys * self.queries }
    }

    fn pass(&self, deterministic: bool, shape: &Shape, dtype: DType) -> Pass {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
        let apart = head_dim > 128;
        let rows = batch * q_heads * q_len.next_multiple_of(self.queries);
        let launch = |function, grid, threads: usize, shared_bytes: usize| Launch {
            function,
            grid,
            threads: threads as u32,
            shared_bytes: shared_bytes as u32,
        };
        let key_blocks = kv_len.div_ceil(self.keys) * if apart { 2 } else { 1 };
        let mut launches = vec![
            launch("backward_delta", [rows.div_ceil(DELTA_ROWS), 1, 1], 128, 0),
            launch("backward_keys", [key_blocks, kv_heads, batch], self.threads, self.key_block_bytes(deterministic)),
        ];
        let passing = if apart { 32 } else { 64 };
        launches.push(match deterministic {
            true => launch(
                "backward_queries",
                [q_len.div_ceil(OWN_ROWS), q_heads, batch],
                128,
                (2 * OWN_ROWS + 4 * passing) * self.row_bytes,
            ),
            false => launch("backward_round", [rows.div_ceil(ROUND_ROWS), 1, 1], 128, 0),
        });
        let macros = vec![("DETERMINISTIC", deterministic.into()), ("SMALL", self.small.into())];
        let sums = if deterministic { 0 } else { rows * head_dim.next_multiple_of(16) };
        (Program { source: TENSOR, dtype, head_dim, macros }, launches, sums)
    }
}

/// The pass of `backward_scalar.cu`, which is deterministic and has no sums in memory.
fn scalar(shape: &Shape, dtype: DType, block_shared_bytes: usize) -> Pass {
    let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
    let bytes = |tile: usize| 4 * (4 * tile * (head_dim | 1) + 2 * tile * (tile + 1));
    let tile = if bytes(32) <= block_shared_bytes { 32 } else { 16 };
    let launch = |function, grid, shared_bytes: usize| Launch {
        function,
        grid,
        threads: 128,
        shared_bytes: shared_bytes as u32,
    };
    let launches = vec![
        launch("backward_delta", [shape.rows().div_ceil(DELTA_ROWS), 1, 1], 0),
        launch("backward_keys", [kv_len.div_ceil(tile), kv_heads, batch], bytes(tile)),
        launch("backward_queries", [q_len.div_ceil(tile), q_heads, batch], bytes(tile)),
    ];
    (Program { source: SCALAR, dtype, head_dim, macros: vec![("TILE", tile)] }, launches, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block on an A100, an H200, and an RTX 4090.
    const A100: usize = 166_912;
    const H200: usize = 232_448;
    const SMALL: usize = 101_376;

    fn planned(deterministic: bool, head_dim: usize, dtype: DType, block_shared_bytes: usize) -> BackwardPlan {
        let shape = Shape { batch: 2, q_heads: 8, kv_heads: 2, q_len: 100, kv_len: 300, head_dim };
        let limits = Limits { capability: (8, 0), multiprocessors: 108, block_shared_bytes };
        plan("tiled", deterministic, &shape, &Params::new(head_dim, true), dtype, &limits).unwrap()
    }

    #[test]
    fn every_block_fits_into_the_shared_memory() {
        for head_dim in (1..=256).filter(|d| d % 8 == 0 || d % 37 == 0) {
            for (dtype, limit) in
                DType::ALL.into_iter().flat_map(|dtype| [A100, H200, SMALL].map(|limit| (dtype, limit)))
            {
                for launch in [true, false].iter().flat_map(|&fixed| planned(fixed, head_dim, dtype, limit).0.launches)
                {
                    assert!(launch.shared_bytes as usize <= limit, "D {head_dim}, {dtype}, {limit}: {launch:?}");
                }
            }
        }
    }

    #[test]
    fn tensor_cores_are_used_where_they_can_be() {
        let source = |head_dim, dtype, limit| planned(false, head_dim, dtype, limit).0.program.source.name;
        assert_eq!(source(128, DType::Bf16, SMALL), "backward.cu");
        assert_eq!(source(256, DType::F16, A100), "backward.cu");
        assert_eq!(source(256, DType::F16, SMALL), "backward_scalar.cu");
        assert_eq!(source(100, DType::F16, H200), "backward_scalar.cu");
        assert_eq!(source(64, DType::F32, H200), "backward_scalar.cu");
    }

    #[test]
    fn only_sums_by_atomics_take_memory_for_dq() {
        // 1600 rows; in tiles of 64 they are 2048.
        let scratch = |deterministic, dtype| planned(deterministic, 120, dtype, H200).workspace();
        let size = |scratch| WorkspaceSize { scores: 0, scratch };
        assert_eq!(scratch(false, DType::Bf16), size(1600 + 2048 * 128));
        assert_eq!(scratch(true, DType::Bf16), size(1600));
        assert_eq!(scratch(false, DType::F32), size(1600));
    }
}

//! `naive` on a GPU: `kernels/naive.cu`.

use super::{CudaKernel, Plan};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "naive.cu", text: include_str!("../../../kernels/naive.cu") };
/// Rows and columns of a block's tile of a product.
const TILE: usize = 64;

/// Scores in memory, two products and a softmax; any element type and head dim.
pub(super) struct Naive;

impl CudaKernel for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn plan(&self, shape: &Shape, params: &Params, dtype: DType, _limits: &Limits) -> Result<Plan, AttentionError> {
        let (q_tiles, kv_tiles) = (shape.q_len.div_ceil(TILE), shape.kv_len.div_ceil(TILE));
        let heads = shape.batch * shape.q_heads;
        let launch = |function, grid| Launch { function, grid, threads: 256, shared_bytes: 0 };
        let launches = vec![
            launch("naive_scores", [kv_tiles, q_tiles, heads]),
            launch("naive_softmax", [shape.rows(), 1, 1]),
            launch("naive_output", [shape.head_dim.div_ceil(TILE), q_tiles, heads]),
        ];
        let program = Program { source: SOURCE, dtype, head_dim: shape.head_dim, macros: vec![] };
        let workspace = WorkspaceSize { scores: shape.scores(), scratch: 0 };
        Plan::new(self.name(), program, launches, workspace, shape, params)
    }
}

//! `tiled` on a GPU: `kernels/tiled.cu`.

use super::{CudaKernel, Plan, row_bytes, strip_takes};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "tiled.cu", text: include_str!("../../../kernels/tiled.cu") };
/// Keys of a tile.
const KEYS: usize = 64;

/// Tiles and online softmax; bf16 and f16.
pub(super) struct Tiled;

impl CudaKernel for Tiled {
    fn name(&self) -> &'static str {
        "tiled"
    }

    fn plan(&self, shape: &Shape, params: &Params, dtype: DType, _limits: &Limits) -> Result<Plan, AttentionError> {
        strip_takes(self.name(), shape.head_dim, dtype)?;
        let block_rows = if shape.head_dim <= 64 { 128 } else { 64 };
        let launches = vec![Launch {
            function: "tiled_forward",
            grid: [shape.q_len.div_ceil(block_rows), shape.q_heads, shape.batch],
            threads: 128,
            shared_bytes: (4 * KEYS * row_bytes(shape.head_dim)) as u32,
        }];
        let program = Program { source: SOURCE, dtype, head_dim: shape.head_dim, macros: vec![] };
        Plan::new(self.name(), program, launches, WorkspaceSize::default(), shape, params)
    }
}

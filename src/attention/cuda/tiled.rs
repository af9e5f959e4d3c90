//! `tiled` on a GPU: `kernels/tiled.cu`; its backward pass is planned by [`tiled_backward`].

use super::{BackwardPlan, CudaKernel, Plan, row_bytes, strip_takes, tiled_backward};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "tiled.cu", text: include_str!("../../../kernels/tiled.cu") };
/// Keys of a tile.
const KEYS: usize = 64;

/// Tiles and online softmax; bf16 and f16.
pub(super) struct Tiled {
    /// The gradients have the same bits every time.
    pub(super) deterministic: bool,
}

impl CudaKernel for Tiled {
    fn name(&self) -> &'static str {
        "tiled"
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[Parameter {
            name: "deterministic",
            default: "false",
            about: "gradients have the same bits every time: seven products instead of five",
        }]
    }

    fn with(&self, named: &Named) -> Result<Option<&'static dyn CudaKernel>, NamedError> {
        const DETERMINISTIC: &Tiled = &Tiled { deterministic: true };
        Ok(named.flag("deterministic", false)?.then_some(DETERMINISTIC))
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

    fn plan_backward(
        &self,
        shape: &Shape,
        params: &Params,
        dtype: DType,
        limits: &Limits,
    ) -> Result<BackwardPlan, AttentionError> {
        tiled_backward::plan(self.name(), self.deterministic, shape, params, dtype, limits)
    }
}

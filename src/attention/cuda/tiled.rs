//! `tiled` on a GPU: `kernels/tiled.cu`; its backward pass is planned by [`tiled_backward`].

use super::{BackwardPlan, CudaKernel, Plan, row_bytes, strip_takes, tiled_backward};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "tiled.cu", text: include_str!("../../../kernels/tiled.cu") };

/// Tiles and online softmax; tensor cores for bf16 and f16.
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

    fn plan(&self, shape: &Shape, params: &Params, dtype: DType, limits: &Limits) -> Result<Plan, AttentionError> {
        strip_takes(self.name(), shape.head_dim)?;
        let row_bytes = row_bytes(shape.head_dim, dtype);
        let half = dtype != DType::F32;
        let block_rows = if half && row_bytes == 128 { 128 } else { 64 };
        // Q in registers needs no place of its own. Where it has none there, registers hold fewer scores too.
        let q_kept = half && row_bytes <= 384;
        let q_bytes = if q_kept { 0 } else { block_rows * row_bytes };
        let choices: &[usize] = match (half, q_kept) {
            (true, true) => &[64, 32],
            (true, false) => &[32],
            (false, _) => &[32, 16, 8],
        };
        let shared_bytes = |keys| q_bytes + 4 * keys * row_bytes;
        let keys = limits.roomiest(choices, shared_bytes);
        let launches = vec![Launch {
            function: "tiled_forward",
            grid: [shape.q_len.div_ceil(block_rows), shape.q_heads, shape.batch],
            threads: 128,
            shared_bytes: shared_bytes(keys) as u32,
        }];
        let macros = vec![("ROWS", block_rows), ("KEYS", keys), ("Q_KEPT", usize::from(q_kept))];
        let program = Program { source: SOURCE, dtype, head_dim: shape.head_dim, macros };
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

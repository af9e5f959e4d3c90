//! `tiled` on a GPU: `kernels/tiled.cu`; its backward pass is planned by [`tiled_backward`].

use super::{BackwardPlan, CudaKernel, Plan, code_bytes, row_bytes, strip_takes, tiled_backward};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::format::GpuRows;
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "tiled.cu", text: include_str!("../../../tiled.cu") };

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
            about: "gradients have the same bits every time, by seven products in place of five (--device cuda)",
        }]
    }

    fn with(&self, named: &Named) -> Result<Option<&'static dyn CudaKernel>, NamedError> {
        const DETERMINISTIC: &Tiled = &Tiled { deterministic: true };
        Ok(named.flag("deterministic", false)?.then_some(DETERMINISTIC))
    }

    fn plan(&self, shape: &Shape, params: &Params, rows: GpuRows, limits: &Limits) -> Result<Plan, AttentionError> {
        let dtype = rows.dtype();
        strip_takes(self.name(), shape.head_dim)?;
        let row_bytes = row_bytes(shape.head_dim, dtype);
        let (block_rows, choices, q_kept) = tiles(shape.head_dim, dtype);
        // Q in registers needs no place of its own.
        let q_bytes = if q_kept { 0 } else { block_rows * row_bytes };
        let shared_bytes =
            |keys| q_bytes + 2 * keys * row_bytes + code_bytes(rows, keys, shape.head_dim).iter().sum::<usize>();
        let keys = limits.roomiest(2, choices, shared_bytes);
        let launches = vec![Launch {
            function: "tiled_forward",
            grid: [shape.q_len.div_ceil(block_rows), shape.q_heads, shape.batch],
            threads: 128,
            shared_bytes: shared_bytes(keys) as u32,
        }];
        let mut macros = vec![("ROWS", block_rows), ("KEYS", keys), ("Q_KEPT", usize::from(q_kept))];
        macros.extend(rows.macros());
        let program = Program { source: SOURCE, dtype, head_dim: shape.head_dim, macros };
        Plan::new(self.name(), program, launches, WorkspaceSize::default(), (shape, params), rows)
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

/// Query rows of a block of four warps; keys of a tile, the best number first; whether Q is kept in registers. What
/// registers hold decides: scores and outputs of 32 rows to a warp fit up to D 128 with 64 keys, up to D 144 with 32.
fn tiles(head_dim: usize, dtype: DType) -> (usize, &'static [usize], bool) {
    match (dtype, head_dim) {
        (DType::F32, _) => (64, &[32, 16, 8], false),
        (_, ..=64) => (128, &[64], true),
        (_, ..=128) => (128, &[64, 32], false),
        (_, ..=144) => (128, &[32], false),
        (_, ..=192) => (64, &[64], true),
        _ => (64, &[64, 32], false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, keys, whether Q is kept, and blocks on a multiprocessor, by GPU: 99 KiB for a block (8.6, 8.9, 12.0), an A100,
    /// an H100.
    #[test]
    fn shapes_are_those_that_fit_registers_and_shared_memory() {
        let (bf16, f32) = (DType::Bf16, DType::F32);
        let cases = [
            (bf16, 64, [(128, 64, 1, 5), (128, 64, 1, 9), (128, 64, 1, 13)]),
            (bf16, 128, [(128, 32, 0, 2), (128, 64, 0, 2), (128, 64, 0, 3)]),
            (bf16, 144, [(128, 32, 0, 1), (128, 32, 0, 2), (128, 32, 0, 3)]),
            (bf16, 192, [(64, 64, 1, 2), (64, 64, 1, 3), (64, 64, 1, 4)]),
            (bf16, 256, [(64, 64, 0, 1), (64, 32, 0, 2), (64, 64, 0, 2)]),
            (f32, 128, [(64, 16, 0, 2), (64, 32, 0, 2), (64, 32, 0, 3)]),
            (f32, 256, [(64, 16, 0, 1), (64, 8, 0, 2), (64, 16, 0, 2)]),
        ];
        for (dtype, head_dim, expected) in cases {
            let found = [99, 163, 227].map(|kib: usize| {
                let limits = Limits { capability: (8, 0), multiprocessors: 100, block_shared_bytes: kib << 10 };
                let shape = Shape { batch: 1, q_heads: 4, kv_heads: 2, q_len: 500, kv_len: 500, head_dim };
                let tiled = Tiled { deterministic: false };
                let plan = tiled.plan(&shape, &Params::new(head_dim, true), dtype.into(), &limits).unwrap();
                let value = |name| plan.program.macros.iter().find(|&&(macro_name, _)| macro_name == name).unwrap().1;
                let launch = &plan.launches[0];
                assert_eq!(launch.grid, [500usize.div_ceil(value("ROWS")), 4, 1]);
                let blocks = ((kib + 1) << 10) / (launch.shared_bytes as usize + (1 << 10));
                (value("ROWS"), value("KEYS"), value("Q_KEPT"), blocks)
            });
            assert_eq!(found, expected, "{dtype} D {head_dim}");
        }
    }
}

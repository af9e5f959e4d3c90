//! Attention statistics on a GPU: `kernels/export.cu`, and `kernels/export_plain.cu` for f32. What
//! [`crate::attention::export`] does on the CPU, over a paged cache.

use super::row_bytes;
use crate::attention::export::{OverGroup, OverQueries, Reduction};
use crate::attention::{Params, Shape};
use crate::device::cuda::{
    CudaError, DeviceBuffer, Launch, Lists, Observers, ObserversOperands, Program, Runtime, Source,
};
use crate::format::GpuRows;
use crate::tensor::DType;

const TILED: Source = Source { name: "export.cu", text: include_str!("../../../export.cu") };
const PLAIN: Source = Source { name: "export_plain.cu", text: include_str!("../../../export_plain.cu") };
/// Keys of a block.
const KEYS: usize = 64;
const WARPS: usize = 4;
/// Queries of a warp's step, and how many steps are in shared memory at once.
const ROWS: usize = 32;
const STAGES: usize = 2;
/// Above this head dim a step has half as many rows.
const ROWS_FIT_DIM: usize = 128;

/// Queries that have seen the lists of a cache.
#[derive(Clone, Copy)]
pub struct Observed<'a> {
    /// `[B, Hq, length, D]`.
    pub q: &'a DeviceBuffer,
    /// Rows of a head in `q`, of which `Lq` from `first` on are the queries.
    pub length: usize,
    /// The first of them.
    pub first: usize,
    /// Their log-sum-exps over these lists, `[B, Hq, Lq]` in f32.
    pub lse: &'a DeviceBuffer,
    /// How queries and keys lie.
    pub rows: GpuRows,
    /// Extents; `kv_len` is the width of the columns, at least the longest list.
    pub shape: Shape,
    /// Scale, soft-cap and mask.
    pub params: Params,
}

/// What is compiled for columns whose queries are reduced like this.
pub fn program(rows: GpuRows, head_dim: usize, queries: OverQueries) -> Program {
    let dtype = rows.dtype();
    let source = if dtype == DType::F32 { PLAIN } else { TILED };
    let queries = match queries {
        OverQueries::Sum => 0,
        OverQueries::Max => 1,
        OverQueries::CountBelowEven => 2,
        OverQueries::SumOfSquares => unreachable!("no scoring plan asks for squares"),
    };
    Program { source, dtype, head_dim, macros: [vec![("QUERIES", queries)], rows.macros()].concat() }
}

/// Begins to reduce, for each key, the probabilities that the last `queries` give it to one number: `columns`
/// `[B, Hkv, kv_len]` in f32, zeros behind the end of a list.
///
/// # Errors
/// [`CudaError::Operand`] when a buffer is too small, and as [`Runtime::module`].
pub fn begin_columns(
    runtime: &Runtime,
    lists: &Lists<'_>,
    observed: &Observed<'_>,
    queries: usize,
    reduction: Reduction,
    columns: &mut DeviceBuffer,
) -> Result<(), CudaError> {
    let Observed { q, length, first, lse, rows, shape, params } = *observed;
    let dtype = rows.dtype();
    let operands = ObserversOperands {
        q,
        length,
        q_first: first,
        row_bytes: shape.head_dim * dtype.bytes(),
        lse,
        columns,
        lists: shape.batch * shape.kv_heads,
        batch: shape.batch,
        q_heads: shape.q_heads,
        q_len: shape.q_len,
        first: shape.q_len.saturating_sub(queries),
        causal: params.causal,
        window: params.window,
        width: shape.kv_len,
        group: match reduction.group {
            OverGroup::Mean => 0,
            OverGroup::Sum => 1,
            OverGroup::Max => 2,
        },
        scale: params.scale,
        softcap: params.softcap,
    };
    let grid = [shape.kv_len.div_ceil(KEYS), operands.lists, 1];
    let (threads, shared_bytes) = match dtype {
        DType::F32 => (256, 0),
        DType::Bf16 | DType::F16 => {
            let row_bytes = row_bytes(shape.head_dim, dtype);
            let queries = if row_bytes <= 2 * ROWS_FIT_DIM { ROWS } else { ROWS / 2 };
            (32 * WARPS as u32, (KEYS + WARPS * STAGES * queries) * row_bytes + 4 * WARPS * KEYS)
        }
    };
    let launch = Launch { function: "export_columns", grid, threads, shared_bytes: shared_bytes as u32 };
    let program = program(rows, shape.head_dim, reduction.queries);
    let device = runtime.device();
    device.begin(&device.ready(&*runtime.module(&program)?, &[launch])?, &[lists, &Observers::new(&operands)?])
}

//! `naive` on a GPU: `kernels/naive.cu`, with the products of cuBLAS where it is there, and `kernels/naive_backward.cu`.

use super::{BackwardPlan, CudaKernel, LibraryPass, Plan, elements_of};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Gemm, Launch, Limits, Program, Source, deltas};
use crate::format::GpuRows;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "naive.cu", text: include_str!("../../../naive.cu") };
const BACKWARD: Source = Source { name: "naive_backward.cu", text: include_str!("../../../naive_backward.cu") };
/// Rows and columns of a block's tile of a product.
const TILE: usize = 64;

/// Scores in memory, two products and a softmax; any element type and head dim.
pub(super) struct Naive;

impl CudaKernel for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn plan(&self, shape: &Shape, params: &Params, rows: GpuRows, _limits: &Limits) -> Result<Plan, AttentionError> {
        let dtype = elements_of(self.name(), rows)?;
        let (q_tiles, kv_tiles) = (shape.q_len.div_ceil(TILE), shape.kv_len.div_ceil(TILE));
        let heads = shape.batch * shape.q_heads;
        let launch = |function, grid| Launch { function, grid, threads: 256, shared_bytes: 0 };
        let softmax = launch("naive_softmax", [shape.rows(), 1, 1]);
        let launches = vec![
            launch("naive_scores", [kv_tiles, q_tiles, heads]),
            softmax,
            launch("naive_output", [shape.head_dim.div_ceil(TILE), q_tiles, heads]),
        ];
        let program = |library| Program {
            source: SOURCE,
            dtype,
            head_dim: shape.head_dim,
            macros: vec![("LIBRARY_PRODUCTS", library)],
        };
        let workspace = WorkspaceSize { scores: shape.scores(), scratch: 0 };
        let mut plan = Plan::new(self.name(), program(0), launches, workspace, (shape, params), rows)?;
        let [scores, output] = products(shape, params.scale, dtype);
        plan.library = Some(LibraryPass { scores, program: program(1), softmax, output });
        Ok(plan)
    }

    fn plan_backward(
        &self,
        shape: &Shape,
        params: &Params,
        dtype: DType,
        _limits: &Limits,
    ) -> Result<BackwardPlan, AttentionError> {
        let (q_tiles, kv_tiles) = (shape.q_len.div_ceil(TILE), shape.kv_len.div_ceil(TILE));
        let (heads, kv_heads) = (shape.batch * shape.q_heads, shape.batch * shape.kv_heads);
        let widths = shape.head_dim.div_ceil(TILE);
        let launch = |function, grid, threads| Launch { function, grid, threads, shared_bytes: 0 };
        let launches = vec![
            launch("naive_delta", [shape.rows().div_ceil(4), 1, 1], 128),
            launch("naive_gradients", [kv_tiles, q_tiles, heads], 256),
            launch("naive_keys", [widths, kv_tiles, kv_heads], 256),
            launch("naive_queries", [widths, q_tiles, heads], 256),
        ];
        let program = Program { source: BACKWARD, dtype, head_dim: shape.head_dim, macros: vec![] };
        let workspace = WorkspaceSize { scores: 2 * shape.scores(), scratch: deltas(shape.rows()) };
        Ok(BackwardPlan(Plan::new(self.name(), program, launches, workspace, (shape, params), dtype.into())?))
    }
}

/// `scores = scale q kᵀ` (of k and q) and `o = p v` (of v and p), as cuBLAS has them: in columns, where a matrix of rows
/// is its transpose. The query heads of a group follow one another, so that they are the rows of one matrix. The softmax
/// leaves `p` in the inputs' type in the place of the scores, rows as far apart as before.
fn products(shape: &Shape, scale: f32, dtype: DType) -> [Gemm; 2] {
    let Shape { batch, kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    let rows = shape.group() * q_len;
    let kv = (head_dim, kv_len * head_dim);
    let queries = (head_dim, rows * head_dim);
    let in_f32 = |row: usize| (row, rows * row);
    let scores = Gemm {
        transpose_a: true,
        m: kv_len,
        n: rows,
        k: head_dim,
        alpha: scale,
        a: kv,
        b: queries,
        c: in_f32(kv_len),
        batch: batch * kv_heads,
        inputs: dtype,
        output: DType::F32,
    };
    let output = Gemm {
        transpose_a: false,
        m: head_dim,
        n: rows,
        k: kv_len,
        alpha: 1.0,
        a: kv,
        b: in_f32(kv_len * (DType::F32.bytes() / dtype.bytes())),
        c: queries,
        batch: batch * kv_heads,
        inputs: dtype,
        output: dtype,
    };
    [scores, output]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small whole numbers, whose sums are exact.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed * 3 + i / 5) % 11) as f32 - 5.0).collect()
    }

    #[test]
    fn the_library_is_asked_for_the_products_of_attention() {
        let shape = Shape { batch: 2, q_heads: 6, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 4 };
        let Shape { q_heads, kv_heads, q_len, kv_len, head_dim, .. } = shape;
        let (q, k) = (numbers(shape.rows() * head_dim, 1), numbers(2 * kv_heads * kv_len * head_dim, 2));
        let v = numbers(k.len(), 3);
        for dtype in [DType::F32, DType::Bf16] {
            let [first, second] = products(&shape, -0.5, dtype);
            let mut scores = vec![f32::NAN; shape.scores()];
            first.multiply(&k, &q, &mut scores);
            // Rows of half the size begin where rows of f32 did: twice as many elements apart.
            let spread = 4 / dtype.bytes();
            let mut p = vec![f32::NAN; spread * scores.len()];
            for (row, values) in scores.chunks(kv_len).enumerate() {
                p[row * spread * kv_len..][..kv_len].copy_from_slice(values);
            }
            let mut o = vec![f32::NAN; q.len()];
            second.multiply(&v, &p, &mut o);
            for row in 0..shape.rows() {
                let head = row / q_len;
                let list = head / q_heads * kv_heads + head % q_heads / shape.group();
                let mut expected = vec![0.0; head_dim];
                for key in 0..kv_len {
                    let place = (list * kv_len + key) * head_dim;
                    let dot: f32 = (0..head_dim).map(|d| q[row * head_dim + d] * k[place + d]).sum();
                    assert_eq!(scores[row * kv_len + key], -0.5 * dot);
                    expected.iter_mut().zip(&v[place..]).for_each(|(sum, v)| *sum += -0.5 * dot * v);
                }
                assert_eq!(o[row * head_dim..][..head_dim], expected);
            }
        }
    }
}

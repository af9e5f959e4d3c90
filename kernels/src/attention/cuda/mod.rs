//! Attention on a GPU: which kernels there are, what they need, and the launches of a problem.
//!
//! A [`CudaKernel`] makes a [`Plan`] for a problem: what is compiled and launched, and its scratch memory, said with the
//! same [`WorkspaceSize`] as a kernel of the CPU. A plan follows from the extents and the GPU's [`Limits`] alone, so it is
//! tested without a GPU; the sizes of tiles are those in the heads of the files under `kernels/`. Adding a kernel is one
//! file here, one under `kernels/`, and one line in [`CUDA_KERNELS`].

mod backward;
mod decode;
pub mod export;
mod hopper;
mod hopper_backward;
mod naive;
mod pass;
mod tiled;
mod tiled_backward;

pub use backward::{BackwardInputs, BackwardPlan, BackwardResults};
pub use decode::decode_paged;
pub use decode::step_workspace;
pub use pass::{Inputs, Results, Scratch};

use super::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Extents, Gemm, Launch, Limits, Program};
use crate::format::GpuRows;
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::DType;

/// A kernel that runs on GPUs.
pub trait CudaKernel: Sync {
    /// Its name on the command line and in records.
    fn name(&self) -> &'static str;

    /// One line for `kvsieve list kernels`, if no kernel of the CPU has the name.
    fn about(&self) -> &'static str {
        ""
    }

    /// Its parameters.
    fn parameters(&self) -> &'static [Parameter] {
        &[]
    }

    /// The kernel that its parameters make of it, where that is another one.
    ///
    /// # Errors
    /// When the value of a parameter is wrong.
    fn with(&self, _named: &Named) -> Result<Option<&'static dyn CudaKernel>, NamedError> {
        Ok(None)
    }

    /// What runs for a problem on a GPU with `limits`, whose queries, keys and values lie there as `rows` says.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] when the kernel cannot do this problem.
    fn plan(&self, shape: &Shape, params: &Params, rows: GpuRows, limits: &Limits) -> Result<Plan, AttentionError>;

    /// What runs for its backward pass.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] when the kernel has none or cannot do this problem.
    fn plan_backward(
        &self,
        _shape: &Shape,
        _params: &Params,
        _dtype: DType,
        _limits: &Limits,
    ) -> Result<BackwardPlan, AttentionError> {
        let (what, instead) = ("backward pass on CUDA", "naive or tiled");
        Err(AttentionError::Unsupported { kernel: self.name(), what, instead })
    }
}

/// Every kernel for GPUs.
pub const CUDA_KERNELS: &[&dyn CudaKernel] =
    &[&naive::Naive, &tiled::Tiled { deterministic: false }, &decode::Decode, &hopper::Hopper];

/// The kernel that a text names, as `tiled` or `tiled:deterministic=true`.
///
/// # Errors
/// When there is no such kernel or parameter, or a value is wrong.
pub fn cuda_kernel(text: &str) -> Result<&'static dyn CudaKernel, NamedError> {
    let named: Named = text.parse()?;
    let kernel = named.find("kernel of --device cuda", CUDA_KERNELS, |kernel| kernel.name())?;
    named.check(kernel.parameters())?;
    Ok(kernel.with(&named)?.unwrap_or(*kernel))
}

/// What runs for one problem on a GPU.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What is compiled.
    pub program: Program,
    /// What is launched, in order.
    pub launches: Vec<Launch>,
    /// Scratch memory: the size that is allocated, and the size that is predicted.
    pub workspace: WorkspaceSize,
    /// What kernels are told.
    pub extents: Extents,
    /// Bytes of a key, and of a value.
    pub row_bytes: [usize; 2],
    /// How it runs where cuBLAS is there: two products, and a kernel between them.
    pub library: Option<LibraryPass>,
    /// How the copy engine takes the inputs, where a kernel uses it.
    pub tma_tiles: Option<TmaTiles>,
}

/// A pass whose products are cuBLAS's.
#[derive(Debug, Clone)]
pub struct LibraryPass {
    /// `scores = scale q kᵀ`.
    pub scores: Gemm,
    /// The softmax between the products.
    pub program: Program,
    /// Its launch.
    pub softmax: Launch,
    /// `o = p v`.
    pub output: Gemm,
}

/// Rows of q, and of k and v, that are copied as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TmaTiles {
    /// Of q.
    pub q_rows: usize,
    /// Of k and v.
    pub kv_rows: usize,
}

impl Plan {
    /// Everything that running it may compile, whether cuBLAS is there or not.
    pub fn programs(&self) -> Vec<Program> {
        let of_library = self.library.iter().map(|library| library.program.clone());
        std::iter::once(self.program.clone()).chain(of_library).collect()
    }

    /// A plan in which no keys are split.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] when a grid has more blocks than GPUs take.
    fn new(
        kernel: &'static str,
        program: Program,
        launches: Vec<Launch>,
        workspace: WorkspaceSize,
        (shape, params): (&Shape, &Params),
        rows: GpuRows,
    ) -> Result<Self, AttentionError> {
        if launches
            .iter()
            .any(|launch| launch.grid[1].max(launch.grid[2]) > Launch::MOST_BLOCKS || launch.grid[0] >= 1 << 31)
        {
            let (what, instead) = ("grid on CUDA for so many heads or queries", "a smaller batch or shorter queries");
            return Err(AttentionError::Unsupported { kernel, what, instead });
        }
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
        let Params { scale, softcap, causal, window } = *params;
        let extents = Extents {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            dtype: rows.dtype(),
            kv_bytes: rows.lists_bytes(batch * kv_heads, kv_len, head_dim),
            causal,
            window,
            scale,
            softcap,
            splits: 1,
            split_keys: kv_len,
            scores: workspace.scores,
            partials: workspace.scratch,
        };
        let row_bytes = rows.row_bytes(head_dim);
        Ok(Plan { program, launches, workspace, extents, row_bytes, library: None, tma_tiles: None })
    }

    /// The extents of the problem that it was made for.
    pub fn shape(&self) -> Shape {
        let Extents { batch, q_heads, kv_heads, q_len, kv_len, head_dim, .. } = self.extents;
        Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim }
    }
}

/// The element type of rows that are nothing but elements; the name is that of the kernel which asks.
fn elements_of(kernel: &'static str, rows: GpuRows) -> Result<DType, AttentionError> {
    let (what, instead) = ("keys and values in codes on CUDA", "tiled or decode");
    if rows.is_coded() { Err(AttentionError::Unsupported { kernel, what, instead }) } else { Ok(rows.dtype()) }
}

/// What the kernels with strips of query rows in registers can do; the name is that of the kernel which asks.
fn strip_takes(kernel: &'static str, head_dim: usize) -> Result<(), AttentionError> {
    match head_dim > MOST_HEAD_DIM {
        true => Err(AttentionError::Unsupported { kernel, what: "head dims on CUDA above 256", instead: "naive" }),
        false => Ok(()),
    }
}

/// The largest head dim whose output row fits in the registers of a strip.
const MOST_HEAD_DIM: usize = 256;

/// Bytes of a row in shared memory, padded as `kernels/rows.cuh` pads it.
fn row_bytes(head_dim: usize, dtype: DType) -> usize {
    (head_dim * dtype.bytes()).next_multiple_of(128)
}

/// Bytes of shared memory in which the codes of so many keys, and of as many values, lie beside their tiles: `ROOM_BYTES` of
/// `kernels/rows.cuh`.
fn code_bytes(rows: GpuRows, count: usize, head_dim: usize) -> [usize; 2] {
    let ([key, value], [keys, values]) = (rows.row_bytes(head_dim), rows.coded());
    [(key, keys), (value, values)].map(|(row, coded)| if coded { (count * row).next_multiple_of(128) } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, q_heads: 8, kv_heads: 2, q_len: 1, kv_len: 5000, head_dim: 128 };

    const H200: Limits = Limits { capability: (9, 0), multiprocessors: 132, block_shared_bytes: 232_448 };

    fn plan(kernel: &str, shape: &Shape, dtype: DType) -> Result<Plan, AttentionError> {
        cuda_kernel(kernel).unwrap().plan(shape, &Params::new(shape.head_dim, true), dtype.into(), &H200)
    }

    #[test]
    fn what_a_kernel_cannot_do_is_said() {
        let cases = [
            ("decode", DType::Bf16, 257, "kernel 'decode' has no head dims on CUDA above 256; use naive"),
            ("tiled", DType::F32, 300, "kernel 'tiled' has no head dims on CUDA above 256; use naive"),
        ];
        for (kernel, dtype, head_dim, expected) in cases {
            let error = plan(kernel, &Shape { head_dim, ..SHAPE }, dtype).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(plan("naive", &Shape { head_dim: 300, ..SHAPE }, DType::F32).is_ok());
        assert!(cuda_kernel("reference").err().unwrap().to_string().contains("naive, tiled, decode"));
        assert!(cuda_kernel("tiled:br=32").is_err());
        assert!(cuda_kernel("tiled:deterministic=maybe").is_err());
        let none = cuda_kernel("decode").unwrap().plan_backward(&SHAPE, &Params::new(128, true), DType::Bf16, &H200);
        assert_eq!(none.unwrap_err().to_string(), "kernel 'decode' has no backward pass on CUDA; use naive or tiled");
    }

    /// GPUs differ in the shared memory of a block: 99 KiB is the least since Ampere (8.6, 8.9, 12.0).
    #[test]
    fn every_plan_fits_the_shared_memory_of_every_gpu() {
        for (capability, block_shared_bytes) in [((8, 6), 99 << 10), ((8, 0), 163 << 10), ((9, 0), 227 << 10)] {
            let limits = Limits { capability, block_shared_bytes, ..H200 };
            for (head_dim, dtype) in
                (1..=256).flat_map(|d| [DType::F32, DType::Bf16, DType::F16].map(|dtype| (d, dtype)))
            {
                let codes = ["int8", "k=fp8-e4m3,v=int8"].map(|kv| GpuRows::new(dtype, kv.parse().unwrap()).unwrap());
                let kinds = [dtype.into(), codes[0], codes[1]];
                for (group, rows) in [1, 5, 40].into_iter().flat_map(|group| kinds.map(|rows| (group, rows))) {
                    let shape = Shape { head_dim, q_heads: 2 * group, ..SHAPE };
                    for kernel in CUDA_KERNELS {
                        let Ok(plan) = kernel.plan(&shape, &Params::new(head_dim, true), rows, &limits) else {
                            let refused = kernel.name() == "hopper" || kernel.name() == "naive" && rows.is_coded();
                            assert!(refused, "{} {dtype} D {head_dim}", kernel.name());
                            continue;
                        };
                        let most = plan.launches.iter().map(|launch| launch.shared_bytes).max().unwrap();
                        assert!(most as usize <= block_shared_bytes, "{} {dtype} D {head_dim}: {most}", kernel.name());
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_share_a_multiprocessor_where_they_fit() {
        let wide = Limits { block_shared_bytes: 227 << 10, ..H200 };
        let narrow = Limits { block_shared_bytes: 99 << 10, ..H200 };
        assert_eq!(wide.roomiest(2, &[100, 50, 20], |kib| kib << 10), 100);
        assert_eq!(narrow.roomiest(2, &[100, 50, 20], |kib| kib << 10), 20);
        assert_eq!(narrow.roomiest(2, &[100, 60, 55], |kib| kib << 10), 60);
        assert_eq!(wide.roomiest(3, &[100, 70, 20], |kib| kib << 10), 70);
        assert_eq!(narrow.roomiest(3, &[100, 48, 45], |kib| kib << 10), 48);
    }

    #[test]
    fn pages_are_planned_as_dense_tensors_are() {
        let params = Params::new(SHAPE.head_dim, true);
        let dense = plan("decode", &SHAPE, DType::Bf16).unwrap();
        let paged = decode_paged(&SHAPE, &params, DType::Bf16.into(), &H200, 16).unwrap();
        assert_eq!((paged.launches, paged.workspace), (dense.launches, dense.workspace));
        assert_ne!(paged.program, dense.program);
        let none = decode_paged(&SHAPE, &params, DType::Bf16.into(), &H200, 0).unwrap_err();
        assert_eq!(none.to_string(), "pages of 0 tokens; pages have at least 1");
    }

    #[test]
    fn only_naive_has_scores_and_only_decode_has_scratch() {
        let size = |kernel| plan(kernel, &SHAPE, DType::Bf16).unwrap().workspace;
        assert_eq!(size("naive"), WorkspaceSize { scores: SHAPE.scores(), scratch: 0 });
        assert_eq!(size("tiled"), WorkspaceSize::default());
        let backward = cuda_kernel("naive").unwrap().plan_backward(&SHAPE, &Params::new(128, true), DType::F32, &H200);
        let rows = SHAPE.rows().next_multiple_of(32);
        assert_eq!(backward.unwrap().workspace(), WorkspaceSize { scores: 2 * SHAPE.scores(), scratch: rows });
        let decode = plan("decode", &SHAPE, DType::Bf16).unwrap();
        assert_eq!(decode.workspace, WorkspaceSize { scores: 0, scratch: decode.extents.splits * 16 * 130 });
    }
}

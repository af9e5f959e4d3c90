//! cuBLAS, NVIDIA's matrix products: loaded when it is there, for the baseline `naive` and the linear layers of models.
//!
//! Seven functions of it are used, taken from the library by name; cudarc's binding would add 680 KB of source. cuBLAS
//! takes memory of its own when a handle is made (NVIDIA names 32 MiB on Hopper, 4 MiB before); like the context's, it is
//! not the arena's.

use super::{CudaError, DeviceBuffer};
use crate::device::gpu::Gpu;
use crate::tensor::DType;
use libloading::{Library, Symbol};
use std::ffi::{c_int, c_longlong, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;

/// cuBLAS with a handle on the current context.
pub struct Cublas {
    library: Library,
    handle: *mut c_void,
    version: c_int,
}

// SAFETY: a handle may be used by any thread, one at a time; calls take `&mut self`.
unsafe impl Send for Cublas {}

/// Products `c = alpha op(a) b` of as many matrices as `batch` says, in columns as cuBLAS has them: element `(i, j)` of a
/// matrix lies `j * ld + i` behind its start, and the next matrix of the batch `stride` behind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemm {
    /// Whether `a` is stored as `[k, m]`, not `[m, k]`.
    pub transpose_a: bool,
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Factor.
    pub alpha: f32,
    /// Leading dimension of `a`, and elements from a matrix to the next.
    pub a: (usize, usize),
    /// The same of `b`.
    pub b: (usize, usize),
    /// The same of `c`.
    pub c: (usize, usize),
    /// Number of products.
    pub batch: usize,
    /// Element type of `a` and `b`.
    pub inputs: DType,
    /// Element type of `c`.
    pub output: DType,
}

/// Where a matrix lies: rows and columns as it is stored.
struct Matrix {
    rows: usize,
    columns: usize,
    ld: usize,
    stride: usize,
}

impl Matrix {
    /// Elements from its first to behind its last.
    fn span(&self) -> usize {
        (self.columns - 1) * self.ld + self.rows
    }
}

impl Gemm {
    /// `a`, `b` and `c` with their element types.
    fn matrices(&self) -> [(Matrix, DType); 3] {
        let Gemm { m, n, k, inputs, output, .. } = *self;
        let matrix = |rows, columns, (ld, stride)| Matrix { rows, columns, ld, stride };
        let a = if self.transpose_a { matrix(k, m, self.a) } else { matrix(m, k, self.a) };
        [(a, inputs), (matrix(k, n, self.b), inputs), (matrix(m, n, self.c), output)]
    }

    /// Whether a matrix has more elements than an `int` counts. Extents may fit one by one all the same, and the functions
    /// that take them as `int` promise nothing then (older ones have read elsewhere); those of 64 bits, from cuBLAS 12 on,
    /// are made for it.
    fn is_long(&self) -> bool {
        let too_long = |count: usize| c_int::try_from(count).is_err();
        self.matrices().iter().any(|(matrix, _)| too_long(matrix.span().max(matrix.ld))) || too_long(self.batch)
    }

    /// What cuBLAS computes, from its definition: what tests hold the extents of a product to.
    pub fn multiply(&self, a: &[f32], b: &[f32], c: &mut [f32]) {
        for batch in 0..self.batch {
            for (i, j) in (0..self.m).flat_map(|i| (0..self.n).map(move |j| (i, j))) {
                let at_a = |l: usize| if self.transpose_a { i * self.a.0 + l } else { l * self.a.0 + i };
                let term = |l| a[batch * self.a.1 + at_a(l)] * b[batch * self.b.1 + j * self.b.0 + l];
                let sum: f32 = (0..self.k).map(term).sum();
                c[batch * self.c.1 + j * self.c.0 + i] = self.alpha * sum;
            }
        }
    }
}

/// One of cuBLAS's functions of strided batches, by its name and the type of its extents: its status, or in words why it
/// cannot be asked.
macro_rules! multiply {
    ($cublas:expr, $gemm:expr, [$a:expr, $b:expr, $c:expr], $name:literal, $int:ty) => {{
        type Multiply = unsafe extern "C" fn(
            *mut c_void,
            c_int,
            c_int,
            $int,
            $int,
            $int,
            *const f32,
            u64,
            c_int,
            $int,
            c_longlong,
            u64,
            c_int,
            $int,
            c_longlong,
            *const f32,
            u64,
            c_int,
            $int,
            c_longlong,
            $int,
            c_int,
            c_int,
        ) -> c_int;
        let (cublas, gemm): (&Cublas, &Gemm) = ($cublas, $gemm);
        let int = |value: usize| <$int>::try_from(value).map_err(|_| format!("{value} is more than it takes"));
        let ask = || -> Result<c_int, String> {
            // SAFETY: the type is that of cublas_api.h for the name; the library outlives the symbol.
            let multiply: Symbol<Multiply> = unsafe { cublas.library.get($name) }.map_err(|error| error.to_string())?;
            // SAFETY: addresses on the GPU are passed as numbers of their size. The matrices lie in the buffers, which the
            // caller has compared; alpha and beta are read before the call returns.
            Ok(unsafe {
                multiply(
                    cublas.handle,
                    if gemm.transpose_a { OP_T } else { OP_N },
                    OP_N,
                    int(gemm.m)?,
                    int(gemm.n)?,
                    int(gemm.k)?,
                    &gemm.alpha,
                    $a.address(),
                    data_type(gemm.inputs),
                    int(gemm.a.0)?,
                    gemm.a.1 as c_longlong,
                    $b.address(),
                    data_type(gemm.inputs),
                    int(gemm.b.0)?,
                    gemm.b.1 as c_longlong,
                    &0.0,
                    $c.address(),
                    data_type(gemm.output),
                    int(gemm.c.0)?,
                    gemm.c.1 as c_longlong,
                    int(gemm.batch)?,
                    COMPUTE_32F,
                    GEMM_DEFAULT,
                )
            })
        };
        ask()
    }};
}

/// `cublasOperation_t`.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
/// `cublasComputeType_t`: sums in f32, and no TF32.
const COMPUTE_32F: c_int = 68;
/// `cublasGemmAlgo_t`.
const GEMM_DEFAULT: c_int = -1;

/// `cublasStatus_t`: no memory for a handle.
const ALLOC_FAILED: c_int = 3;

/// Why there is no cuBLAS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoCublas {
    /// No library of that name.
    NotFound,
    /// There is one, and what is wrong with it.
    Broken(String),
}

impl Cublas {
    /// Loads the first library that [`Gpu::probe`] finds, else one that the system's loader finds, and makes a handle on
    /// the context of this thread and on its default stream.
    ///
    /// # Errors
    /// When none works: what was wrong with the first that is there.
    pub(super) fn load() -> Result<Self, NoCublas> {
        let mut wrong = NoCublas::NotFound;
        let named = ["libcublas.so.13", "libcublas.so.12"].map(PathBuf::from);
        for path in Gpu::probe().cublas.into_iter().chain(named) {
            // SAFETY: the initialisers of NVIDIA's libraries have no requirements on their caller.
            let opened = match unsafe { Library::new(&path) } {
                // A name that leads nowhere says nothing; a file that does not load does.
                Err(_) if !path.is_absolute() => continue,
                Err(error) => Err(error.to_string()),
                Ok(library) => Self::open(library),
            };
            match opened {
                Ok(cublas) => return Ok(cublas),
                Err(reason) if wrong == NoCublas::NotFound => {
                    wrong = NoCublas::Broken(format!("{}: {reason}", path.display()));
                }
                Err(_) => {}
            }
        }
        Err(wrong)
    }

    fn open(library: Library) -> Result<Self, String> {
        let (mut handle, mut version) = (null_mut(), 0);
        {
            type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
            type Version = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
            let missing = |error: libloading::Error| error.to_string();
            // SAFETY: the types are those of cublas_api.h, the same since CUDA 11; the pointers are to variables that live
            // through the calls, and the second call is made only with the handle that the first one gave.
            unsafe {
                let create: Symbol<Create> = library.get(b"cublasCreate_v2").map_err(missing)?;
                let ask: Symbol<Version> = library.get(b"cublasGetVersion_v2").map_err(missing)?;
                match create(&mut handle) {
                    0 => {}
                    ALLOC_FAILED => return Err("no GPU memory for its handle".into()),
                    status => return Err(format!("its handle failed with status {status}")),
                }
                ask(handle, &mut version);
            }
        }
        Ok(Cublas { library, handle, version })
    }

    /// As `13.0`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version / 10_000, self.version / 100 % 100)
    }

    /// Begins products on the default stream.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a matrix reaches beyond its buffer, [`CudaError::Cublas`] when cuBLAS refuses.
    pub fn begin(
        &mut self,
        gemm: &Gemm,
        a: &DeviceBuffer,
        b: &DeviceBuffer,
        c: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        for (buffer, (matrix, dtype)) in [a, b, &*c].into_iter().zip(gemm.matrices()) {
            let end = (gemm.batch - 1) * matrix.stride + matrix.span();
            if matrix.ld < matrix.rows || buffer.bytes() < (end * dtype.bytes()) as u64 {
                let message = format!("a matrix of {end} elements in a buffer of {} bytes", buffer.bytes());
                return Err(CudaError::Operand(message));
            }
        }
        let result = match gemm.is_long() {
            false => multiply!(self, gemm, [a, b, c], b"cublasGemmStridedBatchedEx", c_int),
            true => multiply!(self, gemm, [a, b, c], b"cublasGemmStridedBatchedEx_64", i64),
        };
        let status = result.map_err(|what| CudaError::Operand(format!("cuBLAS {}: {what}", self.version())))?;
        match status {
            0 => Ok(()),
            ALLOC_FAILED => Err(CudaError::NoRoom { what: "multiplying matrices" }),
            status => Err(CudaError::Cublas { version: self.version(), status }),
        }
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: the type is that of cublas_api.h; the handle was made by `open` and is not used again.
        unsafe {
            if let Ok(destroy) = self.library.get::<Destroy>(b"cublasDestroy_v2") {
                destroy(self.handle);
            }
        }
    }
}

/// `cudaDataType_t`.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 2,
        DType::Bf16 => 14,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::Runtime;
    use crate::memory::{Arena, Label};

    /// Scores of `heads` heads over `tokens` tokens, as the baseline asks for them.
    fn scores(tokens: usize, group: usize, head_dim: usize) -> Gemm {
        let rows = group * tokens;
        Gemm {
            transpose_a: true,
            m: tokens,
            n: rows,
            k: head_dim,
            alpha: 1.0,
            a: (head_dim, tokens * head_dim),
            b: (head_dim, rows * head_dim),
            c: (tokens, rows * tokens),
            batch: 4,
            inputs: DType::Bf16,
            output: DType::F32,
        }
    }

    #[test]
    fn matrices_that_an_int_does_not_count_are_long() {
        // 46340² is the last square below 2^31.
        for (tokens, group, head_dim, long) in [
            (46_340, 1, 128, false),
            (46_341, 1, 128, true),
            (16_384, 8, 128, true),
            (16_383, 8, 128, false),
            (64, 1, 8, false),
        ] {
            assert_eq!(scores(tokens, group, head_dim).is_long(), long, "{tokens} tokens, {group} heads of a group");
        }
        // The input alone: 2^24 keys of 128 elements.
        let keys = Gemm { n: 1, c: (1 << 24, 1 << 24), ..scores(1 << 24, 1, 128) };
        assert!(keys.is_long());
        assert!(Gemm { batch: 1 << 31, ..scores(64, 1, 8) }.is_long());
        // Strides are 64 bits in every version.
        let far = scores(64, 1, 8);
        assert!(!Gemm { a: (far.a.0, 1 << 40), ..far }.is_long());
    }

    /// Nothing small has matrices that long, but a single column may lie in a matrix whose columns are that far apart.
    #[test]
    #[ignore = "cuda: needs a GPU, NVRTC and cuBLAS"]
    fn long_matrices_are_multiplied_by_the_functions_of_64_bits() {
        let runtime = Runtime::open(0, None).unwrap();
        let Some(mut cublas) = runtime.cublas() else { return };
        let far = 1 << 31;
        let gemm = Gemm { m: 4, n: 1, k: 3, a: (3, 12), b: (far, 3), c: (far, 4), batch: 2, ..scores(4, 1, 3) };
        let gemm = Gemm { inputs: DType::F32, ..gemm };
        assert!(gemm.is_long());
        let numbers = |count: usize| (0..count).map(|at| (at * at % 7) as f32).collect::<Vec<_>>();
        let (a, b, mut expected) = (numbers(24), numbers(6), vec![0f32; 8]);
        gemm.multiply(&a, &b, &mut expected);
        let there = |values: &[f32]| {
            let bytes: &[u8] = bytemuck::cast_slice(values);
            let mut buffer = runtime.device().alloc(&Arena::unlimited(), Label::Workspace, bytes.len() as u64).unwrap();
            buffer.write(bytes).unwrap();
            buffer
        };
        let (a, b, mut c) = (there(&a), there(&b), there(&expected));
        c.fill(0xff).unwrap();
        runtime.device().timed(|| cublas.begin(&gemm, &a, &b, &mut c)).unwrap();
        let mut found = vec![0f32; 8];
        c.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_span_is_what_a_matrix_reaches() {
        let [a, b, c] = scores(10, 2, 8).matrices();
        assert_eq!([a.0.span(), b.0.span(), c.0.span()], [80, 160, 200]);
        let apart = Matrix { rows: 3, columns: 5, ld: 7, stride: 0 };
        assert_eq!(apart.span(), 4 * 7 + 3);
    }
}

//! cuBLAS, NVIDIA's matrix products: loaded when it is there, for the baseline `naive` and the linear layers of models.
//!
//! Six functions of it are used, taken from the library by name; cudarc's binding would add 680 KB of source. cuBLAS
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

#[cfg(test)]
impl Gemm {
    /// What cuBLAS computes, from its definition.
    pub(crate) fn multiply(&self, a: &[f32], b: &[f32], c: &mut [f32]) {
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

/// `cublasOperation_t`.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
/// `cublasComputeType_t`: sums in f32, and no TF32.
const COMPUTE_32F: c_int = 68;
/// `cublasGemmAlgo_t`.
const GEMM_DEFAULT: c_int = -1;

impl Cublas {
    /// Loads the first library that [`Gpu::probe`] finds, else one that the system's loader finds, and makes a handle on
    /// the context of this thread and on its default stream. `None` where there is none that works.
    pub(super) fn load() -> Option<Self> {
        let named = ["libcublas.so.13", "libcublas.so.12"].map(PathBuf::from);
        Gpu::probe().cublas.into_iter().chain(named).find_map(|path| {
            // SAFETY: the initialisers of NVIDIA's libraries have no requirements on their caller.
            let library = unsafe { Library::new(path) }.ok()?;
            Self::open(library)
        })
    }

    fn open(library: Library) -> Option<Self> {
        let (mut handle, mut version) = (null_mut(), 0);
        {
            type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
            type Version = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
            // SAFETY: the types are those of cublas_api.h, the same since CUDA 11; the pointers are to variables that live
            // through the calls, and the second call is made only with the handle that the first one gave.
            unsafe {
                let create: Symbol<Create> = library.get(b"cublasCreate_v2").ok()?;
                let ask: Symbol<Version> = library.get(b"cublasGetVersion_v2").ok()?;
                if create(&mut handle) != 0 || ask(handle, &mut version) != 0 {
                    return None;
                }
            }
        }
        Some(Cublas { library, handle, version })
    }

    /// As `13.0`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version / 10_000, self.version / 100 % 100)
    }

    /// Begins products on the default stream.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a matrix reaches beyond its buffer, [`CudaError::Cublas`] when cuBLAS refuses.
    pub(crate) fn begin(
        &mut self,
        gemm: &Gemm,
        a: &DeviceBuffer,
        b: &DeviceBuffer,
        c: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let Gemm { m, n, k, alpha, batch, inputs, output, .. } = *gemm;
        let (rows_a, columns_a) = if gemm.transpose_a { (k, m) } else { (m, k) };
        let matrices = [(a, gemm.a, rows_a, columns_a, inputs), (b, gemm.b, k, n, inputs), (&*c, gemm.c, m, n, output)];
        for (buffer, (ld, stride), rows, columns, dtype) in matrices {
            let end = (batch - 1) * stride + (columns - 1) * ld + rows;
            if ld < rows || buffer.bytes() < (end * dtype.bytes()) as u64 {
                let message = format!("a matrix of {end} elements in a buffer of {} bytes", buffer.bytes());
                return Err(CudaError::Operand(message));
            }
        }
        type Multiply = unsafe extern "C" fn(
            *mut c_void,
            c_int,
            c_int,
            c_int,
            c_int,
            c_int,
            *const f32,
            u64,
            c_int,
            c_int,
            c_longlong,
            u64,
            c_int,
            c_int,
            c_longlong,
            *const f32,
            u64,
            c_int,
            c_int,
            c_longlong,
            c_int,
            c_int,
            c_int,
        ) -> c_int;
        let int = |value: usize| {
            c_int::try_from(value).map_err(|_| CudaError::Operand(format!("{value} is more than cuBLAS takes")))
        };
        let op_a = if gemm.transpose_a { OP_T } else { OP_N };
        let sizes = [int(m)?, int(n)?, int(k)?, int(batch)?];
        let [lda, ldb, ldc] = [int(gemm.a.0)?, int(gemm.b.0)?, int(gemm.c.0)?];
        let [stride_a, stride_b, stride_c] = [gemm.a.1, gemm.b.1, gemm.c.1].map(|stride| stride as c_longlong);
        // SAFETY: the type is that of cublas_api.h (addresses on the GPU are passed as numbers of their size). The
        // matrices lie in the buffers, which was just compared; alpha and beta are read before the call returns.
        let status = unsafe {
            let missing = |error: libloading::Error| CudaError::Operand(error.to_string());
            let multiply: Symbol<Multiply> = self.library.get(b"cublasGemmStridedBatchedEx").map_err(missing)?;
            multiply(
                self.handle,
                op_a,
                OP_N,
                sizes[0],
                sizes[1],
                sizes[2],
                &alpha,
                a.address(),
                data_type(inputs),
                lda,
                stride_a,
                b.address(),
                data_type(inputs),
                ldb,
                stride_b,
                &0.0,
                c.address(),
                data_type(output),
                ldc,
                stride_c,
                sizes[3],
                COMPUTE_32F,
                GEMM_DEFAULT,
            )
        };
        match status {
            0 => Ok(()),
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

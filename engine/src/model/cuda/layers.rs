//! The launches of `kernels/model.cu`, and products with weights: cuBLAS's where it is found, else this project's own.
//!
//! Everything is begun on the default stream, in order; who reads the logits waits for it. cuBLAS takes both factors in one
//! type: activations are rounded to that of 16-bit weights then, as frameworks that compute in these types do. The own
//! products keep them in f32, as the CPU does.

use super::weights::{DeviceLinear, DeviceMatrix};
use crate::device::cuda::{
    Argument, CudaError, DeviceBuffer, Each, Embedding, Gemm, Heads, HeadsOperands, Launch, Linear, MODEL, Module,
    Narrowing, Norm, Program, Runtime,
};
use crate::model::config::Activation;
use crate::tensor::DType;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Rows of activations up to which a product reads each row of the weights once.
const FEW: usize = 8;
/// Rows and columns of a tile of a product.
const TILE: usize = 64;
/// Columns of a block for few rows.
const COLUMNS: usize = 8;

/// The kernels of a model, compiled.
pub(super) struct Layers<'a> {
    runtime: &'a Runtime,
    modules: BTreeMap<DType, Arc<Module>>,
}

/// What is compiled for weights of a type.
pub fn program(dtype: DType) -> Program {
    Program { source: MODEL, dtype, head_dim: 1, macros: vec![] }
}

impl<'a> Layers<'a> {
    /// Compiles them for these element types, and for f32.
    ///
    /// # Errors
    /// As [`Runtime::module`].
    pub fn new(runtime: &'a Runtime, dtypes: impl Iterator<Item = DType>) -> Result<Self, CudaError> {
        let module = |dtype| Ok((dtype, runtime.module(&program(dtype))?));
        let modules = dtypes.chain([DType::F32]).map(module).collect::<Result<_, CudaError>>()?;
        Ok(Layers { runtime, modules })
    }

    fn begin(
        &self,
        dtype: DType,
        function: &'static str,
        grid: [usize; 2],
        argument: &dyn Argument,
    ) -> Result<(), CudaError> {
        let threads = if function.ends_with("heads") { 128 } else { 256 };
        let launch = Launch { function, grid: [grid[0], grid[1], 1], threads, shared_bytes: 0 };
        let device = self.runtime.device();
        device.begin(&device.ready(&self.modules[&dtype], &[launch])?, &[argument])
    }

    /// Rows of the embedding, for tokens that lie from number `tokens.1` of their buffer on.
    pub fn embed(
        &self,
        tokens: (&DeviceBuffer, usize),
        table: &DeviceMatrix,
        to: &mut DeviceBuffer,
        rows: usize,
        factor: f32,
    ) -> Result<(), CudaError> {
        let embedding = Embedding::new(tokens, &table.data, to, [rows, table.width], factor)?;
        self.begin(table.dtype, "embed_rows", [rows, 1], &embedding)
    }

    /// Norms of rows from row `first` of `from` on.
    pub fn norm(
        &self,
        from: (&DeviceBuffer, usize),
        weight: &DeviceBuffer,
        to: &mut DeviceBuffer,
        extents: [usize; 2],
        flavour: [f32; 2],
    ) -> Result<(), CudaError> {
        self.begin(DType::F32, "norm_rows", [extents[0], 1], &Norm::new(from, weight, to, extents, flavour)?)
    }

    /// Norms of rows in place.
    pub fn norm_in_place(
        &self,
        x: &mut DeviceBuffer,
        weight: &DeviceBuffer,
        extents: [usize; 2],
        flavour: [f32; 2],
    ) -> Result<(), CudaError> {
        self.begin(DType::F32, "norm_rows", [extents[0], 1], &Norm::in_place(x, weight, extents, flavour)?)
    }

    /// `to = x wᵀ + b` of each; `narrowed` has room for the elements of `x` in 16 bits, where cuBLAS wants them so: once for
    /// all of them.
    pub fn linear<const N: usize>(
        &self,
        x: &DeviceBuffer,
        all: [(&DeviceLinear, &mut DeviceBuffer); N],
        rows: usize,
        narrowed: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let mut there = None;
        for (linear, to) in all {
            self.product(x, &linear.weight, rows, to, (narrowed, &mut there))?;
            let Some(bias) = &linear.bias else { continue };
            let width = linear.weight.rows;
            let each = Each::with_row(to, bias, [rows, width])?;
            self.begin(DType::F32, "add_bias", blocks(rows * width), &each)?;
        }
        Ok(())
    }

    /// `to = x wᵀ`; `there` is the type in which `x` is narrowed already.
    pub fn product(
        &self,
        x: &DeviceBuffer,
        weight: &DeviceMatrix,
        rows: usize,
        to: &mut DeviceBuffer,
        (narrowed, there): (&mut DeviceBuffer, &mut Option<DType>),
    ) -> Result<(), CudaError> {
        let DeviceMatrix { data, dtype, rows: width, width: depth } = weight;
        let (dtype, width, depth) = (*dtype, *width, *depth);
        if let Some(mut cublas) = self.runtime.cublas() {
            let gemm = gemm(rows, depth, width, dtype);
            if dtype == DType::F32 {
                return cublas.begin(&gemm, data, x, to);
            }
            if *there != Some(dtype) {
                let narrowing = Narrowing::new(x, (&mut *narrowed, dtype), rows * depth)?;
                self.begin(dtype, "narrow_each", blocks(rows * depth), &narrowing)?;
                *there = Some(dtype);
            }
            return cublas.begin(&gemm, data, narrowed, to);
        }
        let linear = Linear::new(x, (data, dtype), to, [rows, depth, width])?;
        match rows <= FEW {
            true => self.begin(dtype, "multiply_few", [width.div_ceil(COLUMNS), 1], &linear),
            false => self.begin(dtype, "multiply_rows", [width.div_ceil(TILE), rows.div_ceil(TILE)], &linear),
        }
    }

    /// Rows to heads, turned where there are angles.
    pub fn split_heads(&self, operands: &HeadsOperands<'_>) -> Result<(), CudaError> {
        self.begin(operands.dtype, "split_heads", [operands.tokens, operands.heads], &Heads::new(operands)?)
    }

    /// Heads to rows.
    pub fn merge_heads(&self, operands: &HeadsOperands<'_>) -> Result<(), CudaError> {
        self.begin(operands.dtype, "merge_heads", [operands.tokens, operands.heads], &Heads::new(operands)?)
    }

    /// `x += y`.
    pub fn add(&self, x: &mut DeviceBuffer, y: &DeviceBuffer, count: usize) -> Result<(), CudaError> {
        self.begin(DType::F32, "add_each", blocks(count), &Each::with(x, y, count)?)
    }

    /// `gate = activation(gate) * up`.
    pub fn activate(
        &self,
        activation: Activation,
        gate: &mut DeviceBuffer,
        up: &DeviceBuffer,
        count: usize,
    ) -> Result<(), CudaError> {
        let function = match activation {
            Activation::Silu => "gate_silu",
            Activation::GeluTanh => "gate_gelu",
        };
        self.begin(DType::F32, function, blocks(count), &Each::with(gate, up, count)?)
    }

    /// `x = gelu(x)`, by the error function.
    pub fn gelu(&self, x: &mut DeviceBuffer, count: usize) -> Result<(), CudaError> {
        self.begin(DType::F32, "gelu_each", blocks(count), &Each::alone(x, count)?)
    }

    /// `x = cap tanh(x / cap)`.
    pub fn soft_cap(&self, x: &mut DeviceBuffer, count: usize, cap: f32) -> Result<(), CudaError> {
        self.begin(DType::F32, "cap_each", blocks(count), &Each::capped(x, count, cap)?)
    }
}

/// The grid for so many elements.
fn blocks(count: usize) -> [usize; 2] {
    [count.div_ceil(256), 1]
}

/// `y[rows, width] = x[rows, depth] w[width, depth]ᵀ` as cuBLAS has it: in columns, where a matrix of rows is its
/// transpose.
fn gemm(rows: usize, depth: usize, width: usize, dtype: DType) -> Gemm {
    Gemm {
        transpose_a: true,
        m: width,
        n: rows,
        k: depth,
        alpha: 1.0,
        a: (depth, 0),
        b: (depth, 0),
        c: (width, 0),
        batch: 1,
        inputs: dtype,
        output: DType::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_asked_for_the_products_of_linear_layers() {
        let (rows, depth, width) = (3, 4, 5);
        let numbers = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 7 + seed * 3 + i / 5) % 11) as f32 - 5.0).collect()
        };
        let (x, w) = (numbers(rows * depth, 1), numbers(width * depth, 2));
        let mut y = vec![f32::NAN; rows * width];
        gemm(rows, depth, width, DType::Bf16).multiply(&w, &x, &mut y);
        for (at, y) in y.iter().enumerate() {
            let (x, w) = (&x[at / width * depth..], &w[at % width * depth..]);
            assert_eq!(*y, (0..depth).map(|k| x[k] * w[k]).sum::<f32>());
        }
    }
}

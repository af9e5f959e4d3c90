//! What the attention tests share: problems, seeded inputs, and runs of a kernel in poisoned memory.
#![allow(dead_code)] // each test binary uses a part of it

pub mod accuracy;
pub mod exact;
pub mod gguf;
pub mod models;
pub mod packed;
pub mod ragged;

use kvsieve::attention::{
    Backward, DenseKv, Forward, Gradients, Inputs, KERNELS, Kernel, KvRows, Outputs, Params, Shape, Workspace, kernel,
};
use kvsieve::device::{Cpu, simd::Isa};
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, Tensor, TensorView};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::process::Command;
use std::sync::OnceLock;

/// Kernels under test, with tiles that are odd, square, degenerate and default.
pub const VARIANTS: [&str; 7] =
    ["naive", "tiled", "tiled:br=64,bc=256", "tiled:br=16,bc=48", "tiled:br=7,bc=5", "tiled:br=1,bc=1", "decode"];

/// The variants that have a backward pass.
pub const WITH_BACKWARD: [&str; 5] = ["naive", "tiled", "tiled:br=16,bc=48", "tiled:br=7,bc=5", "tiled:br=1,bc=1"];

/// One attention problem.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    pub shape: Shape,
    pub params: Params,
    pub dtype: DType,
}

/// The extents `[B, Hq, Hkv, Lq, Lk, D]`.
pub fn shape([batch, q_heads, kv_heads, q_len, kv_len, head_dim]: [usize; 6]) -> Shape {
    let shape = Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim };
    shape.check().unwrap();
    shape
}

/// A pool of 1 to 3 threads, made once.
pub fn cpu(threads: usize) -> &'static Cpu {
    static POOLS: [OnceLock<Cpu>; 3] = [const { OnceLock::new() }; 3];
    POOLS[threads - 1].get_or_init(|| Cpu::new(Some(threads)).unwrap())
}

/// Runs the tests of this binary once more on each slower instruction path of the machine.
pub fn pass_on_every_path() {
    if std::env::var_os("KVSIEVE_ISA").is_some() {
        return;
    }
    for isa in Isa::available().skip(1) {
        let tests = Command::new(std::env::current_exe().unwrap()).env("KVSIEVE_ISA", isa.name()).output().unwrap();
        let said = String::from_utf8_lossy(&tests.stdout);
        assert!(tests.status.success(), "on the path {}:\n{said}", isa.name());
    }
}

/// Every registered kernel is among the variants, so that a new one cannot go untested.
pub fn assert_every_kernel_is_tested() {
    for entry in KERNELS.iter().filter(|entry| entry.name != "reference") {
        assert!(VARIANTS.contains(&entry.name), "kernel '{}' is not under test", entry.name);
    }
}

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Standard normal numbers times `factor`.
pub fn normal(rng: &mut impl Rng, len: usize, factor: f32) -> Vec<f32> {
    (0..len).map(|_| factor * rng.sample::<f32, _>(StandardNormal)).collect()
}

/// A tensor outside of any measured arena.
pub fn tensor(dtype: DType, dims: [usize; 4], values: &[f32]) -> Tensor {
    Tensor::from_f32(&Arena::unlimited(), Label::Input, dtype, dims, values).unwrap()
}

/// Standard normal inputs.
pub fn inputs(problem: &Problem, seed: u64) -> Inputs {
    let Problem { shape, dtype, .. } = *problem;
    let mut rng = rng(seed);
    let mut make = |dims: [usize; 4]| tensor(dtype, dims, &normal(&mut rng, dims.iter().product(), 1.0));
    Inputs { q: make(shape.q_dims()), k: make(shape.kv_dims()), v: make(shape.kv_dims()) }
}

/// A standard normal gradient of the output.
pub fn grad_o(problem: &Problem, seed: u64) -> Tensor {
    let dims = problem.shape.q_dims();
    tensor(problem.dtype, dims, &normal(&mut rng(seed ^ 0x6a), dims.iter().product(), 1.0))
}

/// A workspace and buffers full of NaN: whatever a kernel does not write itself shows.
fn poison(workspace: &mut Workspace) {
    workspace.scores.fill(f32::NAN);
    workspace.scratch.fill(f32::NAN);
}

/// Fills a tensor with NaN (all bits set is one in every element type).
fn poison_tensor(tensor: &mut Tensor) {
    tensor.bytes_mut().fill(0xff);
}

/// Runs a forward pass in poisoned memory.
pub fn forward_call(kernel: &dyn Kernel, call: &Forward<'_>, dtype: DType) -> Outputs {
    let arena = Arena::unlimited();
    let size = kernel.workspace(&call.shape, &call.params, dtype, call.cpu.threads());
    let mut workspace = size.allocate(&arena).unwrap();
    let mut outputs = Outputs::allocate(&arena, &call.shape, dtype).unwrap();
    poison(&mut workspace);
    poison_tensor(&mut outputs.o);
    outputs.lse.fill(f32::NAN);
    kernel.forward(call, &mut outputs, &mut workspace).unwrap();
    outputs
}

/// The call of a forward pass. (A view's lifetime cannot be shortened: a call that lives less is made anew.)
pub fn call<'a>(problem: &Problem, inputs: &'a Inputs, kv: &'a dyn KvRows, threads: usize) -> Forward<'a> {
    Forward { shape: problem.shape, params: problem.params, q: inputs.q.view(), kv, cpu: cpu(threads) }
}

/// Runs a forward pass over the given queries, keys and values.
pub fn forward_over<'a>(
    name: &str,
    problem: &Problem,
    q: TensorView<'a>,
    kv: &'a dyn KvRows,
    cpu: &'a Cpu,
) -> (Vec<f32>, Vec<f32>) {
    let call = Forward { shape: problem.shape, params: problem.params, q, kv, cpu };
    let outputs = forward_call(&*kernel(name).unwrap(), &call, problem.dtype);
    (outputs.o.to_f32(), outputs.lse.to_vec())
}

/// Runs a forward pass: `(o, lse)`.
pub fn forward(name: &str, problem: &Problem, inputs: &Inputs, threads: usize) -> (Vec<f32>, Vec<f32>) {
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    forward_over(name, problem, inputs.q.view(), &kv, cpu(threads))
}

/// Runs a forward and a backward pass of one kernel: the gradients by `q`, `k` and `v`.
pub fn backward(name: &str, problem: &Problem, inputs: &Inputs, grad_o: &Tensor, threads: usize) -> [Vec<f32>; 3] {
    let kernel = kernel(name).unwrap();
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let Problem { shape, params, dtype } = *problem;
    let outputs = forward_call(&*kernel, &call(problem, inputs, &kv, threads), dtype);
    let arena = Arena::unlimited();
    let mut workspace = kernel.backward_workspace(&shape, &params, dtype, threads).unwrap().allocate(&arena).unwrap();
    let mut gradients = Gradients::allocate(&arena, &shape, dtype).unwrap();
    poison(&mut workspace);
    [&mut gradients.q, &mut gradients.k, &mut gradients.v].into_iter().for_each(poison_tensor);
    let forward = call(problem, inputs, &kv, threads);
    let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: grad_o.view() };
    kernel.backward(&call, &mut gradients, &mut workspace).unwrap();
    [gradients.q.to_f32(), gradients.k.to_f32(), gradients.v.to_f32()]
}

/// `|got - wanted| / |wanted|`; 0 where both are nothing.
pub fn relative_l2(got: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&got, &wanted) in got.iter().zip(wanted) {
        difference += (f64::from(got) - wanted).powi(2);
        norm += wanted * wanted;
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Root mean square of a gradient's error, relative to that of the expected gradient plus 0.3: inputs are standard normal,
/// and a gradient that is nothing but cancellation (of a row that sees one key) is still rounded as its terms are, which
/// are of order one.
pub fn root_mean_square_error(got: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let mean = |sum: f64| (sum / got.len() as f64).sqrt();
    let difference = mean(got.iter().zip(wanted).map(|(&got, wanted)| (f64::from(got) - wanted).powi(2)).sum());
    difference / (mean(wanted.iter().map(|x| x * x).sum()) + 0.3)
}

/// The elements in f64.
pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// The bits of each element: `-0` and `0`, and NaNs, are told apart.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

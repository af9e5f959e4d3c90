//! Speed of the attention kernels. `cargo bench --bench attention -- tiled` runs the part whose names match; kernels
//! that compete are in one group, one after the other, so that their ratio says more than their times.

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use kvsieve::attention::{
    Backward, DenseKv, Forward, Gradients, Inputs, KvRows, Outputs, Params, Shape, Workspace, export, kernel,
};
use kvsieve::cache::{CacheShape, PagedCache};
use kvsieve::device::Cpu;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::time::Duration;

/// Everything that a pass reads and writes, allocated before the clock runs.
struct Bench {
    shape: Shape,
    params: Params,
    dtype: DType,
    inputs: Inputs,
    grad_o: Tensor,
    outputs: Outputs,
    arena: Arena,
    cpu: Cpu,
}

impl Bench {
    fn new(shape: Shape, causal: bool, dtype: DType) -> Self {
        let (arena, mut rng) = (Arena::unlimited(), ChaCha8Rng::seed_from_u64(0));
        let mut normal = |dims: [usize; 4]| {
            let values: Vec<f32> = (0..dims.iter().product()).map(|_| rng.sample(StandardNormal)).collect();
            Tensor::from_f32(&arena, Label::Input, dtype, dims, &values).unwrap()
        };
        let inputs = Inputs { q: normal(shape.q_dims()), k: normal(shape.kv_dims()), v: normal(shape.kv_dims()) };
        let grad_o = normal(shape.q_dims());
        let outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
        let params = Params::new(shape.head_dim, causal);
        Bench { shape, params, dtype, inputs, grad_o, outputs, arena, cpu: Cpu::new(None).unwrap() }
    }

    fn workspace(&self, name: &str) -> Workspace {
        let size = kernel(name).unwrap().workspace(&self.shape, &self.params, self.dtype, self.cpu.threads());
        size.allocate(&self.arena).unwrap()
    }

    /// Runs `work` with the call of a forward pass and with the outputs.
    fn with<R>(&mut self, work: impl FnOnce(&Forward<'_>, &mut Outputs) -> R) -> R {
        let kv = DenseKv::new(self.inputs.k.view(), self.inputs.v.view()).unwrap();
        let Bench { shape, params, .. } = *self;
        work(&Forward { shape, params, q: self.inputs.q.view(), kv: &kv, cpu: &self.cpu }, &mut self.outputs)
    }

    fn forward(&mut self, name: &str, workspace: &mut Workspace) {
        let kernel = kernel(name).unwrap();
        self.with(|call, outputs| kernel.forward(call, outputs, workspace).unwrap());
    }
}

fn square(len: usize, head_dim: usize) -> Shape {
    Shape { batch: 1, q_heads: 2, kv_heads: 2, q_len: len, kv_len: len, head_dim }
}

fn forward(criterion: &mut Criterion) {
    for (dtype, head_dim, len) in [
        (DType::F32, 64, 1024),
        (DType::F32, 64, 4096),
        (DType::F32, 128, 1024),
        (DType::F32, 128, 4096),
        (DType::Bf16, 128, 1024),
        (DType::Bf16, 128, 4096),
    ] {
        for (mask, causal) in [("full", false), ("causal", true)] {
            let mut bench = Bench::new(square(len, head_dim), causal, dtype);
            let mut group = criterion.benchmark_group(format!("forward/{mask}/{dtype}/D{head_dim}/L{len}"));
            group.sampling_mode(SamplingMode::Flat);
            group.throughput(Throughput::Elements(bench.shape.flops(&bench.params)));
            for name in ["naive", "tiled"] {
                let mut workspace = bench.workspace(name);
                group.bench_function(name, |bencher| bencher.iter(|| bench.forward(name, &mut workspace)));
            }
        }
    }
}

fn backward(criterion: &mut Criterion) {
    for (dtype, head_dim) in [(DType::F32, 64), (DType::F32, 128), (DType::Bf16, 64), (DType::Bf16, 128)] {
        for (mask, causal) in [("full", false), ("causal", true)] {
            let len = 2048;
            let mut bench = Bench::new(square(len, head_dim), causal, dtype);
            let mut workspace = bench.workspace("tiled");
            bench.forward("tiled", &mut workspace);
            let kv = DenseKv::new(bench.inputs.k.view(), bench.inputs.v.view()).unwrap();
            let Bench { shape, params, .. } = bench;
            let forward = Forward { shape, params, q: bench.inputs.q.view(), kv: &kv, cpu: &bench.cpu };
            let (o, lse) = (bench.outputs.o.view(), &bench.outputs.lse);
            let call = Backward { forward, o, lse, grad_o: bench.grad_o.view() };
            let mut gradients = Gradients::allocate(&bench.arena, &shape, dtype).unwrap();
            let mut group = criterion.benchmark_group(format!("backward/{mask}/{dtype}/D{head_dim}/L{len}"));
            group.sampling_mode(SamplingMode::Flat);
            group.throughput(Throughput::Elements(shape.flops(&params) * 5 / 2));
            for name in ["naive", "tiled"] {
                let kernel = kernel(name).unwrap();
                let size = kernel.backward_workspace(&shape, &params, dtype, bench.cpu.threads()).unwrap();
                let mut workspace = size.allocate(&bench.arena).unwrap();
                group.bench_function(name, |bencher| {
                    bencher.iter(|| kernel.backward(&call, &mut gradients, &mut workspace).unwrap());
                });
            }
        }
    }
}

/// Memory that the copies of one cache take together, so that no cache of a processor holds them: each pass reads
/// another copy, as each layer of a model does.
const COLD_BYTES: u64 = 128 << 20;

/// One query for each head: the bytes are those of keys and values, each read once.
fn decode(criterion: &mut Criterion) {
    for dtype in DType::ALL {
        for (q_heads, kv_len) in [(8, 8192), (32, 8192), (8, 32768), (32, 32768)] {
            let shape = Shape { batch: 1, q_heads, kv_heads: 8, q_len: 1, kv_len, head_dim: 128 };
            let mut bench = Bench::new(shape, true, dtype);
            let kv_bytes = 2 * Tensor::bytes_of(dtype, shape.kv_dims());
            let copy = |tensor: &Tensor| {
                let mut copy = Tensor::zeros(&bench.arena, Label::Input, dtype, tensor.dims()).unwrap();
                copy.bytes_mut().copy_from_slice(tensor.bytes());
                copy
            };
            let copies = COLD_BYTES.div_ceil(kv_bytes).max(2);
            let caches: Vec<_> = (0..copies).map(|_| (copy(&bench.inputs.k), copy(&bench.inputs.v))).collect();
            let dense: Vec<_> = caches.iter().map(|(k, v)| DenseKv::new(k.view(), v.view()).unwrap()).collect();
            let paged: Vec<_> = caches.iter().map(|(k, v)| paged(&bench.arena, shape, k, v)).collect();
            let mut group = criterion.benchmark_group(format!("decode/{dtype}/D128/L{kv_len}/heads-{q_heads}-8"));
            group.sampling_mode(SamplingMode::Flat);
            group.throughput(Throughput::Bytes(kv_bytes));
            for (name, what) in [("naive", "naive"), ("decode", "decode"), ("decode", "decode-paged")] {
                let (kernel, mut workspace, mut turn) = (kernel(name).unwrap(), bench.workspace(name), 0);
                group.bench_function(what, |bencher| {
                    bencher.iter(|| {
                        turn = (turn + 1) % dense.len();
                        let kv: &dyn KvRows = if what == "decode-paged" { &paged[turn] } else { &dense[turn] };
                        let (q, params, cpu) = (bench.inputs.q.view(), bench.params, &bench.cpu);
                        let call = Forward { shape, params, q, kv, cpu };
                        kernel.forward(&call, &mut bench.outputs, &mut workspace).unwrap();
                    });
                });
            }
        }
    }
}

/// The tensors in pages.
fn paged(arena: &Arena, shape: Shape, k: &Tensor, v: &Tensor) -> PagedCache {
    let Shape { batch, kv_heads, kv_len, head_dim, .. } = shape;
    let dtype = k.dtype();
    let shape = CacheShape { batch, kv_heads, head_dim, dtype, max_tokens: kv_len, with_attention: false };
    let mut cache = PagedCache::new(arena, shape).unwrap();
    cache.append(k.view(), v.view(), 0..kv_len).unwrap();
    cache
}

/// The attention that each key received from all queries (as H2O asks) and from the last 64 (as SnapKV does).
fn column_sums(criterion: &mut Criterion) {
    let mut bench = Bench::new(square(4096, 128), true, DType::F32);
    let mut workspace = bench.workspace("tiled");
    bench.forward("tiled", &mut workspace);
    let shape = bench.shape;
    let lse = bench.outputs.lse.to_vec();
    let mut sums = vec![0.0; shape.batch * shape.kv_heads * shape.kv_len];
    let mut scratch = vec![0.0; export::workspace(&shape, bench.cpu.threads())];
    let mut group = criterion.benchmark_group("column-sums/causal/f32/D128/L4096");
    group.sampling_mode(SamplingMode::Flat);
    for first in [0, 4096 - 64] {
        let id = BenchmarkId::new("last-queries", 4096 - first);
        group.bench_function(id, |bencher| {
            bencher.iter(|| {
                bench.with(|call, _| export::column_sums(call, &lse, first..4096, &mut sums, &mut scratch));
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = forward, backward, decode, column_sums
}
criterion_main!(benches);

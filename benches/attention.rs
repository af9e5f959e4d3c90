//! Speed of the attention kernels. `cargo bench --bench attention -- tiled` runs the part whose names match; kernels
//! that compete are in one group, one after the other, so that their ratio says more than their times. Beside each
//! stands what part of the machine's ceiling it reached, probed just before: multiply-adds in f32, dot products of
//! bf16 where the processor has them, bytes read for decoding.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use kvsieve::attention::{
    Backward, DenseKv, Forward, Gradients, Inputs, KvRows, Outputs, Params, Shape, Workspace, export, kernel,
};
use kvsieve::cache::{CacheShape, PAGE_TOKENS, PagedCache};
use kvsieve::device::{Cpu, probe};
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::time::{Duration, Instant};

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

/// What bounds a kernel, and the work of one call in its units.
#[derive(Clone, Copy)]
enum Work {
    Flops(u64, DType),
    ReadBytes(u64),
}

impl Work {
    fn amount(self) -> u64 {
        match self {
            Work::Flops(amount, _) | Work::ReadBytes(amount) => amount,
        }
    }

    /// The ceiling per second, and its name.
    fn ceiling(self, cpu: &Cpu) -> (f64, &'static str) {
        match self {
            Work::ReadBytes(_) => (probe::read_bytes(cpu), "read bandwidth"),
            Work::Flops(_, DType::Bf16) => match probe::bf16_dot_flops(cpu) {
                Some(flops) => (flops, "bf16 dot-product peak"),
                None => (probe::fma_flops(cpu), "f32 multiply-add peak"),
            },
            Work::Flops(..) => (probe::fma_flops(cpu), "f32 multiply-add peak"),
        }
    }
}

type Group<'a> = BenchmarkGroup<'a, WallTime>;

fn group<'a>(criterion: &'a mut Criterion, name: String, work: Work) -> Group<'a> {
    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(match work {
        Work::Flops(amount, _) => Throughput::Elements(amount),
        Work::ReadBytes(amount) => Throughput::Bytes(amount),
    });
    group
}

/// Times `call`, and prints what part of the ceiling its median reached.
fn measure(group: &mut Group<'_>, name: &str, work: Work, cpu: &Cpu, mut call: impl FnMut()) {
    let mut seconds = Vec::new();
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|calls| {
            let start = Instant::now();
            (0..calls).for_each(|_| call());
            let elapsed = start.elapsed();
            seconds.push(elapsed.as_secs_f64() / calls as f64);
            elapsed
        });
    });
    // Nothing was timed if the name does not match what was asked for.
    if seconds.len() > 1 {
        let (ceiling, of) = work.ceiling(cpu);
        seconds.sort_by(f64::total_cmp);
        let reached = work.amount() as f64 / seconds[seconds.len() / 2];
        println!("{:24}{:.0}% of the {of}, {:.4} T/s", "", 100.0 * reached / ceiling, ceiling / 1e12);
    }
}

fn square(len: usize, head_dim: usize) -> Shape {
    Shape { batch: 1, q_heads: 2, kv_heads: 2, q_len: len, kv_len: len, head_dim }
}

fn forward(criterion: &mut Criterion) {
    let types = [DType::F32, DType::Bf16, DType::F16];
    for (dtype, head_dim, len) in types.into_iter().flat_map(|dtype| {
        [64, 128].into_iter().flat_map(move |head_dim| [1024, 4096].map(|len| (dtype, head_dim, len)))
    }) {
        for (mask, causal) in [("full", false), ("causal", true)] {
            let mut bench = Bench::new(square(len, head_dim), causal, dtype);
            let work = Work::Flops(bench.shape.flops(&bench.params), dtype);
            let mut group = group(criterion, format!("forward/{mask}/{dtype}/D{head_dim}/L{len}"), work);
            for name in ["naive", "tiled"] {
                let (mut workspace, cpu) = (bench.workspace(name), Cpu::new(None).unwrap());
                measure(&mut group, name, work, &cpu, || bench.forward(name, &mut workspace));
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
            let work = Work::Flops(shape.flops(&params) * 5 / 2, dtype);
            let mut group = group(criterion, format!("backward/{mask}/{dtype}/D{head_dim}/L{len}"), work);
            for name in ["naive", "tiled"] {
                let kernel = kernel(name).unwrap();
                let size = kernel.backward_workspace(&shape, &params, dtype, bench.cpu.threads()).unwrap();
                let mut workspace = size.allocate(&bench.arena).unwrap();
                measure(&mut group, name, work, &bench.cpu, || {
                    kernel.backward(&call, &mut gradients, &mut workspace).unwrap();
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
            let work = Work::ReadBytes(kv_bytes);
            let mut group = group(criterion, format!("decode/{dtype}/D128/L{kv_len}/heads-{q_heads}-8"), work);
            for (name, what) in [("naive", "naive"), ("decode", "decode"), ("decode", "decode-paged")] {
                let (kernel, mut workspace, mut turn) = (kernel(name).unwrap(), bench.workspace(name), 0);
                measure(&mut group, what, work, &bench.cpu, || {
                    turn = (turn + 1) % dense.len();
                    let kv: &dyn KvRows = if what == "decode-paged" { &paged[turn] } else { &dense[turn] };
                    let (q, params, cpu) = (bench.inputs.q.view(), bench.params, &bench.cpu);
                    let call = Forward { shape, params, q, kv, cpu };
                    kernel.forward(&call, &mut bench.outputs, &mut workspace).unwrap();
                });
            }
        }
    }
}

/// The tensors in pages.
fn paged(arena: &Arena, shape: Shape, k: &Tensor, v: &Tensor) -> PagedCache {
    let Shape { batch, kv_heads, kv_len, head_dim, .. } = shape;
    let dtype = k.dtype();
    let shape = CacheShape {
        batch,
        kv_heads,
        head_dim,
        format: dtype.into(),
        max_tokens: kv_len,
        page_tokens: PAGE_TOKENS,
        columns: &[],
    };
    let mut cache = PagedCache::new(arena, shape).unwrap();
    cache.append(k.view(), v.view(), 0..kv_len).unwrap();
    cache
}

/// The attention that each key received from all queries (as H2O asks) and from the last 64 (as SnapKV does), beside
/// the forward pass that it follows. Its own work is one product, half of the forward pass's.
fn column_sums(criterion: &mut Criterion) {
    for (dtype, head_dim) in [(DType::F32, 64), (DType::F32, 128), (DType::Bf16, 128)] {
        let mut bench = Bench::new(square(4096, head_dim), true, dtype);
        let (mut workspace, cpu) = (bench.workspace("tiled"), Cpu::new(None).unwrap());
        let shape = bench.shape;
        let flops = shape.flops(&bench.params);
        let work = Work::Flops(flops, dtype);
        let mut group = group(criterion, format!("column-sums/causal/{dtype}/D{head_dim}/L4096"), work);
        measure(&mut group, "forward", work, &cpu, || bench.forward("tiled", &mut workspace));
        let lse = bench.outputs.lse.to_vec();
        let mut sums = vec![0.0; shape.batch * shape.kv_heads * shape.kv_len];
        let mut scratch = vec![0.0; export::workspace(&shape, cpu.threads())];
        for last in [4096, 64] {
            let work = Work::Flops(Shape { q_len: last, ..shape }.flops(&bench.params) / 2, dtype);
            group.throughput(Throughput::Elements(work.amount()));
            let queries = 4096 - last..4096;
            measure(&mut group, &format!("last-{last}-queries"), work, &cpu, || {
                bench.with(|call, _| export::column_sums(call, &lse, queries.clone(), &mut sums, &mut scratch));
            });
        }
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

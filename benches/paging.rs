//! What pages cost: a decode step over the cache against the same step over contiguous tensors, for several sizes of a
//! page and four histories of the cache; and what every-step eviction costs beside the step.
//!
//! `cargo bench --bench paging -- bf16/generated` runs the part whose names match. Contiguous and paged steps take
//! turns, so that the printed ratio holds where the times do not. No processor's cache holds what a step reads: other
//! copies are read in between.

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use kvsieve::attention::{DenseKv, Forward, KvRows, Outputs, Params, Shape, Workspace, kernel};
use kvsieve::cache::{CacheShape, PAGE_TOKENS, PagedCache};
use kvsieve::device::Cpu;
use kvsieve::format::KvFormat;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, Rows, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::time::{Duration, Instant};

const KV_LEN: usize = 8192;
const SHAPE: Shape = Shape { batch: 1, q_heads: 32, kv_heads: 8, q_len: 1, kv_len: KV_LEN, head_dim: 128 };
/// Contiguous copies, and paged ones of each history of a single layer.
const COPIES: usize = 2;
/// Layers of a history of several.
const LAYERS: usize = 8;

/// How a cache came to hold what it holds.
#[derive(Clone, Copy)]
enum History {
    /// All tokens were appended at once.
    Prefill,
    /// Tokens were appended one by one to all lists.
    Generated,
    /// The same for the lists of several layers, of which a step reads one: 64 lists grow in turn.
    Layers,
    /// Twice as many were, and every list lost another part of them; half in all.
    Evicted,
}

impl History {
    fn name(self) -> &'static str {
        match self {
            History::Prefill => "prefill",
            History::Generated => "generated",
            History::Layers => "layers",
            History::Evicted => "evicted",
        }
    }

    fn tokens(self) -> usize {
        match self {
            History::Prefill | History::Generated | History::Layers => KV_LEN,
            History::Evicted => 2 * KV_LEN,
        }
    }

    /// Slots of a list that stay.
    fn kept(self, list: usize) -> Vec<usize> {
        let share = match self {
            History::Prefill | History::Generated | History::Layers => 1.0,
            History::Evicted => 0.22 + 0.08 * list as f64,
        };
        let mut rng = ChaCha8Rng::seed_from_u64(list as u64);
        (0..self.tokens()).filter(|_| rng.random::<f64>() < share).collect()
    }

    fn layers(self) -> usize {
        if matches!(self, History::Layers) { LAYERS } else { 1 }
    }

    fn cache(self, arena: &Arena, [k, v]: &[Tensor; 2], page_tokens: usize) -> PagedCache {
        let Shape { kv_heads, head_dim, .. } = SHAPE;
        let batch = self.layers();
        let (dtype, tokens) = (k.dtype(), self.tokens());
        let shape = CacheShape {
            batch,
            kv_heads,
            head_dim,
            format: dtype.into(),
            max_tokens: tokens + 1,
            page_tokens,
            columns: &[],
        };
        let mut cache = PagedCache::new(arena, shape).unwrap();
        let step = if matches!(self, History::Prefill) { tokens } else { 1 };
        for (at, layer) in (0..tokens).step_by(step).flat_map(|at| (0..batch).map(move |layer| (at, layer))) {
            cache.append_sequence(layer, k.view(), v.view(), 0, at..at + step).unwrap();
        }
        (0..shape.lists()).for_each(|list| cache.retain(list, self.kept(list)).unwrap());
        cache.release();
        cache
    }
}

/// The same rows as a cache holds, each list in tensors of its own.
struct Contiguous(Vec<[Tensor; 2]>);

impl Contiguous {
    fn new(arena: &Arena, history: History, sources: &[Tensor; 2]) -> Self {
        let lists = (0..SHAPE.kv_heads).map(|list| {
            let kept = history.kept(list);
            sources.each_ref().map(|source| {
                let dims = [1, 1, kept.len(), SHAPE.head_dim];
                let mut tensor = Tensor::zeros(arena, Label::Input, source.dtype(), dims).unwrap();
                let row_bytes = SHAPE.head_dim * source.dtype().bytes();
                for (row, &slot) in tensor.bytes_mut().chunks_exact_mut(row_bytes).zip(&kept) {
                    row.copy_from_slice(&source.bytes()[(list * history.tokens() + slot) * row_bytes..][..row_bytes]);
                }
                tensor
            })
        });
        Contiguous(lists.collect())
    }

    fn dense(&self, head: usize) -> DenseKv<'_> {
        let [k, v] = &self.0[head];
        DenseKv::new(k.view(), v.view()).unwrap()
    }
}

impl KvRows for Contiguous {
    fn len(&self, _: usize, head: usize) -> usize {
        self.dense(head).len(0, 0)
    }

    fn format(&self) -> KvFormat {
        KvFormat::plain(self.0[0][0].dtype())
    }

    fn key_rows(&self, _: usize, head: usize, start: usize) -> Rows<'_> {
        self.0[head][0].view().head(0, 0, start)
    }

    fn value_rows(&self, _: usize, head: usize, start: usize) -> Rows<'_> {
        self.0[head][1].view().head(0, 0, start)
    }
}

/// A layer of a cache.
struct Layer<'a>(&'a PagedCache, usize);

impl KvRows for Layer<'_> {
    fn len(&self, _: usize, head: usize) -> usize {
        self.0.len(self.1, head)
    }

    fn format(&self) -> KvFormat {
        self.0.format()
    }

    fn key_rows(&self, _: usize, head: usize, start: usize) -> Rows<'_> {
        self.0.key_rows(self.1, head, start)
    }

    fn value_rows(&self, _: usize, head: usize, start: usize) -> Rows<'_> {
        self.0.value_rows(self.1, head, start)
    }
}

/// What a decode step needs besides keys and values.
struct Step {
    arena: Arena,
    q: Tensor,
    outputs: Outputs,
    workspace: Workspace,
    cpu: Cpu,
}

impl Step {
    fn new(dtype: DType) -> Self {
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(None).unwrap());
        let q = normal(&arena, dtype, SHAPE.q_dims());
        let outputs = Outputs::allocate(&arena, &SHAPE, dtype).unwrap();
        let shape = Shape { kv_len: 2 * KV_LEN + 1, ..SHAPE };
        let params = Params::new(SHAPE.head_dim, true);
        let workspace = kernel("decode").unwrap().workspace(&shape, &params, dtype, cpu.threads());
        let workspace = workspace.allocate(&arena).unwrap();
        Step { arena, q, outputs, workspace, cpu }
    }

    fn run(&mut self, kv: &dyn KvRows) -> Duration {
        let kv_len = (0..SHAPE.kv_heads).map(|head| kv.len(0, head)).max().unwrap();
        let (shape, params) = (Shape { kv_len, ..SHAPE }, Params::new(SHAPE.head_dim, true));
        let call = Forward { shape, params, q: self.q.view(), kv, cpu: &self.cpu };
        let start = Instant::now();
        kernel("decode").unwrap().forward(&call, &mut self.outputs, &mut self.workspace).unwrap();
        start.elapsed()
    }
}

fn normal(arena: &Arena, dtype: DType, dims: [usize; 4]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let values: Vec<f32> = (0..dims.iter().product()).map(|_| rng.sample(StandardNormal)).collect();
    Tensor::from_f32(arena, Label::Input, dtype, dims, &values).unwrap()
}

fn sources(arena: &Arena, dtype: DType, tokens: usize) -> [Tensor; 2] {
    let dims = [1, SHAPE.kv_heads, tokens, SHAPE.head_dim];
    [normal(arena, dtype, dims), normal(arena, dtype, dims)]
}

/// Times pairs of a first and a second piece of work, which take turns; the second's time is shown, and its ratio to
/// the first's.
fn compare(criterion: &mut Criterion, group: &str, name: &str, mut pair: impl FnMut() -> [Duration; 2]) {
    let mut group = criterion.benchmark_group(group);
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::Elements(1));
    let mut times = [Vec::new(), Vec::new()];
    let mut ratios = Vec::new();
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|calls| {
            (0..calls).fold(Duration::ZERO, |sum, _| {
                let [first, second] = pair();
                ratios.push(second.as_secs_f64() / first.as_secs_f64());
                times[0].push(first.as_secs_f64());
                times[1].push(second.as_secs_f64());
                sum + second
            })
        });
    });
    if !ratios.is_empty() {
        // On a machine with other work the quickest turns are those that were not disturbed.
        let quick = at(&mut times[1], 0.1) / at(&mut times[0], 0.1);
        let [low, median, high] = [0.25, 0.5, 0.75].map(|share| at(&mut ratios, share));
        println!("{:24}ratio {median:.3}, quartiles {low:.3} to {high:.3}; of the quickest tenths {quick:.3}", "");
    }
}

/// The value below which a share of the values lies.
fn at(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share) as usize]
}

fn decode(criterion: &mut Criterion) {
    for dtype in [DType::Bf16, DType::F32] {
        for history in [History::Prefill, History::Generated, History::Layers, History::Evicted] {
            let mut step = Step::new(dtype);
            let sources = sources(&step.arena, dtype, history.tokens());
            let dense: Vec<_> = (0..COPIES).map(|_| Contiguous::new(&step.arena, history, &sources)).collect();
            // The other layers are copies enough.
            let copies = if history.layers() > 1 { 1 } else { COPIES };
            for page_tokens in [8, 16, 32, 64] {
                let cache = || history.cache(&step.arena, &sources, page_tokens);
                let caches: Vec<_> = (0..copies).map(|_| cache()).collect();
                let layers = caches.iter().flat_map(|cache| (0..history.layers()).map(move |at| Layer(cache, at)));
                let paged: Vec<_> = layers.collect();
                let mut turn = 0;
                let group = format!("paged-decode/{dtype}/{}", history.name());
                compare(criterion, &group, &format!("pages-of-{page_tokens}"), || {
                    turn += 1;
                    [step.run(&dense[turn % dense.len()]), step.run(&paged[turn % paged.len()])]
                });
            }
        }
    }
}

/// A decode step, then one token in the middle of each list makes room for the next.
fn retain(criterion: &mut Criterion) {
    for dtype in [DType::Bf16, DType::F32] {
        let (mut step, history) = (Step::new(dtype), History::Generated);
        let sources = sources(&step.arena, dtype, history.tokens());
        let mut cache = history.cache(&step.arena, &sources, PAGE_TOKENS);
        let name = format!("pages-of-{PAGE_TOKENS}/{dtype}");
        compare(criterion, "evict-one-in-the-middle-beside-decode", &name, || {
            cache.append(sources[0].view(), sources[1].view(), 0..1).unwrap();
            let step = step.run(&cache);
            let start = Instant::now();
            for list in 0..SHAPE.kv_heads {
                let len = cache.lens()[list];
                cache.retain_ranges(list, [0..len / 2, len / 2 + 1..len]).unwrap();
            }
            cache.release();
            [step, start.elapsed()]
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(1000));
    targets = decode, retain
}
criterion_main!(benches);

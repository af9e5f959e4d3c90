//! Policies on a GPU against the same policies on the CPU. Ignored unless asked for:
//! `cargo test --release -- --ignored cuda`, on a GPU or on the emulated device (`tests/kernels/emulate/device.py`).

use crate::common::{normal, rng, tensor};
use kvsieve::attention::rope::{Frequencies, Rotation};
use kvsieve::attention::{DenseKv, Forward, Params, Shape};
use kvsieve::cache::cuda::DeviceCache;
use kvsieve::device::Cpu;
use kvsieve::device::cuda::{DeviceBuffer, Runtime};
use kvsieve::eviction::cuda::{DeviceTensors, RetainedThere, retain as retain_there};
use kvsieve::eviction::{Given, Retained, retain};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::Registry;
use kvsieve::tensor::{DType, Tensor};

/// Every method and part with a form for CUDA, with parameters that change what its kernels do.
const POLICIES: &[&str] = &[
    "streaming-llm",
    "streaming-llm:sink=40",
    "knorm",
    "keydiff",
    "h2o",
    "h2o:window=3,age=true",
    "observed-attention",
    "snapkv:window=8,kernel=5",
    "snapkv:window=16,kernel=7,pool=max,queries=sum,group=max,sink=3",
    "snapkv:window=200,kernel=3,queries=max,span=all,local=4",
    "tova",
    "max-attention",
    "max-attention:last=5",
    "scissorhands",
    "knorm+protect:sink=2,window=9",
    "snapkv:window=8+vnorm",
    "ada-snapkv:window=8",
    "pyramidkv:window=2",
    "knorm+global",
];

/// A context on the host and on the GPU.
struct Problem {
    shape: Shape,
    params: Params,
    layers: usize,
    dtype: DType,
    tensors: [Tensor; 3],
    there: Vec<DeviceBuffer>,
    inputs: Arena,
}

impl Problem {
    fn new(runtime: &Runtime, shape: Shape, params: Params, layers: usize, dtype: DType) -> Self {
        let dims = [shape.q_dims(), shape.kv_dims(), shape.kv_dims()];
        let tensors = [0, 1, 2].map(|index| {
            let spread = if index == 0 { 3.0 } else { 1.0 };
            tensor(dtype, dims[index], &normal(&mut rng(index as u64), dims[index].iter().product(), spread))
        });
        let inputs = Arena::unlimited();
        let there = tensors.iter().map(|tensor| {
            let mut buffer = runtime.device().alloc(&inputs, Label::Input, tensor.bytes().len() as u64).unwrap();
            buffer.write(tensor.bytes()).unwrap();
            buffer
        });
        let there = there.collect();
        Problem { shape, params, layers, dtype, tensors, there, inputs }
    }

    fn on_cpu(&self, policy: &str, budget_tokens: usize, cpu: &Cpu) -> Retained {
        let [q, k, v] = &self.tensors;
        let kv = DenseKv::new(k.view(), v.view()).unwrap();
        let call = Forward { shape: self.shape, params: self.params, q: q.view(), kv: &kv, cpu };
        let given = Given { layers: self.layers, ..Given::budget(budget_tokens) };
        retain(&Registry::default().policy(policy).unwrap(), call, given, &Arena::unlimited()).unwrap()
    }

    fn on_gpu(
        &self,
        policy: &str,
        budget_tokens: usize,
        cpu: &Cpu,
        runtime: &Runtime,
        arena: &Arena,
        rope: Option<&Frequencies>,
    ) -> RetainedThere {
        let [q, k, v] = [0, 1, 2].map(|index| &self.there[index]);
        let Problem { shape, params, layers, dtype, .. } = *self;
        let tensors = DeviceTensors { q, k, v, dtype, shape, params, layers, rope };
        let policy_there = Registry::default().policy(policy).unwrap();
        policy_there.check_device(policy).unwrap();
        retain_there(&policy_there, runtime, arena, cpu, tensors, budget_tokens).unwrap()
    }

    /// Rows of a list in the tensor `part` (1 keys, 2 values), as bytes.
    fn row(&self, part: usize, list: usize, position: usize) -> &[u8] {
        let bytes = self.shape.head_dim * self.dtype.bytes();
        &self.tensors[part].bytes()[(list * self.shape.kv_len + position) * bytes..][..bytes]
    }
}

fn numbers(buffer: &DeviceBuffer) -> Vec<f32> {
    let mut values = vec![0f32; buffer.bytes() as usize / 4];
    buffer.read(bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

/// Slots of the `count` best scores, of equal ones the later, ascending.
fn best(scores: &[f32], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(b.cmp(&a)));
    order.truncate(count);
    order.sort_unstable();
    order
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_policies_keep_what_the_cpu_keeps() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(2)).unwrap());
    let shape =
        |batch, q_heads, kv_heads, q_len, kv_len, head_dim| Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim };
    let causal = |shape: &Shape| Params::new(shape.head_dim, true);
    let cases = [
        (shape(2, 4, 2, 70, 150, 40), DType::Bf16, 2, 37),
        (shape(1, 3, 1, 33, 33, 18), DType::F32, 1, 20),
        (shape(2, 2, 2, 9, 70, 64), DType::F16, 1, 69),
        (shape(1, 2, 1, 5, 12, 10), DType::F16, 1, 45),
    ];
    for (shape, dtype, layers, budget_tokens) in cases {
        let plain = causal(&shape);
        let odd = Params { window: Some(29), softcap: Some(8.0), ..plain };
        for (params, policies) in [(plain, POLICIES), (odd, &POLICIES[4..8])] {
            let problem = Problem::new(&runtime, shape, params, layers, dtype);
            for policy in policies {
                let what = format!("{policy} of {shape:?} in {dtype}, {params:?}");
                let here = problem.on_cpu(policy, budget_tokens, &cpu);
                let arena = Arena::unlimited();
                let there = problem.on_gpu(policy, budget_tokens, &cpu, &runtime, &arena, None);
                let (expected, found) = (here.scores.unwrap(), numbers(&there.scores.as_ref().unwrap().0));
                let lists = shape.batch * shape.kv_heads;
                let size = expected.iter().fold(0f32, |most, score| most.max(score.abs()));
                for list in 0..lists {
                    let part = list * shape.kv_len..(list + 1) * shape.kv_len;
                    let (expected, found) = (&expected[part.clone()], &found[part]);
                    let kept = here.selection.kept(list);
                    for (slot, (a, b)) in expected.iter().zip(found).enumerate() {
                        assert!((a - b).abs() <= 2e-5 * size, "{what}: list {list}, slot {slot}: {a}, on the GPU {b}");
                    }
                    assert_eq!(there.kept[list], best(found, there.kept[list].len()), "{what}: list {list}");
                    // Where the two differ, scores are as good as equal.
                    assert_eq!(there.kept[list].len(), kept.len(), "{what}: list {list}");
                    let bar = kept.iter().map(|&slot| expected[slot as usize]).fold(f32::INFINITY, f32::min);
                    for &slot in there.kept[list].iter().filter(|slot| !kept.contains(slot)) {
                        assert!(
                            (expected[slot as usize] - bar).abs() <= 4e-5 * size,
                            "{what}: list {list}, slot {slot}"
                        );
                    }
                    for part in [1, 2] {
                        let rows = there.cache.read_rows(list, part - 1).unwrap();
                        let wanted = there.kept[list].iter().map(|&at| problem.row(part, list, at as usize));
                        assert!(rows.iter().eq(wanted.flatten()), "{what}: list {list}, rows of tensor {part}");
                    }
                }
                let most_pages = lists * there.cache.shape().pages(shape.kv_len);
                drop(there.scores);
                let predicted = DeviceCache::bytes(there.cache.shape(), there.cache.lens().iter().copied(), 0);
                let live = arena.usage().live;
                for (label, bytes) in predicted {
                    assert_eq!(live.get(&label).copied().unwrap_or(0), bytes, "{what}: {label:?}");
                }
                assert_eq!(there.cache.most_pages(), most_pages);
                drop(there.cache);
                assert_eq!(arena.usage().live_bytes, 0, "{what}");
            }
            drop(problem.there);
            assert_eq!(problem.inputs.usage().live_bytes, 0);
        }
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_keys_turn_to_positions_inside_the_cache() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(2)).unwrap());
    let shape = Shape { batch: 1, q_heads: 2, kv_heads: 2, q_len: 1, kv_len: 90, head_dim: 72 };
    let rope = Frequencies::new(shape.head_dim, 1e4);
    for (dtype, allowed) in [(DType::F32, 2e-6), (DType::Bf16, 8e-3), (DType::F16, 1e-3)] {
        let problem = Problem::new(&runtime, shape, Params::new(72, true), 1, dtype);
        let there = problem.on_gpu("knorm+rerotate", 31, &cpu, &runtime, &Arena::unlimited(), Some(&rope));
        assert_eq!(there.cache.read_positions().unwrap(), vec![(0..31).collect::<Vec<u32>>(); 2]);
        for list in 0..2 {
            let mut keys = vec![0.0; 31 * 72];
            dtype.decode(&there.cache.read_rows(list, 0).unwrap(), &mut keys);
            for (slot, (&position, found)) in there.kept[list].iter().zip(keys.chunks(72)).enumerate() {
                let mut key = vec![0.0; 72];
                dtype.decode(problem.row(1, list, position as usize), &mut key);
                Rotation::new(&rope, slot as i64 - i64::from(position)).rotate(&mut key);
                let size = key.iter().fold(0f32, |most, x| most.max(x.abs()));
                let error = key.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error <= allowed * size, "{dtype}, list {list}, slot {slot}: {error}");
            }
        }
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_caches_grow_shrink_and_give_slabs_back() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(2)).unwrap());
    // 4 lists of 2000 tokens: 500 pages in 8 slabs of 64.
    let shape = Shape { batch: 1, q_heads: 4, kv_heads: 4, q_len: 1, kv_len: 2000, head_dim: 8 };
    let problem = Problem::new(&runtime, shape, Params::new(8, true), 1, DType::Bf16);
    let arena = Arena::unlimited();
    let mut there = problem.on_gpu("knorm+ada:floor=0", 400, &cpu, &runtime, &arena, None);
    let held = |arena: &Arena| {
        let live = arena.usage().live;
        [Label::Kv, Label::KvFragmentation, Label::KvSlack].iter().filter_map(|label| live.get(label)).sum::<u64>()
    };
    assert_eq!(there.cache.lens().iter().sum::<usize>(), 1600);
    let slab = 64 * there.cache.shape().page_bytes();
    assert_eq!(held(&arena), there.cache.pages().div_ceil(64) as u64 * slab);
    // It grows again, and what was there stays as it was.
    let before: Vec<Vec<u8>> = (0..4).map(|list| there.cache.read_rows(list, 1).unwrap()).collect();
    there.cache.append(&runtime, [&problem.there[1], &problem.there[2]], 2000, 100..133).unwrap();
    for (list, before) in before.iter().enumerate() {
        let rows = there.cache.read_rows(list, 1).unwrap();
        assert_eq!(&rows[..before.len()], before);
        assert!(rows[before.len()..].iter().eq((100..133).flat_map(|at| problem.row(2, list, at))));
        assert_eq!(there.cache.read_positions().unwrap()[list].last(), Some(&132));
    }
}

/// A list that grows by a page and shrinks again with every token takes and gives back no slab.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_caches_keep_the_slabs_of_the_next_token() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(2)).unwrap());
    let shape = Shape { batch: 1, q_heads: 4, kv_heads: 4, q_len: 1, kv_len: 300, head_dim: 8 };
    let problem = Problem::new(&runtime, shape, Params::new(8, true), 1, DType::Bf16);
    // 4 lists of 256 tokens: 64 pages, which are a slab.
    let (device, arena) = (runtime.device(), Arena::unlimited());
    let mut cache = problem.on_gpu("streaming-llm:sink=4", 256, &cpu, &runtime, &arena, None).cache;
    let numbers = |numbers: Vec<u32>| {
        let mut buffer = device.alloc(&problem.inputs, Label::Policy, 4 * numbers.len() as u64).unwrap();
        buffer.write(bytemuck::cast_slice(&numbers)).unwrap();
        buffer
    };
    let (slots, counts) = (numbers((0..4).flat_map(|_| 0..257).collect()), numbers(vec![256; 4]));
    let slab = 64 * cache.shape().page_bytes();
    let held = |arena: &Arena| {
        let live = arena.usage().live;
        [Label::Kv, Label::KvFragmentation, Label::KvSlack].iter().filter_map(|label| live.get(label)).sum::<u64>()
    };
    for ahead in [1, 1, 0] {
        cache.append(&runtime, [&problem.there[1], &problem.there[2]], 300, 0..1).unwrap();
        assert_eq!(held(&arena), 2 * slab);
        cache.keep(&runtime, &slots, 257, &[256; 4], &counts).unwrap();
        cache.release(&runtime, ahead).unwrap();
        assert_eq!(held(&arena), (1 + ahead as u64) * slab);
        assert_eq!((cache.pages(), cache.lens()), (64, &[256; 4][..]));
    }
}

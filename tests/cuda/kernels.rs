//! Kernels on a GPU against the f64 reference. Ignored unless asked for: `cargo test --release -- --ignored cuda`.

use crate::common;
use crate::common::ragged::Ragged;
use crate::common::{Problem, grad_o, inputs, tensor, widen};
use kvsieve::attention::cuda::{BackwardInputs, BackwardResults, Inputs, Plan, Results, cuda_kernel, decode_paged};
use kvsieve::attention::{DenseKv, Forward, Params, Shape, reference};
use kvsieve::device::Cpu;
use kvsieve::device::cuda::{Device, PagedKv, Runtime, Slabs};
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

fn random(arena: &Arena, dtype: DType, dims: [usize; 4], seed: u64) -> Tensor {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    let count = dims.iter().product();
    let values: Vec<f32> = (0..count).map(|_| StandardNormal.sample(&mut generator)).collect();
    let mut tensor = Tensor::zeros(arena, Label::Input, dtype, dims).unwrap();
    dtype.encode(&values, tensor.bytes_mut());
    tensor
}

/// How far a kernel's output is from the reference, on up to 64 queries of each head.
fn error_of((runtime, cpu): (&Runtime, &Cpu), kernel: &str, dtype: DType, shape: Shape, params: Params) -> f64 {
    let device = runtime.device();
    let host = Arena::unlimited();
    let dims = [shape.q_dims(), shape.kv_dims(), shape.kv_dims()];
    let inputs: Vec<Tensor> = (0..3).map(|i| random(&host, dtype, dims[i], i as u64)).collect();
    let plan = cuda_kernel(kernel).unwrap().plan(&shape, &params, dtype.into(), device.limits()).unwrap();
    // Where cuBLAS is found, the products that stand in for it are tried as well.
    let own = plan.library.is_some() && runtime.cublas().is_some();
    let own = own.then(|| Plan { library: None, ..plan.clone() });
    let arena = Arena::unlimited();
    let alloc = |bytes: usize| device.alloc(&arena, Label::Activations, bytes as u64).unwrap();
    let mut buffers: Vec<_> = inputs.iter().map(|tensor| alloc(tensor.bytes().len())).collect();
    for (buffer, tensor) in buffers.iter_mut().zip(&inputs) {
        buffer.write(tensor.bytes()).unwrap();
    }
    let mut result = Tensor::zeros(&host, Label::Activations, dtype, shape.q_dims()).unwrap();
    let (mut o, mut lse) = (alloc(result.bytes().len()), alloc(4 * shape.rows()));
    let mut scratch = plan.scratch(device, &arena).unwrap();
    let tensors = Inputs { q: &buffers[0], k: &buffers[1], v: &buffers[2] };
    let kv = DenseKv::new(inputs[1].view(), inputs[2].view()).unwrap();
    let call = Forward { shape, params, q: inputs[0].view(), kv: &kv, cpu };
    let at = reference::sample_rows(&shape, 64);
    let expected = reference::rows(&call, &at);
    let errors = [Some(plan), own].into_iter().flatten().map(|plan| {
        o.write(&vec![0xff; result.bytes().len()]).unwrap();
        plan.forward(runtime, tensors, Results { o: &mut o, lse: &mut lse }, &mut scratch).unwrap();
        o.read(result.bytes_mut()).unwrap();
        reference::relative_error(&result.view(), &at, &expected)
    });
    errors.fold(0.0, |worst, error| if error.is_nan() { f64::INFINITY } else { error.max(worst) })
}

fn shape(batch: usize, q_heads: usize, kv_heads: usize, q_len: usize, kv_len: usize, head_dim: usize) -> Shape {
    Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim }
}

/// Without a mask, causal, with a window, with a soft-cap, and with a negative scale.
fn options(head_dim: usize) -> [Params; 5] {
    let plain = Params::new(head_dim, false);
    let causal = Params { causal: true, ..plain };
    let (window, softcap) = (Params { window: Some(50), ..causal }, Params { softcap: Some(5.0), ..causal });
    [plain, causal, window, softcap, Params { scale: -plain.scale, ..causal }]
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_kernels_agree_with_the_reference() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(None).unwrap());
    let shapes = [
        shape(1, 1, 1, 1, 1, 64),
        shape(2, 4, 2, 130, 190, 64),
        shape(1, 4, 1, 65, 300, 128),
        shape(1, 3, 3, 140, 70, 96),
        shape(2, 16, 2, 1, 3000, 128),
        shape(1, 2, 1, 70, 200, 256),
        shape(1, 2, 2, 20, 90, 37),
    ];
    let kinds = [
        ("naive", DType::F32, 3e-6),
        ("naive", DType::Bf16, 8e-3),
        ("tiled", DType::Bf16, 8e-3),
        ("tiled", DType::F16, 1e-3),
        ("decode", DType::Bf16, 8e-3),
        ("decode", DType::F16, 1e-3),
        ("tiled", DType::F32, 3e-6),
        ("decode", DType::F32, 3e-6),
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        for (j, params) in options(shape.head_dim).into_iter().enumerate() {
            // Half of them: each two of a shape, an option and a kind meet.
            for (kernel, dtype, allowed) in kinds.into_iter().skip((i + j) % 2).step_by(2) {
                let error = error_of((&runtime, &cpu), kernel, dtype, shape, params);
                assert!(error <= allowed, "{kernel} {dtype} {shape:?} {params:?}: {error:e}, {allowed:e} allowed");
            }
        }
    }
}

/// Ragged lists in pages that lie in slabs in no order, read where they lie.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_decode_reads_pages() {
    const SLAB_PAGES: usize = 3;
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(None).unwrap());
    let device = runtime.device();
    let shape = Shape { batch: 2, q_heads: 6, kv_heads: 3, q_len: 1, kv_len: 300, head_dim: 64 };
    let params = Params::new(shape.head_dim, true);
    let kinds = [(DType::Bf16, 16, 8e-3), (DType::F16, 10, 1e-3), (DType::F32, 16, 3e-6)];
    for (dtype, page_tokens, allowed) in kinds {
        let (host, arena) = (Arena::unlimited(), Arena::unlimited());
        let lists = shape.batch * shape.kv_heads;
        let lens: Vec<usize> = (0..lists).map(|list| shape.kv_len - 53 * list).collect();
        let [k, v] = [1, 2].map(|seed| random(&host, dtype, shape.kv_dims(), seed));
        let q = random(&host, dtype, shape.q_dims(), 3);

        let row_bytes = shape.head_dim * dtype.bytes();
        let (page_bytes, width) = (page_tokens * row_bytes, shape.kv_len.div_ceil(page_tokens));
        let slab_count = (lists * width).div_ceil(SLAB_PAGES);
        let mut slabs = Slabs::new(device, &arena, slab_count, (2 * SLAB_PAGES * page_bytes) as u64).unwrap();
        for _ in 0..slab_count {
            slabs.add(device, &arena, Label::Kv).unwrap();
        }
        let mut table = vec![u32::MAX; lists * width];
        for (list, &len) in lens.iter().enumerate() {
            for token in 0..len {
                let index = list * width + token / page_tokens;
                // Every second page from behind: neighbours in a list are none in memory.
                let page = if index % 2 == 0 { index } else { lists * width / 2 * 2 - index };
                table[index] = (((page / SLAB_PAGES) << 2) | (page % SLAB_PAGES)) as u32;
                let slab = slabs.get_mut(page / SLAB_PAGES).unwrap();
                let place = page % SLAB_PAGES * page_bytes + token % page_tokens * row_bytes;
                let from = (list * shape.kv_len + token) * row_bytes;
                slab.write_at(place as u64, &k.bytes()[from..][..row_bytes]).unwrap();
                slab.write_at((SLAB_PAGES * page_bytes + place) as u64, &v.bytes()[from..][..row_bytes]).unwrap();
            }
        }
        let put = |bytes: &[u8]| {
            let mut buffer = device.alloc(&arena, Label::PageTable, bytes.len() as u64).unwrap();
            buffer.write(bytes).unwrap();
            buffer
        };
        let table = put(&table.iter().flat_map(|page| page.to_le_bytes()).collect::<Vec<_>>());
        let lens_there = put(&lens.iter().flat_map(|&len| (len as i32).to_le_bytes()).collect::<Vec<_>>());
        let origins =
            put(&(0..lists).flat_map(|_| (0..shape.kv_len as i32).flat_map(i32::to_le_bytes)).collect::<Vec<_>>());
        let kv = PagedKv {
            first_list: 0,
            slabs: &slabs,
            table: &table,
            lens: &lens_there,
            origins: &origins,
            stride: shape.kv_len,
            slab_pages: SLAB_PAGES,
            shift: 2,
            page_tokens,
            table_width: width,
        };
        let plan = decode_paged(&shape, &params, dtype.into(), device.limits(), page_tokens).unwrap();
        let mut scratch = plan.scratch(device, &arena).unwrap();
        let (q_there, mut o, mut lse) = (put(q.bytes()), put(q.bytes()), put(&vec![0; 4 * shape.rows()]));
        let results = Results { o: &mut o, lse: &mut lse };
        plan.forward_paged(&runtime, &q_there, &kv, results, &mut scratch).unwrap();
        let wrong = PagedKv { page_tokens: page_tokens + 1, ..kv };
        let results = Results { o: &mut o, lse: &mut lse };
        assert!(plan.forward_paged(&runtime, &q_there, &wrong, results, &mut scratch).is_err());
        let mut result = Tensor::zeros(&host, Label::Activations, dtype, shape.q_dims()).unwrap();
        o.read(result.bytes_mut()).unwrap();

        let [k, v] = [k, v].map(|tensor| {
            let mut values = vec![0.0; lists * shape.kv_len * shape.head_dim];
            dtype.decode(tensor.bytes(), &mut values);
            values
        });
        let ragged = Ragged::prefixes(shape.kv_heads, shape.head_dim, shape.kv_len, &k, &v, &lens);
        let call = Forward { shape, params, q: q.view(), kv: &ragged, cpu: &cpu };
        let at = reference::sample_rows(&shape, 64);
        let error = reference::relative_error(&result.view(), &at, &reference::rows(&call, &at));
        assert!(error <= allowed, "{dtype}, pages of {page_tokens}: {error:e}, {allowed:e} allowed");
    }
}

/// More items than multiprocessors, tails, groups, rows that see nothing; where the GPU is of capability 9.0.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_hopper_agrees_with_the_reference() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(None).unwrap());
    if runtime.device().limits().capability != (9, 0) {
        return;
    }
    let many = 2 * runtime.device().limits().multiprocessors;
    // Every way in which keys are cut into tiles, and few other differences: each variant is compiled.
    let (plain, causal, window, softcap, negative) = (0, 1, 2, 3, 4);
    let cases: [(Shape, &[usize], DType); 6] = [
        (shape(1, 1, 1, 1, 1, 64), &[plain], DType::Bf16),
        (shape(2, 4, 2, 230, 290, 64), &[plain, causal, window], DType::Bf16),
        (shape(1, many, many / 2, 65, 600, 128), &[plain, causal, softcap], DType::Bf16),
        (shape(2, 2, 1, 300, 190, 128), &[causal, negative], DType::Bf16),
        (shape(1, 3, 3, 140, 400, 256), &[plain, window], DType::Bf16),
        (shape(1, 2, 1, 200, 300, 256), &[softcap], DType::F16),
    ];
    for (shape, chosen, dtype) in cases {
        let allowed = if dtype == DType::F16 { 1e-3 } else { 8e-3 };
        for &index in chosen {
            let params = options(shape.head_dim)[index];
            let error = error_of((&runtime, &cpu), "hopper", dtype, shape, params);
            assert!(error <= allowed, "{dtype} {shape:?} {params:?}: {error:e}, {allowed:e} allowed");
        }
    }
}

/// Gradients by `q`, `k` and `v` on the GPU, as bytes, and the bytes of scratch memory that they took.
fn gradients_on(runtime: &Runtime, kernel: &str, problem: &Problem, seed: u64) -> ([Vec<u8>; 3], u64) {
    let Problem { shape, params, dtype } = *problem;
    let (device, kernel) = (runtime.device(), cuda_kernel(kernel).unwrap());
    let (inputs, grad_o) = (inputs(problem, seed), grad_o(problem, seed));
    let (kv, cpu) = (DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap(), common::cpu(2));
    let call = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu };
    let outputs = common::forward_call(&*kvsieve::attention::kernel("tiled").unwrap(), &call, dtype);
    let arena = Arena::unlimited();
    let holding = |bytes: &[u8]| {
        let mut buffer = device.alloc(&arena, Label::Input, bytes.len() as u64).unwrap();
        buffer.write(bytes).unwrap();
        buffer
    };
    let lse: Vec<u8> = outputs.lse.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let there = [inputs.q.bytes(), inputs.k.bytes(), inputs.v.bytes(), outputs.o.bytes(), &lse, grad_o.bytes()];
    let [q, k, v, o, lse, grad_o] = there.map(holding);
    let lengths = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| tensor.bytes().len());
    let mut results = lengths.map(|bytes| holding(&vec![0xff; bytes]));
    let plan = kernel.plan_backward(&shape, &params, dtype, device.limits()).unwrap();
    let before = arena.usage().live_bytes;
    let mut scratch = plan.scratch(device, &arena).unwrap();
    let scratch_bytes = arena.usage().live_bytes - before;
    assert_eq!(scratch_bytes, plan.workspace().bytes());
    let call = BackwardInputs { q: &q, k: &k, v: &v, o: &o, lse: &lse, grad_o: &grad_o };
    let [grad_q, grad_k, grad_v] = &mut results;
    plan.run(runtime, call, BackwardResults { q: grad_q, k: grad_k, v: grad_v }, &mut scratch).unwrap();
    let mut bytes = lengths.map(|length| vec![0; length]);
    results.iter().zip(&mut bytes).for_each(|(buffer, bytes)| buffer.read(bytes).unwrap());
    (bytes, scratch_bytes)
}

/// Against the CPU's gradients in f32 of the same inputs. (Those are compared with central differences of the f64
/// reference in `tests/attention/backward.rs`.)
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_gradients_agree_with_those_of_the_cpu() {
    let runtime = Runtime::open(0, None).unwrap();
    let shapes = [[1, 1, 1, 1, 1, 64], [2, 4, 2, 130, 190, 64], [1, 3, 3, 140, 70, 96], [1, 6, 2, 33, 150, 256]];
    let kinds = [
        ("naive", DType::F32, 2e-6),
        ("naive", DType::Bf16, 1.6e-2),
        ("tiled", DType::F32, 2e-6),
        ("tiled", DType::Bf16, 1.6e-2),
        ("tiled:deterministic=true", DType::F16, 2e-3),
    ];
    for (seed, extents) in shapes.into_iter().enumerate() {
        let (shape, seed) = (common::shape(extents), seed as u64);
        let plain = Params::new(shape.head_dim, false);
        let causal = Params { causal: true, ..plain };
        let cases = [plain, causal, Params { window: Some(50), ..causal }, Params { softcap: Some(5.0), ..causal }];
        for (params, (kernel, dtype, allowed)) in cases.into_iter().flat_map(|case| kinds.map(|kind| (case, kind))) {
            assert_gradients(&runtime, kernel, &Problem { shape, params, dtype }, seed, allowed);
        }
    }
}

fn assert_gradients(runtime: &Runtime, kernel: &str, problem: &Problem, seed: u64, allowed: f64) {
    let Problem { shape, params, dtype } = *problem;
    let (inputs, grad_o) = (inputs(problem, seed), grad_o(problem, seed));
    let as_f32 = |given: &Tensor| tensor(DType::F32, given.dims(), &given.to_f32());
    let wide = kvsieve::attention::Inputs { q: as_f32(&inputs.q), k: as_f32(&inputs.k), v: as_f32(&inputs.v) };
    let wanted = common::backward("tiled", &Problem { dtype: DType::F32, ..*problem }, &wide, &as_f32(&grad_o), 2);
    let (got, _) = gradients_on(runtime, kernel, problem, seed);
    for (name, (got, wanted)) in ["dq", "dk", "dv"].iter().zip(got.iter().zip(&wanted)) {
        let mut decoded = vec![0.0; wanted.len()];
        dtype.decode(got, &mut decoded);
        let error = common::root_mean_square_error(&decoded, &widen(wanted));
        assert!(error <= allowed, "{kernel} {dtype} {shape:?} {params:?}: {name} {error:e}, {allowed:e} allowed");
    }
}

/// Tails of queries and of keys, groups, rows and keys that see nothing; where the GPU is of capability 9.0.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_hopper_gradients_agree_with_those_of_the_cpu() {
    let runtime = Runtime::open(0, None).unwrap();
    if runtime.device().limits().capability != (9, 0) {
        return;
    }
    let cases = [
        ([2, 4, 2, 130, 290, 64], DType::Bf16, 1.6e-2),
        ([1, 3, 3, 300, 130, 64], DType::F16, 2e-3),
        ([1, 6, 2, 200, 260, 128], DType::Bf16, 1.6e-2),
    ];
    for (seed, (extents, dtype, allowed)) in cases.into_iter().enumerate() {
        let shape = common::shape(extents);
        let causal = Params::new(shape.head_dim, true);
        let chosen = [
            Params { causal: false, ..causal },
            causal,
            Params { window: Some(50), ..causal },
            Params { softcap: Some(5.0), scale: -causal.scale, ..causal },
        ];
        for params in chosen {
            assert_gradients(&runtime, "hopper", &Problem { shape, params, dtype }, seed as u64, allowed);
        }
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_deterministic_gradients_have_the_same_bits_every_time() {
    let runtime = Runtime::open(0, None).unwrap();
    let problem =
        Problem { shape: common::shape([1, 4, 2, 300, 700, 64]), params: Params::new(64, true), dtype: DType::Bf16 };
    let (once, scratch_bytes) = gradients_on(&runtime, "tiled:deterministic=true", &problem, 3);
    let (fast, fast_bytes) = gradients_on(&runtime, "tiled", &problem, 3);
    assert!(scratch_bytes < fast_bytes, "no sums of dq in memory");
    for _ in 0..4 {
        assert!(gradients_on(&runtime, "tiled:deterministic=true", &problem, 3).0 == once);
    }
    // dk and dv have one owner either way.
    assert!(fast[1..] == once[1..]);
}

/// On a device of a container of its own, ids are those of another namespace: then some process holds memory.
#[test]
#[ignore = "cuda: needs a GPU and NVML"]
fn cuda_processes_are_those_that_hold_memory() {
    let device = Device::open(0).unwrap();
    let arena = Arena::unlimited();
    let held = device.alloc(&arena, Label::Activations, 64 << 20).unwrap();
    let processes = device.nvml().unwrap().processes();
    let own = processes.iter().find(|process| process.pid == std::process::id()).or(processes.first()).unwrap();
    assert!(own.used_bytes.is_none_or(|used| used >= 64 << 20), "{processes:?}");
    drop(held);
}

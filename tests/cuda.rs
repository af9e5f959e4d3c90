//! Kernels on a GPU against the f64 reference. Ignored unless asked for: `cargo test --release -- --ignored cuda`.

mod common;

use common::{Problem, grad_o, inputs, tensor, widen};
use kvsieve::attention::cuda::{BackwardInputs, BackwardResults, Inputs, Results, cuda_kernel};
use kvsieve::attention::{DenseKv, Forward, Params, Shape, reference};
use kvsieve::device::Cpu;
use kvsieve::device::cuda::Runtime;
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

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_kernels_agree_with_the_reference() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(None).unwrap());
    let device = runtime.device();
    let shape =
        |batch, q_heads, kv_heads, q_len, kv_len, head_dim| Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim };
    let shapes = [
        shape(1, 1, 1, 1, 1, 64),
        shape(2, 4, 2, 130, 190, 64),
        shape(1, 4, 1, 65, 300, 128),
        shape(1, 3, 3, 140, 70, 96),
        shape(2, 16, 2, 1, 3000, 128),
    ];
    for shape in shapes {
        let plain = Params::new(shape.head_dim, false);
        let causal = Params { causal: true, ..plain };
        let cases = [plain, causal, Params { window: Some(50), ..causal }, Params { softcap: Some(5.0), ..causal }];
        for (params, kernel, dtype, allowed) in cases.into_iter().flat_map(|params| {
            let (naive, tiled, decode) = ("naive", "tiled", "decode");
            let kinds = [(naive, DType::F32, 3e-6), (naive, DType::Bf16, 8e-3), (tiled, DType::Bf16, 8e-3)];
            let more = [(tiled, DType::F16, 1e-3), (decode, DType::Bf16, 8e-3), (decode, DType::F16, 1e-3)];
            kinds.into_iter().chain(more).map(move |(kernel, dtype, allowed)| (params, kernel, dtype, allowed))
        }) {
            let host = Arena::unlimited();
            let dims = [shape.q_dims(), shape.kv_dims(), shape.kv_dims()];
            let inputs: Vec<Tensor> = (0..3).map(|i| random(&host, dtype, dims[i], i as u64)).collect();
            let plan = cuda_kernel(kernel).unwrap().plan(&shape, &params, dtype, device.limits()).unwrap();
            let arena = Arena::unlimited();
            let alloc = |bytes: usize| device.alloc(&arena, Label::Activations, bytes as u64).unwrap();
            let mut buffers: Vec<_> = inputs.iter().map(|tensor| alloc(tensor.bytes().len())).collect();
            for (buffer, tensor) in buffers.iter_mut().zip(&inputs) {
                buffer.write(tensor.bytes()).unwrap();
            }
            let mut result = Tensor::zeros(&host, Label::Activations, dtype, shape.q_dims()).unwrap();
            let (mut o, mut lse) = (alloc(result.bytes().len()), alloc(4 * shape.rows()));
            o.write(&vec![0xff; result.bytes().len()]).unwrap();
            let mut scratch = plan.scratch(device, &arena).unwrap();
            let tensors = Inputs { q: &buffers[0], k: &buffers[1], v: &buffers[2] };
            plan.forward(&runtime, tensors, Results { o: &mut o, lse: &mut lse }, &mut scratch).unwrap();
            o.read(result.bytes_mut()).unwrap();

            let kv = DenseKv::new(inputs[1].view(), inputs[2].view()).unwrap();
            let call = Forward { shape, params, q: inputs[0].view(), kv: &kv, cpu: &cpu };
            let at = reference::sample_rows(&shape, 64);
            let error = reference::relative_error(&result.view(), &at, &reference::rows(&call, &at));
            assert!(error <= allowed, "{kernel} {dtype} {shape:?} {params:?}: {error:e}, {allowed:e} allowed");
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
/// reference in attention_backward.rs.)
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
            let problem = Problem { shape, params, dtype };
            let (inputs, grad_o) = (inputs(&problem, seed), grad_o(&problem, seed));
            let as_f32 = |given: &Tensor| tensor(DType::F32, given.dims(), &given.to_f32());
            let wide = kvsieve::attention::Inputs { q: as_f32(&inputs.q), k: as_f32(&inputs.k), v: as_f32(&inputs.v) };
            let wanted =
                common::backward("tiled", &Problem { dtype: DType::F32, ..problem }, &wide, &as_f32(&grad_o), 2);
            let (got, _) = gradients_on(&runtime, kernel, &problem, seed);
            for (name, (got, wanted)) in ["dq", "dk", "dv"].iter().zip(got.iter().zip(&wanted)) {
                let mut decoded = vec![0.0; wanted.len()];
                dtype.decode(got, &mut decoded);
                let error = common::root_mean_square_error(&decoded, &widen(wanted));
                assert!(
                    error <= allowed,
                    "{kernel} {dtype} {shape:?} {params:?}: {name} {error:e}, {allowed:e} allowed"
                );
            }
        }
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn deterministic_gradients_have_the_same_bits_every_time() {
    let runtime = Runtime::open(0, None).unwrap();
    let problem =
        Problem { shape: common::shape([2, 8, 2, 300, 700, 128]), params: Params::new(128, true), dtype: DType::Bf16 };
    let (once, scratch_bytes) = gradients_on(&runtime, "tiled:deterministic=true", &problem, 3);
    let (fast, fast_bytes) = gradients_on(&runtime, "tiled", &problem, 3);
    assert!(scratch_bytes < fast_bytes, "no sums of dq in memory");
    for _ in 0..4 {
        assert!(gradients_on(&runtime, "tiled:deterministic=true", &problem, 3).0 == once);
    }
    // dk and dv have one owner either way.
    assert!(fast[1..] == once[1..]);
}
